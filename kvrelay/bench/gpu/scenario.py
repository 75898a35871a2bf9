"""Both halves of the scenario, and the table of figures beside what another engine and the card reach."""

from __future__ import annotations

from typing import Annotated

import torch
from msgspec import Meta
from rich.console import Console
from rich.table import Table

from kvrelay.bench.gpu.fp8 import measure_fp8
from kvrelay.bench.gpu.parity import check_families
from kvrelay.bench.gpu.relay import measure_relay
from kvrelay.bench.gpu.speed import measure_speed
from kvrelay.bench.harness.report import Target, format_figure
from kvrelay.bench.harness.scenario import BenchOptions, Part, Results, Scenario
from kvrelay.config import CardOptions, Positive
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
_FP8 = {"fp8_b1_in128_itl_ms": Target("<=", 2.3)}
_RELAY = {
    "ipc_over_device_copy_2048": Target(">=", 0.5),
    "handover_ms_p50": Target("<=", 1.5),
    "late_bytes_share": Target("<=", 0.05),
    **{f"ttft_excess_{length}_ms": Target("<=", 3.0) for length in (128, 512, 2048)},
    "ttft_whole_128_ms": Target("<=", 20.0),
    "ttft_whole_512_ms": Target("<=", 20.0),
    "ttft_whole_2048_ms": Target("<=", 56.0),
    "ttft_whole_8192_ms": Target("<=", 231.0),
    "itl_p99_ms_1p1d": Target("<=", 8.0),
    "itl_max_ms_1p1d": Target("<=", 40.0),
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

    rounds: Annotated[Positive, Meta(description="rounds; figures are the best of them, those of the relay the median")] = 3
    seconds: Annotated[Positive, Meta(description="how long long prompts arrive beside running requests (relay)")] = 15
    prefill_sms: Annotated[
        int, Meta(ge=1, le=100, description="percent of the card's multiprocessors that prefill may use under MPS (relay)")
    ] = CardOptions().prefill_sms


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


def fp8(options: GpuBench, console: Console) -> Results:
    _need_card()
    return measure_fp8(options.rounds, console)


def relay(options: GpuBench, console: Console) -> Results:
    _need_card()
    return measure_relay(options.rounds, options.seconds, options.prefill_sms, console)


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
        "fp8": Part("weights in fp8: precision and speed", fp8, _FP8),
        "relay": Part("prefill and decode apart on one card, over HTTP", relay, _RELAY, by_default=False),
    },
)
