"""Beam search over the fake runner: beams share blocks, go and come together, and under any pressure give the same result."""

from __future__ import annotations

import functools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from leaks import check_idle

from kvrelay.engine.movers import Arrival
from kvrelay.errors import HandOverError, InvalidRequestError
from kvrelay.ids import KeptId, RequestId
from kvrelay.sampling import BeamSearch, Grammar, GrammarKind, SamplingParams
from kvrelay.states import FinishReason, RequestState
from kvrelay.wire.events import Freed
from kvrelay.wire.serving import BeamResult, Failure, Finish, FirstToken, Keep, Resumed, Submit, TokenLogprobs, of_kind
from tests.engine.swap_engine import NEVER, SwapEngine
from tests.engine.test_engine import Collected, make_engine, submit
from tests.engine.test_engine import run as run_engine
from tests.engine.test_engine import solo as solo_samples
from tests.engine.test_handover import Pair, run

EOS_ONE_IN = 12
Result = list[tuple[list[int], FinishReason, float, float]]


def beam(width: int, **settings: object) -> BeamSearch:
    return BeamSearch(width=width, **settings)  # type: ignore[arg-type]


def result_of(seen: Collected, request: Submit) -> Result:
    found: Result = []
    for sample in range(request.params.n):
        key = (request.request_id, sample)
        told: BeamResult = seen.beams[key]
        found.append((seen.tokens[key], seen.ends[key], told.cumulative_logprob, told.score))
    return found


@functools.cache
def _alone(prompt: tuple[int, ...], width: int, n: int, max_tokens: int, eos_one_in: int) -> Result:
    engine = SwapEngine(
        num_blocks=2000, host_blocks=0, max_batch=128, token_budget=512, eos_one_in=eos_one_in, prefix_cache=False
    )
    request = engine.submit(list(prompt), beam=beam(width), n=n, max_tokens=max_tokens)
    result = result_of(engine.run(), request)
    assert engine.engine.load().preemptions == 0
    return result


def alone(request: Submit, eos_one_in: int = EOS_ONE_IN) -> Result:
    """What an engine says that has room for everything."""
    params = request.params
    assert params.beam is not None
    return _alone(tuple(request.prompt), params.beam.width, params.n, params.max_tokens, eos_one_in)


def assert_as_alone(engine: SwapEngine, eos_one_in: int = EOS_ONE_IN) -> None:
    for request in engine.requests:
        if engine.seen.ends[request.request_id, 0] is FinishReason.ABORT:
            assert request.request_id not in {request_id for request_id, _ in engine.seen.beams}
        elif request.params.beam is not None:
            assert result_of(engine.seen, request) == alone(request, eos_one_in)
        else:
            assert engine.seen.tokens[request.request_id, 0]
        assert engine.kinds(request).count("Freed") == 1


def search(engine: SwapEngine, start: int, *, width: int = 4, n: int = 2, length: int = 6, max_tokens: int = 14) -> Submit:
    return engine.submit([start + index for index in range(length)], beam=beam(width), n=n, max_tokens=max_tokens)


# What a search gives, and what it holds


def test_results_come_at_once_best_first_with_scores() -> None:
    engine = SwapEngine(num_blocks=100, eos_one_in=EOS_ONE_IN)
    request = engine.submit([1, 2, 3], beam=beam(4, length_penalty=0.5), n=3, max_tokens=7, logprobs=2)
    outputs, beams = [], []
    while engine.engine.has_work:
        step = engine.engine.step()
        outputs += step.outputs
        beams += of_kind(BeamResult, step.news)
        assert len(step.outputs) in (0, 3)
    assert [(output.sample, output.position) for output in outputs] == [(0, 0), (1, 0), (2, 0)]
    assert [told.score for told in beams] == sorted((told.score for told in beams), reverse=True)
    assert len({tuple(output.tokens) for output in outputs}) == 3
    for output, told in zip(outputs, beams, strict=True):
        assert (told.request_id, told.sample) == (request.request_id, output.sample)
        assert output.finish is (FinishReason.STOP if output.tokens[-1] == 0 else FinishReason.LENGTH)
        assert output.logprobs is not None
        assert [len(entry.top) for entry in output.logprobs] == [2] * len(output.tokens)
        assert sum(entry.logprob for entry in output.logprobs) == pytest.approx(told.cumulative_logprob)
        assert told.score == pytest.approx(told.cumulative_logprob / len(output.tokens) ** 0.5)
    engine.settle()


