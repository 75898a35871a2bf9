"""Beam search gives transformers' hypotheses, with its scores: for every width, both ways to stop early and neither, several
length penalties, ends by end-of-text and by length, in mixed batches, and under forced preemption."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import pytest
import torch
import transformers
from leaks import check_idle
from parity import reference_tokens
from test_parity import DEVICES, prompts
from test_parity import make_engine as make_parity_engine
from tiny_models import reference_model
from transformers.generation import GenerationMode

from kvrelay.engine.engine import Engine
from kvrelay.ids import new_request_id
from kvrelay.sampling import BeamSearch, SamplingParams
from kvrelay.states import FinishReason
from kvrelay.wire.serving import BeamResult, Failure, SequenceOutput, Submit, of_kind

NUM_TOKENS = 9
WIDTHS = tuple(range(1, 9))
STOPPING: tuple[Any, ...] = (False, True, "never")
PENALTIES = (1.0, 0.0, 2.0, -0.5)
TOLERANCE = 1e-4


@dataclasses.dataclass(frozen=True)
class Case:
    """A prompt and how to search."""

    prompt: int
    beam: BeamSearch
    n: int = 1
    min_tokens: int = 0
    max_tokens: int = NUM_TOKENS


@functools.cache
def ends(name: str) -> list[int]:
    """Tokens that the model likes: hypotheses end early, late and not at all."""
    model = reference_model(name)
    greedy = [reference_tokens(model, prompts()[index], 8)[0] for index in (0, 4, 6)]
    return sorted({greedy[0][2], greedy[1][5], greedy[2][1]})


@torch.inference_mode()
def reference(name: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], float]]:
    """transformers' hypotheses and their scores. It would do a search of width 1 by its greedy loop, which has no scores."""
    monkeypatch.setattr(transformers.GenerationConfig, "get_generation_mode", lambda *_: GenerationMode.BEAM_SEARCH)
    prompt = prompts()[case.prompt]
    found = reference_model(name).generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        num_beams=case.beam.width,
        num_return_sequences=case.n,
        length_penalty=case.beam.length_penalty,
        early_stopping=case.beam.early_stopping,
        max_new_tokens=case.max_tokens,
        min_new_tokens=case.min_tokens,
        eos_token_id=ends(name),
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    rows = [row[len(prompt) :].tolist() for row in found.sequences]
    return [(_up_to_end(row, ends(name)), score) for row, score in zip(rows, found.sequences_scores.tolist(), strict=True)]


def _up_to_end(tokens: list[int], eos: list[int]) -> list[int]:
    return next((tokens[: place + 1] for place, token in enumerate(tokens) if token in eos), tokens)


def make_engine(name: str, device: str = "cpu", **options: object) -> Engine:
    """With the same end-of-text tokens as the reference."""
    return make_parity_engine(name, device, eos_token_ids=frozenset(ends(name)), **options)


def search(engine: Engine, cases: list[Case]) -> list[list[tuple[SequenceOutput, BeamResult]]]:
    """All at once."""
    requests = []
    for case in cases:
        params = SamplingParams(
            temperature=0.0, n=case.n, beam=case.beam, max_tokens=case.max_tokens, min_tokens=case.min_tokens, logprobs=2
        )
        request = Submit(request_id=new_request_id(), external_id="", prompt=prompts()[case.prompt], params=params)
        requests.append(request)
        engine.submit(request)
    found: dict[tuple[str, int], tuple[SequenceOutput, BeamResult]] = {}
    while engine.has_work:
        step = engine.step()
        assert not of_kind(Failure, step.news), of_kind(Failure, step.news)
        for output, result in zip(step.outputs, of_kind(BeamResult, step.news), strict=True):
            assert (output.request_id, output.sample) == (result.request_id, result.sample)
            assert (output.request_id, output.sample) not in found
            found[output.request_id, output.sample] = output, result
    check_idle(engine.core)
    return [
        [found[request.request_id, sample] for sample in range(case.n)] for request, case in zip(requests, cases, strict=True)
    ]


def assert_equal(
    name: str, cases: list[Case], monkeypatch: pytest.MonkeyPatch, *, device: str = "cpu", **options: object
) -> Engine:
    engine = make_engine(name, device, **options)
    for case, results in zip(cases, search(engine, cases), strict=True):
        expected = reference(name, case, monkeypatch)
        assert [output.tokens for output, _ in results] == [tokens for tokens, _ in expected], case
        assert [result.score for _, result in results] == pytest.approx([score for _, score in expected], abs=TOLERANCE), case
        for output, result in results:
            assert output.finish is (FinishReason.STOP if output.tokens[-1] in ends(name) else FinishReason.LENGTH)
            assert output.logprobs is not None
            assert len(output.logprobs) == len(output.tokens)
            assert sum(entry.logprob for entry in output.logprobs) == pytest.approx(result.cumulative_logprob)
            length = len(output.tokens) ** case.beam.length_penalty
            assert result.score * length == pytest.approx(result.cumulative_logprob)
    engine.close()
    return engine


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_every_width_and_way_to_stop(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both models together: each width with both."""
    cases = [
        Case(
            (0, 4, 6, 2, 3)[width % 5],
            BeamSearch(width=width, length_penalty=PENALTIES[width // 2 % 4], early_stopping=width % 2 == (name == "llama")),
            n=width if width > 4 else 1 + width // 2,
        )
        for width in WIDTHS
    ]
    never = [
        Case(prompt, BeamSearch(width=width, length_penalty=penalty, early_stopping="never"), n=width)
        for prompt, width, penalty in ((0, 2, 1.0), (4, 5, 2.0), (6, 8, 0.0))
    ]
    assert_equal(name, cases + never, monkeypatch, device=device, max_batch=40, token_budget=64)


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_every_width_way_to_stop_and_penalty(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    used = (0, 1, 2, 4, 6, 8, 9, 10, 11)
    cases = [
        Case(
            used[turn % len(used)],
            BeamSearch(width=width, length_penalty=penalty, early_stopping=stopping),
            n=width if turn % 2 else max(1, width // 2),
            max_tokens=24,
        )
        for turn, (width, stopping, penalty) in enumerate(itertools.product(WIDTHS, STOPPING, PENALTIES))
    ]
    assert_equal(name, cases, monkeypatch, max_batch=60, block_size=3, kv_blocks=2000)


def test_few_tokens_and_a_least_number_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    searches = [BeamSearch(width=width, early_stopping=stopping) for width in (1, 4) for stopping in (False, True)]
    cases = [
        Case(prompt, beam, n=beam.width, min_tokens=least, max_tokens=most)
        for beam in searches
        for prompt, least, most in ((0, 0, 1), (4, 1, 1), (6, 0, 2), (0, 3, 6), (6, 5, 6))
    ]
    assert_equal("llama", cases, monkeypatch, max_batch=40, token_budget=64)


@pytest.mark.parametrize("swap_blocks", [0, 400])
def test_forced_preemption(swap_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [Case(prompt, BeamSearch(width=width), n=width) for prompt, width in ((6, 5), (8, 6), (4, 8), (10, 3), (9, 7))]
    engine = assert_equal(
        "llama",
        cases,
        monkeypatch,
        block_size=4,
        kv_blocks=72,
        kept_kv_share=0.0,
        max_batch=24,
        swap_blocks=swap_blocks,
        swap_timeout_s=60.0,
    )
    assert engine.load().preemptions > 0
