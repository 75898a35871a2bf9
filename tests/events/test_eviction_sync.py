"""When a context index is told to forget a request: every rule, one by one, and then all of them at random."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable

import pytest
from patience import PATIENCE_S

from kvrelay.events.eviction_sync import EvictionSyncAdapter, Mode, SyncSettings
from kvrelay.ids import WorkerId, new_answer_id, new_request_id
from kvrelay.metrics import Metrics

PREFILL, DECODE, OTHER = WorkerId("prefill-000000000001"), WorkerId("decode-000000000002"), WorkerId("decode-000000000003")


class Removed:
    """Keeps what the index would be told."""

    def __init__(self) -> None:
        self.ids: list[str] = []

    def add(self, request_id: str) -> None:
        self.ids.append(request_id)

    def cancel(self, request_id: str) -> None:
        if request_id in self.ids:
            self.ids.remove(request_id)


class World:
    """An adapter, and workers whose caches are sets."""

    def __init__(self, mode: Mode = "evicted", **settings: float) -> None:
        self.removed = Removed()
        self.metrics = Metrics()
        self.caches: dict[WorkerId, set[bytes]] = {PREFILL: set(), DECODE: set(), OTHER: set()}
        self.sync = EvictionSyncAdapter(
            self.removed,
            mode=mode,
            is_held=lambda digest: any(digest in cache for cache in self.caches.values()),
            metrics=self.metrics,
            settings=SyncSettings(**settings),  # type: ignore[arg-type]
        )

    @property
    def told(self) -> list[str]:
        return self.removed.ids

    def count(self, outcome: str) -> int:
        return int(self.metrics.eviction_sync.labels(outcome)._value.get())

    def free(self, worker: WorkerId, name: str, blocks: Iterable[int] = (), *, handed_over: bool = False) -> None:
        """The request's part on the worker is over, and these blocks of it stay cached."""
        hashes = [block(number) for number in blocks]
        self.caches[worker].update(hashes)
        self.sync.on_kv_blocks_freed(worker, name, terminal=True, handed_over=handed_over, hashes=hashes)

    def preempt(self, worker: WorkerId, name: str) -> None:
        self.sync.on_kv_blocks_freed(worker, name, terminal=False)

    def evict(self, worker: WorkerId, *blocks: int) -> None:
        hashes = [block(number) for number in blocks]
        self.caches[worker].difference_update(hashes)
        self.sync.on_blocks_removed(hashes)

    def clear(self, worker: WorkerId) -> None:
        self.caches[worker].clear()
        self.sync.on_cache_lost()

    def die(self, worker: WorkerId) -> None:
        self.caches[worker].clear()
        self.sync.on_worker_left(worker)

    def serve(self, name: str, blocks: Iterable[int]) -> None:
        """A whole life on both workers."""
        listed = list(blocks)
        self.sync.on_request_started(name, [PREFILL, DECODE])
        self.free(PREFILL, name, listed[:-1], handed_over=True)
        self.free(DECODE, name, listed)
        self.sync.on_request_ended(name)


def block(number: int) -> bytes:
    return number.to_bytes(16, "big")


# Mode `terminal`: the note as it is written


async def test_terminal_a_request_is_removed_when_it_ends() -> None:
    world = World("terminal")
    world.sync.on_request_started("a", [PREFILL, DECODE])
    world.free(PREFILL, "a", [1], handed_over=True)
    world.free(DECODE, "a", [1, 2])
    assert world.told == []  # the client is still waiting
    world.sync.on_request_ended("a")
    assert world.told == ["a"]
    assert len(world.sync) == 0


async def test_terminal_an_aborted_request_is_removed_once_its_blocks_are_freed() -> None:
    world = World("terminal")
    world.sync.on_request_started("a", [DECODE])
    world.sync.on_request_ended("a")
    assert world.told == []
    world.free(DECODE, "a", [1])
    assert world.told == ["a"]


