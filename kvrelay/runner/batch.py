"""A plan's rows as the tensors of one forward pass.

Everything is written into host arrays that live as long as the runner; the tensors handed out are views on them (CPU) or on
device twins that a non-blocking copy fills (CUDA). Two sets of arrays take turns, so that the copies of a step that is still
under way are not overwritten by the next one. This is the seam for CUDA graphs: the addresses repeat every second step.

A sequence's block table is kept as a row of one int32 matrix between steps. It is compared with the sequence's own (a
comparison of equal lists costs a few nanoseconds per block) and only what changed is written, so nothing here depends on how
the engine changes tables: it may append, copy on write, or start over.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.engine.interfaces import Row, StepPlan
from kvrelay.kernels.base import AttentionBatch, ForwardBatch
from kvrelay.runner.vision.images import ImageRows


@dataclass(slots=True)
class LogitLayout:
    """Whose logits are where in the forward pass's result."""

    sampled: list[tuple[int, int]]  # row of the plan, row of the logits it samples from, or whose best tokens it asks for
    prompts: list[tuple[int, int, int]]  # row of the plan, first of its prompt positions in the logits, how many
    num_rows: int


class BlockTables:
    """The block tables of all live sequences, one matrix row each. What stands behind a table's end means nothing."""

    def __init__(self, max_rows: int, max_blocks: int) -> None:
        self._matrix = np.zeros((max(1, max_rows), max(1, max_blocks)), dtype=np.int32)
        self._tables: dict[int, list[int]] = {}  # what each matrix row holds
        self._places: dict[int, int] = {}
        self._free = list(range(self._matrix.shape[0]))[::-1]

    def __len__(self) -> int:
        return len(self._places)

    def places(self, rows: list[Row]) -> list[int]:
        """The matrix row of each plan row's sequence, brought up to date."""
        tables, places, result = self._tables, self._places, []
        for row in rows:
            sequence = row.sequence
            key, table = sequence.key, sequence.block_table
            if tables.get(key) != table:
                self._update(key, list(table))
            result.append(places[key])
        return result

    def gather(self, places: NDArray[np.int64], num_blocks: NDArray[np.int64], out: NDArray[np.int32]) -> None:
        """The first out.shape[1] columns of those rows; entries past a row's `num_blocks` become 0."""
        width = out.shape[1]
        np.take(self._matrix[:, :width], places, axis=0, out=out)
        out *= np.arange(width) < num_blocks[:, None]

    def at(self, places: NDArray[np.int64], indexes: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._matrix[places, indexes].astype(np.int64)

    def forget(self, keys: Iterable[int]) -> None:
        for key in keys:
            if self._tables.pop(key, None) is not None:
                self._free.append(self._places.pop(key))

    def _update(self, key: int, table: list[int]) -> None:
        if len(table) > self._matrix.shape[1]:
            self._resize(self._matrix.shape[0], max(len(table), 2 * self._matrix.shape[1]))
        known = self._tables.get(key)
        if known is None:
            self._places[key] = self._new_place()
            known = []
        place = self._matrix[self._places[key]]
        same = len(known) if table[: len(known)] == known else 0
        place[same : len(table)] = table[same:]
        self._tables[key] = table

    def _new_place(self) -> int:
        if not self._free:
            num_rows = self._matrix.shape[0]
            self._resize(2 * num_rows, self._matrix.shape[1])
            self._free = list(range(num_rows, 2 * num_rows))[::-1]
        return self._free.pop()

    def _resize(self, num_rows: int, width: int) -> None:
        larger = np.zeros((num_rows, width), dtype=np.int32)
        larger[: self._matrix.shape[0], : self._matrix.shape[1]] = self._matrix
        self._matrix = larger


class _Buffer:
    """A flat host array with, on CUDA, a device twin. Grows when a step needs more, which is rare."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._allocate(size)

    def _allocate(self, size: int) -> None:
        self._host = torch.zeros(max(1, size), dtype=self._dtype, pin_memory=self._device.type == "cuda")
        self._twin = self._host if self._device.type == "cpu" else torch.zeros_like(self._host, device=self._device)
        self._array: NDArray[Any] = self._host.numpy()
        self._view: torch.Tensor | None = None  # the last one, which the next step usually wants again

    def array(self, size: int) -> NDArray[Any]:
        """The first `size` elements, to be filled."""
        if size > self._array.shape[0]:
            self._allocate(max(size, 2 * self._array.shape[0]))
        return self._array[:size]

    def tensor(self, *shape: int) -> torch.Tensor:
        """What was filled, on the device."""
        size = math.prod(shape)
        if self._twin is self._host:
            if self._view is None or self._view.shape != shape:
                self._view = self._twin[:size].view(*shape)
            return self._view
        view = self._twin[:size]
        view.copy_(self._host[:size], non_blocking=True)
        return view.view(*shape)


class _Buffers:
    """The inputs of one forward pass."""

    def __init__(self, max_tokens: int, max_rows: int, max_blocks: int, device: torch.device) -> None:
        self.token_ids = _Buffer(max_tokens, torch.int64, device)
        self.positions = _Buffer(max_tokens, torch.int64, device)
        self.slots = _Buffer(max_tokens, torch.int64, device)
        self.logit_rows = _Buffer(max_rows, torch.int64, device)
        self.query_start = _Buffer(max_rows + 1, torch.int32, device)
        self.context_lens = _Buffer(max_rows, torch.int32, device)
        self.block_tables = _Buffer(max_rows * max_blocks, torch.int32, device)
        self._copied = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Until the device has taken what was filled in last: a step without output is collected before it has run."""
        if self._copied is not None:
            self._copied.synchronize()

    def filled(self) -> None:
        if self._copied is not None:
            self._copied.record()


class BatchBuilder:
    """Turns plans into forward batches. A batch is valid until the second next `build`."""

    def __init__(
        self,
        *,
        block_size: int,
        max_tokens: int,
        max_rows: int,
        max_blocks: int,
        device: torch.device,
        images: ImageRows | None = None,
    ) -> None:
        self._block_size = block_size
        self._images = images  # None: a text model
        self._tables = BlockTables(max_rows, max_blocks)
        self._sets = [_Buffers(max_tokens, max_rows, max_blocks, device) for _ in range(2 if device.type == "cuda" else 1)]
        self._turn = 0

    @property
    def num_known_sequences(self) -> int:
        return max(len(self._tables), 0 if self._images is None else len(self._images))

    def forget(self, keys: list[int]) -> None:
        self._tables.forget(keys)
        if self._images is not None:
            self._images.forget(keys)

    def build(self, plan: StepPlan) -> tuple[ForwardBatch, LogitLayout]:
        rows = plan.rows
        assert rows, "a forward pass needs at least one row"
        buffers = self._sets[self._turn]
        self._turn = (self._turn + 1) % len(self._sets)
        buffers.wait()
        starts = np.array([row.start for row in rows], dtype=np.int64)
        counts = np.array([row.count for row in rows], dtype=np.int64)
        places = np.array(self._tables.places(rows), dtype=np.int64)
        num_tokens = int(counts.sum())
        self._fill_tokens(buffers, rows, num_tokens)
        query_start = buffers.query_start.array(len(rows) + 1)
        query_start[0] = 0
        np.cumsum(counts, out=query_start[1:])
        self._fill_positions(buffers, starts, counts, places, query_start, num_tokens)
        images = None
        if self._images is not None:
            token_ids, positions = buffers.token_ids.array(num_tokens), buffers.positions.array(num_tokens)
            images = self._images.fill(rows, query_start, token_ids, positions)
        attention = self._attention(buffers, starts + counts, places, counts)
        layout, wanted = _logit_layout(rows, query_start)
        buffers.logit_rows.array(len(wanted))[:] = wanted
        batch = ForwardBatch(
            token_ids=buffers.token_ids.tensor(num_tokens),
            positions=buffers.positions.tensor(num_tokens),
            slots=buffers.slots.tensor(num_tokens),
            attention=attention,
            logit_rows=buffers.logit_rows.tensor(len(wanted)),
            images=images,
        )
        buffers.filled()
        return batch, layout

    def _fill_tokens(self, buffers: _Buffers, rows: list[Row], num_tokens: int) -> None:
        token_ids = buffers.token_ids.array(num_tokens)
        if num_tokens == len(rows):  # nothing but single tokens: one conversion instead of one per row
            token_ids[:] = [row.sequence.tokens[row.start] for row in rows]
            return
        first = 0
        for row in rows:
            token_ids[first : first + row.count] = row.sequence.tokens[row.start : row.start + row.count]
            first += row.count

    def _fill_positions(
        self,
        buffers: _Buffers,
        starts: NDArray[np.int64],
        counts: NDArray[np.int64],
        places: NDArray[np.int64],
        query_start: NDArray[np.int64],
        num_tokens: int,
    ) -> None:
        positions = buffers.positions.array(num_tokens)
        if num_tokens == len(starts):
            positions[:] = starts
        else:
            np.add(np.arange(num_tokens), np.repeat(starts - query_start[:-1], counts), out=positions)
            places = np.repeat(places, counts)
        slots = buffers.slots.array(num_tokens)
        blocks, offsets = np.divmod(positions, self._block_size)
        np.multiply(self._tables.at(places, blocks), self._block_size, out=slots)
        slots += offsets

    def _attention(
        self, buffers: _Buffers, context_lens: NDArray[np.int64], places: NDArray[np.int64], counts: NDArray[np.int64]
    ) -> AttentionBatch:
        num_rows, max_context, max_query = len(places), int(context_lens.max()), int(counts.max())
        width = -(-max_context // self._block_size)
        buffers.context_lens.array(num_rows)[:] = context_lens
        table = buffers.block_tables.array(num_rows * width).reshape(num_rows, width)
        self._tables.gather(places, -(-context_lens // self._block_size), table)
        return AttentionBatch(
            query_start=buffers.query_start.tensor(num_rows + 1),
            context_lens=buffers.context_lens.tensor(num_rows),
            block_tables=buffers.block_tables.tensor(num_rows, width),
            max_query=max_query,
            max_context=max_context,
            lengths=tuple(zip(counts.tolist(), context_lens.tolist(), strict=True)) if max_query > 1 else None,
        )


def num_prompt_targets(row: Row) -> int:
    """How many tokens of the row are followed by a prompt token, whose logprob they tell."""
    if not row.prompt_logprobs:
        return 0
    return max(0, min(row.count, row.sequence.num_prompt_tokens - 1 - row.start))


def _logit_layout(rows: list[Row], query_start: NDArray[np.int64]) -> tuple[LogitLayout, list[int]]:
    """Where logits are wanted: after the last token of a row that samples, and after every token that a prompt logprob asks."""
    ends = query_start.tolist()
    layout = LogitLayout(sampled=[], prompts=[], num_rows=0)
    wanted: list[int] = []
    for index, row in enumerate(rows):
        num_targets = num_prompt_targets(row)
        if num_targets:
            layout.prompts.append((index, len(wanted), num_targets))
            wanted.extend(range(ends[index], ends[index] + num_targets))
        if row.samples or row.candidates:
            layout.sampled.append((index, len(wanted)))
            wanted.append(ends[index + 1] - 1)
    layout.num_rows = len(wanted)
    return layout, wanted