def test_a_search_as_wide_as_there_are_continuations_finds_the_best_of_all() -> None:
    engine = make_engine(num_blocks=200, max_batch=60)
    wide = submit([5, 6], beam=beam(60), n=60, max_tokens=2)
    narrow = submit([5, 6], beam=beam(1), n=1, max_tokens=2)
    for request in (wide, narrow):
        engine.submit(request)
    seen = run_engine(engine)
    totals = [total for _, _, total, _ in result_of(seen, wide)]
    assert totals == sorted(totals, reverse=True)
    assert totals[0] >= result_of(seen, narrow)[0][2]
    assert len({tuple(tokens) for tokens, *_ in result_of(seen, wide)}) == 60


def test_stop_tokens_end_hypotheses_and_are_left_out_before_the_least_number_of_tokens() -> None:
    free = greedy_search()
    assert free[1] not in free[:1]
    eos = frozenset({free[1]})
    assert greedy_search(eos) == greedy_search(eos, min_tokens=1) == free[:2]
    assert greedy_search(eos, ignore_eos=True) == free
    assert greedy_search(ignore_eos=True, stop_token_ids=[free[1]]) == free[:2]
    late = greedy_search(eos, min_tokens=2)
    assert (late[0], len(late)) == (free[0], 6)
    assert late[1] != free[1]


def greedy_search(eos: frozenset[int] = frozenset(), **params: object) -> list[int]:
    engine = make_engine(eos=eos)
    request = submit([1, 2, 3], beam=beam(1), max_tokens=6, **params)
    engine.submit(request)
    return result_of(run_engine(engine), request)[0][0]


def test_beams_share_the_prompt_and_give_back_what_they_leave() -> None:
    engine = SwapEngine(num_blocks=202, host_blocks=0, max_batch=32)
    request = engine.submit(list(range(1, 43)), beam=beam(32), n=1, max_tokens=20)  # 10 full blocks and a half
    known, references = engine.engine.requests[request.request_id], engine.engine.kv.pool.references
    num_searching, least, most = 0, 202, 0
    while engine.engine.has_work:
        engine.step()
        if len(known.sequences) == 32 and known.sequences[0].state is RequestState.RUNNING:
            num_searching += 1
            tables = [sequence.block_table for sequence in known.sequences]
            assert {tuple(table[:10]) for table in tables} == {tuple(tables[0][:10])}
            assert all(references[block] == 32 for block in tables[0][:10])
            in_use = engine.engine.load().blocks.in_use
            assert in_use == len({block for table in tables for block in table})
            least, most = min(least, in_use), max(most, in_use)
    assert num_searching == 19
    assert least == 11  # right after the fork: the prompt's
    assert 10 + 32 < most < 10 + 32 * 6
    engine.settle()


def test_what_the_runner_knows_of_beams_is_forgotten() -> None:
    engine = SwapEngine(num_blocks=200, host_blocks=0)
    search(engine, 1, width=8, max_tokens=12)
    engine.run()
    engine.submit([9], max_tokens=1)
    engine.run()
    engine.engine.step()
    assert engine.runner.num_known_sequences <= 1


def test_a_search_counts_as_many_places_as_it_has_beams() -> None:
    engine = SwapEngine(num_blocks=200, max_batch=8)
    first, second, third = search(engine, 1, width=5), search(engine, 20, width=4), search(engine, 40, width=3)
    engine.step()
    states = [engine.sequence(request).state for request in (first, second, third)]
    assert states == [RequestState.RUNNING, RequestState.WAITING, RequestState.WAITING]
    engine.run()
    assert_as_alone(engine, eos_one_in=0)


def test_searches_and_samples_run_side_by_side() -> None:
    engine = SwapEngine(num_blocks=200, max_batch=16, token_budget=16, eos_one_in=EOS_ONE_IN)
    search(engine, 1)
    plain = engine.submit([4, 5, 6], max_tokens=9, ignore_eos=True)
    search(engine, 30, width=6, n=6)
    engine.run()
    assert_as_alone(engine)
    assert len(engine.seen.tokens[plain.request_id, 0]) == 9


