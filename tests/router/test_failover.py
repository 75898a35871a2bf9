"""Requests outlive their workers: the router sends them again, and the client sees each token once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest
from patience import PATIENCE_S, eventually
from router.test_router import Cluster, ask, expected, tokens_of
from stub_worker import StubWorker

from kvrelay.discovery.breaker import FAILURES, FIRST_PAUSE_S, Breaker
from kvrelay.errors import (
    DeadlineError,
    InternalError,
    InvalidRequestError,
    MissingEmbeddingError,
    RequestError,
    UnavailableError,
)
from kvrelay.ids import new_request_id
from kvrelay.router.attempt import OpenRequest
from kvrelay.router.failover import Verdict, as_told, judge, num_setbacks
from kvrelay.router.stream import RequestStream
from kvrelay.states import BreakerState, FinishReason


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    made = Cluster(wait_s=PATIENCE_S)
    yield made
    await made.close()
    assert made.router.cluster()["in_flight"] == made.router.cluster()["stranded"] == 0


async def some_tokens(stream: RequestStream, count: int) -> list[tuple[int, int]]:
    """At least so many (sample, token) pairs, in the order they came."""
    seen: list[tuple[int, int]] = []
    async with asyncio.timeout(PATIENCE_S):
        while len(seen) < count:
            for output in await stream.next():
                seen += [(output.sample, token) for token in output.tokens]
    return seen


def serving(cluster: Cluster, stream: RequestStream) -> tuple[StubWorker, list[StubWorker]]:
    """The worker that serves the stream, and the others."""
    return (
        next(worker for worker in cluster.workers if worker.id == stream.decode),
        [worker for worker in cluster.workers if worker.id != stream.decode],
    )


@pytest.mark.parametrize("samples", [1, 3])
async def test_a_stream_goes_on_elsewhere_without_gap_or_repeat(cluster: Cluster, samples: int) -> None:
    for _ in range(2):
        await cluster.add_ready(step_s=0.002)
    stream = cluster.router.submit(ask([7, 7], max_tokens=400, n=samples))
    begun = await some_tokens(stream, 5)
    dying, (heir,) = serving(cluster, stream)
    await asyncio.to_thread(dying.crash)
    rest = await tokens_of_rest(stream)
    for sample in range(samples):
        tokens = [token for which, token in [*begun, *rest] if which == sample]
        assert tokens == expected([7, 7], 400, sample)
    (submit,) = heir.engine.submitted
    assert submit.attempt == 1
    assert all(sample.tokens for sample in submit.resume)
    assert stream.decode == heir.id


async def tokens_of_rest(stream: RequestStream) -> list[tuple[int, int]]:
    rest: list[tuple[int, int]] = []
    async with asyncio.timeout(PATIENCE_S):
        while outputs := await stream.next():
            for output in outputs:
                rest += [(output.sample, token) for token in output.tokens]
    return rest


def test_failures_count_since_the_last_token_and_giving_way_to_others_is_none() -> None:
    """Its images' KV went for want of room. If it never gets on, something else is wrong."""
    stream = RequestStream(new_request_id(), 1, StubOwner(), prefill="", decode="")
    entry = OpenRequest(ask([5]), stream)
    gone, lost = MissingEmbeddingError("gone from this worker"), MissingEmbeddingError("did not come", digest="digest")
    unavailable, counted = UnavailableError("lost"), []
    for num_tokens, error in (
        (0, unavailable), (3, gone), (3, gone), (3, unavailable), (4, gone), (5, lost), (5, lost), (6, unavailable),
    ):  # fmt: skip
        stream.tokens(0)[:] = range(num_tokens)
        entry.num_setbacks = num_setbacks(entry, error)
        counted.append(entry.num_setbacks)
    assert counted == [1, 0, 1, 2, 0, 1, 2, 1]


def test_a_client_is_told_of_no_digest() -> None:
    told = as_told(MissingEmbeddingError("did not come", digest="digest"))
    assert (told.kind, told.message, told.param) == ("service_unavailable_error", "did not come", None)


class StubOwner:
    def stream_finished(self, stream: RequestStream) -> None: ...

    def send_finish(self, stream: RequestStream, sample: int, keep_tokens: int, reason: FinishReason) -> None: ...

    def send_abort(self, stream: RequestStream) -> None: ...


