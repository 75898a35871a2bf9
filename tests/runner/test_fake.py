"""The fake runner notices every way to get KV wrong, and its tokens tell requests apart."""

from __future__ import annotations

import time

import pytest
from free_sequences import FreeSequence, last, plan, whole

from kvrelay.engine.interfaces import Row, StepPlan
from kvrelay.runner.fake import FakeRunner
from kvrelay.sampling import Grammar, GrammarKind, SamplingParams

TOKENS = [5, 6, 7, 8, 9, 10]


def make(**options: object) -> FakeRunner:
    return FakeRunner(**{"num_blocks": 8, "vocab_size": 50, "block_size": 4, **options})  # type: ignore[arg-type]


def run(runner: FakeRunner, step: StepPlan) -> list[list[int]]:
    runner.launch(step)
    return [row.tokens for row in runner.collect().rows]


def computed(runner: FakeRunner, table: list[int], tokens: list[int] = TOKENS) -> FreeSequence:
    """A sequence whose first tokens were computed into its blocks; one more is to come."""
    sequence = FreeSequence(tokens=list(tokens), block_table=table)
    run(runner, plan(whole(sequence)))
    sequence.tokens.append(11)
    return sequence


def wrong_block(sequence: FreeSequence) -> StepPlan:
    sequence.block_table[0] = 6
    return plan(last(sequence))


def swapped_blocks(sequence: FreeSequence) -> StepPlan:
    sequence.block_table.reverse()
    return plan(last(sequence))


def another_prefix(sequence: FreeSequence) -> StepPlan:
    """The same tokens in the block, but other ones before it: real KV would differ."""
    other = FreeSequence(tokens=[1, 2, 3, 4, *sequence.tokens[4:]], block_table=[6, sequence.block_table[1]])
    return plan(Row(other, 0, 4, 0), last(other))


def changed_token(sequence: FreeSequence) -> StepPlan:
    sequence.tokens[2] += 1
    return plan(last(sequence))


def skipped_position(sequence: FreeSequence) -> StepPlan:
    sequence.tokens.append(12)
    return plan(last(sequence))


def overwritten_by_another(sequence: FreeSequence) -> StepPlan:
    return plan(last(sequence), whole(FreeSequence(tokens=[1, 2, 3], block_table=[sequence.block_table[0]])))


def same_slot_twice(sequence: FreeSequence) -> StepPlan:
    twin = FreeSequence(tokens=list(sequence.tokens), block_table=list(sequence.block_table))
    return plan(last(sequence), last(twin))


def short_table(sequence: FreeSequence) -> StepPlan:
    sequence.block_table.pop()
    return plan(last(sequence))


def block_that_does_not_exist(sequence: FreeSequence) -> StepPlan:
    sequence.block_table[1] = 8
    return plan(last(sequence))


def copied_the_wrong_way(sequence: FreeSequence) -> StepPlan:
    return plan(last(sequence), copies=[(7, sequence.block_table[1])])


def copied_too_late(sequence: FreeSequence) -> StepPlan:
    sequence.block_table[1] = 7
    return plan(last(sequence), copies=[(6, 7), (2, 6)])


def sampled_too_early(sequence: FreeSequence) -> StepPlan:
    return plan(Row(sequence, 3, 1, 1))


def more_tokens_than_there_are(sequence: FreeSequence) -> StepPlan:
    return plan(Row(sequence, 6, 2, 0))


@pytest.mark.parametrize(
    "mistake",
    [
        wrong_block, swapped_blocks, another_prefix, changed_token, skipped_position, overwritten_by_another, same_slot_twice,
        short_table, block_that_does_not_exist, copied_the_wrong_way, copied_too_late, sampled_too_early,
        more_tokens_than_there_are,
    ],
    ids=lambda mistake: mistake.__name__,
)  # fmt: skip
def test_a_mistake_is_noticed(mistake: object) -> None:
    runner = make()
    sequence = computed(runner, [1, 2])
    with pytest.raises(AssertionError):
        run(runner, mistake(sequence))  # type: ignore[operator]


def test_the_same_step_without_a_mistake_passes() -> None:
    runner = make()
    sequence = computed(runner, [1, 2])
    assert len(run(runner, plan(last(sequence)))[0]) == 1


def test_a_copied_block_holds_what_the_source_held() -> None:
    runner = make()
    sequence = computed(runner, [1, 2])
    sequence.block_table[1] = 7
    assert len(run(runner, plan(last(sequence), copies=[(2, 6), (6, 7)]))[0]) == 1


@pytest.mark.parametrize("change", [0, 3, 5])
def test_any_other_token_gives_another_next_token(change: int) -> None:
    tokens = list(TOKENS)
    tokens[change] += 1
    runner = make(vocab_size=10**6)
    expected = run(runner, plan(whole(FreeSequence(tokens=list(TOKENS), block_table=[0, 1]))))
    assert run(runner, plan(whole(FreeSequence(tokens=tokens, block_table=[2, 3])))) != expected


def test_tokens_are_the_same_with_and_without_verification() -> None:
    for params in (SamplingParams(temperature=0.0), SamplingParams(seed=-8)):
        outputs = []
        for verify in (True, False):
            runner = make(verify=verify)
            sequence = FreeSequence(tokens=list(TOKENS), block_table=[0, 1, 2, 3], params=params)
            run(runner, plan(Row(sequence, 0, 2, 0)))
            for step in range(6):
                row = Row(sequence, 2, 4, 1) if step == 0 else last(sequence)
                sequence.tokens += run(runner, plan(row))[0]
            run(runner, plan(whole(sequence)))  # preempted and computed anew
            outputs.append((sequence.tokens, run(runner, plan(whole(sequence)))))
        assert outputs[0] == outputs[1]


def test_end_of_text_comes_as_often_as_asked_and_never_by_itself() -> None:
    for one_in, expected in ((0, 0), (1, 400), (4, 100)):
        runner = make(verify=False, eos_token_ids=[7], eos_one_in=one_in)
        tokens = [run(runner, plan(whole(FreeSequence(tokens=[n], block_table=[0]))))[0][0] for n in range(400)]
        assert abs(tokens.count(7) - expected) <= 30 * (one_in > 1)


def test_only_the_given_tokens_are_used() -> None:
    runner = make(verify=False, tokens=range(20, 23))
    tokens = {run(runner, plan(whole(FreeSequence(tokens=[n], block_table=[0]))))[0][0] for n in range(40)}
    assert tokens == {20, 21, 22}


def test_a_grammar_is_refused_by_name() -> None:
    params = SamplingParams(grammar=Grammar(kind=GrammarKind.JSON_OBJECT))
    runner = make()
    runner.launch(plan(whole(FreeSequence(tokens=[1], block_table=[0], params=params))))
    (row,) = runner.collect().rows
    assert row.failure is not None
    assert row.failure.param == "response_format"


def test_released_sequences_are_forgotten() -> None:
    runner = make()
    sequence = computed(runner, [0, 1])
    assert runner.num_known_sequences == 1
    run(runner, plan(released=[sequence.key]))
    assert runner.num_known_sequences == 0


def test_paced_steps_follow_each_other_like_those_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    monkeypatch.setattr(time, "sleep", sleep)
    runner = make(step_time_s=2.0)
    for _ in range(2):
        runner.launch(plan(released=[1]))
    runner.collect()
    assert now_s == 102.0
    now_s = 103.0  # the second step went on meanwhile
    runner.collect()
    assert now_s == 104.0
