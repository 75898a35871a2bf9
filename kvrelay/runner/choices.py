"""What is settled before anything of a model is loaded: device, precision, threads, and whether the options go together."""

from __future__ import annotations

import os
import pathlib
import sys
from dataclasses import dataclass

import torch

from kvrelay.checkpoint.digest import weights_digest
from kvrelay.checkpoint.spec import ModelSpec, fingerprint, read_spec
from kvrelay.config import EngineOptions, Environment, ModelOptions
from kvrelay.errors import ConfigError
from kvrelay.kernels.cuda.products import wrong_product
from kvrelay.kernels.fp8 import FIRST_WITH_FP8
from kvrelay.runner.cuda_fence import leave_default_stream
from kvrelay.runner.kv_dtype import check_kv_dtype, choose_kv_dtype
from kvrelay.runner.kv_pool import token_bytes
from kvrelay.runner.ranks.shares import RankShare

_BFLOAT16_FLAGS = frozenset({"bf16", "avx512_bf16", "amx_bf16"})
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Choices:
    """What is settled before anything is loaded."""

    model: ModelOptions
    engine: EngineOptions
    folder: pathlib.Path
    environment: Environment
    spec: ModelSpec
    device: torch.device
    dtype_name: str
    num_threads: int

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.dtype_name]

    @property
    def kv_dtype(self) -> torch.dtype:
        return choose_kv_dtype(self.model, self.dtype)

    @property
    def longest(self) -> int:
        """The most tokens of a sequence, as far as the pool has room for them."""
        return min(self.engine.max_model_len or self.spec.max_position_embeddings, self.spec.max_position_embeddings)

    @property
    def has_fp8(self) -> bool:
        return self.spec.fp8 or self.model.weights == "fp8"

    @property
    def num_cards(self) -> int:
        """Among which weights and KV are divided: one for each rank."""
        return self.model.tp if self.device.type == "cuda" else 1

    @property
    def block_bytes(self) -> int:
        return self.engine.block_size * token_bytes(self.spec, self.kv_dtype, self.model.tp)


def choose(
    model_options: ModelOptions, engine_options: EngineOptions, folder: pathlib.Path, environment: Environment
) -> Choices:
    chosen = Choices(
        model=model_options,
        engine=engine_options.for_device(model_options.device),
        folder=folder,
        environment=environment,
        device=open_device(model_options),
        dtype_name=choose_dtype(model_options, cpu_flags()),
        num_threads=set_threads(model_options.threads, model_options.tp),
        spec=read_spec(folder),
    )
    check_weights(chosen.spec, model_options, chosen.dtype)
    check_kv_dtype(model_options)
    return chosen


def check_products(spec: ModelSpec, dtype: torch.dtype, device: torch.device, environment: Environment) -> None:
    """Raises ConfigError where this process has a part of a card with which cuBLAS multiplies wrong. `spec` may be a rank's."""
    if device.type != "cuda" or not environment.mps_folder:
        return
    heads, kv_heads = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    wrong = wrong_product(
        [
            (heads + 2 * kv_heads, spec.hidden_size),
            (spec.hidden_size, heads),
            (2 * spec.intermediate_size, spec.hidden_size),
            (spec.hidden_size, spec.intermediate_size),
        ],
        dtype,
        device,
    )
    torch.cuda.empty_cache()
    if wrong is not None:
        num_rows, num_out, num_in = wrong
        count = torch.cuda.get_device_properties(device).multi_processor_count
        raise ConfigError(
            f"--prefill-sms: with {count} multiprocessors cuBLAS multiplies wrong here ({num_rows} rows, {num_out} x {num_in}):"
            " choose another percentage, such as 50 or 100"
        )


