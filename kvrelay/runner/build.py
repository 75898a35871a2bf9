"""From options and a checkpoint folder to a runner that is ready: every decision about device, precision and memory."""

from __future__ import annotations

import os
import pathlib
import sys
from dataclasses import dataclass
from typing import Literal

import torch

from kvrelay.checkpoint.digest import weights_digest
from kvrelay.checkpoint.lora import named_folders
from kvrelay.checkpoint.spec import ModelSpec, fingerprint, read_spec
from kvrelay.config import EngineOptions, Environment, ModelOptions
from kvrelay.engine.interfaces import Adapters, Allocate
from kvrelay.errors import ConfigError
from kvrelay.kernels.base import Kernels
from kvrelay.kernels.choose import choose_kernels
from kvrelay.kernels.cuda.products import wrong_product
from kvrelay.kernels.fp8 import FIRST_WITH_FP8
from kvrelay.kernels.native.kernels import NativeKernels
from kvrelay.kernels.torch_kernels import TorchKernels
from kvrelay.log import Log
from kvrelay.models.registry import Model
from kvrelay.progress import Progress
from kvrelay.runner.gpu_memory import explained, graph_bytes, kv_bytes
from kvrelay.runner.graphs import graph_sizes
from kvrelay.runner.host_pool import HostPool, choose_host_blocks, make_host_pool
from kvrelay.runner.kv_dtype import check_kv_dtype, choose_kv_dtype
from kvrelay.runner.kv_pool import KVPool, PoolSize, blocks_for, choose_pool_size, free_cpu_bytes, token_bytes
from kvrelay.runner.lora import LoraAdapters, Pack
from kvrelay.runner.prompt_graphs import prompt_sizes
from kvrelay.runner.ranks.adapters import SplitAdapters
from kvrelay.runner.ranks.group import OnDeath, RankGroup
from kvrelay.runner.ranks.leading import LeadingModel
from kvrelay.runner.ranks.shares import check_split
from kvrelay.runner.runner import TorchRunner
from kvrelay.runner.shared import load_for_worker
from kvrelay.runner.vision.features import FeatureStore
from kvrelay.runner.warm_up import run_prompt, warm_up, warm_up_mixed
from kvrelay.sampling import SamplingParams
from kvrelay.wire.ranks import RankSetup

_BFLOAT16_FLAGS = frozenset({"bf16", "avx512_bf16", "amx_bf16"})
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

log = Log("build")


@dataclass(frozen=True, slots=True)
class _Choices:
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
    def block_bytes(self) -> int:
        return self.engine.block_size * token_bytes(self.spec, self.kv_dtype, self.model.tp)


def build_runner(
    model_options: ModelOptions,
    engine_options: EngineOptions,
    folder: pathlib.Path,
    environment: Environment,
    progress: Progress,
    allocate: Allocate | None = None,
    features: FeatureStore | None = None,
    on_rank_death: OnDeath | None = None,
) -> TorchRunner:
    """Raises ConfigError or ModelError. The runner has computed once, so its first request is not slower than the others.

    `features` is the store of an encoder in the same process; else a model that takes images gets one of its own.
    With several ranks, `allocate` must give memory that they can map, and `on_rank_death` is told when one has ended."""
    chosen = _choose(model_options, engine_options, folder, environment)
    group = _start_ranks(chosen, on_rank_death)
    try:
        return _build(chosen, group, progress, allocate, features)
    except BaseException:
        if group is not None:
            group.close()
        raise