def test_the_cached_part_of_the_prompt_is_told() -> None:
    engine = SwapEngine(num_blocks=60)
    for cached in (0, 8):
        request = search(engine, 1, length=9)
        engine.run()
        assert engine.seen.first[request.request_id].cached_tokens == cached
    assert engine.engine.load().cached_tokens == 8


# Under pressure


PRESSURE = {
    "off": {"host_blocks": 0},
    "on": {},
    "small host": {"host_blocks": 3},
    "slow copies": {"delays": [4, 1, 3]},
    "flaky": {"delays": [1, 9, 2, 30, 1, 1, 12]},
    "without prefix cache": {"prefix_cache": False, "delays": [2, 1, 9]},
    "oldest makes room": {"preempt": "oldest", "delays": [1, 2, 9]},
    "oldest without a host": {"preempt": "oldest", "host_blocks": 0},
}


@pytest.mark.parametrize("mode", PRESSURE)
def test_two_searches_on_a_pool_for_one_and_a_half(mode: str) -> None:
    engine = SwapEngine(num_blocks=26, eos_one_in=EOS_ONE_IN, **PRESSURE[mode])  # type: ignore[arg-type]
    for start in (1, 30):
        search(engine, start, width=5, n=5, max_tokens=16)
    engine.run()
    assert_as_alone(engine)
    load = engine.engine.load()
    assert load.preemptions > 0
    assert (load.host.swapped_out > 0) == (engine.options.swap_blocks > 3)


def test_all_beams_are_swapped_together_and_what_they_share_once() -> None:
    engine = SwapEngine(num_blocks=26)
    first, second = search(engine, 1, width=5, length=20, max_tokens=16), search(engine, 30, width=5, length=20, max_tokens=16)
    for _ in range(100):
        if engine.engine.load().host.swapped_out:
            break
        engine.step()
    swapped = engine.engine.requests[second.request_id].sequences
    assert {sequence.state for sequence in swapped} == {RequestState.SWAPPED}
    assert {sequence.state for sequence in engine.engine.requests[first.request_id].sequences} == {RequestState.RUNNING}
    assert engine.engine.load().host.swapped_out == 5
    shared = [engine.engine.core.swap.on_host[sequence.key].host_blocks[:5] for sequence in swapped]
    assert len({tuple(host_blocks) for host_blocks in shared}) == 1
    engine.run()
    assert_as_alone(engine, eos_one_in=0)
    assert engine.kinds(second).count("Restored") == engine.kinds(second).count("Swapped") >= 5


def test_without_a_host_the_search_starts_again_and_says_so_once() -> None:
    engine = SwapEngine(num_blocks=26, host_blocks=0)
    search(engine, 1, width=5, max_tokens=16)
    second = search(engine, 30, width=5, max_tokens=16)
    engine.run()
    assert_as_alone(engine, eos_one_in=0)
    kinds = engine.kinds(second)
    assert kinds == ["preempted"] * (len(kinds) - 1) + ["Freed"]
    assert len(kinds) == 1 + engine.engine.load().preemptions == 2  # it came back where it could stay


@pytest.mark.parametrize("direction", ["out", "in"])
def test_a_copy_that_takes_too_long_starts_the_search_again(direction: str) -> None:
    engine = SwapEngine(num_blocks=26)
    engine.delays = [NEVER] if direction == "out" else [1]
    search(engine, 1, width=5, max_tokens=16)
    second = search(engine, 30, width=5, max_tokens=16)
    if direction == "in":
        engine.until_swapped(second)
        engine.delays = [NEVER]
    for _ in range(200):
        if any(kind.endswith("timeout") for kind in engine.kinds(second)):
            break
        engine.step()
    engine.delays = [1]
    engine.run()
    assert_as_alone(engine, eos_one_in=0)
    assert engine.kinds(second).count(f"swap_{direction}_timeout") == 1


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_pool_gives_the_results_of_a_large_one(data: st.DataObject) -> None:
    check_random(data.draw(st.integers(0, 10**9)))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(300))
