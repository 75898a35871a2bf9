"""Leases: what a request computed is kept when asked for, whatever happens, and a child computes only what it adds."""

from __future__ import annotations

import random

import pytest

from kvrelay.engine.memory.swap import Swap
from kvrelay.ids import KeptId, RequestId, new_kept_id
from kvrelay.states import FinishReason, KeptState, RequestState
from kvrelay.wire.serving import Failure, Finish, Image, Inherited, Keep, Submit, of_kind
from tests.engine.kept_engine import TTL_S, KeptEngine, kept_id
from tests.engine.swap_engine import NEVER

SUFFIX = [90, 91, 92]


def swap_of(engine: KeptEngine) -> Swap:
    return engine.engine.core.swap


def finish(request: Submit, keep_tokens: int, sample: int = 0, reason: FinishReason = FinishReason.STOP) -> Finish:
    return Finish(request_id=request.request_id, sample=sample, keep_tokens=keep_tokens, reason=reason)


def press(engine: KeptEngine, *, num_requests: int = 6) -> list[Submit]:
    """Other traffic, of which each request takes half of what kept KV leaves."""
    return [engine.ask([60 + number] * 17, keep=False, max_tokens=15) for number in range(num_requests)]


# Reference counts


def test_blocks_are_pinned_when_the_parent_finishes() -> None:
    engine = KeptEngine()
    parent = engine.ask(list(range(9)), max_tokens=5)
    while parent.request_id in engine.engine.requests:
        table = engine.sequence(parent).block_table
        engine.step()
    news = engine.seen.kept[parent.request_id, 0]
    assert (news.kept, news.num_tokens, news.num_blocks, news.ttl_s) == (True, 14, 4, TTL_S)
    counts = engine.engine.load().blocks
    assert (counts.pinned, counts.in_use) == (4, 0)
    assert engine.engine.core.kept.samples[kept_id(parent)].kv.block_table == table
    assert engine.engine.load().kept == 1
    engine.step()
    assert not engine.engine.has_work  # kept KV is no work
    engine.end()


def test_a_child_shares_full_blocks_and_copies_the_last_one() -> None:
    engine = KeptEngine()
    parent = engine.parent(list(range(9)), max_tokens=6)
    pinned = engine.engine.core.kept.samples[kept_id(parent)].kv.block_table
    child = engine.child(parent, SUFFIX)
    engine.step()
    table = engine.sequence(child).block_table
    assert table[:3] == pinned[:3]
    assert table[3] != pinned[3]
    pool = engine.engine.kv.pool
    assert [pool.references[block] for block in pinned] == [2, 2, 2, 1]
    engine.until_ended(child)
    engine.assert_inherited(child, parent)
    engine.assert_as_from_scratch(child)
    assert engine.engine.load().inherited_tokens == 14
    engine.end()


def test_kept_kv_outlives_its_parent_and_traffic_that_would_have_evicted_it() -> None:
    engine = KeptEngine(num_blocks=16, host_blocks=0)
    parent = engine.parent(list(range(9)), max_tokens=6)
    for number in range(20):
        engine.parent([30 + number] * 23, keep=False)
    child = engine.child(parent, SUFFIX)
    engine.until_ended(child)
    engine.assert_inherited(child, parent)
    engine.assert_as_from_scratch(child)
    engine.end()


def test_a_child_that_ends_leaves_the_kept_kv_as_it_was() -> None:
    engine = KeptEngine()
    parent = engine.parent(list(range(9)), max_tokens=6)
    for _ in range(3):
        child = engine.child(parent, SUFFIX)
        engine.until_ended(child)
        engine.assert_inherited(child, parent)
        assert engine.pinned == 4
        assert engine.engine.load().blocks.in_use == 0
    engine.end()


def test_kept_kv_ends_when_its_time_is_over_without_any_step() -> None:
    engine = KeptEngine()
    parent = engine.parent(list(range(9)), ttl_s=5.0)
    begin = engine.now
    engine.now = begin + 5.9  # the second of grace
    assert engine.engine.load().kept == 1
    (info,) = engine.engine.find_kept(parent.external_id, "")
    assert info.ttl_s == 0.0
    engine.now = begin + 6.0
    load = engine.engine.load()
    assert (load.kept, load.blocks.pinned, load.blocks.cached) == (0, 0, 4)
    assert engine.engine.find_kept(parent.external_id, "") == []
    late = engine.child(parent, SUFFIX)
    engine.until_ended(late)
    assert engine.seen.inherited[late.request_id] == Inherited(late.request_id, 0, 16)
    engine.assert_as_from_scratch(late)
    engine.end()


