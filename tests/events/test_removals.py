"""The queue in front of a context index: batches, retries, bounds, and an index that is slow, dead, not ready or unwilling."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
from patience import PATIENCE_S, eventually

from kvrelay.errors import ContextIndexError, IndexNotReadyError, IndexRefusedError
from kvrelay.events.context_index import Removal
from kvrelay.events.removals import RemovalQueue, RemovalSettings
from kvrelay.metrics import Metrics
from kvrelay.states import BreakerState
from tests.recording_index import RecordingIndex

QUICK = RemovalSettings(
    batch_ids=10,
    gather_s=0.01,
    max_waiting=50,
    first_pause_s=0.002,
    not_ready_pause_s=0.004,
    first_open_s=0.005,
    longest_open_s=0.01,
)


class World:
    def __init__(self, index: RecordingIndex, settings: RemovalSettings = QUICK) -> None:
        self.index = index
        self.metrics = Metrics()
        self.queue = RemovalQueue(index, self.metrics, settings)

    def count(self, outcome: str) -> int:
        return int(self.metrics.eviction_sync.labels(outcome)._value.get())

    async def sent(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self.queue.until_idle()


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World(RecordingIndex(f"req-{number}" for number in range(100)))
    yield made
    await made.queue.close()
    assert made.index.closed


async def test_ids_go_together(world: World) -> None:
    for number in range(5):
        world.queue.add(f"req-{number}")
    world.queue.add("req-3")
    world.queue.add("stranger")
    await world.sent()
    assert world.index.calls == [["req-0", "req-1", "req-2", "req-3", "req-4", "stranger"]]
    assert (world.count("sent"), world.count("removed"), world.count("not_found")) == (6, 5, 1)


async def test_a_batch_is_bounded_and_a_full_one_goes_at_once() -> None:
    world = World(RecordingIndex(), RemovalSettings(batch_ids=10, gather_s=3600.0))
    for number in range(10):
        world.queue.add(f"req-{number}")
    await eventually(lambda: len(world.index.calls) == 1)
    await world.queue.close()
    world = World(RecordingIndex())
    for number in range(35):
        world.queue.add(f"req-{number}")
    await world.sent()
    assert [len(call) for call in world.index.calls] == [10, 10, 10, 5]
    await world.queue.close()


async def test_what_fails_is_sent_again_and_the_order_stays(world: World) -> None:
    world.index.failures.extend([ContextIndexError("reset"), ContextIndexError("timeout")])
    world.queue.add("req-1")
    world.queue.add("req-2")
    await eventually(lambda: len(world.index.failures) == 1)
    world.queue.add("req-3")
    await world.sent()
    assert world.index.removed == ["req-1", "req-2", "req-3"]
    assert world.queue.state is BreakerState.CLOSED


async def test_after_three_failures_one_id_finds_out_whether_it_works_again(world: World) -> None:
    world.index.failures.extend([ContextIndexError("dead")] * 6)
    for number in range(4):
        world.queue.add(f"req-{number}")
    await eventually(lambda: world.queue.state is BreakerState.OPEN)
    assert world.metrics.registry.get_sample_value("kvrelay_eviction_sync_up") == 0
    await world.sent()
    assert world.index.calls == [["req-0"], ["req-1", "req-2", "req-3"]]
    assert world.queue.state is BreakerState.CLOSED
    assert world.metrics.registry.get_sample_value("kvrelay_eviction_sync_up") == 1


async def test_an_index_that_is_not_ready_is_no_failure(world: World) -> None:
    world.index.failures.extend([IndexNotReadyError("503")] * 20)
    world.queue.add("req-1")
    states = set()
    while world.index.failures:
        states.add(world.queue.state)
        await asyncio.sleep(0.001)
    await world.sent()
    assert states == {BreakerState.CLOSED}
    assert world.index.removed == ["req-1"]


async def test_one_that_is_refused_is_dropped_and_the_others_arrive() -> None:
    class Choosy(RecordingIndex):
        async def remove_requests(self, request_ids: Sequence[str]) -> Removal:
            if "bad" in request_ids:
                raise IndexRefusedError("422")
            return await super().remove_requests(request_ids)

    world = World(Choosy([f"req-{number}" for number in range(8)]))
    for name in ["req-0", "req-1", "req-2", "bad", "req-4", "req-5"]:
        world.queue.add(name)
    await world.sent()
    assert sorted(world.index.removed) == ["req-0", "req-1", "req-2", "req-4", "req-5"]
    assert (world.count("dropped"), world.queue.state) == (1, BreakerState.CLOSED)
    await world.queue.close()


async def test_the_queue_is_bounded_and_the_oldest_go_first(world: World) -> None:
    world.index.failures.extend([ContextIndexError("dead")] * 1000)
    for number in range(80):
        world.queue.add(f"req-{number}")
        await asyncio.sleep(0)
    await eventually(lambda: len(world.index.failures) < 995)
    assert len(world.queue) == 50
    assert world.count("dropped") == 30
    world.index.failures.clear()
    await world.sent()
    assert sorted(world.index.removed) == sorted(f"req-{number}" for number in range(30, 80))


async def test_what_is_taken_back_in_time_is_not_sent(world: World) -> None:
    world.index.failures.append(ContextIndexError("reset"))
    for name in ("req-1", "req-2", "req-3"):
        world.queue.add(name)
    world.queue.cancel("req-1")
    world.queue.cancel("nobody")
    await eventually(lambda: not world.index.failures)
    world.queue.cancel("req-2")  # after its first try has failed
    await world.sent()
    assert world.index.removed == ["req-3"]


async def test_an_index_that_never_answers_holds_up_nobody() -> None:
    class Stuck(RecordingIndex):
        async def remove_requests(self, request_ids: Sequence[str]) -> Removal:
            await asyncio.Event().wait()
            raise AssertionError

    world = World(Stuck())
    world.queue.add("req-0")
    await asyncio.sleep(0.02)
    for number in range(1000):
        world.queue.add(f"req-{number}")  # returns at once
    assert len(world.queue) <= 51
    async with asyncio.timeout(1):
        await world.queue.close(0.02)
    assert world.count("dropped") >= 1000


async def test_an_index_with_a_mistake_in_it_does_not_end_the_task(world: World) -> None:
    async def broken(request_ids: Sequence[str]) -> Removal:
        raise ZeroDivisionError

    working, world.index.remove_requests = world.index.remove_requests, broken  # type: ignore[method-assign]
    world.queue.add("req-1")
    await eventually(lambda: world.queue.state is BreakerState.OPEN)
    world.index.remove_requests = working  # type: ignore[method-assign]
    await world.sent()
    assert world.index.removed == ["req-1"]


async def test_closing_lets_what_waits_go_out(world: World) -> None:
    made = World(RecordingIndex(), RemovalSettings(gather_s=0.05))
    made.queue.add("req-1")
    await made.queue.close(5.0)
    assert made.index.removed == ["req-1"]