def _build(
    chosen: _Choices,
    group: RankGroup | None,
    progress: Progress,
    allocate: Allocate | None,
    features: FeatureStore | None,
) -> TorchRunner:
    kernels = _choose_kernels(chosen)
    model = _load_weights(chosen, kernels, group, progress)
    sizes = [] if isinstance(kernels, TorchKernels | NativeKernels) else graph_sizes(chosen.engine.max_batch)
    most = min(chosen.engine.token_budget, chosen.longest) if sizes and chosen.spec.vision is None else 0
    prompts = prompt_sizes(most)
    size = _pool_size(model, chosen, sizes, prompts)
    num_blocks = size.num_blocks + bool(sizes)  # graphs need one of their own
    room = f"making room for {size.num_blocks} KV blocks and decode graphs"
    with explained(room, num_blocks * chosen.block_bytes, chosen.device):
        pool = _open_pool(chosen, num_blocks, allocate)
        pack: Pack = kernels.pack_adapter
        if group is not None:
            group.share(pool.descriptor, num_blocks, chosen.engine.block_size)
            split = SplitAdapters(chosen.spec, chosen.model.tp, kernels, group)
            pack, model = split.pack, LeadingModel(model, group, split)
        runner = TorchRunner(
            model,
            pool,
            chosen.spec,
            block_size=chosen.engine.block_size,
            max_batch=chosen.engine.max_batch,
            token_budget=chosen.engine.token_budget,
            max_model_len=size.max_model_len,
            fingerprint=model_fingerprint(chosen.spec, chosen.model, chosen.folder),
            folder=chosen.folder,
            num_threads=chosen.num_threads,
            host_pool=_open_host_pool(pool, chosen.engine.swap_blocks, chosen.num_threads * chosen.model.tp),
            features=make_store(chosen.spec, chosen.engine, chosen.device, chosen.dtype) if features is None else features,
            adapters=_load_adapters(chosen, pack),
            graph_sizes=sizes,
            prompt_sizes=prompts,
            progress=progress,
            ranks=group,
        )
        warm_up(runner, chosen.engine.block_size)
        if sizes:
            warm_up_mixed(runner, chosen.engine)
    _log_ready(chosen, runner, size, sizes)
    return runner


def _choose(
    model_options: ModelOptions, engine_options: EngineOptions, folder: pathlib.Path, environment: Environment
) -> _Choices:
    chosen = _Choices(
        model=model_options,
        engine=engine_options.for_device(model_options.device),
        folder=folder,
        environment=environment,
        device=choose_device(model_options),
        dtype_name=choose_dtype(model_options, cpu_flags()),
        num_threads=set_threads(model_options.threads, model_options.tp),
        spec=read_spec(folder),
    )
    check_weights(chosen.spec, model_options, chosen.dtype)
    check_kv_dtype(model_options)
    return chosen


def _choose_kernels(chosen: _Choices) -> Kernels:
    check_products(chosen.spec, chosen.dtype, chosen.device, chosen.environment)
    kernels = choose_kernels(chosen.device, chosen.dtype, chosen.environment, chosen.model)
    if chosen.model.weights == "int8" and not isinstance(kernels, NativeKernels):
        raise ConfigError("--weights int8 needs the native kernels, which cannot run here: see the warning before")
    if isinstance(kernels, TorchKernels) and chosen.has_fp8:
        raise ConfigError("weights in fp8 need the Triton kernels, which cannot run here: see the warning before")
    return kernels


def _load_weights(chosen: _Choices, kernels: Kernels, group: RankGroup | None, progress: Progress) -> Model:
    size_bytes = weight_elements(chosen.spec) * (1 if chosen.has_fp8 else chosen.dtype.itemsize)
    with explained("loading weights", size_bytes, chosen.device):
        return load_for_worker(
            chosen.folder,
            chosen.spec,
            chosen.model,
            chosen.environment,
            kernels=kernels,
            dtype=chosen.dtype,
            progress=progress,
            max_positions=chosen.engine.max_model_len or None,
            ranks=None if group is None else group.ranks,
        )


def _open_pool(chosen: _Choices, num_blocks: int, allocate: Allocate | None) -> KVPool:
    return KVPool(
        chosen.spec,
        num_blocks=num_blocks,
        block_size=chosen.engine.block_size,
        dtype=chosen.kv_dtype,
        device=chosen.device,
        allocate=allocate,
        num_ranks=chosen.model.tp,
    )


def _log_ready(chosen: _Choices, runner: TorchRunner, size: PoolSize, sizes: list[int]) -> None:
    log.info(
        "runner ready", model=chosen.model.model, device=chosen.device.type, dtype=chosen.dtype_name,
        kv_dtype=runner.layout.dtype, threads=chosen.num_threads, kv_blocks=size.num_blocks, host_blocks=runner.num_host_blocks,
        host_mib=runner.num_host_blocks * chosen.block_bytes >> 20, max_model_len=size.max_model_len, graphs=len(sizes),
    )  # fmt: skip


def check_products(spec: ModelSpec, dtype: torch.dtype, device: torch.device, environment: Environment) -> None:
    """Raises ConfigError where this process has a part of a card with which cuBLAS multiplies wrong."""
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


def _load_adapters(chosen: _Choices, pack: Pack) -> Adapters:
    adapters = LoraAdapters(chosen.spec, pack, chosen.device, chosen.dtype)
    for name, folder in named_folders(chosen.model.lora).items():
        adapters.add(name, str(folder), adapters.read(str(folder)))
    return adapters


