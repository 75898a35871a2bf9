"""vLLM's KV memory as the relay sees it: whole blocks, each one token of a layout of its own.

vLLM allocates one stretch of memory for all layers. Where blocks of a layer lie side by side, each layer is a plane; where all
layers of a block do, there is one plane. What is inside a block (heads, tokens, K and V) is the same on both sides of a
hand-over, or the layouts differ by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from kvrelay.errors import ConfigError
from kvrelay.transfer.kv.layout import KVLayout
from kvrelay.transfer.region import Region, shared_region
from kvrelay.worker.vllm.seam import Hooks


@dataclass(slots=True, eq=False)
class Shared:
    """What both halves of the connector and the worker share."""

    hooks: Hooks
    region: Region | None = None
    layout: KVLayout | None = None
    layers: Sequence[str] = ()


class InRegion(TorchFunctionMode):
    """Inside, the zeros that a CPU is asked for lie in memory that other processes can map."""

    def __init__(self, shared: Shared) -> None:
        super().__init__()
        self._shared = shared

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.zeros or self._shared.region is not None:
            return func(*args, **kwargs)
        (size_bytes,) = args
        region = self._shared.region = shared_region(size_bytes)
        return torch.frombuffer(region.buffer, dtype=kwargs["dtype"])


def block_layout(placement: Any, num_blocks: int, contents: str) -> KVLayout:
    """`placement` is vLLM's KVCacheTensor; `contents` says what a block is."""
    is_by_layer = placement.layer_stride == placement.block_stride * num_blocks
    num_layers = len(placement.layers) if is_by_layer else 1
    if placement.offset or num_layers * num_blocks * placement.block_stride > placement.size:
        raise ConfigError("--engine vllm: the KV memory of this model has a layout that cannot be handed over")
    return KVLayout(
        num_layers=num_layers, num_blocks=num_blocks, block_size=1, num_kv_heads=1, head_dim=placement.block_stride,
        dtype=contents, item_bytes=1, planes=1,
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
