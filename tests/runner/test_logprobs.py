"""Logprobs equal those of transformers, for prompts and for output, in any chunks."""

from __future__ import annotations

import math
import pathlib

import pytest
import torch
from free_sequences import FreeSequence, plan
from tiny_models import VOCAB_SIZE, reference_model, tiny_model

import kvrelay.runner.sampling.logprobs
from kvrelay.checkpoint.spec import read_spec
from kvrelay.engine.interfaces import Row
from kvrelay.kernels.torch_kernels import TorchKernels
from kvrelay.progress import Silent
from kvrelay.runner.kv_pool import KVPool
from kvrelay.runner.loader import load_model
from kvrelay.runner.runner import TorchRunner
from kvrelay.runner.sampling.logprobs import best_logprobs, token_logprobs
from kvrelay.sampling import SamplingParams
from kvrelay.wire.serving import TokenLogprobs

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def runner() -> TorchRunner:
    folder = pathlib.Path(tiny_model("qwen2"))
    spec = read_spec(folder)
    model = load_model(folder, spec, kernels=TorchKernels(), device=CPU, dtype=torch.float32, load="auto", progress=Silent())
    pool = KVPool(spec, num_blocks=32, block_size=8, dtype=torch.float32, device=CPU)
    return TorchRunner(
        model, pool, spec, block_size=8, max_batch=4, token_budget=64, max_model_len=128, fingerprint="", folder=folder
    )


@torch.inference_mode()
def reference(tokens: list[int]) -> torch.Tensor:
    logits: torch.Tensor = reference_model("qwen2")(torch.tensor([tokens])).logits[0]
    return logits.float().log_softmax(dim=-1)


def assert_equal(entry: TokenLogprobs, expected: torch.Tensor, token: int, number: int) -> None:
    assert abs(entry.logprob - float(expected[token])) < 1e-4
    assert entry.rank == 1 + int((expected > expected[token] + 1e-6).sum())
    best = expected.topk(number).values
    assert torch.allclose(torch.tensor([value for _, value in entry.top]), best, atol=1e-4)
    for alternative, value in entry.top:
        assert abs(float(expected[alternative]) - value) < 1e-4


@pytest.mark.parametrize("chunks", [[30], [7, 1, 22], [29, 1]])
def test_prompt_and_output_logprobs_equal_transformers(runner: TorchRunner, chunks: list[int]) -> None:
    tokens = [(position * 37) % (VOCAB_SIZE - 3) + 3 for position in range(30)]
    params = SamplingParams(temperature=0.0, prompt_logprobs=4, logprobs=3)
    sequence = FreeSequence(tokens=tokens, block_table=[4, 9, 2, 7], params=params)
    found: list[TokenLogprobs] = []
    start = 0
    for count in chunks:
        runner.launch(plan(Row(sequence, start, count, int(start + count == 30), prompt_logprobs=True)))
        (result,) = runner.collect().rows
        found += result.prompt_logprobs or []
        start += count
    expected = reference(tokens)
    assert len(found) == 29
    for position, entry in enumerate(found):
        assert_equal(entry, expected[position], tokens[position + 1], 4)
    assert result.logprobs is not None
    assert_equal(result.logprobs[0], expected[29], result.tokens[0], 3)


def test_output_tokens_of_a_sequence_computed_anew_are_not_reported_as_prompt(runner: TorchRunner) -> None:
    params = SamplingParams(temperature=0.0, prompt_logprobs=0)
    sequence = FreeSequence(tokens=list(range(3, 15)), num_prompt_tokens=5, block_table=[1, 2], params=params)
    runner.launch(plan(Row(sequence, 0, 12, 1, prompt_logprobs=True)))
    (result,) = runner.collect().rows
    assert result.prompt_logprobs is not None
    assert len(result.prompt_logprobs) == 4


def test_many_rows_are_done_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(23, 50, generator=torch.Generator().manual_seed(2))
    tokens, numbers = list(range(23)), [index % 4 for index in range(23)]
    whole = token_logprobs(logits, tokens, numbers)
    monkeypatch.setattr(kvrelay.runner.sampling.logprobs, "_MOST_ELEMENTS", 150)
    assert token_logprobs(logits, tokens, numbers) == whole


def test_alternatives_are_at_most_the_vocabulary() -> None:
    (entry,) = token_logprobs(torch.zeros(1, 3), [1], [20])
    assert [token for token, _ in entry.top] == [0, 1, 2]


def test_the_best_are_the_lower_ids_where_many_are_equal() -> None:
    logits = torch.zeros(3, 50)
    logits[0, 20:] = 1.0
    logits[1, 7] = 2.0
    found = best_logprobs(logits, 4)
    assert [[token for token, _ in row or []] for row in found] == [[20, 21, 22, 23], [7, 0, 1, 2], [0, 1, 2, 3]]
    assert found[2] is not None
    assert found[2][0][1] == pytest.approx(-math.log(50))


def test_a_row_without_a_finite_logit_has_no_best() -> None:
    logits = torch.zeros(3, 8)
    logits[0] = -torch.inf
    logits[1, 3] = torch.nan
    assert [row is None for row in best_logprobs(logits, 8)] == [True, True, False]


def test_named_tokens_instead_of_the_likeliest(runner: TorchRunner) -> None:
    tokens = list(range(3, 15))
    params = SamplingParams(temperature=0.0, logprobs=2, logprob_token_ids=[9, 4, 30])
    runner.launch(plan(Row(FreeSequence(tokens=tokens, block_table=[1, 2], params=params), 0, 12, 1)))
    (result,) = runner.collect().rows
    assert result.logprobs is not None
    (entry,) = result.logprobs
    expected = reference(tokens)[11]
    assert {token for token, _ in entry.top} == {9, 4, 30}
    assert [value for _, value in entry.top] == sorted((value for _, value in entry.top), reverse=True)
    for token, value in entry.top:
        assert abs(float(expected[token]) - value) < 1e-4
    assert abs(entry.logprob - float(expected[result.tokens[0]])) < 1e-4
