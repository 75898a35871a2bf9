"""The blocks of a worker's embedding pool: which are free, and what is in the others. Several threads may use it.

    free ──take──> held ──give_back──> free
                    └──quarantine──> quarantined ──give_back──> free     a peer may still write them

An embedding outside of any pool is a `Piece`, or several in a row.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from kvrelay.transfer.embedding.layout import EmbeddingLayout
from kvrelay.transfer.region import Region

Rows = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int32]
WriteRows = Callable[[int, Rows], None]
"""Called with the number of a token and memory for the rows of it and its successors, which it must fill."""


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Tokens of an embedding from `start` on. Rows are bytes [tokens, row_bytes]: what they mean is the models' business."""

    start: int
    rows: Rows
    fill_ids: Ints  # [tokens]
    positions: Ints  # [tokens, 3]
    home: Piece | None = None  # memory for all tokens of the embedding, which this is a part of

    @property
    def stop(self) -> int:
        return self.start + len(self.fill_ids)

    def put(self, piece: Piece) -> Piece:
        """Copies the piece to its place here; returns that."""
        here = slice(piece.start - self.start, piece.stop - self.start)
        self.rows[here], self.fill_ids[here], self.positions[here] = piece.rows, piece.fill_ids, piece.positions
        return Piece(piece.start, self.rows[here], self.fill_ids[here], self.positions[here], self)


def empty_piece(num_tokens: int, row_bytes: int) -> Piece:
    """Memory for a whole embedding. Raises MemoryError."""
    rows = np.empty((num_tokens, row_bytes), dtype=np.uint8)
    return Piece(0, rows, np.empty(num_tokens, dtype=np.int32), np.empty((num_tokens, 3), dtype=np.int32))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Embedding:
    """What a producer offers. `aux` holds up to `aux_items - 1` numbers; the number of tokens is put before them."""

    rows: Rows | WriteRows
    fill_ids: Ints
    positions: Ints
    aux: Sequence[int] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.fill_ids)


def joined(pieces: Sequence[Piece]) -> Piece:
    """One piece of several that follow each other. Copies, unless there is but one."""
    if len(pieces) == 1:
        return pieces[0]
    return Piece(
        pieces[0].start,
        np.concatenate([piece.rows for piece in pieces]),
        np.concatenate([piece.fill_ids for piece in pieces]),
        np.concatenate([piece.positions for piece in pieces]),
    )


def owned(pieces: Sequence[Piece]) -> Piece:
    """All tokens of an embedding, in memory that is its holder's own. What is at home already is not copied again."""
    home = pieces[0].home
    if home is None:
        home = empty_piece(pieces[-1].stop, pieces[0].rows.shape[1])
    for piece in pieces:
        if piece.home is not home:
            home.put(piece)
    return home


class PoolCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks; the three kinds sum to `total`."""

    total: int
    free: int
    held: int
    quarantined: int


class EmbeddingPool:
    """Blocks in a region that peers can reach."""

    def __init__(self, layout: EmbeddingLayout, region: Region) -> None:
        assert region.buffer is not None
        assert region.size_bytes >= layout.size_bytes
        self.layout = layout
        memory = np.frombuffer(region.buffer, dtype=np.uint8)
        tokens, blocks = layout.num_tokens, layout.num_blocks
        self._rows: Rows = memory[: tokens * layout.row_bytes].reshape(tokens, layout.row_bytes)
        self._fill_ids: Ints = np.frombuffer(region.buffer, np.int32, tokens, layout.fill_ids_offset)
        positions = np.frombuffer(region.buffer, np.int32, tokens * 3, layout.positions_offset)
        self._positions: Ints = positions.reshape(tokens, 3)
        aux = np.frombuffer(region.buffer, np.int64, blocks * layout.aux_items, layout.aux_offset)
        self._aux = aux.reshape(blocks, layout.aux_items)
        self._lock = threading.Lock()
        self._free = np.ones(blocks, dtype=bool)
        self._quarantined: set[int] = set()

    # Blocks

    def take(self, num_tokens: int) -> tuple[int, ...] | None:
        """Blocks for so many tokens, side by side if possible; none if there are not enough."""
        with self._lock:
            return self._take(self.layout.blocks_for(num_tokens))

    def take_up_to(self, num_tokens: int) -> tuple[int, ...]:
        with self._lock:
            count = min(self.layout.blocks_for(num_tokens), int(self._free.sum()))
            return self._take(count) or ()

    def give_back(self, blocks: Sequence[int]) -> None:
        if not blocks:
            return
        with self._lock:
            assert not self._free[list(blocks)].any(), "given back twice"
            self._free[list(blocks)] = True
            self._quarantined.difference_update(blocks)

    def quarantine(self, blocks: Sequence[int]) -> None:
        """They stay out of use until they are given back, and are counted by themselves."""
        with self._lock:
            self._quarantined.update(blocks)

    def counts(self) -> PoolCounts:
        with self._lock:
            free, quarantined = int(self._free.sum()), len(self._quarantined)
        total = self.layout.num_blocks
        return PoolCounts(total=total, free=free, held=total - free - quarantined, quarantined=quarantined)

    def _take(self, count: int) -> tuple[int, ...] | None:
        free = np.flatnonzero(self._free)
        if count > len(free):
            return None
        first = _first_run(free, count)
        taken = free[first : first + count] if first is not None else free[:count]
        self._free[taken] = False
        return tuple(taken.tolist())

    # What is in them

    def store(self, blocks: Sequence[int], embedding: Embedding) -> None:
        assert embedding.positions.shape == (embedding.num_tokens, 3)
        assert callable(embedding.rows) or embedding.rows.shape == (embedding.num_tokens, self.layout.row_bytes)
        for start, places in self._runs(blocks, embedding.num_tokens):
            stop = start + places.stop - places.start
            if callable(embedding.rows):
                embedding.rows(start, self._rows[places])
            else:
                self._rows[places] = embedding.rows[start:stop]
            self._fill_ids[places] = embedding.fill_ids[start:stop]
            self._positions[places] = embedding.positions[start:stop]
        aux = self._aux[blocks[0]]
        aux[:] = 0
        aux[0] = embedding.num_tokens
        aux[1 : 1 + len(embedding.aux)] = embedding.aux

    def pieces(self, blocks: Sequence[int], first_token: int, num_tokens: int) -> list[Piece]:
        """Views of the tokens that the blocks hold from `first_token` on, one for each run of blocks side by side."""
        return [
            Piece(first_token + start, self._rows[places], self._fill_ids[places], self._positions[places])
            for start, places in self._runs(blocks, num_tokens)
        ]

    def aux(self, block: int) -> tuple[int, ...]:
        return tuple(self._aux[block].tolist())

    def _runs(self, blocks: Sequence[int], num_tokens: int) -> Iterator[tuple[int, slice]]:
        """For each run of neighbouring blocks: the first token in it, counted from 0, and the places in the planes."""
        size = self.layout.block_size
        numbers = np.asarray(blocks[: self.layout.blocks_for(num_tokens)], dtype=np.int64)
        for run in np.split(np.arange(len(numbers)), np.flatnonzero(np.diff(numbers) != 1) + 1):
            if not len(run):
                return
            start = int(run[0]) * size
            stop = min(num_tokens, (int(run[-1]) + 1) * size)
            place = int(numbers[run[0]]) * size
            yield start, slice(place, place + stop - start)


def _first_run(free: npt.NDArray[np.intp], count: int) -> int | None:
    """Where in the sorted numbers the first `count` neighbours begin."""
    if count == 0 or count > len(free):
        return None
    begins = np.flatnonzero(free[count - 1 :] - free[: len(free) - count + 1] == count - 1)
    return int(begins[0]) if len(begins) else None
