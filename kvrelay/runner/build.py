"""From options and a checkpoint folder to a runner that is ready: every decision about device, precision and memory."""

from __future__ import annotations

import math
import pathlib
from typing import Literal

import torch

from kvrelay.checkpoint.lora import named_folders
from kvrelay.checkpoint.spec import ModelSpec
from kvrelay.config import EngineOptions, Environment, ModelOptions
from kvrelay.engine.interfaces import Adapters, Allocate
from kvrelay.errors import ConfigError
from kvrelay.kernels.base import Kernels
from kvrelay.kernels.choose import choose_kernels
from kvrelay.kernels.native.kernels import NativeKernels
from kvrelay.kernels.ranks import ALONE
from kvrelay.kernels.torch_kernels import TorchKernels
from kvrelay.log import Log
from kvrelay.models.registry import Model
from kvrelay.progress import Progress
from kvrelay.runner.choices import Choices, check_products, choose, model_fingerprint, num_cores, weight_elements
from kvrelay.runner.gpu_memory import explained, graph_bytes, kv_bytes
from kvrelay.runner.graphs import graph_sizes
from kvrelay.runner.host_pool import HostPool, NoHostPool, choose_host_blocks, make_host_pool
from kvrelay.runner.kv_pool import KVPool, PoolSize, blocks_for, choose_pool_size, free_cpu_bytes
from kvrelay.runner.lora import LoraAdapters, Pack
from kvrelay.runner.prompt_graphs import prompt_sizes
from kvrelay.runner.ranks.adapters import SplitAdapters
from kvrelay.runner.ranks.group import OnDeath, RankGroup
from kvrelay.runner.ranks.leading import LeadingModel
from kvrelay.runner.ranks.shares import RankShare, check_split
from kvrelay.runner.runner import TorchRunner
from kvrelay.runner.shared import load_for_worker
from kvrelay.runner.vision.features import FeatureStore
from kvrelay.runner.warm_up import run_prompt, warm_up, warm_up_mixed
from kvrelay.sampling import SamplingParams
from kvrelay.wire.ranks import RankSetup