def test_many_pools_give_the_results_of_a_large_one(seed: int) -> None:
    check_random(seed)


def check_random(seed: int) -> SwapEngine:
    """Searches and plain requests, of which some are aborted, on a pool that holds one of them at least."""
    rng = random.Random(seed)
    shapes = [(rng.randint(1, 6), rng.randint(1, 9), rng.randint(1, 14)) for _ in range(rng.randint(3, 7))]
    size = rng.choice((1, 2, 4))
    needed = [length // size + width * (-(-(length + most) // size) - length // size) for width, length, most in shapes]
    engine = SwapEngine(
        num_blocks=max(-(-23 // size), *needed) + rng.choice((0, 1, 3)),
        host_blocks=rng.choice((0, 5, 20, 100, 300)),
        delays=rng.choices((1, 2, 5, 9), weights=(6, 3, 1, 1), k=5),
        block_size=size,
        max_batch=rng.randint(6, 24),
        token_budget=rng.choice((24, 40)),
        prefix_cache=rng.random() < 0.7,
        preempt=rng.choice(("latest", "oldest")),
        eos_one_in=EOS_ONE_IN,
    )
    for index, (width, length, most) in enumerate(shapes):
        prompt = [1 + (7 * index * (index % 3) + place) % 90 for place in range(length)]
        if rng.random() < 0.2:
            engine.submit(prompt, max_tokens=most)
        else:
            engine.submit(prompt, beam=beam(width), n=rng.randint(1, width), max_tokens=most)
        if rng.random() < 0.3:
            engine.step()
    for request in list(engine.requests):
        if rng.random() < 0.1:
            for _ in range(rng.randint(0, 12)):
                engine.step()
            engine.engine.abort([request.request_id])
    engine.run()
    assert_as_alone(engine)
    return engine


# Endings


STATES: dict[str, dict[str, object]] = {  # options of engines in which the second of two searches gets into each state
    "waiting": {"max_batch": 5},
    "prompt": {"token_budget": 12, "num_blocks": 100},
    "searching": {"num_blocks": 100},
    "leaving": {"num_blocks": 26, "delays": [NEVER]},
    "swapped": {"num_blocks": 26},
    "loading": {"num_blocks": 26, "delays": [5]},
    "started again": {"num_blocks": 26, "host_blocks": 0},
}


def has_reached(engine: SwapEngine, request: Submit, state: str) -> bool:
    known = engine.engine.requests[request.request_id]
    first, swap = known.sequences[0], engine.engine.core.swap
    is_swapped = first.state is RequestState.SWAPPED and swap is not None
    match state:
        case "waiting":
            return first.state is RequestState.WAITING
        case "prompt":
            return first.state is RequestState.RUNNING and 0 < first.num_computed < len(request.prompt)
        case "searching":
            return len(known.sequences) > 1
        case "leaving":
            return is_swapped and not swap.is_saved(first)
        case "swapped":
            return is_swapped and swap.is_saved(first) and first in engine.engine.scheduler.swapped
        case "loading":
            return is_swapped and first in engine.engine.scheduler.loading
        case _:
            return known.search is not None and known.search.has_restarted


def reach(state: str) -> tuple[SwapEngine, Submit, Submit]:
    options: dict[str, object] = {"num_blocks": 60, **STATES[state]}
    engine = SwapEngine(**options)  # type: ignore[arg-type]
    first = search(engine, 1, width=5, n=3, length=20, max_tokens=14)
    second = search(engine, 40, width=5, n=3, length=20, max_tokens=14)
    for _ in range(300):
        if has_reached(engine, second, state):
            return engine, first, second
        engine.step()
    raise AssertionError(f"it was never {state}")


@pytest.mark.parametrize("how", ["abort", "finish", "failure"])
@pytest.mark.parametrize("state", STATES)
def test_a_search_ends_once_in_whatever_state_it_is(state: str, how: str) -> None:
    engine, first, second = reach(state)
    request_id = second.request_id
    match how:
        case "abort":
            engine.engine.abort([request_id])
            engine.engine.abort([request_id])
        case "finish":
            engine.engine.finish(Finish(request_id=request_id, sample=1, keep_tokens=0, reason=FinishReason.STOP))
        case _:
            engine.engine._endings.fail(engine.engine.requests[request_id], HandOverError("broken"))
    engine.run()
    ends = {sample: reason for (known, sample), reason in engine.seen.ends.items() if known == request_id}
    assert ends == (dict.fromkeys(range(3), FinishReason.ABORT) if how == "abort" else {})
    assert (request_id in engine.seen.failures) == (how == "failure")
    assert result_of(engine.seen, first) == alone(first, eos_one_in=0)
    assert engine.kinds(second).count("Freed") == 1
    assert request_id not in {known for known, _ in engine.seen.beams}


# What is refused


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"temperature": 0.5}, "temperature"),
        ({"top_p": 0.9}, "top_p"),
        ({"top_k": 3}, "top_k"),
        ({"min_p": 0.1}, "min_p"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"presence_penalty": 0.1}, "presence_penalty"),
        ({"frequency_penalty": 0.1}, "frequency_penalty"),
        ({"logit_bias": {1: 1.0}}, "logit_bias"),
        ({"grammar": Grammar(kind=GrammarKind.JSON_OBJECT)}, "response_format"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"stop": ["x"]}, "stop"),
        ({"n": 5}, "n"),
        ({"beam": beam(0)}, "beam_width"),
        ({"beam": beam(129)}, "beam_width"),
        ({"beam": beam(4, length_penalty=float("nan"))}, "length_penalty"),
        ({"beam": beam(4, length_penalty=11.0)}, "length_penalty"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(params: dict[str, object], param: str) -> None:
    settings = {"temperature": 0.0, "beam": beam(4), "n": 4, **params}
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**settings).validate()  # type: ignore[arg-type]
    assert caught.value.param == param


