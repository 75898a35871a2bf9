"""Where a token's KV lies in a worker's region, and which bytes to move for which tokens. Pure arithmetic.

A region is one array [ranks, layers, planes, blocks, block_size, kv_heads, head_dim]: the ranks of a tensor-parallel worker
have their shares in it, one after the other, each with the KV heads that are its own. Tokens of a block are contiguous within
a rank, layer and plane, so a run of tokens that crosses no block edge, on either side, is one range of bytes, if the ranks of
both sides have the same heads. Where they do not, each token is a range for each pair of ranks that share heads. Block sizes
and numbers of ranks may differ between the two sides; everything else must be equal.
"""

from __future__ import annotations

import functools

import msgspec
import numpy as np

from kvrelay.errors import VersionMismatchError
from kvrelay.transfer.blocks import Numbers, Placement, mismatch, runs
from kvrelay.transfer.engines.base import Ranges
from kvrelay.transfer.engines.ranges import coalesce
from kvrelay.wire.kv import MAX_RANKS, Layout, heads_of, heads_per_rank


class KVLayout(Layout, frozen=True, kw_only=True):
    """The shape of one worker's KV memory, with its arithmetic."""

    @property
    def head_bytes(self) -> int:
        """Of one token in one layer, plane and head."""
        return self.head_dim * self.item_bytes

    @property
    def token_bytes(self) -> int:
        """Of one token in one rank, layer and plane."""
        return heads_per_rank(self.num_kv_heads, self.tp) * self.head_bytes

    @property
    def all_heads_bytes(self) -> int:
        """Of one token in all layers, each head once, however many ranks have it."""
        return self.num_layers * self.planes * self.num_kv_heads * self.head_bytes

    @property
    def block_bytes(self) -> int:
        return self.block_size * self.token_bytes

    @property
    def plane_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def rank_bytes(self) -> int:
        return self.num_layers * self.planes * self.plane_bytes

    @property
    def size_bytes(self) -> int:
        return self.tp * self.rank_bytes

    def heads(self, rank: int) -> range:
        return heads_of(self.num_kv_heads, self.tp, rank)

    def mismatch(self, other: KVLayout) -> str:
        """Why KV cannot move between the two; empty if it can. Pools, block sizes and numbers of ranks may differ."""
        return mismatch(self, other, ("num_layers", "planes", "num_kv_heads", "head_dim", "dtype", "item_bytes"))


def kv_layout(layout: Layout) -> KVLayout:
    """As it came over the wire, with arithmetic. Raises VersionMismatchError if there can be no such cache."""
    if layout.block_size < 1 or layout.num_blocks < 1:
        raise VersionMismatchError(f"a KV cache of {layout.num_blocks} blocks of {layout.block_size} tokens")
    if layout.num_kv_heads < 1 or not 1 <= layout.tp <= MAX_RANKS:
        raise VersionMismatchError(f"a KV cache of {layout.num_kv_heads} heads in {layout.tp} ranks")
    return KVLayout(**msgspec.structs.asdict(layout))


class Piece(msgspec.Struct, frozen=True):
    """Heads that one rank there has and one rank here wants, or the other way round. `local` and `remote` are the ranks."""

    local: int
    remote: int
    first_local: int  # of the heads, counted from the first of the rank
    first_remote: int
    num_heads: int


@functools.cache
def pieces(num_kv_heads: int, local_tp: int, remote_tp: int, writes: bool) -> tuple[Piece, ...]:
    """So that every head of every rank that receives comes once: from the first rank that has it."""
    senders, receivers = (local_tp, remote_tp) if writes else (remote_tp, local_tp)
    found: list[Piece] = []
    for receiver in range(receivers):
        wanted = heads_of(num_kv_heads, receivers, receiver)
        head = wanted.start
        while head < wanted.stop:
            sender, theirs = next(
                (rank, heads) for rank in range(senders) for heads in [heads_of(num_kv_heads, senders, rank)] if head in heads
            )
            count = min(wanted.stop, theirs.stop) - head
            sent, received = (sender, head - theirs.start), (receiver, head - wanted.start)
            (local, first_local), (remote, first_remote) = (sent, received) if writes else (received, sent)
            found.append(Piece(local, remote, first_local, first_remote, count))
            head += count
    return tuple(found)


def move_ranges(
    local: Placement[KVLayout], remote: Placement[KVLayout], tokens: tuple[int, int], layers: tuple[int, int], *, writes: bool
) -> Ranges:
    """The bytes of tokens [start, stop) in layers [first, last) of all ranks, contiguous neighbours within a rank joined.
    `writes`: from here to there."""
    if tokens[0] >= tokens[1] or layers[0] >= layers[1]:
        return np.empty((0, 3), dtype=np.int64)
    here, there = local.layout, remote.layout
    within = coalesce(runs(local, remote, tokens))
    planes = np.arange(layers[0] * here.planes, layers[1] * here.planes, dtype=np.int64)
    shifts = np.multiply.outer(planes, np.array([here.plane_bytes, there.plane_bytes, 0]))
    ranges = [
        coalesce((shifts[:, None] + _piece_ranges(piece, within, here, there)).reshape(-1, 3))
        for piece in pieces(here.num_kv_heads, here.tp, there.tp, writes)
    ]
    return ranges[0] if len(ranges) == 1 else np.concatenate(ranges)


def _piece_ranges(piece: Piece, within: Numbers, here: KVLayout, there: KVLayout) -> Ranges:
    """In the first plane of both ranks. `within` are runs of tokens; those of which not all heads move are cut into tokens."""
    size = piece.num_heads * here.head_bytes
    if not size == here.token_bytes == there.token_bytes:
        counts = within[:, 2]
        steps = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        within = np.repeat(within, counts, axis=0)
        within[:, :2] += steps[:, None]
        within[:, 2] = 1
    ranges: Ranges = within * np.array([here.token_bytes, there.token_bytes, size])
    ranges[:, 0] += piece.local * here.rank_bytes + piece.first_local * here.head_bytes
    ranges[:, 1] += piece.remote * there.rank_bytes + piece.first_remote * there.head_bytes
    return ranges