def test_over_quota_it_is_not_kept_and_says_so() -> None:
    engine = KeptEngine(host_blocks=0)  # 24 blocks, of which one request may need 10
    parents = [engine.parent([number] * 17, max_tokens=8) for number in range(4)]
    assert [engine.is_kept(parent) for parent in parents] == [True, True, False, False]
    assert "quota" in engine.seen.kept[parents[2].request_id, 0].reason
    assert engine.pinned == 12
    engine.engine.release_kept([kept_id(parents[0])])
    assert engine.is_kept(engine.parent([9] * 17, max_tokens=8))
    engine.end()
    small = KeptEngine(host_blocks=64, kept_kv_share=0.2)
    assert not small.is_kept(small.parent([1] * 20, max_tokens=8))
    assert small.pinned == 0
    small.end()


def test_over_quota_who_was_used_least_lately_goes_to_the_host() -> None:
    engine = KeptEngine(num_blocks=40, kept_kv_share=0.3)
    first, second = (engine.parent([number] * 17, max_tokens=6) for number in range(2))
    assert engine.pinned == 12
    engine.until_ended(engine.child(first, SUFFIX))
    third = engine.parent([7] * 17, max_tokens=6)
    assert all(engine.is_kept(parent) for parent in (first, second, third))
    engine.run_until(lambda: engine.state(second) is KeptState.ON_HOST)
    assert engine.state(first) is engine.state(third) is KeptState.ON_DEVICE
    assert engine.pinned == 12
    engine.end()


def test_blocks_that_have_not_left_yet_count_where_the_longest_request_needs_them() -> None:
    engine = KeptEngine(delays=[3])  # 14 blocks at most
    first = engine.parent([1] * 17, max_tokens=6)
    second = engine.parent([2] * 17, max_tokens=6)
    third = engine.parent([3] * 17, max_tokens=6)
    assert [engine.is_kept(parent) for parent in (first, second, third)] == [True, True, False]
    assert engine.state(first) is KeptState.LEAVING
    engine.run_until(lambda: engine.state(first) is KeptState.ON_HOST)
    assert engine.is_kept(engine.parent([4] * 17, max_tokens=6))
    engine.end()


def test_shared_blocks_count_once() -> None:
    engine = KeptEngine(host_blocks=0)
    stem = list(range(20))
    parents = [engine.parent([*stem, number], max_tokens=4) for number in range(5)]
    assert all(engine.is_kept(parent) for parent in parents)
    assert engine.pinned == 5 + 5
    engine.end()


@pytest.mark.parametrize("steps", range(12))
def test_an_aborted_parent_is_kept_in_every_state_in_which_it_has_kv(steps: int) -> None:
    """Waiting, in the middle of its prompt, while it decodes, and when it has ended."""
    engine = KeptEngine(token_budget=4)
    parent = engine.ask(list(range(10)), max_tokens=8)
    for _ in range(steps):
        engine.step()
    engine.engine.abort([parent.request_id])
    engine.step()
    news = engine.seen.kept[parent.request_id, 0]
    assert news.kept == (steps > 0)
    if news.kept:
        text = engine.text(parent)
        assert news.num_tokens == len(text)
        child = engine.child(parent, SUFFIX)
        engine.until_ended(child)
        num_tokens = min(len(text) - 1, 4 * steps)
        assert engine.seen.inherited[child.request_id].num_tokens == num_tokens
        assert engine.computed[child.request_id] == len(child.prompt) - num_tokens
        assert child.request_id not in engine.walked
        engine.assert_as_from_scratch(child)
    else:
        assert "nothing" in news.reason
    engine.end()


def swapped_parent(delay: int = 1) -> tuple[KeptEngine, Submit]:
    engine = KeptEngine(num_blocks=10, max_model_len=36, delays=[delay])
    engine.ask([10, 1, 2, 3, 4], keep=False, max_tokens=24)
    return engine, engine.ask([20, 1, 2, 3, 4], max_tokens=24)


def test_a_parent_that_is_aborted_on_the_host_is_kept_there() -> None:
    engine, parent = swapped_parent()
    engine.until_swapped(parent)
    engine.engine.abort([parent.request_id])
    engine.step()
    assert engine.is_kept(parent)
    assert engine.state(parent) is KeptState.ON_HOST
    assert engine.engine.load().host.in_use > 0
    child = engine.child(parent, SUFFIX)
    engine.until_ended(child)
    engine.assert_inherited(child, parent)
    engine.assert_as_from_scratch(child)
    engine.end()


