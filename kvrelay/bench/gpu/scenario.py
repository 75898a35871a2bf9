"""Both halves of the scenario, and the table of figures beside what another engine and the card reach."""

from __future__ import annotations

from typing import Annotated

import torch
from msgspec import Meta
from rich.console import Console
from rich.table import Table

from kvrelay.bench.gpu.parity import check_families
from kvrelay.bench.gpu.speed import measure_speed
from kvrelay.bench.harness.report import Target, format_figure
from kvrelay.bench.harness.scenario import BenchOptions, Part, Results, Scenario
from kvrelay.config import Positive
from kvrelay.errors import BenchError, ConfigError

_CORRECT = {"parity_mismatches": Target("<=", 0.0), "bf16_error_over_transformers": Target("<=", 2.0)}
_FAST = {
    "b1_in128_itl_ms": Target("<=", 3.9),
    "b8_in1024_itl_ms": Target("<=", 4.5),
    "b64_in1024_itl_ms": Target("<=", 6.9),
    "b256_in512_itl_ms": Target("<=", 11.8),
    "prefill_512_ms": Target("<=", 12.5),
    "prefill_2048_ms": Target("<=", 46.5),
    "prefill_8192_ms": Target("<=", 203.0),
    "prefill_16x2048_tok_s": Target(">=", 44500.0),
    "gpu_idle_share_b64": Target("<=", 0.03),
    "start_to_first_token_s": Target("<=", 30.0),
}
# One H200, the same shapes: vLLM 0.26, and what its memory and arithmetic allow.
ANCHORS = {
    "b1_in128_itl_ms": (4.83, 3.5),
    "b8_in1024_itl_ms": (5.22, 3.8),
    "b64_in1024_itl_ms": (7.51, 6.4),
    "b256_in512_itl_ms": (13.35, 10.7),
    "prefill_512_ms": (15.9, 10.5),
    "prefill_2048_ms": (49.6, 44.4),
    "prefill_8192_ms": (210.5, 195.0),
    "prefill_16x2048_tok_s": (43000.0, 46000.0),
}


class GpuBench(BenchOptions, frozen=True, kw_only=True):
    """How often it is measured."""

    rounds: Annotated[Positive, Meta(description="rounds; figures are the best of them")] = 3


def check(options: GpuBench, console: Console) -> Results:
    _need_card()
    results = check_families(console)
    missed = [name for name, target in _CORRECT.items() if not target.met(results[name])]
    if missed:
        raise BenchError(f"not correct, so not measured: {', '.join(f'{name} {results[name]:g}' for name in missed)}")
    return results


def measure(options: GpuBench, console: Console) -> Results:
    _need_card()
    results = measure_speed(options.rounds, console)
    _show_anchors(results, console)
    return results


def _need_card() -> None:
    if not torch.cuda.is_available():
        raise ConfigError("bench gpu needs an NVIDIA card, and PyTorch finds none")


def _show_anchors(results: dict[str, float], console: Console) -> None:
    table = Table(title="against vLLM 0.26 and the card's limit, on an H200")
    for heading in ("figure", "kvrelay", "vLLM", "limit"):
        table.add_column(heading, justify="left" if heading == "figure" else "right")
    for name, (vllm, limit) in ANCHORS.items():
        if name in results:
            table.add_row(name, *(format_figure(figure) for figure in (results[name], vllm, limit)))
    console.print(table)


SCENARIO = Scenario(
    GpuBench,
    {
        "parity": Part("the tokens and logits of transformers", check, _CORRECT),
        "speed": Part("decode and prefill of a Llama-3.1-8B shape", measure, _FAST),
    },
)
