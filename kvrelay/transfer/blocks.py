"""Tokens in blocks: what is the same wherever a kind of memory keeps so many tokens a block. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from kvrelay.transfer.engines.base import TransferError
from kvrelay.transfer.engines.ranges import native_ranges

Numbers = npt.NDArray[np.int64]


class BlockLayout(Protocol):
    @property
    def num_blocks(self) -> int: ...

    @property
    def block_size(self) -> int: ...


L = TypeVar("L", bound=BlockLayout)


class Placement(msgspec.Struct, Generic[L], frozen=True):
    """Where some tokens are: `blocks` hold the tokens from `first_token` on, which begins a block."""

    layout: L
    blocks: Sequence[int]
    first_token: int = 0


def mismatch(mine: msgspec.Struct, theirs: msgspec.Struct, names: Sequence[str]) -> str:
    """The first of the fields that differs; empty if none does."""
    here, there = msgspec.structs.asdict(mine), msgspec.structs.asdict(theirs)
    for name in names:
        if here[name] != there[name]:
            return f"{name} is {here[name]} here and {there[name]} there"
    return ""


def placed_blocks(blocks: Sequence[int], layout: BlockLayout, num_tokens: int) -> tuple[int, ...]:
    """Blocks that a peer named, checked: they exist and have room for the tokens. Raises TransferError."""
    if len(blocks) * layout.block_size < num_tokens:
        raise TransferError(f"{len(blocks)} blocks of {layout.block_size} tokens cannot hold {num_tokens} tokens")
    if blocks and not (min(blocks) >= 0 and max(blocks) < layout.num_blocks):
        raise TransferError(f"block ids {min(blocks)} to {max(blocks)} where there are {layout.num_blocks} blocks")
    return tuple(blocks)


def runs(local: Placement[L], remote: Placement[L], tokens: tuple[int, int]) -> Numbers:
    """Tokens [start, stop), cut at the block edges of both sides: of each run its place here, its place there, its length. A
    place is the number of a token counted through all blocks of the layout. Raises TransferError where a side's blocks do not
    hold them all."""
    native, (start, stop) = native_ranges(), tokens
    for side in (local, remote):
        end = side.first_token + len(side.blocks) * side.layout.block_size
        if start < side.first_token or stop > end:
            raise TransferError(f"tokens {start} to {stop} where there are blocks for {side.first_token} to {end}")
    if native is None:
        return _by_numpy(local, remote, tokens)
    sides = [
        (np.asarray(side.blocks, dtype=np.int64), side.first_token, side.layout.block_size)
        for side in (local, remote)
    ]  # fmt: skip
    found = np.empty((sum((stop - start) // size + 2 for _, _, size in sides), 3), dtype=np.int64)
    named = [(blocks.ctypes.data, first, size) for blocks, first, size in sides]
    return found[: native.kvrelay_runs(*named[0], *named[1], start, stop, found.ctypes.data)]


def _by_numpy(local: Placement[L], remote: Placement[L], tokens: tuple[int, int]) -> Numbers:
    edges = np.unique(np.concatenate([_edges(local, *tokens), _edges(remote, *tokens)]))
    return np.column_stack((_places(local, edges[:-1]), _places(remote, edges[:-1]), np.diff(edges)))


def _edges(placement: Placement[L], start: int, stop: int) -> Numbers:
    """Start, every edge of this side's blocks in between, stop."""
    size, first = placement.layout.block_size, placement.first_token
    inner = np.arange(first + -(-(start - first) // size) * size, stop, size, dtype=np.int64)
    return np.concatenate(([start], inner, [stop])).astype(np.int64)


def _places(placement: Placement[L], tokens: Numbers) -> Numbers:
    index, offset = np.divmod(tokens - placement.first_token, placement.layout.block_size)
    places: Numbers = np.asarray(placement.blocks, dtype=np.int64)[index] * placement.layout.block_size + offset
    return places
