"""A plan's rows as the tensors of one forward pass.

Everything is written into host arrays that live as long as the runner (`inputs.py`); block tables are kept between steps
(`tables.py`). Steps that can be replayed are built elsewhere (`graphs.py`, `prompt_graphs.py`).
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.engine.interfaces import Row, StepPlan
from kvrelay.kernels.base import AttentionBatch, ForwardBatch, bulk_end
from kvrelay.runner.inputs import Inputs, make_inputs
from kvrelay.runner.lora import lora_batch
from kvrelay.runner.tables import BlockTables
from kvrelay.runner.vision.images import ImageRows

_NOT_KNOWN = [0]  # stands for a token that the device knows


@dataclass(slots=True)
class LogitLayout:
    """Whose logits are where in the forward pass's result."""

    sampled: list[tuple[int, int]]  # row of the plan, row of the logits it samples from, or whose best tokens it asks for
    prompts: list[tuple[int, int, int]]  # row of the plan, first of its prompt positions in the logits, how many
    num_rows: int

    def groups(self) -> list[tuple[int, int]]:
        """Row of the plan and number of logits of each group, in the order of the logits."""
        groups = [(first, row, count) for row, first, count in self.prompts]
        groups += [(place, row, 1) for row, place in self.sampled]
        return [(row, count) for _, row, count in sorted(groups)]


@dataclass(frozen=True, slots=True)
class LateTokens:
    """Those that the host does not know: of which rows of the plan, and where among `tokens` on the device."""

    rows: list[int]
    sources: list[int]
    tokens: torch.Tensor


