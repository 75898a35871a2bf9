"""From logits to results: order of edits and logprobs, failures that stay in their row, reproducibility."""

from __future__ import annotations

import torch
from free_sequences import FreeSequence

from kvrelay.engine.interfaces import Row, RowResult, StepPlan
from kvrelay.runner.batch import LogitLayout
from kvrelay.runner.sampling.edits import EditState
from kvrelay.runner.sampling.grammar import Grammars
from kvrelay.runner.sampling.sampler import Sampler
from kvrelay.sampling import SamplingParams, uniform

VOCAB = 200


def make_sampler() -> Sampler:
    grammars = Grammars(lambda: "", vocab_size=VOCAB, eos_token_ids=[0])
    return Sampler(EditState(vocab_size=VOCAB, eos_token_ids=[0], grammars=grammars))


def logits_of(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def sample(logits: torch.Tensor, sequences: list[FreeSequence], samples: int = 1) -> list[RowResult]:
    rows = [Row(sequence, 0, len(sequence.tokens), samples) for sequence in sequences]
    layout = LogitLayout(sampled=[(index, index) for index in range(len(rows))], prompts=[], num_rows=len(rows))
    sampler = make_sampler()
    return sampler.finish(logits.clone(), sampler.prepare(StepPlan(rows=rows), layout))


def sequence(**params: object) -> FreeSequence:
    return FreeSequence(tokens=[1, 2, 3], params=SamplingParams(**params))  # type: ignore[arg-type]


def test_greedy_and_drawn_rows_share_a_batch() -> None:
    logits = logits_of(4)
    drawn = {"temperature": 1.0, "seed": 3}
    mixed = sample(
        logits, [sequence(temperature=0.0), sequence(**drawn), sequence(temperature=0.0), sequence(**drawn, top_k=2)]
    )
    assert mixed[0].tokens == [int(logits[0].argmax())]
    assert mixed[2].tokens == [int(logits[2].argmax())]
    assert mixed[1] == sample(logits[1:2], [sequence(**drawn)])[0]
    assert mixed[3].tokens[0] in logits[3].topk(2).indices.tolist()


def test_the_number_drawn_is_that_of_seed_sample_and_position() -> None:
    logits = logits_of(1)
    cdf = logits[0].double().softmax(dim=-1).cumsum(dim=-1)
    for position in range(5):
        one = FreeSequence(
            tokens=[1, 2] + [4] * position, num_prompt_tokens=2, sample=6, params=SamplingParams(temperature=1.0, seed=77)
        )
        expected = int(torch.searchsorted(cdf, torch.tensor(uniform(77, 6, position), dtype=torch.float64), right=True))
        assert sample(logits, [one])[0].tokens == [expected]


def test_a_tiny_temperature_is_greedy() -> None:
    logits = logits_of(3)
    results = sample(logits, [sequence(temperature=1e-6, seed=seed) for seed in range(3)])
    assert [result.tokens for result in results] == [[int(token)] for token in logits.argmax(dim=-1)]


def test_logprobs_are_of_the_models_own_distribution() -> None:
    logits = logits_of(1)
    expected = logits[0].log_softmax(dim=-1)
    (result,) = sample(
        logits, [sequence(temperature=0.1, logprobs=3, logit_bias={9: 100.0}, repetition_penalty=2.0)], samples=2
    )
    assert result.tokens == [9, 9]
    assert result.logprobs is not None
    for entry in result.logprobs:
        assert abs(entry.logprob - float(expected[9])) < 1e-5
        best = expected.topk(3)
        assert [token for token, _ in entry.top] == best.indices.tolist()
        assert torch.allclose(torch.tensor([value for _, value in entry.top]), best.values, atol=1e-5)


def test_rows_ask_for_different_numbers_of_alternatives() -> None:
    results = sample(logits_of(4), [sequence(logprobs=number) for number in (0, 20, None, 1)])
    assert [None if r.logprobs is None else len(r.logprobs[0].top) for r in results] == [0, 20, None, 1]


def test_unusable_logits_fail_their_row_alone() -> None:
    logits = logits_of(8)
    logits[1] = -torch.inf
    logits[2, 5] = torch.nan
    logits[3, 5] = torch.inf
    logits[5] = -torch.inf
    logits[6, 5] = torch.nan
    sequences = [sequence(temperature=0.0, logprobs=1) for _ in range(4)] + [sequence(top_p=0.9, logprobs=1) for _ in range(4)]
    results = sample(logits, sequences)
    assert [result.failure is None for result in results] == [True, False, False, False, True, False, False, True]
    for result in results:
        assert len(result.tokens) == (result.failure is None)
    whole = sample(logits[[0, 4, 7]], [sequences[index] for index in (0, 4, 7)])
    assert [results[index] for index in (0, 4, 7)] == whole


def test_a_failed_row_reports_neither_tokens_nor_logprobs() -> None:
    results = sample(logits_of(2), [sequence(logit_bias={VOCAB: 1.0}, logprobs=2), sequence(logprobs=2)])
    assert results[0].failure is not None
    assert "logit_bias" in results[0].failure.message
    assert (results[0].tokens, results[0].logprobs) == ([], None)
    assert results[1].failure is None
    assert results[1].logprobs is not None
