"""Where a token's KV lies in a worker's region, and which bytes to move for which tokens. Pure arithmetic.

A region is one array [layers, 2 (K, V), blocks, block_size, kv_heads, head_dim]. Tokens of a block are contiguous within a
layer and plane, so a run of tokens that crosses no block edge, on either side, is one range of bytes. Block sizes may differ
between the two sides; everything else must be equal.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from kvrelay.errors import VersionMismatchError
from kvrelay.transfer.engines.base import Ranges, TransferError, coalesce
from kvrelay.wire.kv import Layout


class KVLayout(Layout, frozen=True, kw_only=True):
    """The shape of one worker's KV memory, with its arithmetic."""

    @property
    def token_bytes(self) -> int:
        """Of one token in one layer and plane."""
        return self.num_kv_heads * self.head_dim * self.item_bytes

    @property
    def block_bytes(self) -> int:
        return self.block_size * self.token_bytes

    @property
    def plane_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def size_bytes(self) -> int:
        return self.num_layers * 2 * self.plane_bytes

    def mismatch(self, other: KVLayout) -> str:
        """Why KV cannot move between the two; empty if it can. Pools and block sizes may differ."""
        for name in ("num_layers", "num_kv_heads", "head_dim", "dtype", "item_bytes", "tp"):
            mine, theirs = _field(self, name), _field(other, name)
            if mine != theirs:
                return f"{name} is {mine} here and {theirs} there"
        return ""


def kv_layout(layout: Layout) -> KVLayout:
    """As it came over the wire, with arithmetic. Raises VersionMismatchError if there can be no such cache."""
    if layout.block_size < 1 or layout.num_blocks < 1:
        raise VersionMismatchError(f"a KV cache of {layout.num_blocks} blocks of {layout.block_size} tokens")
    return KVLayout(**msgspec.structs.asdict(layout))


def placed_blocks(blocks: list[int], layout: KVLayout, num_tokens: int) -> tuple[int, ...]:
    """Blocks that a peer named, checked: they exist and have room for the tokens. Raises TransferError."""
    if len(blocks) * layout.block_size < num_tokens:
        raise TransferError(f"{len(blocks)} blocks of {layout.block_size} tokens cannot hold {num_tokens} tokens")
    if blocks and not (min(blocks) >= 0 and max(blocks) < layout.num_blocks):
        raise TransferError(f"block ids {min(blocks)} to {max(blocks)} where there are {layout.num_blocks} blocks")
    return tuple(blocks)


def _field(layout: KVLayout, name: str) -> object:
    return msgspec.structs.asdict(layout)[name]


class Placement(msgspec.Struct, frozen=True):
    """Where some tokens of a sequence are: `blocks` hold the tokens from `first_token` on, which begins a block."""

    layout: KVLayout
    blocks: Sequence[int]
    first_token: int = 0


def move_ranges(local: Placement, remote: Placement, tokens: tuple[int, int], layers: tuple[int, int]) -> Ranges:
    """The bytes of tokens [start, stop) in layers [first, last), contiguous neighbours joined."""
    start, stop = tokens
    if start >= stop or layers[0] >= layers[1]:
        return np.empty((0, 3), dtype=np.int64)
    edges = _edges(start, stop, (local.layout.block_size, remote.layout.block_size))
    runs, sizes = edges[:-1], np.diff(edges) * local.layout.token_bytes
    within = np.column_stack((_offsets(local, runs), _offsets(remote, runs), sizes))
    plane_bytes = (local.layout.plane_bytes, remote.layout.plane_bytes)
    planes = np.arange(layers[0] * 2, layers[1] * 2, dtype=np.int64)
    shifts = np.column_stack((planes * plane_bytes[0], planes * plane_bytes[1], np.zeros_like(planes)))
    return coalesce((shifts[:, None, :] + within[None, :, :]).reshape(-1, 3))


def _edges(start: int, stop: int, block_sizes: tuple[int, int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Start, every block edge in between, stop."""
    inner = [np.arange(-(-start // size) * size, stop, size, dtype=np.int64) for size in set(block_sizes)]
    return np.unique(np.concatenate([[start], *inner, [stop]]).astype(np.int64))


def _offsets(
    placement: Placement, tokens: np.ndarray[tuple[int], np.dtype[np.int64]]
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    layout = placement.layout
    blocks = np.asarray(placement.blocks, dtype=np.int64)
    index, offset = np.divmod(tokens - placement.first_token, layout.block_size)
    offsets: np.ndarray[tuple[int], np.dtype[np.int64]] = blocks[index] * layout.block_bytes + offset * layout.token_bytes
    return offsets