@pytest.mark.parametrize("mode", ["terminal", "evicted"])
async def test_swapping_changes_nothing(mode: Mode) -> None:
    world = World(mode)
    world.sync.on_request_started("a", [DECODE])
    world.sync.on_kv_blocks_swapped(DECODE, "a")
    world.sync.on_kv_blocks_swapped(DECODE, "foreign")
    assert (world.told, len(world.sync)) == ([], 1)
    world.free(DECODE, "a")
    world.sync.on_request_ended("a")
    assert world.told == ["a"]


@pytest.mark.parametrize("mode", ["terminal", "evicted"])
async def test_a_free_that_is_not_terminal_is_deferred_until_the_terminal_one(mode: Mode) -> None:
    world = World(mode)
    world.sync.on_request_started("a", [DECODE])
    world.preempt(DECODE, "a")
    world.preempt(DECODE, "a")
    world.preempt(DECODE, "foreign")
    assert (world.told, world.count("deferred")) == ([], 3)
    world.free(DECODE, "a")
    world.sync.on_request_ended("a")
    world.free(DECODE, "foreign")
    assert world.told == ["a", "foreign"]


@pytest.mark.parametrize("mode", ["terminal", "evicted"])
async def test_a_deferred_request_that_is_aborted_is_removed(mode: Mode) -> None:
    world = World(mode)
    world.sync.on_request_started("a", [DECODE])
    world.preempt(DECODE, "a")
    world.sync.on_request_ended("a")
    assert world.told == []
    world.free(DECODE, "a")
    assert world.told == ["a"]


@pytest.mark.parametrize("mode", ["terminal", "evicted"])
async def test_a_deferred_request_whose_worker_dies_is_removed_with_the_request(mode: Mode) -> None:
    world = World(mode)
    world.sync.on_request_started("a", [DECODE])
    world.preempt(DECODE, "a")
    world.die(DECODE)
    assert world.told == []  # it is about to go elsewhere
    world.sync.on_request_ended("a")
    assert world.told == ["a"]


async def test_a_deferred_request_of_another_router_does_not_outlive_its_worker_for_long() -> None:
    world = World(settle_s=0.02)
    world.preempt(DECODE, "foreign")
    world.die(DECODE)
    assert world.told == []
    await until_told(world, ["foreign"])


# Mode `evicted`: until the last block is gone


async def test_a_finished_request_stays_until_its_last_block_is_gone_from_every_worker() -> None:
    world = World()
    world.serve("a", [1, 2, 3])
    world.evict(DECODE, 3, 2, 1)
    assert world.told == []  # the prefill worker has two of them
    world.evict(PREFILL, 2)
    assert world.told == []
    world.evict(PREFILL, 1)
    assert world.told == ["a"]
    assert (len(world.sync), world.sync._num_hashes, world.sync._witnessed) == (0, 0, {})


async def test_blocks_may_go_in_any_order() -> None:
    world = World()
    world.serve("a", [1, 2, 3])
    world.clear(PREFILL)
    world.evict(DECODE, 1)
    world.evict(DECODE, 2)
    assert world.told == []
    world.evict(DECODE, 3)
    assert world.told == ["a"]


async def test_a_shared_prefix_keeps_everybody_who_has_it() -> None:
    world = World()
    world.serve("a", [1, 2])
    world.serve("b", [1, 3, 4])
    world.clear(PREFILL)
    world.evict(DECODE, 2, 4, 3)
    assert world.told == []
    world.evict(DECODE, 1)
    assert sorted(world.told) == ["a", "b"]


async def test_a_block_that_another_worker_computed_for_somebody_else_counts() -> None:
    world = World()
    world.caches[OTHER].add(block(1))
    world.serve("a", [1, 2])
    world.clear(PREFILL)
    world.clear(DECODE)
    assert world.told == []
    world.evict(OTHER, 1)
    assert world.told == ["a"]


@pytest.mark.parametrize("how", ["clear", "die"])
async def test_a_cache_that_is_lost_as_a_whole_takes_its_requests_with_it(how: str) -> None:
    world = World()
    world.serve("a", [1, 2])
    world.serve("b", [5, 6])
    world.clear(PREFILL)
    world.caches[OTHER].add(block(6))
    (world.clear if how == "clear" else world.die)(DECODE)
    assert world.told == ["a"]
    world.die(OTHER)
    assert world.told == ["a", "b"]