def test_what_changes_nothing_is_allowed() -> None:
    SamplingParams(temperature=0.0, beam=beam(128), n=128, seed=7, ignore_eos=True, min_tokens=2, stop_token_ids=[1]).validate()


@pytest.mark.parametrize(
    ("width", "length", "max_tokens", "is_refused"),
    [
        (9, 4, 2, True),  # more than the batch
        (8, 4, 2, False),
        (9, 4, 1, False),  # never more than the prompt is computed
        (98, 4, 1, True),  # more than the vocabulary
        (8, 8, 28, False),  # 2 + 8 * 7 of 64 blocks
        (8, 8, 29, True),  # 2 + 8 * 8
        (8, 63, 500, False),  # the model ends it after one token
    ],
)
def test_a_search_that_could_not_reach_its_end_is_refused(width: int, length: int, max_tokens: int, is_refused: bool) -> None:
    engine = make_engine(num_blocks=64, kept_kv_share=0.0)  # what kept KV may pin would not be its own
    request = submit([1] * length, beam=beam(width), max_tokens=max_tokens)
    engine.submit(request)
    step = engine.step()
    assert [(failure.param, failure.request_id) for failure in of_kind(Failure, step.news)] == (
        [("beam_width", request.request_id)] if is_refused else []
    )
    if not is_refused:
        seen = Collected()
        seen.take(step)
        assert len(result_of(run_engine(engine, seen), request)) == 1


def test_a_search_that_is_sent_again_starts_anew_and_keeps_nothing() -> None:
    engine = make_engine()
    first = submit([1, 2, 3], beam=beam(3), n=3)
    again = Submit(
        request_id=first.request_id + "x",  # type: ignore[arg-type]
        external_id="x",
        prompt=first.prompt,
        params=first.params,
        resume=[Resumed(1, [])],
        attempt=1,
    )
    halfway = Submit(
        request_id=RequestId("y"), external_id="x", prompt=first.prompt, params=first.params, resume=[Resumed(0, [5])]
    )
    kept = Submit(
        request_id=RequestId("z"), external_id="x", prompt=first.prompt, params=first.params, keep=Keep([KeptId("a")], 1.0)
    )
    for request in (first, again, halfway, kept):
        engine.submit(request)
    seen = run_engine(engine)
    assert "keep_kv" in seen.failures[kept.request_id]
    assert result_of(seen, first) == result_of(seen, again)
    assert "always starts anew" in seen.failures[halfway.request_id]


