"""What a device chooses as part of a launch is what `finish` chooses from the same logits on a CPU."""

from __future__ import annotations

import random

import pytest
import torch
from free_sequences import FreeSequence
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.engine.interfaces import Row, StepPlan
from kvrelay.runner.batch import LogitLayout
from kvrelay.runner.sampling.draw import NOT_RESOLVED, NOT_USABLE, greedy, likeliest
from kvrelay.runner.sampling.edits import EditState
from kvrelay.runner.sampling.grammar import Grammars
from kvrelay.runner.sampling.sampler import Prepared, Sampler
from kvrelay.sampling import SamplingParams

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
_EDITS: list[dict[str, object]] = [
    {},
    {},
    {"logit_bias": {5: 4.0, 17: -100.0}},
    {"repetition_penalty": 1.4, "frequency_penalty": 0.5},
    {"min_tokens": 5, "max_tokens": 9},
    {"allowed_token_ids": list(range(3, 30)), "bad_tokens": [[9], [4, 5]]},
]
_FILTERS: list[dict[str, object]] = [
    {},
    {"min_p": 0.05},
    {"top_k": 7},
    {"top_p": 0.8},
    {"top_p": 0.99, "top_k": 150},
    {"top_p": 0.3, "min_p": 0.01},
]


def make_sampler(vocab_size: int) -> Sampler:
    grammars = Grammars(lambda: "", vocab_size=vocab_size, eos_token_ids=[0])
    return Sampler(EditState(vocab_size=vocab_size, eos_token_ids=[0], grammars=grammars))


def make_row(rng: random.Random, vocab_size: int) -> Row:
    tokens = [rng.randrange(vocab_size) for _ in range(rng.randrange(2, 12))]
    chosen: dict[str, object] = {"temperature": rng.choice([0.0, 0.7, 1.5]), "seed": rng.randrange(99), **rng.choice(_EDITS)}
    if chosen["temperature"]:
        chosen |= rng.choice(_FILTERS)
    params = SamplingParams(**chosen)  # type: ignore[arg-type]
    sequence = FreeSequence(tokens=tokens, num_prompt_tokens=rng.randrange(1, len(tokens)), params=params)
    return Row(sequence, 0, len(tokens), rng.choice([1, 1, 1, 0]))


def make_logits(rng: random.Random, rows: int, vocab_size: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    spread = torch.tensor([rng.choice([0.0, 0.1, 3.0, 12.0]) for _ in range(rows)])
    logits = torch.randn(rows, vocab_size, generator=generator) * spread[:, None]
    if rng.random() < 0.2:
        logits[rng.randrange(rows)] = rng.choice([float("nan"), float("-inf")])
    return logits.to(dtype)


def compare(seed: int, device: str) -> None:
    rng = random.Random(seed)
    vocab_size, dtype = rng.choice([200, 1024, 3000]), rng.choice([torch.float32, torch.bfloat16])
    rows = [make_row(rng, vocab_size) for _ in range(rng.randrange(1, 9))]
    wanted = [index for index, row in enumerate(rows) if row.samples]
    if not wanted:
        return
    every = rng.random() < 0.5  # as a replayed step has it: logits of all rows
    sampled = [(index, index if every else place) for place, index in enumerate(wanted)]
    layout = LogitLayout(sampled=sampled, prompts=[], num_rows=len(rows) if every else len(wanted))
    logits = make_logits(rng, layout.num_rows, vocab_size, dtype)
    sampler = make_sampler(vocab_size)
    prepared: Prepared = sampler.prepare(StepPlan(rows=rows), layout)
    assert prepared.takes_one_each
    there = logits.to(device)
    best = likeliest(there) if rng.random() < 0.5 else None
    chosen = sampler.choose(there, prepared, best).tolist()
    assert torch.equal(there.cpu().nan_to_num(), logits.nan_to_num()), "the logits were changed"
    assert NOT_RESOLVED not in chosen or not prepared.is_certain
    expected = sampler.finish(logits.clone(), prepared)
    tokens = [expected[index].tokens for index in wanted]
    for token, known in zip(chosen, tokens, strict=True):
        if token != NOT_RESOLVED:
            assert ([] if token == NOT_USABLE else [token]) == known
    if NOT_RESOLVED not in chosen:
        assert sampler.results(chosen, prepared) == expected


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_cpu_chooses_alike(seed: int) -> None:
    compare(seed, "cpu")


@pytest.mark.cuda
def test_a_card_chooses_alike() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA card")
    for seed in range(200):
        compare(seed, "cuda")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocab_size", [1, 7, 96, 128, 1024, 3000])
def test_the_likeliest_is_the_lowest_of_equals(device: str, vocab_size: int) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no NVIDIA card")
    rng = random.Random(vocab_size)
    rows = [[float(rng.randrange(4)) for _ in range(vocab_size)] for _ in range(6)]
    rows[2] = [float("-inf")] * vocab_size
    rows[3][rng.randrange(vocab_size)] = float("nan")
    logits = torch.tensor(rows)
    assert likeliest(logits.to(device)).tolist() == [NOT_USABLE if token is None else token for token in greedy(logits)]
