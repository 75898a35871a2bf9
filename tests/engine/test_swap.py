"""Swapping: under pressure every request lives on, its tokens do not change, and nothing leaks on the device or the host."""

from __future__ import annotations

import pytest

from kvrelay.engine.memory.swap import Swap
from kvrelay.states import FinishReason, KVState, RequestState
from kvrelay.wire.events import Freed, FreedForNow, Restored, Swapped
from kvrelay.wire.serving import Submit
from tests.engine.swap_engine import NEVER, SwapEngine, prompts
from tests.engine.test_engine import solo

LONG = 2 * NEVER


def swap_of(engine: SwapEngine) -> Swap:
    return engine.engine.core.swap


def pressed(**options: object) -> tuple[SwapEngine, list[Submit]]:
    """Two requests that outgrow the pool together; the second makes room."""
    engine = SwapEngine(**{"num_blocks": 8, **options})  # type: ignore[arg-type]
    return engine, [engine.submit([start, 1, 2, 3, 4], max_tokens=18) for start in (10, 20)]


def assert_as_alone(engine: SwapEngine) -> None:
    for request in engine.requests:
        params = request.params
        expected = solo(
            request.prompt, n=params.n, max_tokens=params.max_tokens, temperature=params.temperature, seed=params.seed
        )
        for sample, tokens in expected.items():
            assert engine.seen.tokens[request.request_id, sample] == tokens


MODES = {
    "off": {"host_blocks": 0},
    "on": {},
    "small host": {"host_blocks": 7},
    "slow copies": {"delays": [4, 1, 3]},
    "flaky": {"delays": [1, 9, 2, 30, 1, 1, 12]},
    "without prefix cache": {"prefix_cache": False, "delays": [2, 1, 9]},
    "oldest makes room": {"preempt": "oldest", "delays": [1, 2, 9]},
}


@pytest.mark.parametrize("mode", MODES)
def test_a_pool_for_three_of_twelve_requests_changes_no_token_and_nobody_starves(mode: str) -> None:
    engine = SwapEngine(num_blocks=18, **MODES[mode])  # type: ignore[arg-type]
    for index, prompt in enumerate(prompts(12, seed=3)):
        engine.submit(prompt, max_tokens=16, temperature=float(index % 2), seed=index)
    engine.run()
    assert_as_alone(engine)
    load = engine.engine.load()
    assert load.preemptions > 0
    assert (load.host.swapped_out > 0) == (mode != "off")
    assert (load.host.timeouts > 0) == any(delay > 6 for delay in engine.delays)
    total = sum(len(request.prompt) + 16 for request in engine.requests)
    assert max(engine.longest_wait.values()) <= total  # the bound that the scheduler promises, copies included with room


def test_swap_out_and_swap_in_are_told_and_resume_where_they_were() -> None:
    engine, (first, second) = pressed()
    sequence = engine.until_swapped(second)
    assert sequence.kv_state is KVState.SWAPPED
    computed = sequence.num_computed
    assert computed > 0
    assert engine.engine.load().swapped == 1
    assert engine.engine.has_work
    engine.run()
    assert_as_alone(engine)
    assert engine.kinds(second)[:2] == ["Swapped", "Restored"]
    assert engine.kinds(second)[-1] == "Freed"
    assert engine.kinds(first) == ["Freed"]
    assert engine.engine.load().prompt_tokens == 10  # nothing was computed twice


def test_the_blocks_of_a_victim_stay_until_they_are_on_the_host_and_whoever_needs_them_sits_out() -> None:
    engine, (first, second) = pressed(delays=[4])
    sequence = engine.until_swapped(second, saved=False)
    swap = swap_of(engine)
    (copy,) = swap.copies.values()
    assert swap.num_releasing == len(copy.blocks) > 0
    assert not sequence.block_table
    before = len(engine.seen.tokens[first.request_id, 0])
    engine.step()
    assert len(engine.seen.tokens[first.request_id, 0]) == before
    assert swap.copies
    engine.run()
    assert_as_alone(engine)