log = Log("build")


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
    Several ranks on a CPU need an `allocate` whose memory they can map; `on_rank_death` is told when one has ended."""
    chosen = choose(model_options, engine_options, folder, environment)
    group = _start_ranks(chosen, on_rank_death)
    try:
        return _build(chosen, group, progress, allocate, features)
    except BaseException:
        if group is not None:
            group.close()
        raise


def _build(
    chosen: Choices,
    group: RankGroup | None,
    progress: Progress,
    allocate: Allocate | None,
    features: FeatureStore | None,
) -> TorchRunner:
    kernels = _choose_kernels(chosen)
    model, pack = _load_weights(chosen, kernels, group, progress), kernels.pack_adapter
    if group is not None:
        group.until_loaded()
        split = SplitAdapters(chosen.spec, chosen.model.tp, kernels, group)
        model, pack = LeadingModel(model, group, split), split.pack
    sizes = [] if isinstance(kernels, TorchKernels | NativeKernels) else graph_sizes(chosen.engine.max_batch)
    most = min(chosen.engine.token_budget, chosen.longest) if sizes and chosen.spec.vision is None else 0
    prompts = prompt_sizes(most)
    size = _pool_size(model, chosen, group, sizes, prompts)
    num_blocks = size.num_blocks + bool(sizes)  # graphs need one of their own
    room = f"making room for {size.num_blocks} KV blocks and decode graphs"
    with explained(room, num_blocks * chosen.block_bytes // chosen.num_cards, chosen.device):
        pool = _open_pool(chosen, num_blocks, allocate)
        if group is not None:
            pool.add(group.share(num_blocks, chosen.engine.block_size, pool.descriptor))
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
            bulk=kernels.has_bulk,
        )
        warm_up(runner, chosen.engine.block_size)
        if sizes:
            warm_up_mixed(runner, chosen.engine, progress)
    _log_ready(chosen, runner, size, sizes)
    return runner


def _choose_kernels(chosen: Choices) -> Kernels:
    share = chosen.spec if chosen.model.tp == 1 else RankShare(chosen.spec, 0, chosen.model.tp).spec
    check_products(share, chosen.dtype, chosen.device, chosen.environment)
    kernels = choose_kernels(chosen.device, chosen.dtype, chosen.environment, chosen.model)
    if chosen.model.weights == "int8" and not isinstance(kernels, NativeKernels):
        raise ConfigError("--weights int8 needs the native kernels, which cannot run here: see the warning before")
    if isinstance(kernels, TorchKernels) and chosen.has_fp8:
        raise ConfigError("weights in fp8 need the Triton kernels, which cannot run here: see the warning before")
    return kernels


def _load_weights(chosen: Choices, kernels: Kernels, group: RankGroup | None, progress: Progress) -> Model:
    size_bytes = weight_elements(chosen.spec) * (1 if chosen.has_fp8 else chosen.dtype.itemsize) // chosen.num_cards
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
            ranks=ALONE if group is None else group.ranks,
        )


def _open_pool(chosen: Choices, num_blocks: int, allocate: Allocate | None) -> KVPool:
    return KVPool(
        chosen.spec,
        num_blocks=num_blocks,
        block_size=chosen.engine.block_size,
        dtype=chosen.kv_dtype,
        device=chosen.device,
        allocate=allocate,
        num_ranks=chosen.model.tp,
    )


def _log_ready(chosen: Choices, runner: TorchRunner, size: PoolSize, sizes: list[int]) -> None:
    log.info(
        "runner ready", model=chosen.model.model, device=chosen.device.type, dtype=chosen.dtype_name,
        kv_dtype=runner.layout.dtype, threads=chosen.num_threads, kv_blocks=size.num_blocks, host_blocks=runner.num_host_blocks,
        host_mib=runner.num_host_blocks * chosen.block_bytes >> 20, max_model_len=size.max_model_len, graphs=len(sizes),
    )  # fmt: skip


def _load_adapters(chosen: Choices, pack: Pack) -> Adapters:
    adapters = LoraAdapters(chosen.spec, pack, chosen.device, chosen.dtype)
    for name, folder in named_folders(chosen.model.lora).items():
        adapters.add(name, str(folder), adapters.read(str(folder)))
    return adapters


def _start_ranks(chosen: Choices, on_death: OnDeath | None) -> RankGroup | None:
    """None for a worker of one rank."""
    num_ranks = chosen.model.tp
    if num_ranks == 1:
        return None
    check_split(chosen.spec, num_ranks)
    num_cards = torch.cuda.device_count() if chosen.device.type == "cuda" else 0
    if 0 < num_cards < num_ranks:
        log.warning("ranks share a card: for tests, since their sums go through sockets", ranks=num_ranks, cards=num_cards)
    setup = RankSetup(
        rank=0,
        num_ranks=num_ranks,
        folder=str(chosen.folder),
        model=chosen.model,
        dtype=chosen.dtype_name,
        num_threads=chosen.num_threads,
        max_positions=chosen.engine.max_model_len,
        log_level=chosen.environment.log_level,
        num_cards=num_cards,
    )
    return RankGroup(setup, on_death)


def make_store(spec: ModelSpec, options: EngineOptions, device: torch.device, dtype: torch.dtype) -> FeatureStore | None:
    """None for a text model."""
    return None if spec.vision is None else FeatureStore(_feature_bytes(spec, options), device=device, dtype=dtype)


def _open_host_pool(pool: KVPool, num_blocks: int | Literal["auto"], num_threads: int) -> HostPool:
    """Of a number that was not asked for, none where they cannot be had: pinned memory may be limited."""
    if num_blocks != "auto":
        return make_host_pool(pool, num_blocks)
    core_share = min(1.0, num_threads / num_cores())
    chosen = choose_host_blocks(pool, free_bytes=free_cpu_bytes(), core_share=core_share)
    try:
        return make_host_pool(pool, chosen)
    except ConfigError as error:
        log.warning("no host blocks: KV that must make room is computed again", reason=error)
        return NoHostPool()


def _pool_size(model: Model, chosen: Choices, group: RankGroup | None, sizes: list[int], prompts: list[int]) -> PoolSize:
    """Of a worker whose ranks have a card each, rank 0's decides for all: it has the embedding and the head besides."""
    spec, options, dtype, device = chosen.spec, chosen.engine, chosen.dtype, chosen.device
    if options.kv_blocks:
        free_bytes = 0  # not asked for
    elif device.type == "cuda":
        beside = graph_bytes(spec, sizes, prompts, blocks_for(chosen.longest, options.block_size) + 1, dtype)
        beside += _feature_bytes(spec, options)
        beside += options.token_budget * spec.vocab_size * dtype.itemsize  # logits of a whole step, for prompt logprobs
        num_tokens = min(options.token_budget, chosen.longest)
        with explained("trying the largest step", weight_elements(spec) * dtype.itemsize, device):
            share = chosen.model.gpu_memory / math.ceil(chosen.model.tp / torch.cuda.device_count())
            free_bytes = chosen.model.tp * kv_bytes(share, beside, lambda: _profile(model, chosen, group, num_tokens), device)
    else:
        free_bytes = free_cpu_bytes()
    return choose_pool_size(
        spec, options, dtype=chosen.kv_dtype, free_bytes=free_bytes, device=device, num_ranks=chosen.model.tp
    )


def _feature_bytes(spec: ModelSpec, options: EngineOptions) -> int:
    return 0 if spec.vision is None else options.feature_cache_mib << 20


def _profile(model: Model, chosen: Choices, group: RankGroup | None, num_tokens: int) -> None:
    """Computes a prompt of the whole budget, and samples with a full batch's worth of logits, in a pool just large enough."""
    spec, options = chosen.spec, chosen.engine
    num_blocks = blocks_for(num_tokens, options.block_size)
    pool = _open_pool(chosen, num_blocks, None)
    if group is not None:
        group.share(num_blocks, options.block_size)
    runner = TorchRunner(
        model, pool, spec, block_size=options.block_size, max_batch=1, token_budget=num_tokens, max_model_len=num_tokens,
        fingerprint="", folder=pathlib.Path(),
    )  # fmt: skip
    run_prompt(runner, num_tokens, options.block_size, SamplingParams(temperature=0.0))
    logits = torch.zeros(options.max_batch, spec.vocab_size, dtype=torch.float32, device=chosen.device)
    logits.softmax(dim=-1).cumsum(dim=-1)