def open_device(options: ModelOptions) -> torch.device:
    """The device. On a card, this thread computes on a stream of its own from now on."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: PyTorch finds no usable NVIDIA card here; use --device cpu")
    device = torch.device(options.device)
    leave_default_stream(device)
    return device


def choose_dtype(options: ModelOptions, cpu_flags: frozenset[str]) -> str:
    """`auto` is float32 on a CPU and bfloat16 on a GPU. A CPU without bfloat16 instructions would emulate it, slowly."""
    if options.dtype == "auto":
        return "bfloat16" if options.device == "cuda" else "float32"
    if options.dtype == "bfloat16" and options.device == "cpu" and not cpu_flags & _BFLOAT16_FLAGS:
        raise ConfigError("--dtype bfloat16: this CPU has no bfloat16 instructions; use --dtype float32")
    return options.dtype


def check_weights(spec: ModelSpec, options: ModelOptions, dtype: torch.dtype) -> None:
    """Raises ConfigError where weights as they are asked for or stored cannot be computed with."""
    if options.weights in ("float32", "int8") and options.device != "cpu":
        raise ConfigError(f"--weights {options.weights} is for a CPU; on a card there are auto and fp8")
    if options.weights == "int8" and options.tp > 1:
        raise ConfigError("--weights int8: weights are not rounded where a model is split; use --tp 1, or other weights")
    if options.weights == "int8" and dtype is not torch.float32:
        raise ConfigError("--weights int8: computed beside float32 alone; use --dtype float32")
    if not spec.fp8 and options.weights != "fp8":
        return
    what = "--weights fp8" if options.weights == "fp8" else "the checkpoint's weights are in fp8"
    if options.device != "cuda":
        raise ConfigError(f"{what}: fp8 is computed by NVIDIA cards alone; use --device cuda or other weights")
    if dtype is not torch.bfloat16:
        raise ConfigError(f"{what}: fp8 is computed beside bfloat16 alone; use --dtype bfloat16")
    if torch.cuda.get_device_capability() < FIRST_WITH_FP8:
        raise ConfigError(f"{what}: the card's compute capability is below {FIRST_WITH_FP8[0]}.{FIRST_WITH_FP8[1]}")
    shares = [RankShare(spec, rank, options.tp).spec for rank in range(options.tp)] if options.tp > 1 else [spec]
    sizes = (size for part in shares for size in (part.hidden_size, part.intermediate_size, part.num_heads * part.head_dim))
    odd = [size for size in sizes if size % 16]
    if odd:
        raise ConfigError(f"{what}: linear layers of {odd[0]} columns are not computed in fp8, only multiples of 16")


def model_fingerprint(spec: ModelSpec, options: ModelOptions, folder: pathlib.Path) -> str:
    """Equal for workers that can work together, whatever part of the model each of them has."""
    weights = "dummy" if options.load == "dummy" else weights_digest(folder)
    held = "" if options.weights in ("auto", "float32") else f"-{options.weights}"
    kv = "" if options.kv_dtype == "auto" else f"-kv-{options.kv_dtype}"
    return f"{fingerprint(spec, choose_dtype(options, cpu_flags()))}-{weights}{held}{kv}"


def set_threads(threads: int, num_ranks: int = 1) -> int:
    """Once per process. 0 takes every core the process may run on. Ranks of one worker share its threads."""
    num_threads = max(1, (threads or num_cores()) // num_ranks)
    torch.set_num_threads(num_threads)
    return num_threads


def num_cores() -> int:
    """That this process may run on."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def cpu_flags() -> frozenset[str]:
    """What the kernel says the CPU can do ("flags" on x86, "Features" on Arm)."""
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    lines = (line.partition(":") for line in text.splitlines())
    return frozenset(word for name, _, words in lines if name.strip() in ("flags", "Features") for word in words.split())


def weight_elements(spec: ModelSpec) -> int:
    """Of the matrices; norms and biases are too small to matter."""
    attention = spec.hidden_size * spec.head_dim * (2 * spec.num_heads + 2 * spec.num_kv_heads)
    layers = spec.num_layers * (attention + 3 * spec.hidden_size * spec.intermediate_size)
    return layers + spec.hidden_size * spec.vocab_size * (1 if spec.tie_word_embeddings else 2)
