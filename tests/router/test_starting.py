"""Workers that are starting: requests wait for them, and are told which wait was in vain."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec
import pytest
from patience import PATIENCE_S, eventually
from registry_records import make_record
from router.test_failover import some_tokens, tokens_of_rest
from router.test_router import Cluster, ask, expected, tokens_of

from kvrelay.discovery.embedded import EmbeddedRegistration
from kvrelay.errors import ConflictError, NotFoundError, UnavailableError
from kvrelay.ids import new_worker_id
from kvrelay.router.stream import RequestStream
from kvrelay.states import Role, WorkerState
from kvrelay.wire.serving import Image
from kvrelay.worker.starting import announced


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    """A request without a worker, and without one that starts, ends soon."""
    made = Cluster(wait_s=0.1)
    yield made
    await made.close()
    assert made.router.cluster()["in_flight"] == made.router.cluster()["stranded"] == 0


@contextlib.asynccontextmanager
async def starting(cluster: Cluster, role: Role = Role.WHOLE) -> AsyncIterator[str]:
    record = make_record(
        id=new_worker_id(role.value),
        role=role,
        state=WorkerState.STARTING,
        serving_address="",
        fingerprint="",
        max_model_len=0,
    )
    registration = EmbeddedRegistration(cluster.membership.address, timeout_s=PATIENCE_S)
    loading = announced(registration, record, cluster.registration_s)
    await asyncio.to_thread(loading.__enter__)
    await eventually(lambda: (record.id, "starting") in states(cluster))
    try:
        yield record.id
    finally:
        await asyncio.to_thread(loading.__exit__, None, None, None)
        await asyncio.to_thread(registration.leave)
        registration.close()


def states(cluster: Cluster) -> list[tuple[str, str]]:
    return [(entry["id"], entry["state"]) for entry in cluster.workers_shown()]


async def lose_its_worker(cluster: Cluster) -> tuple[RequestStream, list[int]]:
    """A request that has begun on the only worker, which dies then."""
    worker = await cluster.add_ready(step_s=0.002)
    stream = cluster.router.submit(ask([5], max_tokens=300))
    begun = await some_tokens(stream, 3)
    await asyncio.to_thread(worker.crash)
    await eventually(lambda: not cluster.router.ready)
    return stream, [token for _, token in begun]


async def test_a_stream_waits_for_the_successor_of_its_worker(cluster: Cluster) -> None:
    async with starting(cluster):
        stream, begun = await lose_its_worker(cluster)
        await asyncio.sleep(0.5)  # longer than it would wait for a worker of which nothing is known
        assert cluster.router.cluster()["stranded"] == 1
        await cluster.add_ready()
        assert [*begun, *(token for _, token in await tokens_of_rest(stream))] == expected([5], 300)


async def test_a_request_that_finds_no_worker_waits_for_one_that_starts(cluster: Cluster) -> None:
    first = await cluster.add_ready()
    await asyncio.to_thread(first.crash)
    await eventually(lambda: not cluster.router.ready)
    with pytest.raises(UnavailableError, match="no worker can take requests"):
        cluster.router.submit(ask([5]))
    async with starting(cluster):
        stream = cluster.router.submit(ask([5]))
        assert cluster.router.max_model_len == 128  # known from the worker that was up
        await cluster.add_ready()
        assert await tokens_of(stream) == {0: expected([5], 5)}


async def test_before_any_worker_was_up_a_request_is_told_at_once(cluster: Cluster) -> None:
    async with starting(cluster) as worker_id:
        with pytest.raises(UnavailableError, match=f"{worker_id}: it is starting"):
            cluster.router.submit(ask([5]))


async def test_a_start_wait_of_zero_leaves_the_other_wait(cluster: Cluster) -> None:
    rules = cluster.router._dispatcher.stranded.rules
    cluster.router._dispatcher.stranded.rules = type(rules)(wait_s=PATIENCE_S, start_wait_s=0.0)
    async with starting(cluster):
        stream, begun = await lose_its_worker(cluster)
        await cluster.add_ready()
        assert [*begun, *(token for _, token in await tokens_of_rest(stream))] == expected([5], 300)


async def test_a_successor_that_does_not_come_up_in_time_is_named_as_the_reason(cluster: Cluster) -> None:
    rules = cluster.router._dispatcher.stranded.rules
    cluster.router._dispatcher.stranded.rules = type(rules)(wait_s=0.1, start_wait_s=0.3)
    async with starting(cluster):
        stream, _ = await lose_its_worker(cluster)
        with pytest.raises(UnavailableError, match=r"a worker is starting, but was not up within 0\.3 s") as failure:
            await tokens_of_rest(stream)
        assert failure.value.code == "worker_lost"


async def test_a_successor_that_cannot_start_is_waited_for_no_longer(cluster: Cluster) -> None:
    async with starting(cluster) as worker_id:
        stream, _ = await lose_its_worker(cluster)
    with pytest.raises(UnavailableError, match=r"no other worker came up within 0\.1 s"):
        await tokens_of_rest(stream)
    assert worker_id not in [name for name, _ in states(cluster)]


async def test_a_worker_of_another_role_is_not_waited_for(cluster: Cluster) -> None:
    for role in (Role.PREFILL, Role.ENCODE):
        async with starting(cluster, role):
            stream, _ = await lose_its_worker(cluster)
            with pytest.raises(UnavailableError, match="no other worker came up"):
                await tokens_of_rest(stream)


async def test_images_wait_for_an_encode_worker_that_starts(cluster: Cluster) -> None:
    image = Image(digest="a", start=1, num_tokens=4, grid=(1, 4, 4), data=b"file")
    request = msgspec.structs.replace(ask(list(range(8))), images=[image])
    await cluster.add_ready(role=Role.DECODE)
    with pytest.raises(UnavailableError, match="no encode worker is up"):
        cluster.router.submit(request)
    async with starting(cluster, Role.ENCODE):
        stream = cluster.router.submit(request)
        await asyncio.sleep(0.5)
        assert cluster.router.cluster()["stranded"] == 1
        encoder = await cluster.add_ready(role=Role.ENCODE)
        await eventually(lambda: cluster.router.cluster()["stranded"] == 0)
        assert stream.encode == encoder.id
        stream.abort()


async def test_loading_that_fails_leaves_the_registry(cluster: Cluster) -> None:
    registration = EmbeddedRegistration(cluster.membership.address, timeout_s=PATIENCE_S)
    record = make_record(state=WorkerState.STARTING, serving_address="")
    is_shown = asyncio.Event()
    loop = asyncio.get_running_loop()

    def load() -> None:
        with announced(registration, record, cluster.registration_s):
            asyncio.run_coroutine_threadsafe(is_shown.wait(), loop).result(PATIENCE_S)
            raise MemoryError

    loading = asyncio.create_task(asyncio.to_thread(load))
    await eventually(lambda: (record.id, "starting") in states(cluster))
    is_shown.set()
    with pytest.raises(MemoryError):
        await loading
    await eventually(lambda: states(cluster) == [])
    registration.close()


async def test_a_worker_that_starts_cannot_be_told_to_drain_yet(cluster: Cluster) -> None:
    async with starting(cluster) as worker_id:
        with pytest.raises(ConflictError, match="is starting"):
            cluster.router.drain(worker_id)
        with pytest.raises(NotFoundError):
            cluster.router.drain("whole-000000000000")
