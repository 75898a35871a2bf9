"""A request that another worker began goes on here as if nothing had happened, wherever it was cut."""

from __future__ import annotations

import itertools
import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine import VOCAB, Collected, make_engine, run, submit

from kvrelay.engine.engine import Engine
from kvrelay.errors import InvalidRequestError, QueueFullError
from kvrelay.states import FinishReason
from kvrelay.wire.serving import Failure, Finish, Resumed, SequenceOutput, Submit, of_kind

PROMPT = list(range(11))


class Undisturbed:
    """A request's whole run, on an engine of its own."""

    def __init__(self, request: Submit, *, eos: frozenset[int] = frozenset(), max_model_len: int = 64) -> None:
        engine = make_engine(num_blocks=256, max_model_len=max_model_len, prefix_cache=False, token_budget=512, eos=eos)
        engine.submit(request)
        self.request = request
        self.outputs: list[SequenceOutput] = []
        seen = Collected()
        while engine.has_work:
            step = engine.step()
            seen.take(step)
            self.outputs += step.outputs
        self.tokens = {sample: tokens for (_, sample), tokens in seen.tokens.items()}
        self.ends = {sample: reason for (_, sample), reason in seen.ends.items()}

    def cut(self, lengths: dict[int, int]) -> Submit:
        """As the router sends it again: these samples have so many tokens, the others have ended."""
        resume = [Resumed(sample, self.tokens[sample][:length]) for sample, length in lengths.items()]
        return msgspec.structs.replace(self.request, resume=resume, attempt=1)

    def check(self, resumed: Submit, seen: Collected) -> None:
        """The samples that were listed ended as they would have; of the others nothing was said."""
        listed = [one.sample for one in resumed.resume]
        assert {sample: seen.tokens[resumed.request_id, sample] for sample in listed} == {s: self.tokens[s] for s in listed}
        assert {key[1]: end for key, end in seen.ends.items() if key[0] == resumed.request_id} == {
            s: self.ends[s] for s in listed
        }


def send(engine: Engine, resumed: Submit, seen: Collected) -> None:
    for one in resumed.resume:
        seen.tokens[resumed.request_id, one.sample] = list(one.tokens)  # so that each output must continue them
    engine.submit(resumed)


def resume(engine: Engine, resumed: Submit) -> Collected:
    seen = Collected()
    send(engine, resumed, seen)
    return run(engine, seen)


OTHER = submit([1]).request_id
GREEDY = submit(PROMPT, max_tokens=14)
THIRD = Undisturbed(GREEDY).tokens[0][3]


@pytest.mark.parametrize(
    ("request_", "eos", "limit"),
    [
        (GREEDY, frozenset(), 64),
        (submit(PROMPT, max_tokens=14, temperature=1.0, seed=3), frozenset(), 64),
        (submit(PROMPT, max_tokens=14), frozenset({THIRD}), 64),
        (submit(PROMPT, max_tokens=14, stop_token_ids=[THIRD]), frozenset(), 64),
        (submit(PROMPT, max_tokens=14, min_tokens=9, stop_token_ids=[THIRD, 5, 6]), frozenset(), 64),
        (submit(PROMPT, max_tokens=14, ignore_eos=True), frozenset({THIRD}), 64),
        (submit(PROMPT, max_tokens=50), frozenset(), 20),
    ],
    ids=["greedy", "seeded", "eos", "stop token", "min_tokens", "ignore_eos", "max_model_len"],
)
def test_cut_after_every_token(request_: Submit, eos: frozenset[int], limit: int) -> None:
    whole = Undisturbed(request_, eos=eos, max_model_len=limit)
    for length in range(len(whole.tokens[0])):
        for prefix_cache in (False, True):
            engine = make_engine(eos=eos, max_model_len=limit, token_budget=1 + 3 * length, prefix_cache=prefix_cache)
            resumed = whole.cut({0: length})
            whole.check(resumed, resume(engine, resumed))
            assert engine.load().output_tokens == len(whole.tokens[0]) - length


def test_every_chunk_size() -> None:
    whole = Undisturbed(submit(PROMPT, max_tokens=14, temperature=1.0, seed=8))
    for budget in range(1, 65):
        resumed = whole.cut({0: budget % 14})
        whole.check(resumed, resume(make_engine(token_budget=budget), resumed))


