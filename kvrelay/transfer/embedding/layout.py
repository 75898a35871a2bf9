"""Where a token of an embedding lies in a worker's pool, and which bytes to move for which tokens. Pure arithmetic.

A pool is one region of four planes (`wire.embedding.PoolLayout`):

    rows       [blocks, block_size, row_bytes]        hidden * (1 + deepstack) items a token
    fill ids   [blocks, block_size] int32             the token id that stands for it in the prompt
    positions  [blocks, block_size, 3] int32          its M-RoPE position: time, height, width
    aux        [blocks, aux_items] int64              once an embedding, in its first block: the true number of tokens, then
                                                      what the two workers agree on (the grid of the image)

Block sizes may differ between two pools, and a resumed round may begin inside a block of the producer; everything else must
be equal.
"""

from __future__ import annotations

import msgspec
import numpy as np

from kvrelay.transfer.blocks import Placement, mismatch, placed_blocks, runs
from kvrelay.transfer.engines.base import Ranges, TransferError
from kvrelay.transfer.engines.ranges import coalesce
from kvrelay.wire.embedding import Init, PoolLayout, Resume

FILL_ID_BYTES = 4
POSITION_BYTES = 3 * 4
AUX_ITEM_BYTES = 8
_ALIGNED_BYTES = 64


class EmbeddingLayout(PoolLayout, frozen=True, kw_only=True):
    """The shape of one worker's pool, with its arithmetic."""

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def row_bytes(self) -> int:
        return self.hidden * (1 + self.deepstack) * self.item_bytes

    @property
    def token_bytes(self) -> int:
        """All that moves for one token."""
        return self.row_bytes + FILL_ID_BYTES + POSITION_BYTES

    @property
    def aux_bytes(self) -> int:
        return self.aux_items * AUX_ITEM_BYTES

    @property
    def fill_ids_offset(self) -> int:
        return _aligned(self.num_tokens * self.row_bytes)

    @property
    def positions_offset(self) -> int:
        return self.fill_ids_offset + _aligned(self.num_tokens * FILL_ID_BYTES)

    @property
    def aux_offset(self) -> int:
        return self.positions_offset + _aligned(self.num_tokens * POSITION_BYTES)

    @property
    def size_bytes(self) -> int:
        return self.aux_offset + self.num_blocks * self.aux_bytes

    def size_of(self, num_tokens: int) -> int:
        """Bytes that move for an embedding of so many tokens."""
        return num_tokens * self.token_bytes + self.aux_bytes

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def mismatch(self, other: EmbeddingLayout) -> str:
        """Why embeddings cannot move between the two; empty if they can. The size of pools and blocks may differ."""
        return mismatch(self, other, ("hidden", "deepstack", "dtype", "item_bytes", "aux_items"))


def embedding_layout(layout: PoolLayout) -> EmbeddingLayout:
    """As it came over the wire, with arithmetic. Raises TransferError if there can be no such pool."""
    named = msgspec.structs.asdict(layout)
    for name in ("num_blocks", "block_size", "hidden", "item_bytes", "aux_items"):
        if named[name] < 1:
            raise TransferError(f"a pool whose {name} is {named[name]}")
    if layout.deepstack < 0:
        raise TransferError(f"a pool whose deepstack is {layout.deepstack}")
    return EmbeddingLayout(**named)


def embedding_ranges(local: Placement[EmbeddingLayout], remote: Placement[EmbeddingLayout], tokens: tuple[int, int]) -> Ranges:
    """The bytes of tokens [start, stop) in all planes, contiguous neighbours joined; with token 0 also the aux data."""
    if tokens[0] >= tokens[1]:
        return np.empty((0, 3), dtype=np.int64)
    here, there, counts = runs(local, remote, tokens).T
    mine, theirs = local.layout, remote.layout
    planes = [
        (0, 0, mine.row_bytes),
        (mine.fill_ids_offset, theirs.fill_ids_offset, FILL_ID_BYTES),
        (mine.positions_offset, theirs.positions_offset, POSITION_BYTES),
    ]
    parts = [
        np.column_stack((base_here + here * size, base_there + there * size, counts * size))
        for base_here, base_there, size in planes
    ]
    if tokens[0] == 0:
        aux = (mine.aux_offset + local.blocks[0] * mine.aux_bytes, theirs.aux_offset + remote.blocks[0] * theirs.aux_bytes)
        parts.append(np.array([[*aux, mine.aux_bytes]], dtype=np.int64))
    return coalesce(np.concatenate(parts).astype(np.int64))


def check_room(layout: EmbeddingLayout, message: Init | Resume) -> tuple[int, ...]:
    """The blocks that a consumer named, checked against everything it said about them. Raises TransferError."""
    size, tokens, blocks = message.block_size, message.allocated_tokens, message.blocks
    if size != layout.block_size:
        raise TransferError(f"blocks of {size} tokens, but the pool that was mapped has blocks of {layout.block_size}")
    if tokens < 1 or len(blocks) != layout.blocks_for(tokens):
        raise TransferError(f"{len(blocks)} blocks of {size} tokens for {tokens} allocated tokens")
    if len(set(blocks)) != len(blocks):
        raise TransferError("a block is named twice")
    return placed_blocks(blocks, layout, tokens)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
