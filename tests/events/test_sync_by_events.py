"""From a worker's socket to a context index: real publishers, the router's feed, the adapter, the queue and a fake index."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from patience import eventually
from registry_records import make_record

from kvrelay.events import publisher as publisher_module
from kvrelay.events.eviction_sync import EvictionSyncAdapter, SyncSettings
from kvrelay.events.publisher import EventPublisher, PublisherSettings
from kvrelay.events.removals import RemovalQueue, RemovalSettings
from kvrelay.ids import new_worker_id
from kvrelay.metrics import Metrics
from kvrelay.router.event_feed import EventFeed
from kvrelay.router.prefix_index import PrefixIndex
from kvrelay.states import FreeReason
from kvrelay.wire.events import CacheEvent, Cleared, Freed, FreedForNow, Removed, Restored, Stored, Swapped
from tests.recording_index import RecordingIndex


def block(number: int) -> bytes:
    return number.to_bytes(16, "big")


def stored(*numbers: int) -> Stored:
    return Stored(hashes=[block(number) for number in numbers], parent=b"root")


def removed(*numbers: int) -> Removed:
    return Removed(hashes=[block(number) for number in numbers])


def freed(name: str, *numbers: int, reason: FreeReason = FreeReason.FINISHED) -> Freed:
    return Freed(request=name, reason=reason, hashes=[block(number) for number in numbers])


class World:
    """A router's event side, and workers that say what they are told to."""

    def __init__(self) -> None:
        metrics = Metrics()
        self.index = RecordingIndex()
        self.queue = RemovalQueue(self.index, metrics, RemovalSettings(gather_s=0.002))
        prefixes = PrefixIndex()
        self.sync = EvictionSyncAdapter(
            self.queue, mode="evicted", is_held=prefixes.holds, metrics=metrics, settings=SyncSettings(settle_s=0.05)
        )
        self.feed = EventFeed(prefixes, metrics, self.sync)
        self.prefixes = prefixes
        self.publishers: list[EventPublisher] = []

    def worker(self, role: str, settings: PublisherSettings | None = None) -> EventPublisher:
        made = EventPublisher(new_worker_id(role), host="127.0.0.1", settings=settings or PublisherSettings(beat_s=0.05))
        made.start()
        self.publishers.append(made)
        return made

    def join(self, worker: EventPublisher) -> None:
        record = make_record(id=worker._worker_id, events_address=worker.events_address, replay_address=worker.replay_address)
        self.feed.joined(record)

    async def in_step(self, worker: EventPublisher) -> None:
        await eventually(lambda: self.feed._subscribers[worker._worker_id].in_step)

    async def close(self) -> None:
        self.feed.close()
        self.sync.close()
        await self.queue.close()
        for publisher in self.publishers:
            publisher.close()


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    yield made
    await made.close()


async def test_a_request_is_removed_when_both_workers_have_nothing_of_it(world: World) -> None:
    prefill, decode = world.worker("prefill"), world.worker("decode")
    for worker in (prefill, decode):
        world.join(worker)
        await world.in_step(worker)
    world.sync.on_request_started("a", [prefill._worker_id, decode._worker_id])
    prefill.publish([stored(1, 2), freed("a", 1, 2, reason=FreeReason.HANDED_OVER)])
    decode.publish([stored(1, 2)])
    decode.publish([Swapped(request="a", num_blocks=2)])
    decode.publish([Restored(request="a", num_blocks=2)])
    decode.publish([FreedForNow(request="a", reason=FreeReason.NO_SWAP_ROOM)])
    decode.publish([stored(3), freed("a", 1, 2, 3)])
    await eventually(lambda: world.prefixes.holds(block(3)))
    world.sync.on_request_ended("a")
    decode.publish([removed(3, 2, 1)])
    await eventually(lambda: not world.prefixes.holds(block(3)))
    assert world.index.calls == []
    prefill.publish([removed(2, 1)])
    await eventually(lambda: world.index.removed == ["a"])


@pytest.mark.parametrize("how", ["cleared", "left"])
async def test_a_worker_that_loses_everything_takes_its_requests_with_it(world: World, how: str) -> None:
    decode = world.worker("decode")
    world.join(decode)
    decode.publish([stored(1), freed("a", 1)])
    await eventually(lambda: "a" in world.sync)
    if how == "cleared":
        decode.publish([Cleared()])
    else:
        world.feed.left(decode._worker_id)
    await eventually(lambda: world.index.removed == ["a"])


async def test_what_happened_before_a_router_listened_is_repeated_to_it(world: World) -> None:
    """However small the cache is by then: a snapshot would not tell what became of requests."""
    decode = world.worker("decode")
    for number in range(1, 200):
        decode.publish([stored(number), removed(number - 1)])
    decode.publish([freed("a", 199)])
    await eventually(lambda: decode._sequence == 200)
    world.join(decode)
    await eventually(lambda: "a" in world.sync)
    decode.publish([removed(199)])
    await eventually(lambda: world.index.removed == ["a"])


async def test_what_was_lost_for_good_ends_with_a_removal_all_the_same(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The router knows its own requests, if not what became of their blocks."""
    monkeypatch.setattr(publisher_module, "_CHEAP_REPLAY_BYTES", 0)
    decode = world.worker("decode", PublisherSettings(beat_s=0.05, ring_batches=1))
    world.sync.on_request_started("a", [decode._worker_id])
    lost: list[CacheEvent] = [stored(1), freed("a", 1)]
    decode.publish(lost)
    decode.publish([stored(2)])
    await eventually(lambda: decode._sequence == 2)
    world.sync.on_request_ended("a")
    world.join(decode)
    await world.in_step(decode)
    await eventually(lambda: world.index.removed == ["a"])


async def test_a_router_that_ends_takes_nothing_with_it(world: World) -> None:
    decode = world.worker("decode")
    world.join(decode)
    decode.publish([stored(1), freed("a", 1)])
    await eventually(lambda: "a" in world.sync)
    world.feed.close()
    await asyncio.sleep(0.02)
    assert world.index.calls == []