async def test_a_sample_that_has_ended_is_not_asked_for_again(cluster: Cluster) -> None:
    for _ in range(2):
        await cluster.add_ready(step_s=0.002)
    stream = cluster.router.submit(ask([3], max_tokens=200, n=2))
    begun = await some_tokens(stream, 4)
    stream.finish(1, 2, FinishReason.STOP)
    dying, (heir,) = serving(cluster, stream)
    await asyncio.to_thread(dying.crash)
    rest = await tokens_of_rest(stream)
    assert [token for sample, token in [*begun, *rest] if sample == 0] == expected([3], 200)
    assert [sample.sample for sample in heir.engine.submitted[0].resume] == [0]


async def test_a_request_waits_for_a_worker_that_comes_up(cluster: Cluster) -> None:
    worker = await cluster.add_ready(step_s=0.002)
    stream = cluster.router.submit(ask([5], max_tokens=300))
    begun = await some_tokens(stream, 3)
    await asyncio.to_thread(worker.crash)
    await eventually(lambda: cluster.router.cluster()["stranded"] == 1)
    await cluster.add_ready(step_s=0.0)
    assert [token for _, token in [*begun, *await tokens_of_rest(stream)]] == expected([5], 300)


async def test_a_stranded_request_can_be_aborted(cluster: Cluster) -> None:
    worker = await cluster.add_ready(step_s=0.002)
    stream = cluster.router.submit(ask([5], max_tokens=300))
    await some_tokens(stream, 1)
    await asyncio.to_thread(worker.crash)
    await eventually(lambda: cluster.router.cluster()["stranded"] == 1)
    stream.abort()
    assert cluster.router.cluster()["stranded"] == 0


async def test_when_nobody_comes_up_the_client_is_told() -> None:
    cluster = Cluster(wait_s=0.1)
    worker = await cluster.add_ready(step_s=0.002)
    stream = cluster.router.submit(ask([5], max_tokens=300))
    await some_tokens(stream, 1)
    await asyncio.to_thread(worker.crash)
    with pytest.raises(UnavailableError, match="no other worker came up") as failure:
        await tokens_of_rest(stream)
    assert failure.value.code == "worker_lost"
    await cluster.close()


async def test_a_request_that_meets_a_draining_worker_goes_elsewhere(cluster: Cluster) -> None:
    for _ in range(2):
        await cluster.add_ready()
    for worker in cluster.workers[:1]:
        worker.engine.drain()  # before the registry has heard of it
        worker.engine.gate.clear()
    for prompt in range(6):
        assert await tokens_of(cluster.router.submit(ask([prompt]))) == {0: expected([prompt], 5)}


async def test_retries_without_a_token_are_bounded() -> None:
    cluster = Cluster(max_retries=2, wait_s=PATIENCE_S)
    for _ in range(4):
        (await cluster.add_ready()).engine.gate.clear()
    stream = cluster.router.submit(ask([1], max_tokens=900))
    for _ in range(2):
        await _lose_worker(cluster, stream)
    await asyncio.to_thread(serving(cluster, stream)[0].crash)
    with pytest.raises(UnavailableError, match="was lost"):
        await tokens_of_rest(stream)
    await cluster.close()


async def test_a_request_that_gets_on_is_sent_again_however_often_it_loses_its_worker() -> None:
    cluster = Cluster(max_retries=1, wait_s=PATIENCE_S)
    for _ in range(5):
        await cluster.add_ready(step_s=0.002)
    stream = cluster.router.submit(ask([1], max_tokens=900))
    for _ in range(4):
        num_tokens = len(stream.tokens(0))
        await eventually(lambda num_tokens=num_tokens: len(stream.tokens(0)) > num_tokens)  # type: ignore[misc]
        await _lose_worker(cluster, stream)
    assert [token for _, token in await tokens_of_rest(stream)] == expected([1], 900)
    await cluster.close()


async def _lose_worker(cluster: Cluster, stream: RequestStream) -> None:
    """Until the request is on another."""
    worker, _ = serving(cluster, stream)
    await asyncio.to_thread(worker.crash)
    await eventually(lambda: stream.decode != worker.id)


