"""Bias, penalties and minimum length: against transformers and against the definitions."""

from __future__ import annotations

import random

import pytest
import torch
import transformers
from free_sequences import FreeSequence

from kvrelay.engine.interfaces import RowFailure
from kvrelay.runner.sampling.edits import EditState
from kvrelay.runner.sampling.grammar import Grammars
from kvrelay.sampling import SamplingParams

VOCAB = 60
EOS = (2, 59)


def make_state() -> EditState:
    def no_tokenizer() -> str:
        raise AssertionError("no grammar, no tokenizer")

    grammars = Grammars(no_tokenizer, vocab_size=VOCAB, eos_token_ids=EOS)
    return EditState(vocab_size=VOCAB, eos_token_ids=EOS, grammars=grammars)


def logits_of(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 4


def edited(state: EditState, logits: torch.Tensor, *sequences: FreeSequence) -> torch.Tensor:
    edits, failures = state.prepare(list(enumerate(sequences)))
    assert not failures
    result = logits.clone()
    edits.apply(result)
    return result


def sequence(prompt: list[int], output: list[int], **params: object) -> FreeSequence:
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    return FreeSequence(tokens=prompt + output, num_prompt_tokens=len(prompt), params=sampling)


def test_repetition_penalty_is_that_of_transformers() -> None:
    logits = logits_of(2)
    sequences = [
        sequence([5, 6, 6, 7], [9, 9], repetition_penalty=1.3),
        sequence([1], [2, 3, 4], repetition_penalty=0.7),
    ]
    found = edited(make_state(), logits, *sequences)
    for row, one in enumerate(sequences):
        processor = transformers.RepetitionPenaltyLogitsProcessor(penalty=one.params.repetition_penalty)
        expected = processor(torch.tensor([one.tokens]), logits[row : row + 1].clone())
        assert torch.equal(found[row : row + 1], expected)


def test_presence_and_frequency_count_output_only() -> None:
    logits = logits_of(1)
    found = edited(make_state(), logits, sequence([5, 5, 6], [6, 8, 8, 8], presence_penalty=0.5, frequency_penalty=0.25))
    expected = logits.clone()
    expected[0, 6] -= 0.5 + 0.25
    expected[0, 8] -= 0.5 + 3 * 0.25
    assert torch.allclose(found, expected, atol=1e-6)


def test_bias_comes_before_penalties() -> None:
    logits = logits_of(1)
    found = edited(make_state(), logits, sequence([7], [], logit_bias={7: 3.0, 8: -100.0}, repetition_penalty=2.0))
    value = float(logits[0, 7]) + 3.0
    expected = logits.clone()
    expected[0, 7] = value / 2 if value > 0 else value * 2
    expected[0, 8] -= 100.0
    assert torch.allclose(found, expected)


def test_other_rows_are_not_touched() -> None:
    logits = logits_of(3)
    plain = sequence([1, 2], [3])
    found = edited(make_state(), logits, plain, sequence([1], [3], frequency_penalty=1.0, logit_bias={4: 1.0}), plain)
    assert torch.equal(found[[0, 2]], logits[[0, 2]])
    assert not torch.equal(found[1], logits[1])


def test_counts_follow_a_growing_sequence_as_if_counted_anew() -> None:
    rng = random.Random(3)
    state = make_state()
    params = {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.1}
    growing = sequence([1, 2, 3], [], **params)
    for step in range(80):
        logits = logits_of(1, step)
        fresh = sequence(growing.tokens[:3], growing.tokens[3:], **params)
        assert torch.equal(edited(state, logits, growing), edited(make_state(), logits, fresh))
        growing.tokens.append(rng.randrange(VOCAB))
        if step == 40:
            del growing.tokens[10:]  # shorter than before: counted anew


def test_min_tokens_forbids_every_way_to_end_until_reached() -> None:
    ends = [*EOS, 11]
    for num_output, forbidden in ((0, True), (2, True), (3, False)):
        logits = logits_of(1)
        found = edited(make_state(), logits, sequence([1], [4] * num_output, min_tokens=3, max_tokens=9, stop_token_ids=[11]))
        assert bool(torch.isinf(found[0, ends]).all()) is forbidden
        others = [token for token in range(VOCAB) if token not in ends]
        assert torch.equal(found[0, others], logits[0, others])


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_a_bias_outside_the_vocabulary_fails_that_row_alone(token: int) -> None:
    rows = [(0, sequence([1], [], logit_bias={token: 1.0})), (1, sequence([1], [], logit_bias={3: 1.0}))]
    edits, failures = make_state().prepare(rows)
    assert failures == {0: RowFailure(f"logit_bias names token {token}, but the vocabulary has {VOCAB}")}
    assert [row for row, _ in edits.bias] == [1]


def test_what_was_prepared_does_not_follow_the_sequence() -> None:
    state, logits = make_state(), logits_of(1)
    growing = sequence([1], [5], frequency_penalty=1.0)
    edits, _ = state.prepare([(0, growing)])
    growing.tokens.append(5)
    state.prepare([(0, growing)])
    edits.apply(logits)
    assert float(logits[0, 5]) == float(logits_of(1)[0, 5]) - 1.0


def test_released_sequences_are_forgotten() -> None:
    state = make_state()
    one = sequence([1], [2], presence_penalty=1.0)
    edited(state, logits_of(1), one)
    assert len(state) == 1
    state.forget([one.key, 10**9])
    assert len(state) == 0


def test_only_allowed_tokens_are_left() -> None:
    logits = logits_of(2)
    found = edited(make_state(), logits, sequence([1], [], allowed_token_ids=[7, 9]), sequence([1], []))
    assert torch.isfinite(found[0]).nonzero()[:, 0].tolist() == [7, 9]
    assert torch.equal(found[0, [7, 9]], logits[0, [7, 9]])
    assert torch.equal(found[1], logits[1])


def test_allowed_tokens_and_a_minimum_length() -> None:
    found = edited(make_state(), logits_of(1), sequence([1], [], allowed_token_ids=[2, 9], min_tokens=3))
    assert torch.isfinite(found[0]).nonzero()[:, 0].tolist() == [9]


@pytest.mark.parametrize(
    ("output", "banned"),
    [([], [5]), ([3], [4, 5]), ([8, 3], [4, 5]), ([3, 8], [5]), ([6, 7], [5, 8]), ([7], [5])],
)
def test_the_last_token_of_a_bad_word_does_not_follow_the_others(output: list[int], banned: list[int]) -> None:
    one = sequence([3, 6, 7], output, bad_tokens=[[5], [3, 4], [6, 7, 8]])
    found = edited(make_state(), logits_of(1), one)
    assert torch.isinf(found[0]).nonzero()[:, 0].tolist() == banned
