"""What LoRA adapters cost: decode steps of a batch in which every sequence has an adapter of its own, against the same batch of
the base model, in turns."""

from __future__ import annotations

import pathlib
import tempfile
import time
from statistics import median

import msgspec
import torch
from rich.console import Console
from safetensors.torch import save_file

from kvrelay.bench.engine.own import EngineSubject, build_subject
from kvrelay.bench.engine.work import STEPS
from kvrelay.bench.harness.report import Target
from kvrelay.bench.harness.scenario import Results
from kvrelay.checkpoint.lora import CONFIG_NAME, TENSOR_PREFIX, WEIGHTS_NAME
from kvrelay.checkpoint.spec import ModelSpec, read_spec
from kvrelay.config import ModelOptions

ADAPTERS = 8
RANK = 8  # PEFT's default
TARGETS = {"lora_over_base_b8": Target("<=", 1.25)}


def measure(model: ModelOptions, prompts: list[list[int]], rounds: int, console: Console) -> Results:
    with tempfile.TemporaryDirectory(prefix="kvrelay-bench-lora-") as folder:
        spec = read_spec(pathlib.Path(model.model))
        names = [f"adapter-{number}" for number in range(ADAPTERS)]
        for number, name in enumerate(names):
            write_adapter(pathlib.Path(folder) / name, spec, seed=number)
        lora = tuple(f"{name}={folder}/{name}" for name in names)
        _, subject = build_subject(msgspec.structs.replace(model, lora=lora), prompts)
        read_s = _read_time(subject, f"{folder}/{names[0]}")
    try:
        with console.status("decoding with and without adapters"):
            pairs = [_round(subject) for _ in range(rounds + 1)][1:]  # the first one fills caches
    finally:
        subject.close()
    return {
        "lora_samples": float(rounds),
        "lora_base_ms_b8": median(base for base, _ in pairs) * 1e3,
        "lora_adapters_ms_b8": median(adapted for _, adapted in pairs) * 1e3,
        "lora_over_base_b8": median(adapted / base for base, adapted in pairs),
        "lora_read_ms": read_s * 1e3,
    }


def _round(subject: EngineSubject) -> tuple[float, float]:
    """Seconds of a step of the base, and with adapters."""
    steps = STEPS[4]
    return median(subject.decode(ADAPTERS, steps)), median(subject.decode(ADAPTERS, steps, adapters=subject.adapters()))


def _read_time(subject: EngineSubject, path: str) -> float:
    begun = time.perf_counter()
    subject.read_adapter(path)
    return time.perf_counter() - begun


def write_adapter(folder: pathlib.Path, spec: ModelSpec, *, seed: int) -> None:
    """Random weights for every linear layer, in PEFT's files."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes = {
        "self_attn.q_proj": (q_size, hidden), "self_attn.k_proj": (kv_size, hidden), "self_attn.v_proj": (kv_size, hidden),
        "self_attn.o_proj": (hidden, q_size), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(spec.num_layers):
        for module, (out, inputs) in shapes.items():
            name = f"{TENSOR_PREFIX}model.layers.{layer}.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, inputs, generator=generator) / inputs**0.5
            tensors[f"{name}.lora_B.weight"] = torch.randn(out, RANK, generator=generator) * 0.01
    save_file(tensors, folder / WEIGHTS_NAME)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": sorted(shapes)}
    (folder / CONFIG_NAME).write_bytes(msgspec.json.encode(config))