async def test_a_request_without_cached_blocks_is_removed_at_its_end() -> None:
    world = World()
    world.sync.on_request_started("short", [DECODE])
    world.free(DECODE, "short")
    assert world.told == []
    world.sync.on_request_ended("short")
    assert world.told == ["short"]


async def test_a_request_whose_workers_publish_nothing_is_removed_at_its_end() -> None:
    world = World()
    world.sync.on_request_started("a", [])
    world.sync.on_request_ended("a")
    assert world.told == ["a"]


async def test_a_request_whose_blocks_went_before_it_ended_is_removed_at_its_end() -> None:
    world = World()
    world.sync.on_request_started("a", [PREFILL, DECODE])
    world.free(PREFILL, "a", [1, 2], handed_over=True)
    world.evict(PREFILL, 2, 1)
    assert world.told == []
    world.free(DECODE, "a")
    world.sync.on_request_ended("a")
    assert world.told == ["a"]


async def test_the_workers_last_word_may_come_after_the_clients() -> None:
    world = World()
    world.sync.on_request_started("a", [PREFILL, DECODE])
    world.sync.on_request_ended("a")
    world.free(DECODE, "a", [1])
    assert world.told == []
    world.evict(DECODE, 1)
    assert world.told == []  # the prefill worker may yet have it
    world.free(PREFILL, "a", [1], handed_over=True)
    assert world.told == []
    world.evict(PREFILL, 1)
    assert world.told == ["a"]


async def test_a_word_that_never_comes_is_not_waited_for_for_ever() -> None:
    world = World(settle_s=0.02)
    world.sync.on_request_started("a", [PREFILL, DECODE])
    world.free(DECODE, "a", [1])
    world.sync.on_request_ended("a")
    world.evict(DECODE, 1)
    world.sync.on_request_started("open", [DECODE])
    await until_told(world, ["a"])
    assert "open" in world.sync


# Failover, reuse, other routers


async def test_a_request_that_goes_elsewhere_keeps_its_id() -> None:
    world = World()
    world.sync.on_request_started("a", [PREFILL, DECODE])
    world.free(PREFILL, "a", [1], handed_over=True)
    world.clear(PREFILL)
    world.die(DECODE)
    world.sync.on_request_sent_again("a", [OTHER])
    assert world.told == []
    world.free(OTHER, "a", [1, 2])
    world.sync.on_request_ended("a")
    assert world.told == []
    world.evict(OTHER, 2, 1)
    assert world.told == ["a"]


async def test_the_same_worker_may_be_tried_twice() -> None:
    world = World()
    world.sync.on_request_started("a", [DECODE])
    world.sync.on_request_sent_again("a", [DECODE])
    world.sync.on_request_ended("a")
    world.free(DECODE, "a")  # of the first attempt
    assert world.told == []
    world.free(DECODE, "a", [1])
    world.evict(DECODE, 1)
    assert world.told == ["a"]


async def test_a_later_request_with_the_same_id_starts_over() -> None:
    world = World()
    world.serve("a", [1])
    world.clear(PREFILL)
    world.clear(DECODE)
    assert world.told == ["a"]
    world.sync.on_request_started("a", [DECODE])
    assert world.told == []  # it had not been sent, and is taken back
    world.free(DECODE, "a", [7])
    world.sync.on_request_ended("a")
    world.sync.on_request_started("a", [DECODE])  # while the blocks of the one before are cached
    world.free(DECODE, "a", [8])
    world.sync.on_request_ended("a")
    world.evict(DECODE, 8)
    assert world.told == ["a"]  # what the one before left is not its business


async def test_all_prompts_of_a_request_must_be_over() -> None:
    world = World()
    world.sync.on_request_started("a", [DECODE])
    world.sync.on_request_started("a", [DECODE])
    world.free(DECODE, "a", [1])
    world.sync.on_request_ended("a")
    world.evict(DECODE, 1)
    assert world.told == []
    world.free(DECODE, "a", [2])
    world.sync.on_request_ended("a")
    world.evict(DECODE, 2)
    assert world.told == ["a"]


