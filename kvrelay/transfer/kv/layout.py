"""Where a token's KV lies in a worker's region, and which bytes to move for which tokens. Pure arithmetic.

A region is one array [layers, 2 (K, V), blocks, block_size, kv_heads, head_dim]. Tokens of a block are contiguous within a
layer and plane, so a run of tokens that crosses no block edge, on either side, is one range of bytes. Block sizes may differ
between the two sides; everything else must be equal.
"""

from __future__ import annotations

import msgspec
import numpy as np

from kvrelay.errors import VersionMismatchError
from kvrelay.transfer.blocks import Placement, mismatch, runs
from kvrelay.transfer.engines.base import Ranges, coalesce
from kvrelay.wire.kv import Layout


class KVLayout(Layout, frozen=True, kw_only=True):
    """The shape of one worker's KV memory, with its arithmetic."""

    @property
    def token_bytes(self) -> int:
        """Of one token in one layer and plane."""
        return self.num_kv_heads * self.head_dim * self.item_bytes

    @property
    def all_layers_bytes(self) -> int:
        """Of one token."""
        return self.num_layers * 2 * self.token_bytes

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
        return mismatch(self, other, ("num_layers", "num_kv_heads", "head_dim", "dtype", "item_bytes", "tp"))


def kv_layout(layout: Layout) -> KVLayout:
    """As it came over the wire, with arithmetic. Raises VersionMismatchError if there can be no such cache."""
    if layout.block_size < 1 or layout.num_blocks < 1:
        raise VersionMismatchError(f"a KV cache of {layout.num_blocks} blocks of {layout.block_size} tokens")
    return KVLayout(**msgspec.structs.asdict(layout))


def move_ranges(
    local: Placement[KVLayout], remote: Placement[KVLayout], tokens: tuple[int, int], layers: tuple[int, int]
) -> Ranges:
    """The bytes of tokens [start, stop) in layers [first, last), contiguous neighbours joined."""
    if tokens[0] >= tokens[1] or layers[0] >= layers[1]:
        return np.empty((0, 3), dtype=np.int64)
    within = np.column_stack(runs(local, remote, tokens)) * local.layout.token_bytes
    planes = np.arange(layers[0] * 2, layers[1] * 2, dtype=np.int64)
    shifts = np.column_stack((planes * local.layout.plane_bytes, planes * remote.layout.plane_bytes, np.zeros_like(planes)))
    return coalesce((shifts[:, None, :] + within[None, :, :]).reshape(-1, 3))
