"""What of a card's memory a worker may use, and what it says when that is not enough.

A worker's share is `gpu_memory` of the whole card, whatever others on it do; what others have already taken cannot be used
either. From the share go the weights, the activations of the largest step, which is tried, and the decode graphs; the rest is
for KV.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch

from kvrelay.checkpoint.spec import ModelSpec
from kvrelay.errors import ConfigError

_GRAPH_BYTES = 12 * 2**20  # of one captured graph, measured with 32 layers
_SPARE_BYTES = 512 * 2**20  # the CUDA context, cuBLAS's workspaces, what fragmentation costs
_GIB = 2**30


def kv_bytes(share: float, other_bytes: int, try_largest_step: Callable[[], None], device: torch.device) -> int:
    """`other_bytes`: what will be allocated beside KV and was not when the largest step was tried."""
    torch.cuda.reset_peak_memory_stats(device)
    try_largest_step()
    torch.cuda.synchronize(device)
    peak, kept = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    needed = peak + other_bytes + _SPARE_BYTES
    left = int(total * share) - needed
    left = min(left, free - (peak - kept) - other_bytes - _SPARE_BYTES // 2)
    if left <= 0:
        raise ConfigError(
            f"no GPU memory is left for KV: weights and activations of one step take {gib(needed)}, --gpu-memory {share:g} "
            f"allows {gib(total * share)} of the card's {gib(total)}, of which {gib(free)} are free now; "
            "raise --gpu-memory, lower --token-budget or --max-batch, or stop what else runs on the card"
        )
    return left


def graph_bytes(spec: ModelSpec, sizes: Sequence[int], prompts: Sequence[int], max_blocks: int, dtype: torch.dtype) -> int:
    """Of decode graphs: the graphs, the logits of the largest (kept, made and searched), block tables by place and by row. Of
    those of prompts: the graphs, and the activations of the largest."""
    if not sizes:
        return 0
    logits = 3 * sizes[-1] * spec.vocab_size * dtype.itemsize
    activations = 4 * (spec.intermediate_size + 2 * spec.hidden_size) * max(prompts, default=0) * dtype.itemsize
    return (len(sizes) + len(prompts)) * _GRAPH_BYTES + logits + activations + 4 * (3 * sizes[-1] + 1) * max_blocks


@contextlib.contextmanager
def explained(what: str, needed_bytes: int, device: torch.device) -> Iterator[None]:
    """Turns PyTorch's error into ours, which says what to change."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        raise ConfigError(
            f"out of GPU memory while {what}, which takes {gib(needed_bytes)}: the card has {gib(total)}, of which {gib(free)} "
            f"are free; stop what else runs on it, lower the --gpu-memory of other workers there, or take a smaller model"
        ) from error


def gib(size_bytes: float) -> str:
    return f"{size_bytes / _GIB:.1f} GiB"
