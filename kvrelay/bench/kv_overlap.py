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

from kvrelay.bench.engine import random_prompt
from kvrelay.bench.report import Target
from kvrelay.config import EngineOptions, ModelOptions, read_environment
from kvrelay.engine.engine import Engine
from kvrelay.errors import BenchError
from kvrelay.ids import new_request_id, new_worker_id
from kvrelay.progress import Silent
from kvrelay.runner.build import build_runner
from kvrelay.runner.runner import TorchRunner
from kvrelay.sampling import SamplingParams
from kvrelay.states import Role
from kvrelay.wire.serving import Submit

_SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 32000,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16",
}  # fmt: skip
_BATCH, _CONTEXT, _STEPS, _COPIED_BLOCKS = 16, 512, 20, 64

TARGETS = {"swap_step_ratio_cuda": Target("<=", 1.1)}


def measure(rounds: int, console: Console) -> dict[str, float]:
    if not torch.cuda.is_available():
        raise BenchError("the part `overlap` needs a GPU")
    with tempfile.TemporaryDirectory() as folder, console.status("decoding beside copies"):
        (pathlib.Path(folder) / "config.json").write_text(json.dumps(_SHAPE), encoding="utf-8")
        engine, runner = _build(folder)
        try:
            return _measure(engine, runner, rounds)
        finally:
            engine.close()


def _measure(engine: Engine, runner: TorchRunner, rounds: int) -> dict[str, float]:
    for number in range(_BATCH):
        prompt = [1 + token % 31000 for token in random_prompt(_CONTEXT, number)]
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=2048)
        engine.submit(Submit(request_id=new_request_id(), external_id="", prompt=prompt, params=params))
    while len(engine.scheduler.running) < _BATCH or any(each.num_uncomputed > 1 for each in engine.scheduler.running):
        engine.step()
    _steps_s(engine, runner, copying=True)  # warm
    alone, beside = [], []
    for _ in range(rounds):
        alone.append(_steps_s(engine, runner, copying=False))
        beside.append(_steps_s(engine, runner, copying=True))
    ratios = [copying / plain for copying, plain in zip(beside, alone, strict=True)]
    return {
        "step_ms_cuda": statistics.median(alone) * 1e3,
        "step_beside_swap_ms_cuda": statistics.median(beside) * 1e3,
        "swap_step_ratio_cuda": statistics.median(ratios),
    }


def _steps_s(engine: Engine, runner: TorchRunner, *, copying: bool) -> float:
    """The median step. Blocks at the end of the pool, which nobody uses, go to the host over and over."""
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


def _build(folder: str) -> tuple[Engine, TorchRunner]:
    environment = read_environment()
    options = EngineOptions(kv_blocks=4096, max_batch=_BATCH, swap_blocks=_COPIED_BLOCKS, max_model_len=4096)
    model = ModelOptions(model=folder, load="dummy", device="cuda")
    runner = build_runner(model, options, pathlib.Path(folder), environment, Silent())
    engine = Engine(
        options=options,
        runner=runner,
        worker_id=new_worker_id(Role.WHOLE),
        eos_token_ids=runner.eos_token_ids,
        max_model_len=runner.max_model_len,
        vocab_size=runner.spec.vocab_size,
        cache_seed=runner.fingerprint,
    )
    return engine, runner
