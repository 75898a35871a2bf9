"""`kvrelay bench engine`: the real engine and runner in this process, against the roofline of this machine.

A round measures the machine's limits, then decode at each batch size, then a prefill, then the same on the peer; rounds
repeat, and a ratio is the median of the rounds' ratios. So a process that takes half of the machine for a while slows limit
and figure alike, and a single disturbed round does not count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Annotated, Literal, Protocol

import msgspec
import torch
from msgspec import Meta
from rich.console import Console
from rich.progress import Progress

from kvrelay.bench.engine import int8, lora, shared, weights
from kvrelay.bench.engine.own import build_subject
from kvrelay.bench.engine.peer import TransformersSubject
from kvrelay.bench.engine.work import (
    BATCHES,
    CONTEXT,
    LONG_PREFILL_TOKENS,
    PREFILL_TOKENS,
    STEPS,
    WARM_STEPS,
    Limits,
    attention_flops,
    decode_work,
    head_weights,
    layer_weights,
    prefill_work,
)
from kvrelay.bench.harness.report import Target
from kvrelay.bench.harness.scenario import ModelBench, Part, Results, Scenario
from kvrelay.bench.harness.workload import draw
from kvrelay.bench.machine import Machine
from kvrelay.checkpoint.spec import ModelSpec
from kvrelay.config import Count, Positive

_ELEMENT_BYTES = 4  # float32

TARGETS = {
    "decode_b1_over_weights_read": Target("<=", 1.25),
    "roofline_share_b4": Target(">=", 0.7),
    "roofline_share_b16": Target(">=", 0.7),
    "roofline_share_b64": Target(">=", 0.7),
    "prefill_512_gemm_share": Target(">=", 0.75),
    "prefill_2048_gemm_share": Target(">=", 0.75),
}


class Subject(Protocol):
    """What is measured: our engine, or a peer."""

    def decode(self, batch: int, steps: int) -> list[float]:
        """Seconds of each of `steps` decode steps of `batch` sequences of CONTEXT tokens each."""

    def prefill(self, prompt: list[int]) -> float:
        """Seconds from a prompt that no cache has seen to its first output token."""

    def close(self) -> None: ...


@dataclass
class Round:
    """What one round measured, in seconds."""

    limits: Limits
    decode_s: dict[int, float] = field(default_factory=dict)  # median step
    best_decode_s: dict[int, float] = field(default_factory=dict)  # fastest step
    prefill_s: float = 0.0
    long_prefill_s: float = 0.0
    peer_decode_s: dict[int, float] = field(default_factory=dict)
    peer_prefill_s: float = 0.0


class EngineBench(ModelBench, frozen=True, kw_only=True):
    """What is measured, and how often."""

    threads: Annotated[Count, Meta(description="CPU threads; 0 uses all cores")] = 0
    peer: Annotated[Literal["none", "transformers"], Meta(description="runs the same workload there, and ratios are shown")] = (
        "none"
    )
    rounds: Annotated[Positive, Meta(description="rounds; figures are medians over them")] = 7


def measure(options: EngineBench, console: Console) -> Results:
    threads = options.threads or torch.get_num_threads()
    torch.set_num_threads(threads)
    model = msgspec.structs.replace(options.local_model(threads), weights="float32")  # what limits and peers are about
    spec, subject = build_subject(model, prompts(max(BATCHES)))
    peer: Subject | None = None
    if options.peer == "transformers":
        with console.status(f"loading {options.model} with transformers"):
            peer = TransformersSubject(model.model, prompts(4), threads)
    try:
        rounds = _run_rounds(options.rounds, subject, peer, console)
    finally:
        subject.close()
        if peer is not None:
            peer.close()
    return summarise(spec, rounds)


def prompts(count: int) -> list[list[int]]:
    """Prompts that no two of begin alike, of CONTEXT + 1 tokens: whole blocks, and a last token that must be computed."""
    return [draw(seed, CONTEXT + 1) for seed in range(count)]


def _run_rounds(count: int, subject: Subject, peer: Subject | None, console: Console) -> list[Round]:
    machine = Machine()
    subjects = [subject] if peer is None else [subject, peer]
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("warming up", total=(count + 1) * (1 + len(subjects) * (len(BATCHES) + 1)))
        rounds = []
        for index in range(count + 1):  # the first one fills caches, compiles kernels, and is thrown away
            progress.update(task, description=f"round {index} of {count}" if index else "warming up")
            rounds.append(_run_round(index, machine, subject, peer, lambda: progress.advance(task)))
    return rounds[1:]


def _run_round(index: int, machine: Machine, subject: Subject, peer: Subject | None, tick: Callable[[], None]) -> Round:
    this = Round(Limits(bytes_per_s=machine.gemv_bytes_per_s(), flops_per_s=machine.gemm_flops_per_s()))
    tick()
    for batch in BATCHES:
        steps = subject.decode(batch, STEPS[batch])
        this.decode_s[batch], this.best_decode_s[batch] = median(steps), min(steps)
        tick()
        if peer is not None:
            this.peer_decode_s[batch] = median(peer.decode(batch, max(2, STEPS[batch] // 4)))
            tick()
    prompt = draw(1_000_000 + index, PREFILL_TOKENS)
    this.prefill_s = subject.prefill(prompt)
    this.long_prefill_s = subject.prefill(draw(2_000_000 + index, LONG_PREFILL_TOKENS))
    tick()
    if peer is not None:
        this.peer_prefill_s = peer.prefill(prompt)
        tick()
    after = Limits(bytes_per_s=machine.gemv_bytes_per_s(), flops_per_s=machine.gemm_flops_per_s())
    this.limits = Limits(  # the better of before and after: a limit that another process lowered flatters us
        bytes_per_s=max(this.limits.bytes_per_s, after.bytes_per_s),
        flops_per_s=max(this.limits.flops_per_s, after.flops_per_s),
    )
    return this


def summarise(spec: ModelSpec, rounds: list[Round]) -> Results:
    """Figures by name, in the order in which they are shown."""
    weight_bytes = (layer_weights(spec) + head_weights(spec)) * _ELEMENT_BYTES
    prefill = prefill_work(spec, PREFILL_TOKENS, _ELEMENT_BYTES)
    results = {
        "gemv_gb_per_s": median(this.limits.bytes_per_s for this in rounds) / 1e9,
        "gemm_gflop_per_s": median(this.limits.flops_per_s for this in rounds) / 1e9,
        "weights_read_ms": median(weight_bytes / this.limits.bytes_per_s for this in rounds) * 1e3,
        "decode_b1_over_weights_read": median(this.decode_s[1] * this.limits.bytes_per_s / weight_bytes for this in rounds),
    }
    for batch in BATCHES:
        results |= _decode_figures(spec, batch, rounds)
    results["prefill_512_ms"] = median(this.prefill_s for this in rounds) * 1e3
    results["prefill_512_gemm_share"] = median(prefill.flops / this.prefill_s / this.limits.flops_per_s for this in rounds)
    long = prefill_work(spec, LONG_PREFILL_TOKENS, _ELEMENT_BYTES).flops + attention_flops(spec, LONG_PREFILL_TOKENS)
    results["prefill_2048_ms"] = median(this.long_prefill_s for this in rounds) * 1e3
    results["prefill_2048_gemm_share"] = median(long / this.long_prefill_s / this.limits.flops_per_s for this in rounds)
    if rounds[0].peer_prefill_s:
        results |= _peer_figures(rounds)
    return results


def _decode_figures(spec: ModelSpec, batch: int, rounds: list[Round]) -> Results:
    work = decode_work(spec, batch, CONTEXT + 1 + WARM_STEPS + STEPS[batch] // 2, _ELEMENT_BYTES)
    figures = {
        f"decode_ms_b{batch}": median(this.decode_s[batch] for this in rounds) * 1e3,
        f"decode_best_ms_b{batch}": min(this.best_decode_s[batch] for this in rounds) * 1e3,
    }
    if batch > 1:
        share = median(work.roofline_s(this.limits) / this.decode_s[batch] for this in rounds)
        figures[f"roofline_share_b{batch}"] = share
    return figures


def _peer_figures(rounds: list[Round]) -> Results:
    figures: Results = {}
    for batch in BATCHES:
        figures[f"transformers_decode_ms_b{batch}"] = median(this.peer_decode_s[batch] for this in rounds) * 1e3
        figures[f"faster_than_transformers_b{batch}"] = median(
            this.peer_decode_s[batch] / this.decode_s[batch] for this in rounds
        )
    figures["transformers_prefill_512_ms"] = median(this.peer_prefill_s for this in rounds) * 1e3
    figures["faster_than_transformers_prefill_512"] = median(this.peer_prefill_s / this.prefill_s for this in rounds)
    return figures


def measure_lora(options: EngineBench, console: Console) -> Results:
    threads = options.threads or torch.get_num_threads()
    return lora.measure(options.local_model(threads), prompts(lora.ADAPTERS), options.rounds, console)


def measure_weights(options: EngineBench, console: Console) -> Results:
    threads = options.threads or torch.get_num_threads()
    return weights.measure(options.local_model(threads), prompts(max(BATCHES)), options.rounds, console)


def measure_shared(options: EngineBench, console: Console) -> Results:
    threads = options.threads or torch.get_num_threads()
    return shared.measure(options.local_model(threads), prompts(max(BATCHES)), options.rounds, console)


def measure_int8(options: EngineBench, console: Console) -> Results:
    with console.status("computing a text with int8 and with float32"):
        return int8.measure(options.local_model(options.threads))


SCENARIO = Scenario(
    EngineBench,
    {
        "engine": Part("decode and prefill", measure, TARGETS),
        "weights": Part("quantised weights against float32", measure_weights, weights.TARGETS),
        "shared": Part("weights that several workers share", measure_shared, shared.TARGETS),
        "int8": Part("weights rounded to int8", measure_int8, int8.TARGETS),
        "lora": Part("decode with LoRA adapters", measure_lora, lora.TARGETS),
    },
)