# Handed over


def handed_over(pair: Pair, prompt: list[int], **params: object) -> tuple[Submit, Collected]:
    request_id = pair.submit(prompt, **params)
    told = Collected()
    run(pair.prefill, told)
    assert not told.tokens, "a prefill worker tells nothing of a search"
    request = Submit(request_id=request_id, external_id="x", prompt=prompt, params=SamplingParams(**params))  # type: ignore[arg-type]
    pair.consumer.news.started.append(request_id)
    run(pair.decode, told)
    return request, told


@pytest.mark.parametrize("max_tokens", [1, 2, 9])
def test_a_search_is_handed_over_with_its_first_candidates(max_tokens: int) -> None:
    pair = Pair(max_batch=8, num_blocks=64)
    request, seen = handed_over(pair, list(range(10)), beam=beam(8), n=8, max_tokens=max_tokens, temperature=0.0)
    (first,) = pair.producer.first_tokens[request.request_id]
    assert first.logprobs is not None
    assert (first.sample, first.token, first.logprobs.logprob) == (0, *first.logprobs.top[0])
    assert len(first.logprobs.top) == 8
    pair.move(request.request_id)
    run(pair.decode, seen)
    assert result_of(seen, request) == alone(request, eos_one_in=0)
    assert pair.decode.load().prompt_tokens == 0
    pair.producer.news.released.append(request.request_id)
    run(pair.prefill, Collected())
    for engine in (pair.prefill, pair.decode):
        check_idle(engine.core)


def test_a_prefill_worker_needs_no_places_for_beams() -> None:
    pair = Pair(max_batch=2, num_blocks=16)
    request_id = pair.submit(list(range(10)), beam=beam(64), max_tokens=50, temperature=0.0)
    seen = Collected()
    run(pair.prefill, seen)
    assert not seen.failures
    assert len(pair.producer.first_tokens[request_id]) == 1
    run(pair.decode, seen)
    assert "size of a batch" in seen.failures[request_id]


@pytest.mark.parametrize(
    "top", [[], [(1, -0.1)], [(1, -0.1), (1, -0.2), (2, -0.3), (3, -0.4)], [(1, -0.1), (97, -0.2), (2, -0.3), (3, -0.4)]]
)
def test_candidates_that_no_search_can_begin_from_are_a_failed_hand_over(top: list[tuple[int, float]]) -> None:
    pair = Pair()
    request, seen = handed_over(pair, [1, 2, 3], beam=beam(4), max_tokens=5, temperature=0.0)
    first = FirstToken(0, 1, TokenLogprobs(-0.1, top))
    pair.consumer.news.arrived.append(Arrival(request.request_id, [first]))
    run(pair.decode, seen)
    assert "did not name the candidates" in seen.failures[request.request_id]
    check_idle(pair.decode.core)


def test_a_search_that_arrived_and_starts_again_computes_its_prompt_here() -> None:
    pair = Pair(num_blocks=21, kept_kv_share=0.0)
    recorder = pair.decode.kv.record_events()
    arrived = [
        handed_over(pair, list(range(start, start + 5)), beam=beam(4), n=2, max_tokens=19, temperature=0.0) for start in (0, 12)
    ]
    requests, seen = [request for request, _ in arrived], Collected()
    for request in requests:
        pair.move(request.request_id)
    run(pair.decode, seen)
    assert pair.decode.load().preemptions > 0
    for request in requests:
        assert result_of(seen, request) == alone(request, eos_one_in=0)
    check_idle(pair.decode.core)
    assert sum(isinstance(event, Freed) for event in recorder.take()) == 2


def test_a_search_of_width_one_is_greedy() -> None:
    """As long as no text ends, it takes the likeliest token each time."""
    engine = make_engine()
    request = submit([1, 2, 3], beam=beam(1), logprobs=1)
    engine.submit(request)
    seen = run_engine(engine)
    logprobs = seen.first[request.request_id].logprobs
    assert logprobs is not None
    assert [entry.top[0][0] for entry in logprobs] == seen.tokens[request.request_id, 0]
    assert len(solo_samples([1, 2, 3])[0]) == len(logprobs)