def test_a_parent_that_is_aborted_on_its_way_to_the_host_is_not_kept() -> None:
    engine, parent = swapped_parent(delay=4)
    engine.until_swapped(parent, saved=False)
    engine.engine.abort([parent.request_id])
    engine.step()
    assert "on the way to the host" in engine.seen.kept[parent.request_id, 0].reason
    engine.end()


def test_a_parent_that_is_aborted_on_its_way_back_is_kept_on_the_host() -> None:
    engine, parent = swapped_parent()
    sequence = engine.until_swapped(parent)
    engine.delays = [5]
    engine.run_until(lambda: sequence in engine.engine.scheduler.loading)
    engine.engine.abort([parent.request_id])
    engine.step()
    assert engine.state(parent) is KeptState.ON_HOST
    child = engine.child(parent, SUFFIX)
    engine.until_ended(child)
    engine.assert_inherited(child, parent)
    engine.assert_as_from_scratch(child)
    engine.end()


def test_a_child_that_is_aborted_before_it_starts_or_while_it_loads_lets_go() -> None:
    engine = KeptEngine(num_blocks=16, max_batch=1, delays=[3])
    parent = engine.parent(list(range(9)), max_tokens=6)
    busy = engine.ask([50], keep=False, max_tokens=20)
    engine.step()
    waiting = engine.child(parent, SUFFIX)
    engine.step()
    assert engine.sequence(waiting).state is RequestState.WAITING
    engine.engine.abort([waiting.request_id])
    engine.until_ended(busy)
    to_host(engine, parent)
    evict(engine)
    loading = engine.child(parent, SUFFIX, keep=True)
    engine.step()
    assert engine.sequence(loading).state is RequestState.TRANSFERRING
    engine.engine.abort([loading.request_id])
    engine.step()
    assert not engine.is_kept(loading)
    assert engine.engine.core.kept.samples[kept_id(parent)].num_holds == 0
    assert waiting.request_id not in engine.seen.inherited
    engine.end()


def test_a_release_or_the_end_of_its_time_takes_nothing_from_a_waiting_child() -> None:
    for on_host in (False, True):
        engine = KeptEngine(num_blocks=20, max_batch=1)
        first, second = engine.parent(list(range(9)), max_tokens=6), engine.parent([5] * 6, ttl_s=100.0, max_tokens=6)
        if on_host:
            to_host(engine, first, second)
            evict(engine)
        busy = engine.ask([50], keep=False, max_tokens=20)
        engine.step()
        children = [engine.child(first, SUFFIX), engine.child(second, SUFFIX)]
        engine.engine.release_kept([kept_id(first), KeptId("kv-unknown")])
        engine.now += 200.0
        assert engine.engine.load().kept == 0
        assert engine.engine.find_kept(kept_id(first), "") == []
        assert engine.state(first) is not KeptState.ENDED
        too_late = engine.child(first, SUFFIX)
        engine.until_ended(busy, *children, too_late)
        for child, parent in zip(children, (first, second), strict=True):
            engine.assert_inherited(child, parent)
            assert engine.state(parent) is KeptState.ENDED
        assert engine.seen.inherited[too_late.request_id].num_tokens == 0
        engine.assert_as_from_scratch(*children, too_late)
        assert engine.pinned == 0
        engine.end()


# The pool is full of kept KV


def to_host(engine: KeptEngine, *parents: Submit) -> None:
    engine.engine.core.kept.blocks.make_room(engine.engine.kv.pool.num_blocks)
    engine.run_until(lambda: all(engine.state(parent) is KeptState.ON_HOST for parent in parents))


def evict(engine: KeptEngine) -> None:
    """Nothing is left in the device's cache that nobody holds."""
    pool = engine.engine.kv.pool
    blocks = pool.allocate(pool.num_available)
    assert blocks is not None
    pool.release(blocks)


