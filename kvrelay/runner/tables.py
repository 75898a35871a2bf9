"""The block tables of live sequences, kept between steps as the rows of one int32 matrix.

A table is compared with the sequence's own (a comparison of equal lists costs a few nanoseconds per block) and only what
changed is written, so nothing here depends on how the engine changes tables: it may append, copy on write, or start over.

On CUDA (`sent`) the matrix has a twin on the device, whose address never changes: only changed entries are sent, and a pass
gathers the rows it wants there. It has places for twice a full batch; when all are taken, those of sequences that no row of
the step belongs to are given up, and sent again should such a sequence return.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.engine.interfaces import Row
from kvrelay.runner.inputs import Inputs


class BlockTables:
    """What stands behind a table's end means nothing, but is always a block id."""

    def __init__(self, max_rows: int, max_blocks: int, device: torch.device, *, sent: bool) -> None:
        """`sent`: passes read a twin on the device."""
        self._fixed = sent
        num_places = max(1, 2 * max_rows if self._fixed else max_rows)
        self._matrix = np.zeros((num_places, max(1, max_blocks + self._fixed)), dtype=np.int32)
        self._tables: dict[int, list[int]] = {}  # what each matrix row holds
        self._places: dict[int, int] = {}
        self._free = list(range(num_places))[::-1]
        self._changed: list[tuple[int, int, int]] = []  # place, first and end of entries that the device lacks
        # The row behind the last place is of no sequence.
        shape = (num_places + 1, self._matrix.shape[1])
        self.twin = torch.zeros(shape, dtype=torch.int32, device=device) if sent else None

    def __len__(self) -> int:
        return len(self._places)

    def places(self, rows: list[Row]) -> list[int]:
        """The matrix row of each plan row's sequence, brought up to date."""
        tables, places, result = self._tables, self._places, []
        if self._fixed and len(self._free) < len(rows):
            self._make_room(rows)
        for row in rows:
            sequence = row.sequence
            key, table = sequence.key, sequence.block_table
            if tables.get(key) != table:
                self._update(key, list(table))
            result.append(places[key])
        return result

    def at(self, places: NDArray[np.int64], indexes: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._matrix[places, indexes].astype(np.int64)

    def fill(self, inputs: Inputs, places: NDArray[np.int64], num_blocks: NDArray[np.int64], width: int) -> None:
        """Before the inputs are sent: the first `width` columns of those places, with 0 past a row's `num_blocks`; or, where
        there is a twin, the places and what it lacks."""
        if self.twin is None:
            out = inputs.array("block_tables", len(places) * width).reshape(len(places), width)
            np.take(self._matrix[:, :width], places, axis=0, out=out)
            out *= np.arange(width) < num_blocks[:, None]
            return
        inputs.array("places", len(places))[:] = places
        self.fill_changed(inputs)

    def gathered(self, inputs: Inputs, num_rows: int, width: int) -> torch.Tensor:
        """After they were sent: [rows, width]."""
        if self.twin is None:
            return inputs.tensor("block_tables", num_rows, width)
        self.take_changed(inputs)
        return torch.index_select(self.twin[:, :width], 0, inputs.tensor("places", num_rows))

    @property
    def num_changed(self) -> int:
        return sum(end - first for _, first, end in self._changed)

    def fill_changed(self, inputs: Inputs) -> None:
        """Each array is filled before the next one is asked for, which may move them."""
        if not self._changed:
            return
        width = self._matrix.shape[1]
        entries = [np.arange(place * width + first, place * width + end) for place, first, end in self._changed]
        inputs.array("changed_entries", self.num_changed)[:] = np.concatenate(entries)
        blocks = [self._matrix[place, first:end] for place, first, end in self._changed]
        inputs.array("changed_blocks", self.num_changed)[:] = np.concatenate(blocks)

    def take_changed(self, inputs: Inputs) -> None:
        count = self.num_changed
        if count and self.twin is not None:
            blocks = inputs.tensor("changed_blocks", count)
            self.twin.view(-1).index_copy_(0, inputs.tensor("changed_entries", count), blocks)
        self._changed.clear()

    def forget(self, keys: Iterable[int]) -> None:
        for key in keys:
            if self._tables.pop(key, None) is not None:
                self._free.append(self._places.pop(key))

    def _make_room(self, rows: list[Row]) -> None:
        wanted = {row.sequence.key for row in rows}
        if sum(key not in self._places for key in wanted) > len(self._free):
            self.forget([key for key in self._places if key not in wanted])

    def _update(self, key: int, table: list[int]) -> None:
        if len(table) > self._matrix.shape[1]:
            self._resize(self._matrix.shape[0], max(len(table), 2 * self._matrix.shape[1]))
        known = self._tables.get(key)
        if known is None:
            self._places[key] = self._new_place()
            known = []
        place = self._places[key]
        same = len(known) if table[: len(known)] == known else 0
        self._matrix[place, same : len(table)] = table[same:]
        if self._fixed:
            self._changed.append((place, same, len(table)))
        self._tables[key] = table

    def _new_place(self) -> int:
        if not self._free:
            num_rows = self._matrix.shape[0]
            self._resize(2 * num_rows, self._matrix.shape[1])
            self._free = list(range(num_rows, 2 * num_rows))[::-1]
        return self._free.pop()

    def _resize(self, num_rows: int, width: int) -> None:
        assert not self._fixed, "a table on the device is longer than the longest sequence, or a batch wider than planned"
        larger = np.zeros((num_rows, width), dtype=np.int32)
        larger[: self._matrix.shape[0], : self._matrix.shape[1]] = self._matrix
        self._matrix = larger
