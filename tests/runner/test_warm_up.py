"""What is computed before the first request."""

from __future__ import annotations

import itertools
import pathlib

import pytest
import torch
from tiny_models import tiny_model
from triton_here import HAS_TRITON

from kvrelay.checkpoint.spec import read_spec
from kvrelay.config import EngineOptions
from kvrelay.engine.interfaces import StepPlan
from kvrelay.kernels.torch_kernels import TorchKernels
from kvrelay.progress import Silent
from kvrelay.runner.kv_pool import KVPool
from kvrelay.runner.loader import load_model
from kvrelay.runner.runner import TorchRunner
from kvrelay.runner.warm_up import _FEW_TOKENS, _HEADS, _QUERY_LINES, warm_up_mixed

CPU = torch.device("cpu")


def make_runner(options: EngineOptions) -> TorchRunner:
    folder = pathlib.Path(tiny_model("llama"))
    spec = read_spec(folder)
    model = load_model(folder, spec, kernels=TorchKernels(), device=CPU, dtype=torch.float32, load="auto", progress=Silent())
    pool = KVPool(spec, num_blocks=17, block_size=options.block_size, dtype=torch.float32, device=CPU)
    return TorchRunner(
        model, pool, spec, block_size=options.block_size, max_batch=options.max_batch, token_budget=options.token_budget,
        max_model_len=128, fingerprint="", folder=folder, graph_sizes=[1, 2],
    )  # fmt: skip


@pytest.mark.parametrize(("max_batch", "budget"), [(1, 128), (3, 128), (80, 128), (300, 512)])
def test_chunks_beside_decodes_as_far_as_there_is_room(max_batch: int, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    options = EngineOptions(block_size=8, max_batch=max_batch, token_budget=budget)
    runner, launched = make_runner(options), list[list[int]]()
    launch = runner.launch

    def note(plan: StepPlan) -> None:
        launched.append([row.count for row in plan.rows])
        launch(plan)

    monkeypatch.setattr(runner, "launch", note)
    warm_up_mixed(runner, options, Silent())
    steps = [counts for counts in launched if counts]
    many = min(68, max_batch - 1)  # two KV heads each
    most = min(257, max_batch - 1)
    beside = min(16, max_batch - 1)
    whole = [[1] * beside + [min(120, budget - beside)]]  # what the context leaves, or the budget
    few = [[1] * min(tokens - 2, max_batch - 1) for tokens in _FEW_TOKENS]
    few = [[*rows, tokens - len(rows)] for rows, tokens in zip(few, _FEW_TOKENS, strict=True)]
    assert steps == ([] if max_batch == 1 else [[1] * many + [16], [1] * most + [32], [1, 33], *few, *whole])
    assert runner.num_known_sequences == 0


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_every_kernel_that_a_mixed_step_of_heads_of_128_can_take_is_among_them() -> None:
    from kvrelay.kernels.cuda.table import choose_linear, choose_mixed, choose_prefill

    assert {choose_prefill(lines, 256) for lines in range(1, 40000)} == {choose_prefill(lines, 256) for lines in _QUERY_LINES}
    assert {choose_mixed(heads, 256) for heads in range(1, 4096)} == {choose_mixed(heads, 256) for heads in _HEADS}
    for lines, gated, scaled in itertools.product((4096, 6144, 128256), (False, True), (False, True)):
        found = {choose_linear(rows, lines, 4096, gated, scaled) for rows in range(2, 65)}
        assert found == {choose_linear(rows, lines, 4096, gated, scaled) for rows in _FEW_TOKENS}
