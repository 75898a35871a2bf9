"""The engine over the fake runner, which notices when KV is read that was not written for exactly these tokens."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from leaks import check_idle

from kvrelay.config import EngineOptions
from kvrelay.engine.engine import Engine
from kvrelay.ids import RequestId, WorkerId, new_request_id
from kvrelay.runner.fake import FakeRunner
from kvrelay.sampling import SamplingParams
from kvrelay.states import FinishReason
from kvrelay.wire.serving import BeamResult, Failure, Finish, SequenceOutput, StepOutputs, Submit, of_kind

VOCAB = 97
WORKER = WorkerId("whole-0123456789ab")


def make_engine(
    *, num_blocks: int = 64, max_model_len: int = 64, eos: frozenset[int] = frozenset(), **options: object
) -> Engine:
    settings = EngineOptions(**{"block_size": 4, "max_batch": 8, "token_budget": 16, "check_invariants": True, **options})  # type: ignore[arg-type]
    runner = FakeRunner(num_blocks=num_blocks, vocab_size=VOCAB, block_size=settings.block_size)
    return Engine(
        options=settings,
        runner=runner,
        worker_id=WORKER,
        eos_token_ids=eos,
        max_model_len=max_model_len,
        vocab_size=VOCAB,
        cache_seed="fake",
    )


def submit(prompt: list[int], *, priority: int = 0, cache_salt: str = "", **params: object) -> Submit:
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 8, **params})  # type: ignore[arg-type]
    return Submit(
        request_id=new_request_id(), external_id="x", prompt=prompt, params=sampling, priority=priority, cache_salt=cache_salt
    )


class Collected:
    """What a router would have seen: tokens by request and sample, and how each ended."""

    def __init__(self) -> None:
        self.tokens: dict[tuple[RequestId, int], list[int]] = {}
        self.ends: dict[tuple[RequestId, int], FinishReason] = {}
        self.failures: dict[RequestId, str] = {}
        self.first: dict[RequestId, SequenceOutput] = {}
        self.beams: dict[tuple[RequestId, int], BeamResult] = {}

    def take(self, step: StepOutputs) -> None:
        for output in step.outputs:
            key = (output.request_id, output.sample)
            self.first.setdefault(output.request_id, output)
            assert key not in self.ends, "a sample that had ended spoke again"
            known = self.tokens.setdefault(key, [])
            if output.finish is not FinishReason.ABORT:
                assert output.position == len(known), "tokens out of order"
            known.extend(output.tokens)
            if output.finish is not None:
                self.ends[key] = output.finish
        for result in of_kind(BeamResult, step.news):
            assert (result.request_id, result.sample) not in self.beams
            self.beams[result.request_id, result.sample] = result
        for failure in of_kind(Failure, step.news):
            assert failure.request_id not in self.failures
            self.failures[failure.request_id] = failure.message


def run(engine: Engine, collected: Collected | None = None, *, max_steps: int = 5000) -> Collected:
    collected = collected or Collected()
    for _ in range(max_steps):
        if not engine.has_work:
            break
        collected.take(engine.step())
    assert not engine.has_work, "the engine did not come to an end"
    check_idle(engine.core)
    return collected


def solo(prompt: list[int], **params: object) -> dict[int, list[int]]:
    """The tokens of each sample of a request that has a large engine for itself."""
    engine = make_engine(num_blocks=256, prefix_cache=False, token_budget=512)
    engine.submit(submit(prompt, **params))
    return {sample: tokens for (_, sample), tokens in run(engine).tokens.items()}


def test_a_request_ends_at_max_tokens_with_length() -> None:
    engine = make_engine()
    request = submit([1, 2, 3], max_tokens=5)
    engine.submit(request)
    seen = run(engine)
    assert len(seen.tokens[request.request_id, 0]) == 5
    assert seen.ends == {(request.request_id, 0): FinishReason.LENGTH}


def test_eos_and_stop_tokens_end_with_stop_unless_ignored_or_too_early() -> None:
    tokens = solo([5, 6], max_tokens=8)[0]
    third = tokens[2]
    assert third not in tokens[:2]
    cases: list[tuple[frozenset[int], dict[str, object], int, FinishReason]] = [
        (frozenset({third}), {}, 3, FinishReason.STOP),
        (frozenset({third}), {"ignore_eos": True}, 8, FinishReason.LENGTH),
        (frozenset(), {"stop_token_ids": [third]}, 3, FinishReason.STOP),
        (frozenset({third}), {"ignore_eos": True, "stop_token_ids": [third]}, 3, FinishReason.STOP),
    ]
    for eos, params, length, reason in cases:
        engine = make_engine(eos=eos)
        request = submit([5, 6], **params)
        engine.submit(request)
        seen = run(engine)
        assert (len(seen.tokens[request.request_id, 0]), seen.ends[request.request_id, 0]) == (length, reason)


def test_max_model_len_ends_with_length() -> None:
    engine = make_engine(max_model_len=10)
    request = submit([1] * 7, max_tokens=50)
    engine.submit(request)
    seen = run(engine)
    assert len(seen.tokens[request.request_id, 0]) == 3
    assert seen.ends[request.request_id, 0] is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("prompt", "params", "says"),
    [
        ([], {}, "empty"),
        ([VOCAB], {}, "token ids"),
        ([-1], {}, "token ids"),
        ([1] * 64, {}, "limit of 64"),
        ([1], {"n": 9}, "size of a batch"),
        ([1], {"stop_token_ids": [VOCAB]}, "token ids"),
        ([1], {"logit_bias": {VOCAB: 1.0}}, "token ids"),
        ([1], {"temperature": -1.0}, "temperature"),
    ],
)
def test_what_cannot_be_served_fails_with_a_reason(prompt: list[int], params: dict[str, object], says: str) -> None:
    engine = make_engine()
    request = submit(prompt, **params)
    engine.submit(request)
    seen = run(engine)
    assert says in seen.failures[request.request_id]
    assert not seen.tokens


def test_a_full_queue_refuses_and_a_draining_engine_too() -> None:
    engine = make_engine(max_queue=2)
    requests = [submit([1]) for _ in range(3)]
    for request in requests:
        engine.submit(request)
    late = submit([2])
    engine.drain()
    engine.submit(late)
    seen = run(engine)
    assert "queue is full" in seen.failures[requests[2].request_id]
    assert "draining" in seen.failures[late.request_id]
    assert len(seen.ends) == 2
    assert engine.drained


def test_a_prompt_is_computed_in_chunks_within_the_budget_beside_running_decodes() -> None:
    engine = make_engine(token_budget=6)
    engine.submit(submit([1, 2], max_tokens=30))
    engine.step()
    engine.submit(submit(list(range(20)), max_tokens=2))
    widths = []
    while engine.has_work:
        before = engine.load().prompt_tokens
        outputs = engine.step().outputs
        widths.append((engine.load().prompt_tokens - before, len(outputs)))
    assert widths[:5] == [(5, 1), (5, 1), (5, 1), (5, 2), (0, 2)]  # the decode never waits
    check_idle(engine.core)


@pytest.mark.parametrize(("length", "widths"), [(20, [60, 20]), (63, [60, 63]), (70, [64, 64, 2])])
def test_a_prompt_is_not_cut_where_little_of_the_budget_is_left_and_the_next_step_computes_all_of_it(
    length: int, widths: list[int]
) -> None:
    engine = make_engine(token_budget=64, max_model_len=128)
    engine.submit(submit([1] * 60, max_tokens=1))
    engine.submit(submit([2] * length, max_tokens=1))
    found = []
    while engine.has_work:
        before = engine.load().prompt_tokens
        engine.step()
        found.append(engine.load().prompt_tokens - before)
    assert [width for width in found if width] == widths
    check_idle(engine.core)


def test_the_second_of_two_equal_prompts_computes_only_what_is_not_cached() -> None:
    engine = make_engine()
    prompt = list(range(11))
    first, second = submit(prompt), submit(prompt)
    engine.submit(first)
    before = run(engine)
    engine.submit(second)
    after = run(engine)
    assert before.tokens[first.request_id, 0] == after.tokens[second.request_id, 0]
    assert before.first[first.request_id].cached_tokens == 0
    assert after.first[second.request_id].cached_tokens == 8  # two full blocks of four
    assert engine.load().prompt_tokens == 11 + 3


def test_the_last_prompt_token_is_always_computed_and_salts_do_not_share() -> None:
    engine = make_engine()
    prompt = list(range(8))
    for salt, cached in (("", 0), ("", 4), ("tenant", 0), ("tenant", 4)):
        request = submit(prompt, cache_salt=salt)
        engine.submit(request)
        assert run(engine).first[request.request_id].cached_tokens == cached


def test_generated_tokens_are_cached_too() -> None:
    engine = make_engine()
    first = submit([1, 2, 3], max_tokens=8)
    engine.submit(first)
    tokens = run(engine).tokens[first.request_id, 0]
    second = submit([1, 2, 3, *tokens, 9])
    engine.submit(second)
    assert run(engine).first[second.request_id].cached_tokens == 8  # 10 of the first 11 tokens have KV: two full blocks


@pytest.mark.parametrize("length", [3, 4, 5])
def test_n_samples_share_one_prefill_and_equal_their_solo_runs(length: int) -> None:
    prompt = list(range(length))
    engine = make_engine()
    request = submit(prompt, n=4, temperature=1.0, seed=3)
    engine.submit(request)
    seen = run(engine)
    expected = solo(prompt, n=4, temperature=1.0, seed=3)
    assert {sample: seen.tokens[request.request_id, sample] for sample in range(4)} == expected
    assert len({tuple(tokens) for tokens in expected.values()}) == 4
    assert engine.load().prompt_tokens == length


def test_the_batch_holds_no_more_sequences_than_allowed_counting_samples_to_come() -> None:
    engine = make_engine(max_batch=4, token_budget=3)
    for _ in range(5):
        engine.submit(submit(list(range(10)), n=3))
    engine.submit(submit([1]))
    run(engine)  # check_invariants asserts the bound after every step


def test_lower_priority_numbers_run_first() -> None:
    engine = make_engine(max_batch=1)
    requests = {priority: submit([1], priority=priority) for priority in (5, 0, 3)}
    for request in requests.values():
        engine.submit(request)
    seen = run(engine)
    assert list(seen.first) == [requests[priority].request_id for priority in (0, 3, 5)]


def test_abort_in_every_state_returns_the_blocks_and_ends_each_sample_once() -> None:
    for steps in range(8):
        engine = make_engine(token_budget=4)
        victim, other = submit(list(range(10)), n=2, max_tokens=20), submit([7, 8], max_tokens=12)
        engine.submit(victim)
        engine.submit(other)
        seen = Collected()
        for _ in range(steps):
            seen.take(engine.step())
        engine.abort([victim.request_id, victim.request_id, new_request_id()])
        run(engine, seen)
        assert [seen.ends[victim.request_id, sample] for sample in range(2)] == [FinishReason.ABORT] * 2
        assert seen.tokens[other.request_id, 0] == solo([7, 8], max_tokens=12)[0]


def test_finish_ends_one_sample_and_leaves_the_others() -> None:
    engine = make_engine()
    request = submit([1, 2], n=2, max_tokens=10)
    engine.submit(request)
    seen = Collected()
    for _ in range(3):
        seen.take(engine.step())
    for _ in range(2):  # the second one comes late and changes nothing
        engine.finish(Finish(request_id=request.request_id, sample=0, keep_tokens=3, reason=FinishReason.STOP))
    run(engine, seen)
    assert len(seen.tokens[request.request_id, 0]) == 3
    assert len(seen.tokens[request.request_id, 1]) == 10
    assert (request.request_id, 0) not in seen.ends  # the router knows


def test_prompt_logprobs_come_once_for_every_token_also_after_preemption_and_with_a_warm_cache() -> None:
    engine = make_engine(num_blocks=8, max_model_len=32, token_budget=5)
    prompt = list(range(13))
    engine.submit(submit(prompt))
    run(engine)
    request = submit(prompt, prompt_logprobs=1, logprobs=0)
    engine.submit(submit([50, 51, 52], max_tokens=16, priority=-1))
    engine.submit(request)
    first = run(engine).first[request.request_id]
    assert first.prompt_logprobs is not None
    assert len(first.prompt_logprobs) == 13
    assert first.prompt_logprobs[0] is None
    assert all(entry is not None for entry in first.prompt_logprobs[1:])
    assert first.logprobs is not None
    assert first.cached_tokens == 0


def test_preemption_recomputes_and_changes_no_token() -> None:
    engine = make_engine(num_blocks=8, max_model_len=24)
    requests = [submit([i, i + 1, i + 2], max_tokens=16) for i in range(5)]
    for request in requests:
        engine.submit(request)
    seen = run(engine)
    assert engine.load().preemptions > 0
    for request in requests:
        assert seen.tokens[request.request_id, 0] == solo(request.prompt, max_tokens=16)[0]


def test_a_step_that_breaks_fails_every_request_and_leaks_nothing() -> None:
    engine = make_engine()
    requests = [submit([i], n=2) for i in range(3)]
    for request in requests:
        engine.submit(request)
    engine.step()
    seen = Collected()
    seen.take(engine.fail_all("the device is gone"))
    assert set(seen.failures) == {request.request_id for request in requests}
    check_idle(engine.core)


def test_a_step_that_breaks_while_its_plan_is_under_way_leaves_no_results_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    engine.submit(submit([1]))
    with monkeypatch.context() as broken:
        broken.setattr(type(engine.core.swap), "spill", lambda _, at_rest: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    engine.fail_all("a copy could not be started")
    again = submit([2, 3])
    engine.submit(again)
    assert run(engine).tokens[again.request_id, 0] == solo([2, 3])[0]
    check_idle(engine.core)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(8, 40),
    block_size=st.integers(1, 7),
    token_budget=st.integers(1, 40),
    max_batch=st.integers(1, 8),
    prefix_cache=st.booleans(),
    max_running_prefills=st.integers(0, 2),
)
def test_any_traffic_under_any_pressure_equals_solo_runs_and_leaks_nothing(
    seed: int,
    num_blocks: int,
    block_size: int,
    token_budget: int,
    max_batch: int,
    prefix_cache: bool,
    max_running_prefills: int,
) -> None:
    rng = random.Random(seed)
    limit = num_blocks * block_size
    engine = make_engine(
        num_blocks=num_blocks,
        max_model_len=limit,
        block_size=block_size,
        token_budget=token_budget,
        max_batch=max_batch,
        prefix_cache=prefix_cache,
        max_running_prefills=max_running_prefills,
    )
    seen, requests, aborted = Collected(), [], set()
    stem = [rng.randrange(VOCAB) for _ in range(12)]
    for _ in range(rng.randrange(1, 9)):
        prompt = stem[: rng.randrange(12)] + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 8))]
        if len(prompt) >= limit:
            continue
        n = rng.randrange(1, min(3, max_batch) + 1)
        request = submit(
            prompt, n=n, max_tokens=rng.randrange(1, 12), temperature=rng.choice([0.0, 1.0]), seed=rng.randrange(100)
        )
        engine.submit(request)
        requests.append(request)
        for _ in range(rng.randrange(4)):
            seen.take(engine.step())
        if rng.random() < 0.2:
            aborted.add(requests[rng.randrange(len(requests))].request_id)
            engine.abort(aborted)
    run(engine, seen)
    for request in requests:
        expected = solo(
            request.prompt,
            n=request.params.n,
            max_tokens=min(request.params.max_tokens, limit - len(request.prompt)),
            temperature=request.params.temperature,
            seed=request.params.seed,
        )
        for sample, tokens in expected.items():
            got = seen.tokens[request.request_id, sample]
            if seen.ends[request.request_id, sample] is FinishReason.ABORT:
                assert request.request_id in aborted
                assert got == tokens[: len(got)]
            else:
                assert got == tokens
