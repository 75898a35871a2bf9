"""On a GPU: what copies between the pool and the host cost the steps beside which they run.

Decode steps of a batch, in turns with and without copies under way all the time. The model is random, of the shape of a common
model of about a billion parameters, so that nothing has to be fetched.
"""

from __future__ import annotations

import json
import pathlib
import statistics
import tempfile
import time

import torch
from rich.console import Console

from kvrelay.bench.harness.engine import build_engine
from kvrelay.bench.harness.report import Target, median_ratio
from kvrelay.bench.harness.scenario import Part, Results
from kvrelay.bench.harness.workload import draw, submission
from kvrelay.bench.kv.scheduler import KVBench
from kvrelay.config import EngineOptions, ModelOptions
from kvrelay.engine.engine import Engine
from kvrelay.errors import BenchError
from kvrelay.runner.runner import TorchRunner

_SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 32000,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16",
}  # fmt: skip
_BATCH, _CONTEXT, _STEPS, _COPIED_BLOCKS = 16, 512, 20, 64
_ENGINE = EngineOptions(kv_blocks=4096, max_batch=_BATCH, swap_blocks=_COPIED_BLOCKS, max_model_len=4096)


def measure(options: KVBench, console: Console) -> Results:
    if not torch.cuda.is_available():
        raise BenchError("the part `overlap` needs a GPU")
    with tempfile.TemporaryDirectory() as folder, console.status("decoding beside copies"):
        (pathlib.Path(folder) / "config.json").write_text(json.dumps(_SHAPE), encoding="utf-8")
        engine, runner = build_engine(ModelOptions(model=folder, load="dummy", device="cuda"), _ENGINE)
        try:
            return _measure(engine, runner, options.rounds)
        finally:
            engine.close()


def _measure(engine: Engine, runner: TorchRunner, rounds: int) -> Results:
    for number in range(_BATCH):
        engine.submit(submission(draw(number, _CONTEXT), 2048))
    while len(engine.scheduler.running) < _BATCH or any(each.num_uncomputed > 1 for each in engine.scheduler.running):
        engine.step()
    _steps_s(engine, runner, copying=True)  # warm
    alone, beside = [], []
    for _ in range(rounds):
        alone.append(_steps_s(engine, runner, copying=False))
        beside.append(_steps_s(engine, runner, copying=True))
    return {
        "step_ms_cuda": statistics.median(alone) * 1e3,
        "step_beside_swap_ms_cuda": statistics.median(beside) * 1e3,
        "swap_step_ratio_cuda": median_ratio(beside, alone),
    }


def _steps_s(engine: Engine, runner: TorchRunner, *, copying: bool) -> float:
    """The median step. Blocks at the end of the pool, which no request uses, go to the host over and over."""
    last = runner.num_blocks - 1
    saves = [(last - index, index) for index in range(_COPIED_BLOCKS)]
    under_way, times = 0, []
    for _ in range(_STEPS):
        if copying and not under_way:
            runner.begin_copies(saves, [])
            under_way = 1
        began = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - began)
        under_way -= len(runner.finished_copies())
    while under_way:
        under_way -= len(runner.finished_copies(0.01))
    return statistics.median(times)


PART = Part(
    "on a GPU: steps with copies to the host beside them",
    measure,
    {"swap_step_ratio_cuda": Target("<=", 1.1)},
    by_default=False,
)