class BatchBuilder:
    """Turns plans into forward batches. A batch is valid until the next `build`."""

    def __init__(
        self,
        *,
        block_size: int,
        max_tokens: int,
        max_rows: int,
        max_blocks: int,
        device: torch.device,
        images: ImageRows | None = None,
        sent: bool = False,
        max_context: int = 0,
        bulk: bool = False,
    ) -> None:
        """`sent`: passes read twins of the arrays on the device, as they must on CUDA. `max_context`: the longest there may be,
        where the kernel for single queries is compiled for it, so that the last layer of a prompt may attend with its last
        token alone. `bulk`: whether passes say which tokens are the bulk of their prompts."""
        self._block_size = block_size
        self.images = images  # None: a text model
        self.tables = BlockTables(max_rows, max_blocks, device, sent=sent)
        self._max_context = max_context
        self._has_bulk = bulk
        self._one_row = torch.arange(2, dtype=torch.int32, device=device) if max_context else None
        self._inputs = make_inputs(max_tokens=max_tokens, max_rows=max_rows, max_blocks=max_blocks, device=device, sent=sent)

    @property
    def num_known_sequences(self) -> int:
        return max(len(self.tables), 0 if self.images is None else len(self.images))

    def forget(self, keys: list[int]) -> None:
        self.tables.forget(keys)
        if self.images is not None:
            self.images.forget(keys)

    def build(self, plan: StepPlan, late: LateTokens | None = None) -> tuple[ForwardBatch, LogitLayout]:
        rows, inputs = plan.rows, self._inputs
        assert rows, "a forward pass needs at least one row"
        inputs.begin()
        starts = np.array([row.start for row in rows], dtype=np.int64)
        counts = np.array([row.count for row in rows], dtype=np.int64)
        places = np.array(self.tables.places(rows), dtype=np.int64)
        num_tokens = int(counts.sum())
        token_ids = inputs.array("token_ids", num_tokens)
        _fill_tokens(token_ids, rows)
        query_start = inputs.array("query_start", len(rows) + 1)
        query_start[0] = 0
        np.cumsum(counts, out=query_start[1:])
        positions = self._fill_positions(inputs, starts, counts, places, query_start, num_tokens)
        images = None if self.images is None else self.images.fill(rows, query_start, token_ids, positions)
        context_lens = starts + counts
        inputs.array("context_lens", len(rows))[:] = context_lens
        if late is not None:
            inputs.array("late_places", len(late.rows))[:] = query_start[late.rows]
            inputs.array("late_sources", len(late.rows))[:] = late.sources
        layout, wanted = _logit_layout(rows, query_start)
        inputs.array("logit_rows", len(wanted))[:] = wanted
        max_context = int(context_lens.max())
        width = -(-max_context // self._block_size)
        self.tables.fill(inputs, places, -(-context_lens // self._block_size), width)
        inputs.send()
        token_ids_there = inputs.tensor("token_ids", num_tokens)
        if late is not None:
            places_there, sources = (inputs.tensor(name, len(late.rows)) for name in ("late_places", "late_sources"))
            token_ids_there[places_there] = late.tokens[sources]
        tables, device_lens = self.tables.gathered(inputs, len(rows), width), inputs.tensor("context_lens", len(rows))
        batch = ForwardBatch(
            token_ids=token_ids_there,
            positions=inputs.tensor("positions", num_tokens),
            slots=inputs.tensor("slots", num_tokens),
            attention=AttentionBatch(
                query_start=inputs.tensor("query_start", len(rows) + 1),
                context_lens=device_lens,
                block_tables=tables,
                max_query=int(counts.max()),
                max_context=max_context,
                lengths=tuple(zip(counts.tolist(), context_lens.tolist(), strict=True)) if num_tokens > len(rows) else None,
            ),
            logit_rows=inputs.tensor("logit_rows", len(wanted)),
            ends=self._ends(device_lens, tables) if len(layout.sampled) == len(wanted) == len(rows) == 1 else None,
            images=images,
            lora=lora_batch(rows, query_start, layout.groups),
            bulk=_bulk_of(rows, query_start) if self._has_bulk else (),
        )
        return batch, layout

    def _ends(self, context_lens: torch.Tensor, tables: torch.Tensor) -> AttentionBatch | None:
        """Of one row, so that it is the kernel of a decode step, which is compiled: that is chosen by the longest context there
        may be."""
        if self._one_row is None:
            return None
        return AttentionBatch(self._one_row, context_lens, tables, max_query=1, max_context=self._max_context)

    def _fill_positions(
        self,
        inputs: Inputs,
        starts: NDArray[np.int64],
        counts: NDArray[np.int64],
        places: NDArray[np.int64],
        query_start: NDArray[np.int64],
        num_tokens: int,
    ) -> NDArray[np.int64]:
        positions = inputs.array("positions", num_tokens)
        if num_tokens == len(starts):
            positions[:] = starts
        else:
            np.add(np.arange(num_tokens), np.repeat(starts - query_start[:-1], counts), out=positions)
            places = np.repeat(places, counts)
        slots = inputs.array("slots", num_tokens)
        blocks, offsets = np.divmod(positions, self._block_size)
        np.multiply(self.tables.at(places, blocks), self._block_size, out=slots)
        slots += offsets
        return positions


def _fill_tokens(token_ids: NDArray[np.int64], rows: list[Row]) -> None:
    if len(token_ids) == len(rows):  # nothing but single tokens: one conversion instead of one per row
        token_ids[:] = [token for row in rows for token in row.sequence.tokens[row.start : row.start + 1] or _NOT_KNOWN]
        return
    first = 0
    for row in rows:
        tokens = row.sequence.tokens[row.start : row.start + row.count] or _NOT_KNOWN
        token_ids[first : first + row.count] = array("i", tokens)  # a third of the time that NumPy takes for a list
        first += row.count


def _bulk_of(rows: list[Row], query_start: NDArray[np.int64]) -> tuple[tuple[int, int], ...]:
    found = []
    for row, begin in zip(rows, query_start.tolist(), strict=False):
        if row.count > 1 or not row.samples:  # a shortcut: what decodes has none
            count = min(row.count, bulk_end(row.sequence.num_prompt_tokens) - row.start)
            if count > 0:
                found.append((begin, begin + count))
    return tuple(found)


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
