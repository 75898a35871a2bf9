"""vLLM's KV memory as the relay sees it: whole blocks, each one token of a layout of its own.

vLLM allocates one stretch of memory for all layers. Where blocks of a layer lie side by side, each layer is a plane; where all
layers of a block do, there is one plane. What is inside a block (heads, tokens, K and V) is the same on both sides of a
hand-over, or the layouts differ by name.

Where vLLM splits a model, each rank is a process with a share of that memory: all map one file that this process has made, one
share behind the other, so that the relay reads and writes them as if vLLM ran here.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from kvrelay.errors import ConfigError
from kvrelay.transfer.kv.layout import KVLayout
from kvrelay.transfer.region import Region, new_file, region_of, shared_region
from kvrelay.worker.vllm.seam import Hooks


@dataclass(slots=True, eq=False)
class Shared:
    """What both halves of the connector and the worker share."""

    hooks: Hooks
    region: Region | None = None
    layout: KVLayout | None = None
    layers: Sequence[str] = ()
    file: int = -1  # of ranks in other processes

    def allocate(self, size_bytes: int) -> mmap.mmap:
        self.region = shared_region(size_bytes)
        assert self.region.buffer is not None
        return self.region.buffer

    def open_file(self) -> str:
        """By which ranks find it. They may be children of any process, so they do not inherit it."""
        self.file = new_file()
        return f"/proc/{os.getpid()}/fd/{self.file}"

    def join(self, layouts: Sequence[KVLayout]) -> None:
        """The shares of all ranks, which they have filled, become one region."""
        self.region, self.file = region_of(self.file), -1
        if any(layout != layouts[0] for layout in layouts) or self.region.size_bytes != layouts[0].size_bytes:
            raise ConfigError("--engine vllm: the KV memory of this model's ranks differs, and cannot be handed over")
        self.layout = layouts[0]


class InRegion(TorchFunctionMode):
    """Inside, the first zeros that a CPU is asked for lie in memory that other processes can map."""

    def __init__(self, allocate: Callable[[int], mmap.mmap]) -> None:
        super().__init__()
        self._allocate: Callable[[int], mmap.mmap] | None = allocate

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.zeros or self._allocate is None:
            return func(*args, **kwargs)
        (size_bytes,) = args
        buffer, self._allocate = self._allocate(size_bytes), None
        return torch.frombuffer(buffer, dtype=kwargs["dtype"])


def map_share(path: str, rank: int, num_ranks: int, size_bytes: int) -> mmap.mmap:
    """All ranks have as much."""
    if size_bytes % mmap.ALLOCATIONGRANULARITY:
        raise ConfigError("--engine vllm: the KV memory of a rank is not a whole number of pages, and cannot be handed over")
    fd = os.open(path, os.O_RDWR)
    try:
        os.ftruncate(fd, max(os.fstat(fd).st_size, num_ranks * size_bytes))
        return mmap.mmap(fd, size_bytes, offset=rank * size_bytes)
    finally:
        os.close(fd)


def block_layout(placement: Any, num_blocks: int, contents: str, num_ranks: int = 1) -> KVLayout:
    """`placement` is vLLM's KVCacheTensor, of one rank; `contents` says what a block is. What a rank has of a block counts as
    one head: no two have the same."""
    is_by_layer = placement.layer_stride == placement.block_stride * num_blocks
    num_layers = len(placement.layers) if is_by_layer else 1
    if placement.offset or num_layers * num_blocks * placement.block_stride > placement.size:
        raise ConfigError("--engine vllm: the KV memory of this model has a layout that cannot be handed over")
    return KVLayout(
        num_layers=num_layers, num_blocks=num_blocks, block_size=1, num_kv_heads=num_ranks, head_dim=placement.block_stride,
        dtype=contents, item_bytes=1, planes=1, tp=num_ranks,
    )  # fmt: skip


def memory_of(tensor: torch.Tensor) -> Region:
    """On a card, what PyTorch allocated."""
    storage = tensor.untyped_storage()
    return Region(address=storage.data_ptr(), size_bytes=storage.nbytes(), device=str(tensor.device))


SHARED: dict[str, Shared] = {}
"""By worker: vLLM makes the connectors itself, and gives them only what its configuration says."""


def share(worker_id: str) -> Shared:
    shared = SHARED[worker_id] = Shared(Hooks())
    return shared