def test_a_victim_in_prefill_resumes_its_prefill() -> None:
    engine = SwapEngine(num_blocks=10, token_budget=2)
    first = engine.submit([1, 2, 3], max_tokens=30)
    second = engine.submit(list(range(30, 52)), max_tokens=2)
    sequence = engine.until_swapped(second)
    assert 0 < sequence.num_computed < sequence.num_prompt_tokens
    engine.run()
    assert_as_alone(engine)
    assert engine.engine.load().prompt_tokens == len(first.prompt) + len(second.prompt)


def test_who_makes_room_is_chosen_by_priority_then_by_the_policy() -> None:
    for policy, expected in (("latest", 3), ("oldest", 1)):
        engine = SwapEngine(num_blocks=9, preempt=policy)
        requests = [
            engine.submit([index, 1, 2], max_tokens=20, priority=priority) for index, priority in enumerate((0, 1, 1, 1))
        ]
        for _ in range(60):
            if engine.engine.scheduler.swapped:
                break
            engine.step()
        (victim,) = engine.engine.scheduler.swapped[:1]
        assert victim.request_id == requests[expected].request_id
        engine.run()
        assert_as_alone(engine)


def test_nobody_who_computes_in_a_step_makes_room_in_it() -> None:
    for policy in ("latest", "oldest"):
        engine = SwapEngine(num_blocks=9, preempt=policy, delays=[2])
        for index in range(5):
            engine.submit([index, 1, 2], max_tokens=20)
        launch = engine.runner.launch

        def checked(plan, launch=launch):  # type: ignore[no-untyped-def]
            assert all(row.sequence.state is RequestState.RUNNING for row in plan.rows)
            launch(plan)

        engine.runner.launch = checked  # type: ignore[method-assign]
        engine.run()
        assert_as_alone(engine)


def test_without_swap_room_the_kv_is_computed_again() -> None:
    engine, (_, second) = pressed(host_blocks=1)
    engine.run()
    assert_as_alone(engine)
    assert engine.kinds(second)[0] == "no_swap_room"
    assert engine.kinds(second)[-1] == "Freed"
    assert engine.engine.load().host.swapped_out == 0


def test_without_a_host_pool_the_kv_is_computed_again() -> None:
    engine, (_, second) = pressed(host_blocks=0)
    engine.run()
    assert_as_alone(engine)
    assert engine.kinds(second)[0] == "preempted"


def test_a_copy_to_the_host_that_takes_too_long_is_given_up_and_its_host_blocks_wait_for_it() -> None:
    engine, (_, second) = pressed(delays=[NEVER])
    swap = swap_of(engine)
    engine.until_swapped(second, saved=False)
    engine.delays = [1]
    (copy,) = swap.copies.values()
    for _ in range(8):
        engine.step()
    assert copy.expired
    assert all(
        swap.host.pool.references[host_block] == 1 for host_block in copy.host_blocks
    )  # quarantined: the copy may still write them
    assert engine.kinds(second)[0] == "swap_out_timeout"
    engine.run()
    assert_as_alone(engine)


def test_a_copy_from_the_host_that_takes_too_long_is_given_up_and_its_blocks_wait_for_it() -> None:
    engine, (_, second) = pressed(num_blocks=10, prefix_cache=False)
    swap = swap_of(engine)
    sequence = engine.until_swapped(second)
    engine.delays = [40]
    while sequence not in engine.engine.scheduler.loading:
        engine.step()
    (copy,) = swap.copies.values()
    assert copy.blocks
    engine.delays = [1]
    while sequence.state is not RequestState.WAITING:
        engine.step()
    assert sequence.kv_state is KVState.FREED
    assert engine.engine.load().blocks.quarantined == len(copy.blocks)
    assert engine.kinds(second)[:2] == ["Swapped", "swap_in_timeout"]
    engine.run()
    assert_as_alone(engine)


def test_the_host_copy_is_dropped_only_when_the_kv_is_back() -> None:
    engine, (_, second) = pressed(num_blocks=10, prefix_cache=False, delays=[3])
    swap = swap_of(engine)
    sequence = engine.until_swapped(second)
    host_blocks = list(swap.on_host[sequence.key].host_blocks)
    while sequence not in engine.engine.scheduler.loading:
        engine.step()
    assert swap.on_host[sequence.key].table  # allocated
    assert all(swap.host.pool.references[host_block] for host_block in host_blocks)
    engine.run()
    assert_as_alone(engine)