def _start_ranks(chosen: _Choices, on_death: OnDeath | None) -> RankGroup | None:
    """None for a worker of one rank."""
    num_ranks = chosen.model.tp
    if num_ranks == 1:
        return None
    if chosen.model.device != "cpu":
        raise ConfigError(f"--tp {num_ranks}: a model is split among processes on the CPU only; on a GPU, use --tp 1")
    check_split(chosen.spec, num_ranks)
    setup = RankSetup(
        rank=0,
        num_ranks=num_ranks,
        folder=str(chosen.folder),
        model=chosen.model,
        dtype=chosen.dtype_name,
        num_threads=chosen.num_threads,
        max_positions=chosen.engine.max_model_len,
        log_level=chosen.environment.log_level,
    )
    return RankGroup(setup, on_death)


def make_store(spec: ModelSpec, options: EngineOptions, device: torch.device, dtype: torch.dtype) -> FeatureStore | None:
    """None for a text model."""
    return None if spec.vision is None else FeatureStore(_feature_bytes(spec, options), device=device, dtype=dtype)


def choose_device(options: ModelOptions) -> torch.device:
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: PyTorch finds no usable NVIDIA card here; use --device cpu")
    return torch.device(options.device)


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
    odd = [size for size in (spec.hidden_size, spec.intermediate_size, spec.num_heads * spec.head_dim) if size % 16]
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
    num_threads = max(1, (threads or _num_cores()) // num_ranks)
    torch.set_num_threads(num_threads)
    return num_threads


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _open_host_pool(pool: KVPool, num_blocks: int | Literal["auto"], num_threads: int) -> HostPool | None:
    """Of a number that was not asked for, none where they cannot be had: pinned memory may be limited."""
    if num_blocks != "auto":
        return make_host_pool(pool, num_blocks)
    core_share = min(1.0, num_threads / _num_cores())
    chosen = choose_host_blocks(pool, free_bytes=free_cpu_bytes(), core_share=core_share)
    try:
        return make_host_pool(pool, chosen)
    except ConfigError as error:
        log.warning("no host blocks: KV that must make room is computed again", reason=error)
        return None


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


def _pool_size(model: Model, chosen: _Choices, sizes: list[int], prompts: list[int]) -> PoolSize:
    spec, options, dtype, device = chosen.spec, chosen.engine, chosen.dtype, chosen.device
    if options.kv_blocks:
        free_bytes = 0  # not asked for
    elif device.type == "cuda":
        beside = graph_bytes(spec, sizes, prompts, blocks_for(chosen.longest, options.block_size) + 1, dtype)
        beside += _feature_bytes(spec, options)
        beside += options.token_budget * spec.vocab_size * dtype.itemsize  # logits of a whole step, for prompt logprobs
        num_tokens = min(options.token_budget, chosen.longest)
        with explained("trying the largest step", weight_elements(spec) * dtype.itemsize, device):
            free_bytes = kv_bytes(chosen.model.gpu_memory, beside, lambda: _profile(model, chosen, num_tokens), device)
    else:
        free_bytes = free_cpu_bytes()
    return choose_pool_size(
        spec, options, dtype=chosen.kv_dtype, free_bytes=free_bytes, device=device, num_ranks=chosen.model.tp
    )


def _feature_bytes(spec: ModelSpec, options: EngineOptions) -> int:
    return 0 if spec.vision is None else options.feature_cache_mib << 20


def _profile(model: Model, chosen: _Choices, num_tokens: int) -> None:
    """Computes a prompt of the whole budget, and samples with a full batch's worth of logits, in a pool just large enough."""
    spec, options = chosen.spec, chosen.engine
    num_blocks = blocks_for(num_tokens, options.block_size)
    pool = KVPool(spec, num_blocks=num_blocks, block_size=options.block_size, dtype=chosen.kv_dtype, device=chosen.device)
    runner = TorchRunner(
        model, pool, spec, block_size=options.block_size, max_batch=1, token_budget=num_tokens, max_model_len=num_tokens,
        fingerprint="", folder=pathlib.Path(),
    )  # fmt: skip
    run_prompt(runner, num_tokens, options.block_size, SamplingParams(temperature=0.0))
    logits = torch.zeros(options.max_batch, spec.vocab_size, dtype=torch.float32, device=chosen.device)
    logits.softmax(dim=-1).cumsum(dim=-1)
