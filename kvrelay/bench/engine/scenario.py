"""`kvrelay bench engine`: the real engine and runner in this process, against the roofline of this machine.

A round measures the machine's limits, then decode at each batch size and prompts, each on our engine and then on the peers;
rounds repeat, and a ratio is the median of the rounds' ratios. So a process that takes half of the machine for a while slows
limit and figure alike, and a single disturbed round does not count.
"""

from __future__ import annotations

import contextlib
import pathlib
import tempfile
from dataclasses import dataclass, field
from statistics import median
from typing import Annotated

import msgspec
import torch
from msgspec import Meta
from rich.console import Console
from rich.progress import Progress

from kvrelay.bench.engine import int8, lora, ranks, shared, weights
from kvrelay.bench.engine.own import build_subject
from kvrelay.bench.engine.peers import NAMES, PeerMissing, Subject, open_peer, slug
from kvrelay.bench.engine.work import (
    BATCHES,
    CONTEXT,
    PEER_PREFILLS,
    PREFILL_TOKENS,
    PREFILLS,
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
from kvrelay.checkpoint.fetch import gguf_of
from kvrelay.checkpoint.spec import ModelSpec
from kvrelay.config import Count, Positive, read_environment
from kvrelay.errors import ConfigError
from kvrelay.options import suggest
from kvrelay.progress import Silent

_ELEMENT_BYTES = 4  # float32
QUANTISED_PEER = "llama.cpp"  # computes with the blocks of a GGUF file

_COMPARED = [*(f"b{batch}" for batch in BATCHES), *(f"prefill_{tokens}" for tokens in PEER_PREFILLS)]

TARGETS = {
    "decode_b1_over_weights_read": Target("<=", 1.25),
    "roofline_share_b4": Target(">=", 0.7),
    "roofline_share_b16": Target(">=", 0.7),
    "roofline_share_b64": Target(">=", 0.7),
    "prefill_512_gemm_share": Target(">=", 0.75),
    "prefill_2048_gemm_share": Target(">=", 0.75),
}
_PEER_TARGETS = {
    **{f"faster_than_vllm_{what}": Target(">=", 1.5) for what in _COMPARED},
    **{f"faster_than_llama_cpp_{what}": Target(">=", 3.0 if "prefill" in what else 1.0) for what in _COMPARED},
}


@dataclass
class Timed:
    """What one engine took in one round, in seconds."""

    decode_s: dict[int, float] = field(default_factory=dict)  # by batch: median step
    best_decode_s: dict[int, float] = field(default_factory=dict)  # fastest step
    prefill_s: dict[int, float] = field(default_factory=dict)  # by tokens


@dataclass
class Round:
    """What one round measured: our engine with weights in float32 and, beside a peer of quantised ones, with these; peers."""

    limits: Limits
    own: Timed = field(default_factory=Timed)
    quantised: Timed = field(default_factory=Timed)
    peers: dict[str, Timed] = field(default_factory=dict)

    def beside(self, peer: str) -> Timed:
        """Ours, with the peer's weights."""
        return self.quantised if peer == QUANTISED_PEER else self.own


class EngineBench(ModelBench, frozen=True, kw_only=True):
    """What is measured, and how often."""

    threads: Annotated[Count, Meta(description="CPU threads; 0 uses all cores")] = 0
    peer: Annotated[
        str,
        Meta(description="runs the same work there and shows ratios: transformers, vllm, llama.cpp, separated by commas"),
    ] = "none"
    peer_python: Annotated[
        str, Meta(description="Python that has vllm or llama.cpp; default is this one, then .venv-vllm/bin/python")
    ] = ""
    rounds: Annotated[Positive, Meta(description="rounds; figures are medians over them")] = 7


def measure(options: EngineBench, console: Console) -> Results:
    threads = options.threads or torch.get_num_threads()
    torch.set_num_threads(threads)
    names = chosen_peers(options.peer)
    model = msgspec.structs.replace(options.local_model(threads), weights="float32")  # what limits and most peers are about
    with contextlib.ExitStack() as stack:
        peers = _open_peers(options, names, model.model, threads, stack, console)
        spec, subject = build_subject(model, prompts(max(BATCHES)))
        stack.callback(subject.close)
        quantised: Subject | None = None
        if QUANTISED_PEER in peers:
            _, quantised = build_subject(options.local_model(threads), prompts(max(BATCHES)))
            stack.callback(quantised.close)
        return summarise(spec, _run_rounds(options.rounds, subject, quantised, peers, console))


def chosen_peers(text: str) -> list[str]:
    """Raises ConfigError."""
    names = [] if text == "none" else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in NAMES:
            raise ConfigError(f"--peer: unknown peer {name!r}{suggest(name, NAMES)} (there are {', '.join(NAMES)})")
    return names


def _open_peers(
    options: EngineBench, names: list[str], folder: str, threads: int, stack: contextlib.ExitStack, console: Console
) -> dict[str, Subject]:
    """Those that there are; of the others it is said what they lack."""
    unpacked = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvrelay-bench-gguf-")))
    opened: dict[str, Subject] = {}
    for name in names:
        gguf = gguf_of(options.model, read_environment(), unpacked, Silent()) if name == QUANTISED_PEER else None
        try:
            with console.status(f"loading {options.model} with {name}"):
                opened[name] = open_peer(name, folder, gguf, prompts(max(BATCHES)), threads, options.peer_python)
        except PeerMissing as missing:
            console.print(f"[yellow]{name} is left out:[/] {missing}", highlight=False, soft_wrap=True)
            continue
        stack.callback(opened[name].close)
    return opened


def prompts(count: int) -> list[list[int]]:
    """Prompts that no two of begin alike, of CONTEXT + 1 tokens: whole blocks, and a last token that must be computed."""
    return [draw(seed, CONTEXT + 1) for seed in range(count)]


def _run_rounds(
    count: int, subject: Subject, quantised: Subject | None, peers: dict[str, Subject], console: Console
) -> list[Round]:
    machine = Machine()
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("warming up", total=count + 1)
        rounds = []
        for index in range(count + 1):  # the first one fills caches, compiles kernels, and is thrown away
            progress.update(task, description=f"round {index} of {count}" if index else "warming up")
            rounds.append(_run_round(index, machine, subject, quantised, peers))
            progress.advance(task)
    return rounds[1:]


def _run_round(index: int, machine: Machine, subject: Subject, quantised: Subject | None, peers: dict[str, Subject]) -> Round:
    this = Round(_limits(machine), peers={name: Timed() for name in peers})
    beside = [(this.peers[name], peer) for name, peer in peers.items()]
    ours = [(this.own, subject)] if quantised is None else [(this.own, subject), (this.quantised, quantised)]
    for batch in BATCHES:
        for timed, one in ours:
            steps = one.decode(batch, STEPS[batch])
            timed.decode_s[batch], timed.best_decode_s[batch] = median(steps), min(steps)
        for timed, one in beside:
            timed.decode_s[batch] = median(one.decode(batch, max(2, STEPS[batch] // 4)))
    for number, tokens in enumerate(PREFILLS, 1):
        prompt = draw(number * 1_000_000 + index, tokens)
        for timed, one in [*ours, *(beside if tokens in PEER_PREFILLS else [])]:
            timed.prefill_s[tokens] = one.prefill(prompt)
    after = _limits(machine)
    this.limits = Limits(  # the better of before and after: a limit that another process lowered flatters us
        bytes_per_s=max(this.limits.bytes_per_s, after.bytes_per_s),
        flops_per_s=max(this.limits.flops_per_s, after.flops_per_s),
    )
    return this


def _limits(machine: Machine) -> Limits:
    return Limits(bytes_per_s=machine.gemv_bytes_per_s(), flops_per_s=machine.gemm_flops_per_s())


def summarise(spec: ModelSpec, rounds: list[Round]) -> Results:
    """Figures by name, in the order in which they are shown."""
    weight_bytes = (layer_weights(spec) + head_weights(spec)) * _ELEMENT_BYTES
    results = {
        "rounds": float(len(rounds)),
        "num_layers": float(spec.num_layers),
        "kv_bytes_per_token": float(spec.kv_bytes_per_token(_ELEMENT_BYTES)),
        "gemv_gb_per_s": median(this.limits.bytes_per_s for this in rounds) / 1e9,
        "gemm_gflop_per_s": median(this.limits.flops_per_s for this in rounds) / 1e9,
        "weights_read_ms": median(weight_bytes / this.limits.bytes_per_s for this in rounds) * 1e3,
        "decode_b1_over_weights_read": median(this.own.decode_s[1] * this.limits.bytes_per_s / weight_bytes for this in rounds),
    }
    for batch in BATCHES:
        results |= _decode_figures(spec, batch, rounds)
    for tokens in PREFILLS:
        flops = prefill_work(spec, tokens, _ELEMENT_BYTES).flops
        flops += attention_flops(spec, tokens) if tokens > PREFILL_TOKENS else 0
        results[f"prefill_{tokens}_ms"] = median(this.own.prefill_s[tokens] for this in rounds) * 1e3
        results[f"prefill_{tokens}_gemm_share"] = median(
            flops / this.own.prefill_s[tokens] / this.limits.flops_per_s for this in rounds
        )
    for name in rounds[0].peers:
        results |= _peer_figures(name, rounds)
    return results


def _decode_figures(spec: ModelSpec, batch: int, rounds: list[Round]) -> Results:
    work = decode_work(spec, batch, CONTEXT + 1 + WARM_STEPS + STEPS[batch] // 2, _ELEMENT_BYTES)
    figures = {
        f"decode_ms_b{batch}": median(this.own.decode_s[batch] for this in rounds) * 1e3,
        f"decode_best_ms_b{batch}": min(this.own.best_decode_s[batch] for this in rounds) * 1e3,
    }
    if batch > 1:
        share = median(work.roofline_s(this.limits) / this.own.decode_s[batch] for this in rounds)
        figures[f"roofline_share_b{batch}"] = share
    return figures


def _peer_figures(name: str, rounds: list[Round]) -> Results:
    figures: Results = {}
    for batch in BATCHES:
        times = [(this.peers[name].decode_s[batch], this.beside(name).decode_s[batch]) for this in rounds]
        figures |= _ratio(name, f"decode_ms_b{batch}", f"b{batch}", times)
    for tokens in PEER_PREFILLS:
        times = [(this.peers[name].prefill_s[tokens], this.beside(name).prefill_s[tokens]) for this in rounds]
        figures |= _ratio(name, f"prefill_{tokens}_ms", f"prefill_{tokens}", times)
    return figures


def _ratio(name: str, figure: str, what: str, times: list[tuple[float, float]]) -> Results:
    """Of the peer's seconds and ours."""
    own = {f"quantised_{figure}": median(ours for _, ours in times) * 1e3} if name == QUANTISED_PEER else {}
    return own | {
        f"{slug(name)}_{figure}": median(theirs for theirs, _ in times) * 1e3,
        f"faster_than_{slug(name)}_{what}": median(theirs / ours for theirs, ours in times),
    }


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


def measure_ranks(options: EngineBench, console: Console) -> Results:
    model = msgspec.structs.replace(options.local_model(), weights="float32")
    return ranks.measure(model, prompts(max(ranks.BATCHES)), options.rounds, console)


SCENARIO = Scenario(
    EngineBench,
    {
        "engine": Part("decode and prefill", measure, TARGETS | _PEER_TARGETS),
        "weights": Part("quantised weights against float32", measure_weights, weights.TARGETS),
        "shared": Part("weights that several workers share", measure_shared, shared.TARGETS),
        "int8": Part("weights rounded to int8", measure_int8, int8.TARGETS),
        "lora": Part("decode with LoRA adapters", measure_lora, lora.TARGETS),
        "ranks": Part("decode in two ranks", measure_ranks, ranks.TARGETS),
    },
)