def test_shared_blocks_are_copied_once_and_shared_again() -> None:
    """Samples of one request share their prompt's blocks, on the device, on the host, and back."""
    for prefix_cache in (True, False):
        engine = SwapEngine(num_blocks=14, prefix_cache=prefix_cache, delays=[2])
        first = engine.submit([1, 2, 3], max_tokens=40)
        second = engine.submit(list(range(40, 53)), n=3, max_tokens=30, temperature=1.0, seed=4)
        most = 0
        swap = swap_of(engine)
        while engine.engine.has_work:
            engine.step()
            kept = [one for one in swap.on_host.values() if one.sequence.request_id == second.request_id and one.host_blocks]
            if len(kept) == 3:
                assert kept[0].host_blocks[:3] == kept[1].host_blocks[:3] == kept[2].host_blocks[:3]
                most = 3
        assert most == 3, "the samples were never on the host together"
        engine.settle()
        assert_as_alone(engine)
        assert first.request_id in {request_id for request_id, _ in engine.seen.ends}


def test_blocks_that_are_still_on_the_device_are_not_copied_back() -> None:
    engine, (first, second) = pressed()
    engine.until_swapped(second)
    engine.engine.abort([first.request_id])  # before anybody took the blocks
    loads: list[int] = []
    begin = engine.runner.begin_copies

    def counted(saves, to_load):  # type: ignore[no-untyped-def]
        loads.append(len(to_load))
        return begin(saves, to_load)

    engine.runner.begin_copies = counted  # type: ignore[method-assign]
    while engine.kinds(second)[-1] != "Restored":
        engine.step()
    (restored,) = [event for event in engine.events if isinstance(event, Restored)]
    assert sum(loads) < restored.num_blocks
    engine.run()


@pytest.mark.parametrize("delay", [1, 4, 9])
def test_abort_and_finish_of_a_swapped_request_at_every_step(delay: int) -> None:
    for steps in range(1, 40, 2):
        engine, (_, second) = pressed(delays=[delay])
        for _ in range(steps):
            if engine.engine.has_work:
                engine.step()
        engine.engine.abort([second.request_id])
        engine.run()
        assert engine.seen.ends[second.request_id, 0] in (FinishReason.ABORT, FinishReason.LENGTH)
        assert engine.kinds(second)[-1] == "Freed"


def test_swapped_requests_come_back_before_anybody_is_admitted() -> None:
    engine, (_, second) = pressed()
    engine.until_swapped(second)
    late = engine.submit([7], max_tokens=2)
    while engine.sequence(second).state is RequestState.SWAPPED:
        assert engine.sequence(late).state is RequestState.WAITING
        engine.step()
    engine.run()
    assert_as_alone(engine)


def test_a_prompt_that_others_left_less_than_a_block_of_the_budget_is_rolled_back_for_one_step() -> None:
    engine = SwapEngine(num_blocks=30, token_budget=10)
    engine.submit([1] * 8, max_tokens=2)
    second = engine.submit([2] * 9, max_tokens=2)
    engine.step()
    assert engine.sequence(second).state is RequestState.WAITING
    assert engine.kinds(second) == ["rolled_back"]
    engine.step()
    assert engine.sequence(second).state is RequestState.RUNNING
    engine.run()
    assert_as_alone(engine)


def test_evicted_blocks_live_on_in_the_host_cache_and_come_back_on_a_hit() -> None:
    engine = SwapEngine(num_blocks=8, host_blocks=32)
    prompt = list(range(17))
    first = engine.submit(prompt, max_tokens=2)
    engine.run()
    for start in (50, 60):  # these evict it on the device
        engine.submit([start + index for index in range(25)], max_tokens=2)
        engine.run()
    again = engine.submit(prompt, max_tokens=2)
    engine.run()
    assert engine.seen.tokens[again.request_id, 0] == engine.seen.tokens[first.request_id, 0]
    assert engine.seen.first[again.request_id].cached_tokens == 16
    host = engine.engine.load().host
    assert host.hit_tokens > 0
    assert host.cached > 0
    assert host.in_use == 0


@pytest.mark.parametrize("draining", [False, True])
def test_while_there_is_nothing_to_do_all_cached_blocks_are_copied_to_the_host(draining: bool) -> None:
    engine = SwapEngine(num_blocks=60, host_blocks=64)
    engine.submit([index % 90 for index in range(201)], max_tokens=2)
    while engine.engine.requests:
        engine.step()
    assert engine.engine.load().host.cached == 0
    if draining:
        engine.engine.drain()
    engine.run()
    assert (engine.engine.load().host.cached == 50) is not draining


