"""Logits equal those of transformers, however the tokens are cut into steps and wherever their KV lies."""

from __future__ import annotations

import functools

import pytest
import torch
from paged_run import PagedRun, expected_logits, prompts_of
from tiny_models import NAMES, tiny_model

from kvrelay.checkpoint.spec import read_spec
from kvrelay.kernels.torch_kernels import TorchKernels
from kvrelay.models.registry import Model
from kvrelay.progress import Silent
from kvrelay.runner.loader import load_model

LENGTHS = (37, 5, 1, 18)


no_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA card")
on_every_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, no_card])])


@functools.cache
def loaded(name: str, device: str) -> Model:
    folder = tiny_model(name)
    return load_model(
        folder,
        read_spec(folder),
        kernels=TorchKernels(),
        device=torch.device(device),
        dtype=torch.float32,
        load="auto",
        progress=Silent(),
    )


def assert_all_equal(run: PagedRun, got: dict[int, list[torch.Tensor]], name: str) -> None:
    for row, expected in enumerate(expected_logits(name, run.prompts)):
        torch.testing.assert_close(torch.cat(got[row]), expected, atol=1e-4, rtol=0)


@on_every_device
@pytest.mark.parametrize("name", NAMES)
def test_prompts_in_one_step(name: str, device: str) -> None:
    run = PagedRun(loaded(name, device), prompts_of(LENGTHS), device)
    got = run.step({row: len(prompt) for row, prompt in enumerate(run.prompts)})
    assert_all_equal(run, {row: [logits] for row, logits in got.items()}, name)


@on_every_device
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunk", [1, 3, 16])
def test_prompts_in_chunks(name: str, chunk: int, device: str) -> None:
    """A chunk of 1 is decoding: every token is computed alone over the paged context of those before it."""
    run = PagedRun(loaded(name, device), prompts_of(LENGTHS), device)
    got: dict[int, list[torch.Tensor]] = {row: [] for row in range(len(LENGTHS))}
    while any(run.done[row] < length for row, length in enumerate(LENGTHS)):
        left = {row: length - run.done[row] for row, length in enumerate(LENGTHS)}
        for row, logits in run.step({row: min(chunk, count) for row, count in left.items() if count}).items():
            got[row].append(logits)
    assert_all_equal(run, got, name)


@on_every_device
@pytest.mark.parametrize("name", NAMES)
def test_decode_rows_and_prefill_chunks_in_one_step(name: str, device: str) -> None:
    run = PagedRun(loaded(name, device), prompts_of(LENGTHS), device)
    got: dict[int, list[torch.Tensor]] = {row: [] for row in range(len(LENGTHS))}
    for counts in ({0: 20, 3: 17}, {0: 1, 1: 4, 2: 1, 3: 1}, {1: 1, 0: 16}):
        for row, logits in run.step(counts).items():
            got[row].append(logits)
    assert run.done == list(LENGTHS)
    assert_all_equal(run, got, name)