async def test_a_request_that_breaks_two_workers_is_not_given_to_a_third(cluster: Cluster) -> None:
    workers = [await cluster.add_ready() for _ in range(3)]
    for worker in workers:
        worker.engine.step_error = RuntimeError("poisoned")
    stream = cluster.router.submit(ask([1]))
    with pytest.raises(InternalError, match="poisoned"):
        await tokens_of_rest(stream)
    assert sum(len(worker.engine.submitted) for worker in workers) == 2


async def test_what_a_lost_worker_still_says_is_dropped(cluster: Cluster) -> None:
    for _ in range(2):
        await cluster.add_ready(step_s=0.002)
    stream = cluster.router.submit(ask([9], max_tokens=100))
    await some_tokens(stream, 1)
    old, (heir,) = serving(cluster, stream)
    peer = cluster.router._peers[old.id]
    cluster.router._on_broken(peer, "the cable was pulled")  # the worker itself goes on
    assert heir.id == stream.decode
    tokens = [token for _, token in await tokens_of_rest(stream)]
    assert tokens == expected([9], 100)[-len(tokens) :]
    assert heir.engine.lost_peers == [old.id]


async def test_a_deadline_ends_the_request_here_and_on_the_worker(cluster: Cluster) -> None:
    worker = await cluster.add_ready()
    worker.engine.gate.clear()
    request = ask([1])
    stream = cluster.router.submit(msgspec.structs.replace(request, timeout_s=0.05))
    with pytest.raises(DeadlineError, match="longer than it was given"):
        await tokens_of_rest(stream)
    await eventually(lambda: worker.engine.aborted == [stream.request_id])
    worker.engine.gate.set()
    on_time = cluster.router.submit(msgspec.structs.replace(request, timeout_s=PATIENCE_S))
    assert await tokens_of(on_time) == {0: expected([1], 5)}


async def test_what_clients_get_wrong_never_makes_a_worker_sick(cluster: Cluster) -> None:
    worker = await cluster.add_ready()
    for _ in range(3 * FAILURES):
        with pytest.raises(RequestError):
            await tokens_of(cluster.router.submit(ask([1], n=500)))
    assert cluster.shown(worker)["breaker"] == "closed"
    assert await tokens_of(cluster.router.submit(ask([1]))) == {0: expected([1], 5)}


@pytest.mark.parametrize(
    ("error", "is_decode", "is_generating", "num_internal_errors", "verdict"),
    [
        (InvalidRequestError("bad"), True, False, 0, Verdict.CLIENT),
        (InvalidRequestError("bad"), False, False, 0, Verdict.CLIENT),
        (UnavailableError("draining"), True, True, 0, Verdict.RETRY),
        (UnavailableError("draining"), False, False, 0, Verdict.RETRY),
        (UnavailableError("draining"), False, True, 0, Verdict.IGNORE),
        (InternalError("crash"), True, False, 0, Verdict.RETRY),
        (InternalError("crash"), True, False, 1, Verdict.FINAL),
    ],
)
def test_whose_fault_an_error_is(
    error: RequestError, is_decode: bool, is_generating: bool, num_internal_errors: int, verdict: Verdict
) -> None:
    assert judge(error, is_decode=is_decode, is_generating=is_generating, num_internal_errors=num_internal_errors) is verdict


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_breaker_opens_probes_and_closes() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    for _ in range(FAILURES - 1):
        breaker.failed()
    breaker.succeeded()  # failures count only in a row
    for _ in range(FAILURES):
        assert breaker.passes
        breaker.failed()
    assert breaker.state is BreakerState.OPEN
    assert not breaker.passes
    clock.now += FIRST_PAUSE_S
    assert breaker.passes
    breaker.sent()
    assert not breaker.passes, "one probe at a time"
    breaker.failed()
    clock.now += FIRST_PAUSE_S
    assert breaker.state is BreakerState.OPEN, "the second pause is longer"
    clock.now += FIRST_PAUSE_S
    assert breaker.passes
    breaker.sent()
    breaker.abandoned()
    assert breaker.passes, "a probe that told nothing is followed by another"
    breaker.sent()
    breaker.succeeded()
    assert breaker.state is BreakerState.CLOSED