def test_a_fetch_that_takes_too_long_is_computed_instead() -> None:
    engine = SwapEngine(num_blocks=10, host_blocks=32)
    prompt = list(range(17))
    engine.submit(prompt, max_tokens=2)
    engine.run()
    for start in (50, 60):
        engine.submit([start + index for index in range(30)], max_tokens=2)
        engine.run()
    engine.delays = [20]
    again = engine.submit(prompt, max_tokens=2)
    engine.run()
    assert engine.kinds(again)[0] == "swap_in_timeout"
    assert engine.seen.tokens[again.request_id, 0] == solo(prompt, max_tokens=2)[0]


def test_the_end_of_a_request_names_its_blocks_that_can_still_be_found() -> None:
    engine = SwapEngine(num_blocks=20)
    request = engine.submit(list(range(9)), max_tokens=4)
    aborted = engine.submit(list(range(50, 59)), max_tokens=4)
    engine.step()
    sequence = engine.sequence(request)
    engine.engine.abort([aborted.request_id])
    engine.run()
    ends = {event.request: event for event in engine.events if isinstance(event, Freed)}
    assert ends[request.external_id].reason == "finished"
    assert ends[request.external_id].hashes == sequence.hashes[:3]
    assert ends[aborted.external_id].reason == "aborted"
    assert len(ends[aborted.external_id].hashes) == 2
    kinds = {type(event) for event in engine.events}
    assert not kinds & {Swapped, FreedForNow}


def test_kv_that_came_back_can_be_found_on_the_device_again() -> None:
    engine, (first, second) = pressed(num_blocks=9)
    sequence = engine.until_swapped(second)
    while engine.engine.requests.get(first.request_id) is not None:  # it grows into the victim's blocks
        engine.step()
    while sequence.state is not RequestState.RUNNING:
        engine.step()
    num_full = sequence.num_computed // 4
    assert num_full > 1
    assert all(engine.engine.kv.prefixes.has(digest) for digest in sequence.hashes[:num_full])
    engine.run()


def test_a_block_that_was_given_away_while_it_was_copied_is_not_cached_on_the_host() -> None:
    engine = SwapEngine(num_blocks=8, delays=[40], swap_timeout_s=100.0)
    swap = swap_of(engine)
    engine.submit(list(range(17)), max_tokens=2)
    while not swap.copies:
        engine.step()
    (copy,) = swap.copies.values()
    assert copy.spilled
    engine.submit([50 + index for index in range(30)], max_tokens=2)
    while engine.engine.requests:
        engine.step()
    pool = engine.engine.kv.pool
    kept = [generation == pool.generations[block] for block, generation, _ in copy.spilled]
    assert not all(kept)
    engine.delays = [1]
    engine.settle()
    assert [host_block in swap.host.cache for host_block in copy.host_blocks] == kept


def test_a_block_that_others_can_find_is_not_written_by_who_comes_back() -> None:
    """Its first tokens are the swapped sample's, but a sibling filled it meanwhile, and it went into the prefix cache."""
    engine = SwapEngine(num_blocks=20, check_invariants=False)
    request = engine.submit(list(range(13)), n=3, max_tokens=4, temperature=1.0, seed=5)
    engine.step()
    scheduler, pool = engine.engine.scheduler, engine.engine.kv.pool
    victim = engine.sequence(request, sample=1)
    tail = victim.block_table[-1]
    scheduler.running.remove(victim)
    scheduler.running.append(victim)
    scheduler._preempt_last()
    taken = pool.allocate(pool.num_available - 1)  # so that it cannot come back yet
    assert taken is not None
    while engine.sequence(request, sample=2).state is not RequestState.FINISHED:
        engine.step()
    assert tail in engine.engine.kv.prefixes
    assert pool.is_cached(tail)
    pool.release(taken)
    engine.run()
    texts = [request.prompt + engine.seen.tokens[request.request_id, sample] for sample in range(3)]
    for text in texts:
        engine.submit(text, max_tokens=2)
    engine.run()
    assert_as_alone(engine)
