"""The router with workers in threads, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from patience import PATIENCE_S, eventually
from stub_worker import NUM_BLOCKS, StubWorker, stub_token

from kvrelay.discovery.embedded import EmbeddedMembership
from kvrelay.errors import InternalError, QueueFullError, RequestError, UnavailableError
from kvrelay.media.placeholders import placeholder_ids
from kvrelay.metrics import Metrics
from kvrelay.router.backend import GenerateRequest
from kvrelay.router.failover import RetryRules
from kvrelay.router.router import Router
from kvrelay.router.shown import ClusterShown
from kvrelay.router.stream import RequestStream
from kvrelay.sampling import SamplingParams
from kvrelay.states import FinishReason
from kvrelay.wire.registry import TransferCounts
from kvrelay.wire.serving import Image


class Cluster:
    """A router with an embedded registry, and whatever workers a test starts."""

    def __init__(
        self, registration_s: float = 4.0, policy: Any = "least_loaded", *, max_retries: int = 5, wait_s: float = 0.3
    ) -> None:
        self.metrics = Metrics()
        self.membership = EmbeddedMembership("tcp://127.0.0.1:*")
        self.registration_s = registration_s
        rules = RetryRules(max_retries=max_retries, wait_s=wait_s)
        self.router = Router(
            membership=self.membership,
            metrics=self.metrics,
            registration_s=registration_s,
            policy=policy,
            model="stub",
            rules=rules,
        )
        self.router.start()
        self.workers: list[StubWorker] = []

    async def add(self, **settings: Any) -> StubWorker:
        worker = StubWorker(self.membership.address, **{"registration_s": self.registration_s, **settings})
        self.workers.append(worker)
        await eventually(lambda: any(entry["id"] == worker.id for entry in self.workers_shown()))
        return worker

    async def add_ready(self, **settings: Any) -> StubWorker:
        count = self.router.num_usable
        worker = await self.add(**settings)
        await eventually(lambda: self.router.num_usable == count + 1)
        return worker

    def workers_shown(self) -> list[dict[str, Any]]:
        shown: list[dict[str, Any]] = self.router.cluster()["workers"]
        return shown

    def shown(self, worker: StubWorker) -> dict[str, Any]:
        return next(entry for entry in self.workers_shown() if entry["id"] == worker.id)

    async def close(self) -> None:
        """Workers first: one that leaves wants an answer of the registry."""
        await asyncio.gather(*(asyncio.to_thread(worker.stop) for worker in self.workers))
        self.router.close()


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    made = Cluster()
    yield made
    await made.close()


@pytest.fixture
async def quick_cluster() -> AsyncIterator[Cluster]:
    """With a short registration time, for tests in which a worker falls silent."""
    made = Cluster(registration_s=2.0)
    yield made
    await made.close()


def ask(prompt: list[int], **params: Any) -> GenerateRequest:
    return GenerateRequest(external_id="client", prompt=prompt, params=SamplingParams(**{"max_tokens": 5, **params}))


async def tokens_of(stream: RequestStream) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    async with asyncio.timeout(PATIENCE_S):
        while outputs := await stream.next():
            for output in outputs:
                assert len(tokens.setdefault(output.sample, [])) == output.position
                tokens[output.sample].extend(output.tokens)
    return tokens


def expected(prompt: list[int], count: int, sample: int = 0) -> list[int]:
    return [stub_token(prompt, sample, position) for position in range(count)]


async def test_a_request_streams_to_its_end_and_leaves_nothing(cluster: Cluster) -> None:
    worker = await cluster.add_ready()
    stream = cluster.router.submit(ask([1, 2, 3]))
    assert stream.prefill == stream.decode == worker.id
    assert await tokens_of(stream) == {0: expected([1, 2, 3], 5)}
    assert cluster.router.cluster()["in_flight"] == 0
    await eventually(lambda: cluster.shown(worker)["blocks"]["in_use"] == 0)
    assert worker.loop.num_open == 0


async def test_every_sample_of_a_request_arrives(cluster: Cluster) -> None:
    await cluster.add_ready()
    tokens = await tokens_of(cluster.router.submit(ask([5], n=3, max_tokens=4)))
    assert tokens == {sample: expected([5], 4, sample) for sample in range(3)}


async def test_many_streams_on_two_workers_do_not_mix(cluster: Cluster) -> None:
    workers = [await cluster.add_ready(max_batch=64, max_queue=64) for _ in range(2)]
    streams = [cluster.router.submit(ask([number], max_tokens=9)) for number in range(100)]
    answers = await asyncio.gather(*(tokens_of(stream) for stream in streams))
    assert answers == [{0: expected([number], 9)} for number in range(100)]
    assert {stream.decode for stream in streams} == {worker.id for worker in workers}


async def test_an_abort_reaches_the_worker_and_the_cluster_shows_it(cluster: Cluster) -> None:
    worker = await cluster.add_ready()
    worker.engine.gate.clear()
    stream = cluster.router.submit(ask([1], max_tokens=1000))
    await eventually(lambda: worker.loop.num_open == 1)
    stream.abort()
    assert await stream.next() == []
    await eventually(lambda: worker.engine.aborted == [stream.request_id])
    await eventually(lambda: cluster.shown(worker)["blocks"]["in_use"] == 0)
    stream.abort()
    assert cluster.router.cluster()["in_flight"] == 0


async def test_a_stop_string_ends_one_sample_in_the_worker_too(cluster: Cluster) -> None:
    worker = await cluster.add_ready()
    stream = cluster.router.submit(ask([1], n=2, max_tokens=100_000))
    await stream.next()
    stream.finish(0, 1, FinishReason.STOP)
    await eventually(lambda: [finish.sample for finish in worker.engine.finished] == [0])
    stream.finish(1, 1, FinishReason.STOP)
    await eventually(lambda: worker.loop.num_open == 0 and cluster.shown(worker)["running"] == 0)
    assert [(finish.keep_tokens, finish.reason) for finish in worker.engine.finished] == [(1, FinishReason.STOP)] * 2


async def test_without_a_worker_the_error_says_so(cluster: Cluster) -> None:
    assert not cluster.router.ready
    assert cluster.router.max_model_len == 0
    with pytest.raises(UnavailableError, match="no worker has registered"):
        cluster.router.submit(ask([1]))


async def test_a_worker_that_dies_fails_its_requests_long_before_its_registration_ends() -> None:
    cluster = Cluster(registration_s=600.0)
    worker = await cluster.add_ready()
    worker.engine.gate.clear()
    stream = cluster.router.submit(ask([1]))
    await asyncio.to_thread(worker.crash)
    with pytest.raises(UnavailableError, match="lost"):
        await stream.next()
    assert not cluster.router.ready
    assert cluster.shown(worker)["state"] == "gone"
    with pytest.raises(UnavailableError, match="connection"):
        cluster.router.submit(ask([1]))
    await cluster.close()


async def test_a_dead_worker_disappears_when_its_registration_ends(quick_cluster: Cluster) -> None:
    worker = await quick_cluster.add_ready()
    await asyncio.to_thread(worker.crash)
    worker.heartbeat.registration.leave = lambda: None  # type: ignore[method-assign]
    await asyncio.to_thread(worker.heartbeat.stop)
    await eventually(lambda: quick_cluster.workers_shown() == [])


async def test_the_other_worker_goes_on_when_one_dies(cluster: Cluster) -> None:
    dying = await cluster.add_ready()
    staying = await cluster.add_ready()
    await asyncio.to_thread(dying.crash)
    await eventually(lambda: cluster.router.num_usable == 1)
    for _ in range(4):
        stream = cluster.router.submit(ask([2]))
        assert stream.decode == staying.id
        assert await tokens_of(stream) == {0: expected([2], 5)}


async def test_a_full_queue_is_refused_with_a_time_to_come_back(cluster: Cluster) -> None:
    worker = await cluster.add_ready(max_batch=2, max_queue=1)
    worker.engine.gate.clear()
    streams = [cluster.router.submit(ask([number])) for number in range(3)]
    with pytest.raises(QueueFullError) as refused:
        cluster.router.submit(ask([9]))
    assert refused.value.retry_after_s >= 1
    worker.engine.gate.set()
    for stream in streams:
        await tokens_of(stream)
    assert await tokens_of(cluster.router.submit(ask([9]))) == {0: expected([9], 5)}


async def test_a_request_the_worker_cannot_serve_fails_alone(cluster: Cluster) -> None:
    await cluster.add_ready()
    good, bad = cluster.router.submit(ask([1])), cluster.router.submit(ask([1], n=500))
    with pytest.raises(RequestError) as failure:
        await bad.next()
    assert failure.value.param == "n"
    assert await tokens_of(good) == {0: expected([1], 5)}


async def test_an_engine_error_fails_every_request_of_the_worker(cluster: Cluster) -> None:
    worker = await cluster.add_ready()
    worker.engine.gate.clear()
    streams = [cluster.router.submit(ask([1])) for _ in range(3)]
    await eventually(lambda: worker.loop.num_open == 3)
    worker.engine.step_error = RuntimeError("device lost")
    worker.engine.gate.set()
    for stream in streams:
        with pytest.raises(InternalError, match="device lost"):
            await stream.next()
    await eventually(lambda: cluster.workers_shown() == [])
    assert worker.failed


async def test_a_draining_worker_finishes_and_gets_nothing_new(cluster: Cluster) -> None:
    draining = await cluster.add_ready()
    draining.engine.gate.clear()
    stream = cluster.router.submit(ask([3]))
    await eventually(lambda: draining.loop.num_open == 1)
    draining.drain()
    await eventually(lambda: cluster.shown(draining)["state"] == "draining")
    with pytest.raises(UnavailableError, match="draining"):
        cluster.router.submit(ask([4]))
    draining.engine.gate.set()
    assert await tokens_of(stream) == {0: expected([3], 5)}
    await eventually(lambda: cluster.workers_shown() == [])
    await asyncio.to_thread(draining.join)
    assert draining.engine.closed


async def test_a_worker_of_another_model_is_not_used(cluster: Cluster) -> None:
    first = await cluster.add_ready(fingerprint="a")
    other = await cluster.add(fingerprint="b")
    await eventually(lambda: "another model" in cluster.shown(other).get("problem", ""))
    assert {cluster.router.submit(ask([1])).decode for _ in range(4)} == {first.id}
    await asyncio.to_thread(first.stop)
    await eventually(lambda: cluster.router.ready and "problem" not in cluster.shown(other))


async def test_cluster_shows_what_the_contract_names(cluster: Cluster) -> None:
    worker = await cluster.add_ready()
    shown = cluster.router.cluster()
    assert shown["router"] == cluster.router.router_id
    assert shown["model"] == "stub"
    assert msgspec.convert(shown, ClusterShown)["workers"][0]["blocks"].total == NUM_BLOCKS
    entry = cluster.shown(worker)
    wanted = {"id", "role", "state", "host", "pid", "running", "waiting", "transferring", "swapped", "blocks", "transfers"}
    assert wanted <= entry.keys()
    kinds = {"free", "cached", "in_use", "reserved", "sending", "pinned", "quarantined"}
    assert entry["blocks"].keys() == kinds | {"total"}
    assert sum(entry["blocks"][kind] for kind in kinds) == entry["blocks"]["total"] == NUM_BLOCKS
    assert entry["transfers"] == msgspec.structs.asdict(TransferCounts())


async def test_metrics_show_each_worker(cluster: Cluster) -> None:
    worker = await cluster.add_ready()
    await tokens_of(cluster.router.submit(ask([1])))
    text = cluster.metrics.render().decode()
    assert f'kvrelay_worker_blocks{{kind="total",role="whole",worker="{worker.id}"}} {NUM_BLOCKS}.0' in text
    assert f'kvrelay_worker_steps_total{{role="whole",worker="{worker.id}"}} 5.0' in text
    assert 'kvrelay_worker_joins_total{role="whole"} 1.0' in text
    assert "kvrelay_dispatched_total 1.0" in text


async def test_closing_fails_what_is_open_and_tells_the_worker() -> None:
    cluster = Cluster()
    worker = await cluster.add_ready()
    worker.engine.gate.clear()
    stream = cluster.router.submit(ask([1]))
    await eventually(lambda: worker.loop.num_open == 1)
    cluster.router.close()
    with pytest.raises(UnavailableError, match="shutting down"):
        await stream.next()
    await eventually(lambda: worker.engine.aborted == [stream.request_id])
    await cluster.close()


async def test_an_idle_connection_outlives_its_registration_time(quick_cluster: Cluster) -> None:
    worker = await quick_cluster.add_ready()
    worker.engine.gate.clear()
    stream = quick_cluster.router.submit(ask([6]))
    await asyncio.sleep(2 * quick_cluster.registration_s)
    worker.engine.gate.set()
    assert await tokens_of(stream) == {0: expected([6], 5)}


async def test_a_stuck_engine_loses_its_registration_and_comes_back(quick_cluster: Cluster) -> None:
    worker = await quick_cluster.add_ready(watchdog_s=0.3)
    worker.engine.stuck_s = 3 * quick_cluster.registration_s
    stream = quick_cluster.router.submit(ask([1], max_tokens=1))
    with pytest.raises(UnavailableError, match="did not renew its registration"):
        await stream.next()
    worker.engine.stuck_s = 0.0
    await eventually(lambda: quick_cluster.router.ready)
    assert await tokens_of(quick_cluster.router.submit(ask([1]))) == {0: expected([1], 5)}


async def test_images_reach_the_worker_with_their_files(cluster: Cluster) -> None:
    worker = await cluster.add_ready()
    image = Image(digest="a", start=1, num_tokens=4, grid=(1, 4, 4), data=b"file")
    prompt = [1, *placeholder_ids("a", 4), 2]
    stream = cluster.router.submit(msgspec.structs.replace(ask(prompt), images=[image]))
    assert await tokens_of(stream) == {0: expected(prompt, 5)}
    assert worker.engine.submitted[-1].images == [image]
    assert worker.engine.submitted[-1].prompt == prompt