async def test_requests_of_other_routers_are_known_from_their_workers() -> None:
    world = World(settle_s=0.02)
    world.free(PREFILL, "foreign", [1], handed_over=True)
    world.clear(PREFILL)
    assert world.told == []  # somebody took it over
    world.free(DECODE, "foreign", [1, 2])
    assert world.told == []
    world.evict(DECODE, 2, 1)
    assert world.told == ["foreign"]
    world.free(PREFILL, "lost", [5], handed_over=True)
    world.clear(PREFILL)
    await until_told(world, ["foreign", "lost"])


async def test_ids_that_we_made_up_are_never_told() -> None:
    world = World()
    for name in (new_answer_id("cmpl-"), new_answer_id("chatcmpl-"), new_answer_id("resp_"), new_request_id()):
        world.sync.on_request_started(name, [DECODE])
        world.preempt(DECODE, name)
        world.free(DECODE, name, [1])
        world.sync.on_request_ended(name)
    world.clear(DECODE)
    assert (world.told, len(world.sync)) == ([], 0)


async def test_a_prefix_that_everybody_shares_does_not_keep_everybody_for_ever() -> None:
    world = World(max_requests=3)
    world.sync.on_request_started("open", [DECODE])
    for number in range(6):
        world.serve(f"req-{number}", [1, 2 + number])
    assert world.told == [f"req-{number}" for number in range(4)]
    assert (len(world.sync), world.count("early")) == (3, 4)
    bounded = World(max_hashes=10)
    for number in range(5):
        bounded.serve(f"req-{number}", range(100 * number, 100 * number + 4))
    assert bounded.told == ["req-0", "req-1", "req-2"]
    assert bounded.sync._num_hashes == 8


@pytest.mark.parametrize("seed", range(8))
async def test_at_random_what_is_told_is_exactly_what_is_gone(seed: int) -> None:
    """An id is told once, after its end, when no cache has a block of it; and in the end every id is."""
    rng = random.Random(seed)
    world = World()
    blocks_of: dict[str, set[int]] = {}
    steps: dict[str, list[str]] = {}
    gone: set[str] = set()
    for turn in range(600):
        choice = rng.random()
        if choice < 0.25:
            name = f"req-{turn}"
            first = rng.randrange(6)
            blocks_of[name] = {first, 10 + first, *rng.sample(range(20, 60), rng.randrange(4))} if rng.random() < 0.9 else set()
            world.sync.on_request_started(name, [PREFILL, DECODE])
            steps[name] = ["prefill", "decode", "end"]
            rng.shuffle(steps[name])
        elif choice < 0.8 and steps:
            name = rng.choice(sorted(steps))
            step = steps[name].pop()
            if step == "end":
                world.sync.on_request_ended(name)
            else:
                worker = PREFILL if step == "prefill" else DECODE
                if rng.random() < 0.2:
                    world.preempt(worker, name)
                world.free(worker, name, sorted(blocks_of[name]), handed_over=worker is PREFILL)
            if not steps[name]:
                del steps[name]
        else:
            worker = rng.choice([PREFILL, DECODE])
            if rng.random() < 0.02:
                world.clear(worker)
            else:
                world.evict(worker, *rng.sample(range(60), 6))
        held = {int.from_bytes(digest, "big") for cache in world.caches.values() for digest in cache}
        gone |= {name for name, blocks in blocks_of.items() if name not in steps and not blocks & held}
        assert set(world.told) == gone
        assert len(world.told) == len(gone)
    for name in sorted(steps):
        for worker in (PREFILL, DECODE):
            world.free(worker, name)
        world.sync.on_request_ended(name)
    world.clear(PREFILL)
    world.clear(DECODE)
    assert set(world.told) == set(blocks_of)
    assert (len(world.sync), world.sync._num_hashes, world.sync._witnessed, world.sync._unsettled) == (0, 0, {}, {})
    world.sync.close()


async def until_told(world: World, names: list[str]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while world.told != names:
            await asyncio.sleep(0.002)