def test_logprobs_of_what_comes_later() -> None:
    whole = Undisturbed(submit(PROMPT, logprobs=2, prompt_logprobs=1))
    engine, outputs = make_engine(), []
    engine.submit(whole.cut({0: 3}))
    while engine.has_work:
        outputs += engine.step().outputs
    assert outputs == whole.outputs[3:]


@pytest.mark.parametrize(
    ("lengths", "is_told"),
    [({0: 0, 1: 0}, True), ({0: 0, 1: 4}, True), ({0: 0}, True), ({0: 1, 1: 0}, False), ({1: 0}, False), ({1: 2}, False)],
)
def test_prompt_logprobs_come_again_only_if_the_first_sample_has_said_nothing(lengths: dict[int, int], is_told: bool) -> None:
    whole = Undisturbed(submit(PROMPT, n=2, temperature=1.0, prompt_logprobs=1))
    told = whole.outputs[0].prompt_logprobs
    assert told is not None
    for budget, num_blocks in itertools.product((2, 3, 4, 5, 6, 7, 64), (8, 64)):
        engine, outputs = make_engine(num_blocks=num_blocks, max_model_len=32, token_budget=budget), []
        engine.submit(submit([50, 51, 52], max_tokens=16, priority=-1))  # so that some are preempted in the small pool
        resumed = whole.cut(lengths)
        engine.submit(resumed)
        while engine.has_work:
            outputs += [output for output in engine.step().outputs if output.request_id == resumed.request_id]
        assert [output.prompt_logprobs for output in outputs if output.prompt_logprobs] == ([told] if is_told else [])


def test_samples_go_on_at_different_tokens_and_compute_the_prompt_once() -> None:
    whole = Undisturbed(submit(PROMPT, n=4, temperature=1.0, seed=3))
    engine, seen, num_cached = make_engine(), Collected(), 0
    resumed = whole.cut({3: 5, 0: 2, 1: 0})  # sample 2 has ended
    send(engine, resumed, seen)
    while engine.has_work:
        step = engine.step()
        seen.take(step)
        num_cached += sum(output.cached_tokens for output in step.outputs)
    whole.check(resumed, seen)
    assert (resumed.request_id, 2) not in seen.tokens
    assert engine.load().prompt_tokens == 11 + 2 * 3  # the others found two full blocks of four in the cache
    assert num_cached == 0  # and the client is not told so: it was their own request that had computed them


def test_a_request_that_had_no_token_yet_is_an_ordinary_one() -> None:
    whole = Undisturbed(submit(PROMPT, n=3, temperature=1.0, seed=3))
    engine = make_engine(prefix_cache=False)
    resumed = whole.cut({2: 0, 1: 0, 0: 0})
    whole.check(resumed, resume(engine, resumed))
    assert engine.load().prompt_tokens == 11  # forked where the prompt ends


@pytest.mark.parametrize("prompt_logprobs", [None, 1])
def test_what_is_in_the_prefix_cache_is_not_computed_again(prompt_logprobs: int | None) -> None:
    whole = Undisturbed(submit(PROMPT, max_tokens=14, prompt_logprobs=prompt_logprobs))
    engine = make_engine()
    engine.submit(submit(PROMPT, max_tokens=1))
    run(engine)
    resumed = whole.cut({0: 6})
    whole.check(resumed, resume(engine, resumed))
    assert engine.load().prompt_tokens == 11 + 3  # two full blocks of four were there
    resumed = whole.cut({0: 9})
    whole.check(resumed, resume(engine, resumed))
    assert engine.load().prompt_tokens == 11 + 3  # and now all of the prompt, with some of the output


def test_preemption_after_a_resume() -> None:
    runs = [Undisturbed(submit([i, i + 1, i + 2], max_tokens=16, temperature=1.0, seed=i)) for i in range(5)]
    engine, seen = make_engine(num_blocks=8, max_model_len=24), Collected()
    resumed = [whole.cut({0: 3 * index}) for index, whole in enumerate(runs)]
    for one in resumed:
        send(engine, one, seen)
    run(engine, seen)
    assert engine.load().preemptions > 0
    for whole, one in zip(runs, resumed, strict=True):
        whole.check(one, seen)


