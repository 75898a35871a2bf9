"""Short prompts that are padded and replayed: the tokens of those that are launched."""

from __future__ import annotations

import pathlib

import pytest
import torch
from free_sequences import FreeSequence, last, plan, whole
from tiny_models import reference_model, tiny_model
from triton_here import DEVICE, HAS_TRITON, ON_CARD

from kvrelay.checkpoint.spec import read_spec
from kvrelay.progress import Silent
from kvrelay.runner.kv_pool import KVPool
from kvrelay.runner.loader import load_model
from kvrelay.runner.prompt_graphs import PROMPT_SIZES, prompt_sizes
from kvrelay.runner.runner import TorchRunner

pytestmark = [
    pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed"),
    *([pytest.mark.cuda] if ON_CARD else []),
]


def make_runner() -> TorchRunner:
    from kvrelay.kernels.cuda.kernels import CudaKernels

    folder = tiny_model("llama")
    spec = read_spec(folder)
    model = load_model(
        folder, spec, kernels=CudaKernels(), device=DEVICE, dtype=torch.float32, load="auto", progress=Silent()
    )
    pool = KVPool(spec, num_blocks=9, block_size=8, dtype=torch.float32, device=DEVICE)
    return TorchRunner(
        model, pool, spec, block_size=8, max_batch=2, token_budget=64, max_model_len=64, fingerprint="",
        folder=pathlib.Path(folder), graph_sizes=[1, 2], prompt_sizes=[8, 16],
    )  # fmt: skip


def test_prompts_of_any_length_and_what_follows_them() -> None:
    """Some fill their size, some do not, one is too long; each then decodes over the KV that was stored."""
    runner = make_runner()
    runner.kv.fill_(float("nan"))  # what is read of it must have been stored
    for length, table in ((2, [3]), (8, [5, 1]), (13, [6, 2]), (20, [0, 4, 7])):
        tokens = list(range(10, 10 + length))
        sequence = FreeSequence(tokens=tokens, block_table=table)
        runner.launch(plan(whole(sequence)))
        first = runner.collect().rows[0].tokens[0]
        with torch.inference_mode():
            expected = reference_model("llama")(torch.tensor([[*tokens, first]])).logits[0, -2:].argmax(-1).tolist()
        sequence.tokens.append(first)
        runner.launch(plan(last(sequence)))
        assert [first, runner.collect().rows[0].tokens[0]] == expected


def test_sizes_that_no_step_has_are_not_captured() -> None:
    assert prompt_sizes(8192, 131072) == list(PROMPT_SIZES)
    assert prompt_sizes(8192, 200) == [64, 128, 192]
    assert prompt_sizes(32, 200) == []
