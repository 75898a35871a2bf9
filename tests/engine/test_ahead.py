"""Steps launched before the one before them is collected change no token, no end and no block."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from leaks import check_idle

from kvrelay.config import EngineOptions
from kvrelay.engine.engine import Engine
from kvrelay.engine.interfaces import StepPlan
from kvrelay.runner.fake import FakeRunner
from kvrelay.sampling import BeamSearch, SamplingParams
from kvrelay.states import FinishReason
from kvrelay.wire.serving import Finish, Submit
from tests.engine.test_engine import VOCAB, WORKER, Collected, submit

EOS = 0


class CountingRunner(FakeRunner):
    """Counts plans that lack a token, and notes how many tokens those compute that are launched behind another one."""

    num_ahead = 0

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.behind: list[int] = []

    def launch(self, plan: StepPlan) -> None:
        self.num_ahead += any(row.start == len(row.sequence.tokens) for row in plan.rows)
        if self._launched:
            self.behind.append(plan.num_tokens)
        super().launch(plan)


def make(runs_ahead: bool, *, num_blocks: int = 64, host_blocks: int = 0, eos_one_in: int = 0, **options: object) -> Engine:
    chosen = {"block_size": 4, "max_batch": 8, "token_budget": 16, "check_invariants": True, **options}
    runner = CountingRunner(
        num_blocks=num_blocks,
        vocab_size=VOCAB,
        block_size=4,
        eos_token_ids=(EOS,) if eos_one_in else (),
        eos_one_in=eos_one_in,
        num_host_blocks=host_blocks,
        runs_ahead=runs_ahead,
    )
    return Engine(
        options=EngineOptions(**chosen),  # type: ignore[arg-type]
        runner=runner,
        worker_id=WORKER,
        eos_token_ids=runner.eos_token_ids,
        max_model_len=min(64, num_blocks * 4),
        vocab_size=VOCAB,
        cache_seed="fake",
    )


def num_ahead(engine: Engine) -> int:
    assert isinstance(engine._runner, CountingRunner)
    return engine._runner.num_ahead


def behind(engine: Engine) -> list[int]:
    assert isinstance(engine._runner, CountingRunner)
    return engine._runner.behind


def finish(engine: Engine, collected: Collected) -> Collected:
    for _ in range(3000):
        if not engine.has_work:
            break
        collected.take(engine.step())
    assert not engine.has_work
    check_idle(engine.core)
    assert isinstance(engine._runner, CountingRunner)
    assert engine._runner.num_known_sequences == 0
    return collected


def test_decoding_runs_ahead_and_every_step_still_tells_one_token_of_each() -> None:
    engine, collected = make(True), Collected()
    for length in (3, 9, 5):
        engine.submit(submit(list(range(length)), max_tokens=20))
    while engine.has_work:
        step = engine.step()
        assert all(len(output.tokens) == 1 for output in step.outputs)
        collected.take(step)
    assert num_ahead(engine) == 19  # all but the one that computes the prompts
    assert [len(tokens) for tokens in collected.tokens.values()] == [20, 20, 20]
    check_idle(engine.core)


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.2},
        {"max_tokens": 1},
        {"n": 3, "max_tokens": 2},
        {"beam": BeamSearch(width=3), "max_tokens": 6},
    ],
)
def test_what_looks_at_tokens_forks_or_searches_does_not_run_ahead(params: dict[str, object]) -> None:
    engine = make(True)
    engine.submit(submit([1, 2, 3], **params))
    finish(engine, Collected())
    assert num_ahead(engine) == 0


def test_a_newcomer_waits_for_one_step_at_most() -> None:
    engine = make(True)
    engine.submit(submit([1, 2], max_tokens=40))
    for _ in range(5):
        engine.step()
    engine.submit(submit([3, 4], max_tokens=2))
    assert len(engine.step().outputs) == 1  # it was under way
    assert len(engine.step().outputs) == 2


def test_who_waits_for_blocks_gets_those_that_another_leaves() -> None:
    engine, collected = make(True, num_blocks=16, max_batch=2), Collected()
    for seed in range(6):
        engine.submit(submit([seed, seed, 7], max_tokens=12 + 3 * seed))
    finish(engine, collected)
    assert [len(tokens) for tokens in collected.tokens.values()] == [12 + 3 * seed for seed in range(6)]
    assert num_ahead(engine) > 0


def test_who_waits_runs_when_all_others_ended_while_a_step_ran_ahead() -> None:
    engine, collected = make(True, max_batch=2, eos_one_in=1), Collected()  # every first token is the last
    requests = [submit([seed, 7], max_tokens=9) for seed in range(1, 6)]
    for request in requests:
        engine.submit(request)
    finish(engine, collected)
    assert set(collected.ends.values()) == {FinishReason.STOP}
    assert len(collected.ends) == 5
    assert num_ahead(engine) > 0


def test_aborted_while_a_step_runs_ahead_it_gives_its_blocks_back_and_says_nothing_more() -> None:
    engine, collected = make(True), Collected()
    first, second = submit([1, 2, 3], max_tokens=30), submit([4, 5, 6], max_tokens=30)
    engine.submit(first)
    engine.submit(second)
    for _ in range(4):
        collected.take(engine.step())
    engine.abort([first.request_id])
    collected.take(engine.step())
    assert collected.ends[first.request_id, 0] is FinishReason.ABORT
    assert len(collected.tokens[first.request_id, 0]) == 4
    engine.abort([second.request_id])
    assert engine.has_work  # the step under way is to be collected
    finish(engine, collected)


def test_after_an_unforeseen_error_no_step_is_under_way() -> None:
    engine = make(True)
    engine.submit(submit([1, 2, 3], max_tokens=30))
    for _ in range(3):
        engine.step()
    engine.fail_all("broken")
    engine.submit(submit([1, 2, 3], max_tokens=5))
    tokens = [token for _ in range(20) if engine.has_work for output in engine.step().outputs for token in output.tokens]
    plain = make(False)
    plain.submit(submit([1, 2, 3], max_tokens=5))
    assert tokens == [token for _ in range(20) if plain.has_work for output in plain.step().outputs for token in output.tokens]


def prompt_of(length: int, seed: int) -> list[int]:
    return [(7 * seed + place * place) % VOCAB for place in range(length)]


def test_prompts_that_fill_steps_run_ahead_and_their_tokens_are_those_of_steps_that_do_not() -> None:
    requests = [submit(prompt_of(12, seed), max_tokens=4) for seed in range(7)]

    def play(runs_ahead: bool) -> tuple[Engine, Collected]:
        engine = make(runs_ahead, num_blocks=128)
        for request in requests:
            engine.submit(request)
        return engine, finish(engine, Collected())

    (ahead, collected), (_, expected) = play(True), play(False)
    assert collected.tokens == expected.tokens
    assert sum(num_tokens > len(requests) for num_tokens in behind(ahead)) >= 3


def test_a_long_prompt_is_computed_further_before_its_last_chunk_is_collected() -> None:
    engine = make(True)
    engine.submit(submit(prompt_of(56, 1), max_tokens=2))
    finish(engine, Collected())
    assert behind(engine) == [16, 16, 1]  # not the 8 that are left: another request would have room beside them


def test_a_step_that_prompts_do_not_fill_takes_a_newcomer() -> None:
    engine, collected = make(True), Collected()
    engine.submit(submit(prompt_of(20, 1), max_tokens=1))
    collected.take(engine.step())
    assert behind(engine) == []
    engine.submit(submit(prompt_of(9, 2), max_tokens=1))
    collected.take(engine.step())
    assert len(collected.ends) == 2


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_prompt_waits_for_blocks_that_are_being_computed_for_another_one(runs_ahead: bool) -> None:
    engine, collected = make(runs_ahead), Collected()
    for seed in range(4):
        engine.submit(submit([*prompt_of(16, 1), *prompt_of(4, seed)], max_tokens=1))
    finish(engine, collected)
    assert [output.cached_tokens for output in collected.first.values()] == [0, 16, 16, 16]


def test_who_comes_behind_prompts_that_run_ahead_is_aborted_with_them() -> None:
    engine, collected = make(True, num_blocks=128), Collected()
    requests = [submit(prompt_of(16, seed), max_tokens=3) for seed in range(6)]
    for request in requests:
        engine.submit(request)
    collected.take(engine.step())
    assert behind(engine) == [16]  # the first one's next token, and 15 of the second one
    engine.abort([request.request_id for request in requests[1:4]])
    finish(engine, collected)
    assert [collected.ends[request.request_id, 0] for request in requests] == [
        FinishReason.LENGTH, *[FinishReason.ABORT] * 3, *[FinishReason.LENGTH] * 2,
    ]  # fmt: skip


@dataclass
class Script:
    """What happens at which step: the same for both engines."""

    submits: list[tuple[int, Submit]]
    aborts: list[tuple[int, Submit]]
    finishes: list[tuple[int, Submit]]
    options: dict[str, object]

    @classmethod
    def random(cls, seed: int) -> Script:
        rng = random.Random(seed)
        script = cls([], [], [], {})
        num_blocks = rng.choice([18, 24, 64])
        script.options = {
            "num_blocks": num_blocks,
            "host_blocks": rng.choice([0, 0, 40]),
            "eos_one_in": rng.choice([0, 6, 25]),
            "max_batch": rng.choice([3, 8]),
            "token_budget": rng.choice([4, 16]),
            "prefix_cache": rng.random() < 0.7,
            "preempt": rng.choice(["latest", "oldest"]),
        }
        at = 0
        for _ in range(rng.randrange(1, 14)):
            at += rng.choice([0, 0, 1, 3, 9])
            request = submit(
                [rng.randrange(1, 5) for _ in range(rng.randrange(1, 22))],
                temperature=rng.choice([0.0, 1.0]),
                seed=rng.randrange(5),
                max_tokens=rng.randrange(1, 26),
                **rng.choice([{}, {}, {}, {"n": 2}, {"min_tokens": 1}, {"logprobs": 1}, {"frequency_penalty": 0.5}]),
            )
            if rng.random() < 0.1:
                request = submit(request.prompt, beam=BeamSearch(width=2), max_tokens=5)
            script.submits.append((at, request))
            if rng.random() < 0.15:
                script.aborts.append((at + rng.randrange(1, 12), request))
            elif rng.random() < 0.15:
                script.finishes.append((at + rng.randrange(1, 12), request))
        return script

    def play(self, engine: Engine) -> Collected:
        collected, last = Collected(), max(at for at, _ in [*self.submits, *self.aborts, *self.finishes])
        for now in range(last + 1):
            for at, request in self.submits:
                if at == now:
                    engine.submit(request)
            engine.abort([request.request_id for at, request in self.aborts if at == now])
            for at, request in self.finishes:
                if at == now:
                    for sample in range(request.params.n):
                        end = Finish(request_id=request.request_id, sample=sample, keep_tokens=1, reason=FinishReason.STOP)
                        engine.finish(end)
            collected.take(engine.step())
        return finish(engine, collected)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_any_traffic_gives_the_same_tokens_and_ends(seed: int) -> None:
    compare(seed)


@pytest.mark.long
@settings(max_examples=600, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_any_traffic_gives_the_same_tokens_and_ends_for_long(seed: int) -> None:
    compare(seed)


def compare(seed: int) -> None:
    """The same traffic with and without steps that run ahead."""
    script = Script.random(seed)
    plain, ahead = (script.play(make(runs_ahead, **script.options)) for runs_ahead in (False, True))  # type: ignore[arg-type]
    cut = {request.request_id for _, request in [*script.aborts, *script.finishes]}
    assert plain.failures == ahead.failures
    for key in plain.tokens.keys() | ahead.tokens.keys():
        one, other = plain.tokens.get(key, []), ahead.tokens.get(key, [])
        if key[0] in cut:  # it ended from outside, when it had come a token more or less far
            shorter = min(len(one), len(other))
            assert one[:shorter] == other[:shorter]
        else:
            assert one == other
            assert plain.ends[key] == ahead.ends[key]


def test_parameters_that_need_no_look_at_tokens_run_ahead() -> None:
    engine = make(True)
    for params in (SamplingParams(max_tokens=9), SamplingParams(max_tokens=9, top_p=0.5, logprobs=2, min_tokens=1)):
        request = submit([1, 2, 3])
        engine.submit(Submit(request_id=request.request_id, external_id="x", prompt=[1, 2, 3], params=params))
    finish(engine, Collected())
    assert num_ahead(engine) == 8