def test_ends_that_the_router_finds_and_aborts() -> None:
    whole = Undisturbed(submit(PROMPT, n=4, temperature=1.0, max_tokens=20))
    for steps in range(6):
        engine, seen = make_engine(token_budget=8), Collected()
        resumed, dropped = whole.cut({0: 2, 1: 3, 3: 4}), msgspec.structs.replace(whole.cut({2: 1, 3: 0}), request_id=OTHER)
        send(engine, resumed, seen)
        send(engine, dropped, seen)
        for _ in range(steps):
            seen.take(engine.step())
        for sample in (0, 3):
            engine.finish(Finish(request_id=resumed.request_id, sample=sample, keep_tokens=0, reason=FinishReason.STOP))
        engine.abort([OTHER])
        run(engine, seen)
        assert seen.tokens[resumed.request_id, 1] == whole.tokens[1]
        assert {key: end for key, end in seen.ends.items() if key[0] == OTHER} == {
            (OTHER, 2): FinishReason.ABORT,
            (OTHER, 3): FinishReason.ABORT,
        }


@pytest.mark.parametrize(
    ("listed", "says"),
    [
        ([Resumed(2, [1])], "samples from 0 to 1"),
        ([Resumed(-1, [1])], "samples from 0 to 1"),
        ([Resumed(0, [1]), Resumed(0, [1])], "each once"),
        ([Resumed(0, [1]), Resumed(1, [VOCAB])], "token ids"),
        ([Resumed(0, [-1])], "token ids"),
        ([Resumed(0, [1] * 6)], "6 tokens"),
        ([Resumed(0, [1]), Resumed(1, [1] * 7)], "7 tokens"),
    ],
)
def test_what_cannot_be_resumed_is_refused(listed: list[Resumed], says: str) -> None:
    engine = make_engine(max_model_len=18)
    max_tokens = 6 if len(listed) == 1 else 60
    engine.submit(msgspec.structs.replace(submit(PROMPT, n=2, max_tokens=max_tokens), resume=listed))
    (failure,) = of_kind(Failure, engine.step().news)
    assert (failure.kind, failure.param) == (InvalidRequestError.kind, "resume")
    assert says in failure.message
    run(engine)


def test_a_request_that_was_accepted_once_is_not_turned_away_by_a_full_queue() -> None:
    engine = make_engine(max_queue=1)
    whole = Undisturbed(submit(PROMPT))
    engine.submit(submit([1]))
    again, fresh = whole.cut({0: 2}), submit([2])
    seen = Collected()
    engine.submit(fresh)
    send(engine, again, seen)
    step = engine.step()
    assert [(failure.request_id, failure.kind) for failure in of_kind(Failure, step.news)] == [
        (fresh.request_id, QueueFullError.kind)
    ]
    seen.take(step)
    whole.check(again, run(engine, seen))
    engine.drain()
    engine.submit(whole.cut({0: 2}))
    assert "draining" in of_kind(Failure, engine.step().news)[0].message


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(8, 40),
    block_size=st.integers(1, 7),
    token_budget=st.integers(1, 40),
    max_batch=st.integers(1, 8),
    prefix_cache=st.booleans(),
    max_running_prefills=st.integers(0, 2),
)
def test_any_requests_cut_anywhere_under_any_pressure(seed: int, num_blocks: int, block_size: int, **options: int) -> None:
    rng = random.Random(seed)
    limit = num_blocks * block_size
    engine = make_engine(num_blocks=num_blocks, max_model_len=limit, block_size=block_size, **options)
    stem = [rng.randrange(VOCAB) for _ in range(12)]
    seen, sent = Collected(), []
    for _ in range(rng.randrange(1, 7)):
        prompt = (stem[: rng.randrange(12)] + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 8))])[: limit - 1]
        n = rng.randrange(1, min(3, options["max_batch"]) + 1)
        whole = Undisturbed(
            submit(prompt, n=n, max_tokens=rng.randrange(1, 12), temperature=rng.choice([0.0, 1.0]), seed=rng.randrange(9)),
            max_model_len=limit,
        )
        samples = rng.sample(range(n), rng.randrange(1, n + 1))
        resumed = whole.cut({sample: rng.choice([0, rng.randrange(len(whole.tokens[sample]))]) for sample in samples})
        send(engine, resumed, seen)
        sent.append((whole, resumed))
        for _ in range(rng.randrange(4)):
            seen.take(engine.step())
    run(engine, seen)
    for whole, resumed in sent:
        whole.check(resumed, seen)