def test_a_pool_full_of_kept_kv_still_serves_and_no_promise_is_broken() -> None:
    for host_blocks in (64, 9, 0):
        engine = KeptEngine(host_blocks=host_blocks)
        parents = [engine.parent([number, *range(16)], max_tokens=7) for number in range(6)]
        kept = [parent for parent in parents if engine.is_kept(parent)]
        assert len(kept) >= 2
        others = press(engine)
        longest = engine.ask([3] * 20, keep=False, max_tokens=20)
        engine.until_ended(longest, *others)
        assert all(engine.state(parent) is not KeptState.ENDED for parent in kept)
        if host_blocks == 64:
            assert all(engine.state(parent) is KeptState.ON_HOST for parent in kept)
            assert engine.pinned == 0
        evict(engine)
        children = [engine.child(parent, SUFFIX) for parent in kept]
        engine.until_ended(*children)
        for child, parent in zip(children, kept, strict=True):
            engine.assert_inherited(child, parent)
        engine.assert_as_from_scratch(*children, *others, longest)
        engine.end()


@pytest.mark.parametrize("are_back", [[True, True], [False, True, True]], ids=str)
def test_at_rest_what_only_the_host_has_is_cached_on_the_device_again(are_back: list[bool]) -> None:
    """Of half the blocks, what was used last: more would take the places of one another for ever."""
    engine = KeptEngine()
    parents = []
    for number in range(len(are_back)):
        parents.append(engine.parent([number] * 17, max_tokens=8))
        to_host(engine, parents[-1])
    evict(engine)

    def present(parent: Submit) -> list[int | None]:
        return swap_of(engine).blocks_of(engine.engine.core.kept.samples[kept_id(parent)].kv)

    assert {block for parent in parents for block in present(parent)} == {None}
    engine.step()
    while engine.engine.has_work:
        engine.step()
    assert [None not in present(parent)[:6] for parent in parents] == are_back
    assert not swap_of(engine).copies
    assert engine.pinned == 0
    children = [engine.child(parent, SUFFIX) for parent in parents]
    engine.until_ended(*children)
    for child, parent in zip(children, parents, strict=True):
        engine.assert_inherited(child, parent)
    engine.assert_as_from_scratch(*children)
    engine.end()


def test_a_copy_back_at_rest_that_takes_too_long_is_not_used() -> None:
    engine = KeptEngine()
    parent = engine.parent([1] * 17, max_tokens=8)
    to_host(engine, parent)
    evict(engine)
    engine.delays = [NEVER]
    engine.run_until(lambda: any(copy.prefetched and copy.expired for copy in swap_of(engine).copies.values()))
    assert set(swap_of(engine).blocks_of(engine.engine.core.kept.samples[kept_id(parent)].kv)) == {None}
    engine.delays = [1]
    child = engine.child(parent, SUFFIX)
    engine.until_ended(child)
    engine.assert_inherited(child, parent)
    engine.assert_as_from_scratch(child)
    engine.end()


def prefetching(engine: KeptEngine) -> bool:
    return any(copy.prefetched for copy in swap_of(engine).copies.values())


@pytest.mark.parametrize("what", ["cut", "released", "child", "drained"])
def test_while_kept_kv_comes_back_at_rest(what: str) -> None:
    engine = KeptEngine(delays=[3])
    parent = engine.parent([1] * 17, max_tokens=8)
    to_host(engine, parent)
    evict(engine)
    engine.run_until(lambda: prefetching(engine))
    match what:
        case "cut":
            engine.engine.finish(finish(parent, 1))
        case "released":
            engine.engine.release_kept([kept_id(parent)])
        case "child":
            child = engine.child(parent, SUFFIX)
            engine.until_ended(child)
            engine.assert_inherited(child, parent)
            engine.assert_as_from_scratch(child)
        case "drained":
            engine.engine.drain()
    for _ in range(20):
        engine.step()
    assert not prefetching(engine)
    engine.end()


