"""KV memory: how much of it, the one allocation, and block copies.

The number of blocks is `kv_blocks` where it is given. Otherwise, on a CPU, a share of the free memory, at most a few GiB, and
never more than a full batch of longest sequences could use; on a GPU, what `gpu_memory` leaves beside weights and the
activations of the largest step.

A pool must hold one sequence of `max_model_len` tokens. Where it cannot, the limit that was not asked for gives way: a
`max_model_len` taken from the model is lowered, with a warning; one that was given is kept, the pool grows to it if memory
allows, and else the error names the numbers.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from kvrelay.checkpoint.spec import ModelSpec
from kvrelay.config import EngineOptions
from kvrelay.engine.interfaces import Allocate
from kvrelay.errors import ConfigError
from kvrelay.kernels.fp8 import movable
from kvrelay.log import Log
from kvrelay.native.driver import Driver
from kvrelay.wire.kv import Layout, heads_per_rank
from kvrelay.wire.ranks import KVShare

CPU_SHARE = 0.15  # of the memory that is free
CPU_MOST_BYTES = 4 * 2**30
CPU_LIMIT_SHARE = 0.7  # a given max_model_len may take so much of the memory that is free
_ALIGNMENT = 64  # bytes, a cache line

log = Log("kv_pool")


@dataclass(frozen=True, slots=True)
class PoolSize:
    num_blocks: int
    max_model_len: int


class KVPool:
    """One tensor [layers, 2, blocks, block_size, kv_heads, head_dim], allocated once, zeroed. Of a tensor-parallel worker it
    is rank 0's, the first of `shares`. On a CPU these are one piece of memory; on cards each rank has its own, which are
    added."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        allocate: Allocate | None = None,
        num_ranks: int = 1,
    ) -> None:
        """`spec` is the whole model's. Several ranks on a CPU need memory that they can map."""
        num_heads = heads_per_rank(spec.num_kv_heads, num_ranks)
        num_here = num_ranks if device.type == "cpu" else 1
        shape = (num_here, spec.num_layers, 2, num_blocks, block_size, num_heads, spec.head_dim)
        self.layout = Layout(
            num_layers=spec.num_layers,
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=str(dtype).removeprefix("torch."),
            item_bytes=dtype.itemsize,
            tp=num_ranks,
        )
        self.descriptor: int | None = None  # of its memory, where others can map it
        if allocate is not None and device.type == "cpu":
            memory = allocate(math.prod(shape) * dtype.itemsize)
            self.descriptor = memory.fd
            here = torch.frombuffer(memory.buffer, dtype=dtype).view(shape)
        else:
            here = _zeros(shape, dtype, device)
        self.shares = list(here.unbind(0))
        self.tensor = self.shares[0]
        self.added: list[tuple[int, KVShare]] = []  # where others' shares are in this process, and for other processes
        self._driver: Driver | None = None

    def add(self, shares: Sequence[KVShare]) -> None:
        """Those of the other ranks, on their cards: they seem to be on this one, which reaches them by peer access, so that
        what is done with them is done in the order of its streams."""
        if not shares:
            return
        device = self.tensor.device
        self._driver = Driver(device.index or 0)
        size = self.tensor.numel() * self.tensor.element_size()
        for share in shares:
            address = self._driver.open(share.handle) + share.offset
            storage = torch._C._construct_storage_from_data_pointer(address, device, size)
            mapped = torch.empty(0, dtype=self.tensor.dtype, device=device).set_(
                storage, 0, self.tensor.shape, self.tensor.stride()
            )
            self.shares.append(mapped)
            self.added.append((address, share))

    def close(self) -> None:
        """Unmaps what was added, before its owners free it."""
        for address, share in self.added:
            assert self._driver is not None
            self._driver.close(address - share.offset)
        del self.shares[1:], self.added[:]

    @property
    def num_blocks(self) -> int:
        return self.tensor.shape[2]

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copies (source, target) as if one after another: a later one may read what an earlier one wrote."""
        if not copies:
            return
        origins: dict[int, int] = {}  # target -> the block whose present content ends up there
        for source, target in copies:
            origins[target] = origins.get(source, source)
        targets = torch.tensor(list(origins), device=self.tensor.device)
        sources = torch.tensor(list(origins.values()), device=self.tensor.device)
        for share in self.shares:
            kv = movable(share)
            # All sources are read before the first target is written, so chains and even exchanges come out right.
            kv.index_copy_(2, targets, kv.index_select(2, sources))


def choose_pool_size(
    spec: ModelSpec, options: EngineOptions, *, dtype: torch.dtype, free_bytes: int, device: torch.device, num_ranks: int = 1
) -> PoolSize:
    """`free_bytes` is what the pool may use on a GPU, and what is free on a CPU."""
    options = options.for_device("cuda" if device.type == "cuda" else "cpu")
    longest = min(options.max_model_len or spec.max_position_embeddings, spec.max_position_embeddings)
    if options.max_model_len > spec.max_position_embeddings:
        raise ConfigError(
            f"--max-model-len {options.max_model_len} is more than the model's {spec.max_position_embeddings} positions"
        )
    block_bytes = token_bytes(spec, dtype, num_ranks) * options.block_size
    num_blocks = options.kv_blocks or _blocks_from_memory(options, longest, block_bytes, free_bytes, device)
    return _fit(num_blocks, longest, options, block_bytes)


def _blocks_from_memory(options: EngineOptions, longest: int, block_bytes: int, free_bytes: int, device: torch.device) -> int:
    """As many as memory allows and a full batch can use; on a CPU, where memory is everyone's, a modest share."""
    one_sequence = blocks_for(longest, options.block_size)
    budget = free_bytes
    if device.type == "cpu":
        budget = min(int(free_bytes * CPU_SHARE), CPU_MOST_BYTES)
        if options.max_model_len and one_sequence * block_bytes <= free_bytes * CPU_LIMIT_SHARE:
            budget = max(budget, one_sequence * block_bytes)
    num_blocks = min(budget // block_bytes, one_sequence * options.max_batch)
    if num_blocks < 1:
        raise ConfigError(
            f"no memory for KV: a block of {options.block_size} tokens takes {_megabytes(block_bytes)}, "
            f"{_megabytes(budget)} may be used; lower --block-size or free memory"
        )
    return num_blocks


def _fit(num_blocks: int, longest: int, options: EngineOptions, block_bytes: int) -> PoolSize:
    room = num_blocks * options.block_size
    if room >= longest:
        return PoolSize(num_blocks=num_blocks, max_model_len=longest)
    needed = blocks_for(longest, options.block_size)
    if options.max_model_len:
        raise ConfigError(
            f"--max-model-len {longest} needs {needed} KV blocks of {options.block_size} tokens "
            f"({_megabytes(needed * block_bytes)}), but there are {num_blocks}: raise --kv-blocks or lower --max-model-len"
        )
    log.warning(
        "max_model_len lowered to what the KV blocks hold",
        model=longest, max_model_len=room, kv_blocks=num_blocks, block_size=options.block_size,
    )  # fmt: skip
    return PoolSize(num_blocks=num_blocks, max_model_len=room)


def token_bytes(spec: ModelSpec, dtype: torch.dtype, num_ranks: int = 1) -> int:
    """Of a token's KV in all ranks, some of which may have the same heads."""
    pooled = msgspec.structs.replace(spec, num_kv_heads=num_ranks * heads_per_rank(spec.num_kv_heads, num_ranks))
    return pooled.kv_bytes_per_token(dtype.itemsize)


def blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def free_cpu_bytes() -> int:
    """What the kernel says new work may take without swapping; half of all memory where it does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        return min(int(fields["MemAvailable"].split()[0]) * 1024, _cgroup_free_bytes())
    except (OSError, KeyError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _cgroup_free_bytes() -> int:
    """A container's own limit, which /proc/meminfo does not know. The whole address space where there is none."""
    try:
        with (
            open("/sys/fs/cgroup/memory.max", encoding="ascii") as limit,
            open("/sys/fs/cgroup/memory.current", encoding="ascii") as current,
        ):
            text = limit.read().strip()
            return 2**63 if text == "max" else max(0, int(text) - int(current.read()))
    except OSError:
        return 2**63


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # Fresh pages of the kernel are zero already and cost nothing until a block is used; torch.zeros would touch them all.
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.zeros(size + _ALIGNMENT, dtype=np.uint8)
    first = -raw.ctypes.data % _ALIGNMENT
    return torch.from_numpy(raw[first : first + size]).view(dtype).view(shape)


def _megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"
