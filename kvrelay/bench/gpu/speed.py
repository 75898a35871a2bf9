"""Decode and prefill of a Llama-3.1-8B shape with random weights, in bfloat16, through the engine.

t(n) is the time from submitting a batch of prompts to the n-th token of the last of them. The time between tokens (ITL) is
(t(n) - t(1)) / (n - 1), with the best t of all rounds; a prefill is t(1) of one prompt. Prompts are never seen twice, so the
prefix cache finds nothing.
"""

from __future__ import annotations

import contextlib
import gc
import json
import pathlib
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from rich.console import Console

from kvrelay.bench.engine.work import decode_work
from kvrelay.bench.gpu.requests import generate, greedily, submit
from kvrelay.bench.harness.engine import build_engine, run_dry, step
from kvrelay.checkpoint.spec import ModelSpec
from kvrelay.config import EngineOptions, KVDtypeOption, ModelOptions, WeightsOption
from kvrelay.engine.engine import Engine
from kvrelay.launch.console import console_progress
from kvrelay.runner.runner import TorchRunner
from kvrelay.worker.collector import spared_collector

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "torch_dtype": "bfloat16",
}
_WARM_REPLAYS, _TIMED_REPLAYS = 3, 20
_FULL_STEPS = 4  # of all sequences, before one is replayed
_COPIED_BYTES = 4 * 2**30
_KV_ITEM_BYTES = 2  # bfloat16


@dataclass(frozen=True, slots=True)
class Decode:
    batch: int
    prompt_tokens: int
    output_tokens: int

    @property
    def name(self) -> str:
        return f"b{self.batch}_in{self.prompt_tokens}_itl_ms"


DECODES = (Decode(1, 128, 257), Decode(8, 1024, 129), Decode(64, 1024, 129), Decode(256, 512, 129))
PREFILLS = (512, 2048, 8192)
WIDE_PREFILL = (16, 2048)


class Bench:
    """Prompts are numbered, so that no two are alike."""

    def __init__(self, engine: Engine, runner: TorchRunner, rounds: int) -> None:
        self.engine = engine
        self.runner = runner
        self.rounds = rounds
        self._num_prompts = 0

    def seconds(self, batch: int, prompt_tokens: int, output_tokens: int) -> float:
        """t(output_tokens)."""
        prompts = [self._prompt(prompt_tokens) for _ in range(batch)]
        torch.cuda.synchronize()
        start = time.perf_counter()
        generate(self.engine, prompts, greedily(output_tokens))
        return time.perf_counter() - start

    def best(self, batch: int, prompt_tokens: int, output_tokens: int) -> float:
        return min(self.seconds(batch, prompt_tokens, output_tokens) for _ in range(self.rounds))

    def decode_ms(self, work: Decode) -> float:
        whole = self.best(work.batch, work.prompt_tokens, work.output_tokens)
        first = self.best(work.batch, work.prompt_tokens, 1)
        return (whole - first) / (work.output_tokens - 1) * 1e3

    def replay_ms(self, work: Decode) -> float:
        """One decode step of the middle of the run, on the device alone."""
        length = work.prompt_tokens + work.output_tokens // 2
        prompts = [self._prompt(length) for _ in range(work.batch)]
        requests = submit(self.engine, prompts, greedily(work.output_tokens))
        num_full = 0
        while num_full < _FULL_STEPS:
            num_full += len(step(self.engine).outputs) == work.batch
        milliseconds = time_replays(self.runner, work.batch)
        self.engine.abort(requests)
        run_dry(self.engine)
        return milliseconds

    def _prompt(self, length: int) -> list[int]:
        self._num_prompts += 1
        generator = random.Random(self._num_prompts)
        return [generator.randrange(1000, 100_000) for _ in range(length)]


@contextlib.contextmanager
def open_bench(rounds: int, weights: WeightsOption = "auto", kv_dtype: KVDtypeOption = "auto") -> Iterator[Bench]:
    """Has computed its first token. What exists by then is no longer looked at for garbage, as in a worker that serves."""
    gc.collect()
    torch.cuda.empty_cache()  # of one before
    with tempfile.TemporaryDirectory(prefix="kvrelay-gpu-") as base:
        folder = pathlib.Path(base)
        (folder / "config.json").write_text(json.dumps(LLAMA_8B), encoding="utf-8")
        model = ModelOptions(model=str(folder), load="dummy", device="cuda", weights=weights, kv_dtype=kv_dtype)
        engine, runner = build_engine(model, EngineOptions().for_device("cuda"), console_progress())
        bench = Bench(engine, runner, rounds)
        bench.seconds(1, 16, 1)
        try:
            with spared_collector():
                yield bench
        finally:
            engine.close()


def measure_speed(rounds: int, console: Console) -> dict[str, float]:
    start = time.perf_counter()
    with open_bench(rounds) as bench:
        results = {"start_to_first_token_s": time.perf_counter() - start}
        for work in DECODES:
            with console.status(f"decode {work.batch} x {work.prompt_tokens}"):
                bench.seconds(work.batch, work.prompt_tokens, 4)  # what is slow once
                results[work.name] = bench.decode_ms(work)
                results[work.name.replace("itl", "replay")] = bench.replay_ms(work)
        idle = 1.0 - results["b64_in1024_replay_ms"] / results["b64_in1024_itl_ms"]
        results["gpu_idle_share_b64"] = max(0.0, idle)
        for length in PREFILLS:
            with console.status(f"prefill {length}"):
                bench.seconds(1, length, 1)
                results[f"prefill_{length}_ms"] = bench.best(1, length, 1) * 1e3
        batch, length = WIDE_PREFILL
        with console.status(f"prefill {batch} x {length}"):
            results[f"prefill_{batch}x{length}_tok_s"] = batch * length / bench.best(batch, length, 1)
        first = DECODES[0]
        work_bytes = decode_work(bench.runner.spec, 1, first.prompt_tokens + first.output_tokens // 2, _KV_ITEM_BYTES)
        rate, limit = (work_bytes.weight_bytes + work_bytes.kv_bytes) / (results[first.name] / 1e3), copy_bytes_per_s()
        results |= {"memory_gb_per_s": limit / 1e9, "batch1_bandwidth_over_limit": rate / limit}
        results |= shape_figures(bench.runner.spec)
    return results


def shape_figures(spec: ModelSpec) -> dict[str, float]:
    """What `kvrelay simulate` must know of the model beside its times."""
    return {"num_layers": float(spec.num_layers), "kv_bytes_per_token": float(spec.kv_bytes_per_token(_KV_ITEM_BYTES))}


def time_replays(runner: TorchRunner, batch: int) -> float:
    """Milliseconds of a decode step that is replayed again and again, as the last one left its inputs."""
    for _ in range(_WARM_REPLAYS):
        runner.replay_again(batch)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(_TIMED_REPLAYS):
        runner.replay_again(batch)
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / _TIMED_REPLAYS


def copy_bytes_per_s() -> float:
    """The card's memory rate as a copy within it sees it, reads and writes counted."""
    source = torch.empty(_COPIED_BYTES // 4, dtype=torch.float32, device="cuda").normal_()
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        best = min(best, float(begin.elapsed_time(end)) / 1e3)
    return 2 * _COPIED_BYTES / best