def test_kept_kv_comes_back_behind_the_last_request_of_those_that_drove_it_away() -> None:
    """A worker makes no step when there is nothing to do: the last one with a request in it begins the first copy."""
    engine = KeptEngine()
    parent = engine.parent([1] * 17, max_tokens=8)
    others = press(engine)
    while engine.engine.has_work:
        engine.step()
    assert engine.state(parent) is KeptState.ON_HOST
    kept_kv = engine.engine.core.kept.samples[kept_id(parent)].kv
    assert None not in swap_of(engine).blocks_of(kept_kv)[: kept_kv.num_computed // 4]
    engine.assert_as_from_scratch(*others)
    engine.end()


def test_without_a_prefix_cache_kept_kv_stays_on_the_host_at_rest() -> None:
    engine = KeptEngine(prefix_cache=False)
    parent = engine.parent([1] * 17, max_tokens=8)
    to_host(engine, parent)
    for _ in range(10):
        engine.step()
        assert not swap_of(engine).copies
    engine.end()


def test_kept_kv_makes_room_before_anybody_who_runs_has_to() -> None:
    engine = KeptEngine()
    parents = [engine.parent([number] * 17, max_tokens=8) for number in range(2)]
    grown = [engine.ask([30 + number], keep=False, max_tokens=30) for number in range(2)]
    engine.until_ended(*grown)
    assert engine.engine.load().preemptions == 0
    assert KeptState.ON_HOST in [engine.state(parent) for parent in parents]
    engine.assert_as_from_scratch(*grown)
    engine.end()


def test_kept_kv_makes_room_for_who_waits_too() -> None:
    engine = KeptEngine()
    for number in range(2):
        engine.parent([number] * 17, max_tokens=8)
    running = engine.ask([30] * 20, keep=False, max_tokens=8)
    engine.step()
    waiting = engine.ask([31] * 32, keep=False, max_tokens=2)
    engine.run_until(lambda: engine.sequence(waiting).state is RequestState.RUNNING)
    assert running.request_id in engine.engine.requests
    engine.end()


def test_without_room_on_the_host_those_who_run_make_room() -> None:
    engine = KeptEngine(host_blocks=2)
    parents = [engine.parent([number] * 17, max_tokens=8) for number in range(2)]
    grown = [engine.ask([30 + number], keep=False, max_tokens=30) for number in range(2)]
    engine.until_ended(*grown)
    assert engine.engine.load().preemptions > 0
    assert all(engine.state(parent) is KeptState.ON_DEVICE for parent in parents)
    engine.assert_as_from_scratch(*grown)
    engine.end()


def test_blocks_that_live_sequences_hold_are_not_copied_for_nothing() -> None:
    engine = KeptEngine(num_blocks=14, max_model_len=36)
    parent = engine.parent(list(range(9)), max_tokens=4)
    child = engine.child(parent, SUFFIX, max_tokens=20)
    engine.step()
    for _ in range(3):
        engine.engine.core.kept.blocks.make_room(14)
    assert engine.state(parent) is KeptState.ON_DEVICE
    engine.until_ended(child)
    engine.assert_inherited(child, parent)
    engine.end()


def test_kept_kv_that_shares_blocks_is_copied_once() -> None:
    engine = KeptEngine(num_blocks=30)
    first = engine.parent(list(range(16)), max_tokens=5)
    second = engine.child(first, SUFFIX, keep=True, max_tokens=5)
    engine.until_ended(second)
    to_host(engine, first, second)
    kept = [
        swap_of(engine).on_host[engine.engine.core.kept.samples[kept_id(one)].kv.key].host_blocks for one in (first, second)
    ]
    assert kept[0] == kept[1][: len(kept[0])]
    assert engine.engine.load().host.in_use == len(set(kept[0] + kept[1]))
    evict(engine)
    child = engine.child(second, SUFFIX)
    engine.until_ended(child)
    engine.assert_inherited(child, second)
    engine.assert_as_from_scratch(child)
    engine.end()


def test_a_copy_to_the_host_that_takes_too_long_leaves_the_kept_kv_on_the_device() -> None:
    engine = KeptEngine(delays=[NEVER])
    parents = [engine.parent([number] * 17, max_tokens=8) for number in range(2)]
    others = press(engine)
    engine.until_ended(*others)
    assert all(engine.state(parent) is KeptState.ON_DEVICE for parent in parents)
    engine.delays = [1]
    child = engine.child(parents[0], SUFFIX)
    engine.until_ended(child)
    engine.assert_inherited(child, parents[0])
    engine.assert_as_from_scratch(child, *others)
    engine.end()


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_copy_from_the_host_that_takes_too_long_is_computed_instead(prefix_cache: bool) -> None:
    engine = KeptEngine(prefix_cache=prefix_cache)
    parent = engine.parent(list(range(17)), max_tokens=6)
    to_host(engine, parent)
    evict(engine)
    engine.delays = [NEVER]
    child = engine.child(parent, SUFFIX)
    engine.run_until(lambda: child.request_id in engine.seen.inherited)
    assert engine.seen.inherited[child.request_id] == Inherited(child.request_id, 0)
    engine.delays = [1]
    engine.until_ended(child)
    again = engine.child(parent, SUFFIX)
    engine.until_ended(again)
    engine.assert_inherited(again, parent)
    engine.assert_as_from_scratch(child, again)
    engine.end()


def test_kept_kv_that_ends_while_it_leaves_leaks_nothing() -> None:
    for delay in (3, 9):
        engine = KeptEngine(delays=[delay])
        parent = engine.parent([1] * 17, max_tokens=8)
        engine.engine.core.kept.blocks.make_room(24)
        assert engine.state(parent) is KeptState.LEAVING
        assert engine.engine.has_work
        engine.engine.release_kept([kept_id(parent)])
        assert engine.state(parent) is KeptState.ENDED
        engine.run()
        assert engine.pinned == 0
        engine.end()


# What the client saw


@pytest.mark.parametrize("when", ["before", "while it runs", "after"])
@pytest.mark.parametrize("keep_tokens", range(1, 8))
def test_kept_kv_holds_exactly_what_the_client_saw(when: str, keep_tokens: int) -> None:
    """The router finds a stop string; the sequence has run further, or has even ended."""
    engine = KeptEngine(token_budget=4)
    parent = engine.ask(list(range(6)), max_tokens=8)
    if when == "before":
        engine.engine.finish(finish(parent, 0))
        engine.step()
        assert not engine.is_kept(parent)
        engine.end()
        return
    for _ in range(keep_tokens + 1) if when == "while it runs" else range(20):
        engine.step()
    engine.engine.finish(finish(parent, keep_tokens))
    engine.step()
    assert engine.is_kept(parent)
    seen = parent.prompt + engine.seen.tokens[parent.request_id, 0][:keep_tokens]
    (info,) = engine.engine.find_kept(kept_id(parent), "")
    assert (info.tokens, info.num_prompt_tokens, info.on_host) == (seen, 6, False)
    child = engine.ask(seen + SUFFIX, inherit=kept_id(parent), keep=False)
    engine.until_ended(child)
    assert engine.seen.inherited[child.request_id].num_tokens == len(seen) - 1
    assert engine.computed[child.request_id] == len(SUFFIX) + 1
    engine.assert_as_from_scratch(child)
    engine.end()


def test_kept_kv_that_is_cut_when_it_is_on_the_host() -> None:
    engine = KeptEngine()
    parent = engine.parent(list(range(6)), max_tokens=8)
    to_host(engine, parent)
    evict(engine)
    engine.engine.finish(finish(parent, 2))
    seen = engine.text(parent)[:8]
    child = engine.ask(seen + SUFFIX, inherit=kept_id(parent), keep=False)
    engine.until_ended(child)
    assert engine.seen.inherited[child.request_id].num_tokens == 7
    engine.assert_as_from_scratch(child)
    engine.end()


def test_a_child_does_not_write_what_others_can_find_though_nobody_else_holds_it() -> None:
    """The last block of kept KV that was cut is full, and in the prefix cache."""
    engine = KeptEngine()
    parent = engine.parent(list(range(6)), max_tokens=8)
    engine.engine.finish(finish(parent, 1))
    child = engine.ask(engine.text(parent)[:7] + SUFFIX, inherit=kept_id(parent), keep=False)
    engine.engine.release_kept([kept_id(parent)])
    engine.until_ended(child)
    again = engine.ask(engine.text(parent), keep=False)
    engine.until_ended(again)
    assert engine.seen.first[again.request_id].cached_tokens == 12
    engine.assert_as_from_scratch(child, again)
    engine.end()


# Families


def test_every_sample_of_a_parent_is_kept_and_every_sample_of_a_child_inherits() -> None:
    engine = KeptEngine(num_blocks=40)
    parent = engine.parent(list(range(9)), n=3, max_tokens=5, temperature=1.0, seed=3)
    children = [engine.child(parent, SUFFIX, sample=index, n=2, temperature=1.0, seed=index) for index in range(3)]
    engine.until_ended(*children)
    for index, child in enumerate(children):
        engine.assert_inherited(child, parent, index)
    engine.assert_as_from_scratch(*children)
    engine.end()


def test_samples_that_were_never_forked_are_kept_with_the_prompt() -> None:
    engine = KeptEngine(token_budget=4)
    parent = engine.ask(list(range(10)), n=3, max_tokens=5, temperature=1.0, seed=3)
    engine.step()
    engine.step()
    engine.engine.abort([parent.request_id])
    engine.step()
    assert all(engine.is_kept(parent, sample) for sample in range(3))
    assert engine.pinned == 2
    child = engine.child(parent, SUFFIX, sample=2)
    engine.until_ended(child)
    assert engine.seen.inherited[child.request_id].num_tokens == 8
    engine.assert_as_from_scratch(child)
    engine.end()


def test_a_chain_of_children_of_children() -> None:
    engine = KeptEngine(num_blocks=40, max_model_len=100)
    parent = engine.parent(list(range(9)), max_tokens=5)
    for number in range(6):
        child = engine.child(parent, [80 + number], keep=True, max_tokens=5)
        engine.engine.release_kept([kept_id(parent)])
        engine.until_ended(child)
        engine.assert_inherited(child, parent)
        engine.assert_as_from_scratch(child)
        parent = child
    assert engine.engine.load().kept == 1
    engine.end()


def test_several_children_at_once_with_others_among_them() -> None:
    engine = KeptEngine(num_blocks=32)
    parent = engine.parent(list(range(11)), max_tokens=6)
    children = []
    for number in range(5):
        children.append(engine.child(parent, [70 + number] * number, priority=-1))
        engine.ask([number] * 9, keep=False)
    engine.run()
    for child in children:
        engine.assert_inherited(child, parent)
    engine.assert_as_from_scratch(*children)
    engine.end()


def test_what_a_child_computes_can_be_found_by_others() -> None:
    engine = KeptEngine()
    parent = engine.parent(list(range(9)), max_tokens=6)
    child = engine.child(parent, SUFFIX, max_tokens=7)
    engine.until_ended(child)
    again = engine.ask(engine.text(child), keep=False, max_tokens=2)
    engine.until_ended(again)
    assert engine.seen.first[again.request_id].cached_tokens == 24
    engine.end()


def test_a_child_that_is_preempted_goes_on() -> None:
    for host_blocks in (64, 0):
        engine = KeptEngine(num_blocks=14, max_model_len=40, host_blocks=host_blocks)
        parent = engine.parent(list(range(9)), max_tokens=4)
        others = [engine.ask([60 + number], keep=False, max_tokens=30) for number in range(2)]
        child = engine.child(parent, SUFFIX, max_tokens=20)
        engine.until_ended(child, *others)
        assert engine.engine.load().preemptions > 0
        engine.assert_inherited(child, parent)
        engine.assert_as_from_scratch(child, *others)
        engine.end()


# Who may, and who may not


def test_a_child_of_other_tokens_salt_or_images_is_refused() -> None:
    engine = KeptEngine()
    parent = engine.parent(list(range(9)), cache_salt="a", max_tokens=4)
    text, handle = engine.text(parent), kept_id(parent)
    image = Image(digest="d", start=2, num_tokens=3, grid=(1, 2, 2))
    wrong = [
        engine.ask([*text[:-1], (text[-1] + 1) % 97, *SUFFIX], inherit=handle, cache_salt="a"),
        engine.ask(text[:-1], inherit=handle, cache_salt="a"),
        engine.ask(text + SUFFIX, inherit=handle, cache_salt="b"),
        engine.ask(text + SUFFIX, inherit=handle, cache_salt="a", prompt_logprobs=1),
    ]
    base = engine.ask(text + SUFFIX, inherit=handle, cache_salt="a", keep=False)
    with_image = Submit(
        request_id=RequestId("cmpl-image"),
        external_id="p",
        prompt=base.prompt,
        params=base.params,
        cache_salt="a",
        inherit=handle,
        images=[image],
    )
    engine.engine.submit(with_image)
    outputs = engine.engine.step()
    params_named = {failure.request_id: failure.param for failure in of_kind(Failure, outputs.news)}
    engine.seen.take(outputs)
    assert [params_named[request.request_id] for request in wrong] == [*["continuation_of"] * 3, "prompt_logprobs"]
    assert params_named[with_image.request_id] == "images"  # that stand nowhere in its prompt
    engine.until_ended(base)
    engine.assert_inherited(base, parent)
    engine.end()


@pytest.mark.parametrize("keep", [Keep([new_kept_id()], 0.0), Keep([new_kept_id()], float("inf")), Keep([], 5.0)])
def test_a_keep_that_makes_no_sense_is_refused(keep: Keep) -> None:
    engine = KeptEngine()
    request = engine.ask([1, 2])
    wrong = Submit(request_id=RequestId("cmpl-wrong"), external_id="w", prompt=[1], params=request.params, keep=keep)
    engine.engine.submit(wrong)
    outputs = engine.engine.step()
    engine.seen.take(outputs)
    (failure,) = of_kind(Failure, outputs.news)
    assert (failure.request_id, failure.param) == (wrong.request_id, "keep_kv")
    engine.end()


def test_kept_kv_is_found_by_its_owner_alone() -> None:
    engine = KeptEngine()
    parent = engine.parent(list(range(9)), n=2, temperature=1.0, seed=1, max_tokens=4, owner="key")
    assert parent.keep is not None
    assert [info.kept_id for info in engine.engine.find_kept(parent.external_id, "key")] == parent.keep.kept_ids
    (info,) = engine.engine.find_kept(kept_id(parent, 1), "key")
    assert info.tokens == engine.text(parent, 1)
    assert (info.num_blocks, info.external_id, info.owner) == (3, parent.external_id, "key")
    assert engine.engine.find_kept(parent.external_id, "") == engine.engine.find_kept("other", "key") == []
    engine.end()


def test_a_request_that_fails_is_not_kept() -> None:
    engine = KeptEngine()
    parent = engine.ask(list(range(9)))
    engine.step()
    engine.seen.take(engine.engine.fail_all("the roof fell in"))
    assert "roof" in engine.seen.kept[parent.request_id, 0].reason
    assert engine.pinned == 0
    engine.end()


def test_a_drain_does_not_wait_for_kept_kv() -> None:
    engine = KeptEngine(delays=[NEVER])
    engine.parent([1] * 17)
    engine.step()
    engine.engine.drain()
    assert engine.engine.drained
    engine.engine.core.kept.blocks.make_room(24)
    assert engine.engine.drained
    engine.end()


def test_nothing_that_is_kept_is_said_to_be_removed() -> None:
    engine = KeptEngine()
    twins = [engine.ask(list(range(17)), max_tokens=6) for _ in range(2)]  # both compute it; only one's blocks can be found
    engine.until_ended(*twins)
    kept = set(engine.engine.core.kept.samples[kept_id(twins[1])].kv.hashes)
    assert len(kept) == 5
    engine.engine.release_kept([kept_id(twins[0])])
    for _ in range(2):
        evict(engine)
        engine.until_ended(*press(engine))
        assert not kept & engine.removed()
    assert engine.state(twins[1]) is KeptState.ON_HOST
    engine.engine.release_kept([kept_id(twins[1])])
    engine.end()


# Any parent, suffix, block size, chunk and pressure


def any_case(seed: int) -> None:
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 3, 4, 8, 16])
    edge = block_size * rng.randrange(1, 1 + 48 // block_size)
    length = max(2, edge + 1 + seed % 3 - 1 if seed % 4 else rng.randrange(2, 49))  # its KV ends on, before or after an edge
    num_output = rng.randrange(1, min(length, 9))
    suffix = [rng.randrange(97) for _ in range(rng.randrange(0, 12))]
    max_model_len = length + len(suffix) + 12
    most = -(-max_model_len // block_size)
    num_blocks = most + -(-length // block_size) + rng.randrange(0, most + 1)
    engine = KeptEngine(
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        block_size=block_size,
        token_budget=rng.choice([2, 5, 16, 64]),
        host_blocks=rng.choice([0, num_blocks // 2, 3 * num_blocks]),
        delays=[rng.choice([1, 1, 2, 4]) for _ in range(4)],
        prefix_cache=rng.random() < 0.8,
        max_batch=4,
    )
    parent = engine.parent([rng.randrange(97) for _ in range(length - num_output)], max_tokens=num_output)
    assert engine.is_kept(parent)
    others = []
    for _ in range(rng.choice([0, 0, 3, 6])):  # some before, some beside the child
        others.append(engine.ask([rng.randrange(97)] * rng.randrange(1, max_model_len - 10), keep=False, max_tokens=9))
        for _ in range(rng.randrange(12)):
            engine.step()
    child = engine.child(parent, suffix, max_tokens=rng.randrange(1, 12), priority=rng.choice([-1, 0]))
    engine.until_ended(child, *others)
    engine.assert_inherited(child, parent)
    engine.assert_as_from_scratch(child, *others)
    engine.end()


def test_a_child_answers_as_its_text_from_scratch_would_and_computes_its_suffix_and_one_token() -> None:
    for seed in range(60):
        any_case(seed)


@pytest.mark.long
def test_the_same_for_five_hundred_cases() -> None:
    for seed in range(60, 560):
        any_case(seed)
