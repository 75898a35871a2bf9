"""Short prompts that are computed alone, at fixed sizes: a card computes so few tokens sooner than a host launches the kernels,
so the pass is one replay of a CUDA graph, as a decode step is.

    sizes      of tokens: a prompt, or what the prefix cache leaves of it, is padded to the next one
    inputs     tokens, positions and slots, then where the row ends; written to pinned memory and sent by one copy
    outputs    logits and token, where those of a decode step's first row would be
    fence      passed when the last layer's KV is stored: a hand-over need not wait for the token

Padding tokens belong to no row, and are stored in the block that the graphs have for themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvrelay.engine.fence import Fence
from kvrelay.engine.interfaces import Row
from kvrelay.kernels.base import AttentionBatch, ForwardBatch
from kvrelay.progress import Progress
from kvrelay.runner.cuda_fence import CountedPasses
from kvrelay.runner.graphs import DecodeGraphs, pass_name
from kvrelay.runner.inputs import Staging

_END = 16  # at 0, 4, 8, 12: the row's tokens, from and to; context length; token whose logits are wanted; place in block tables
_SIZES = (32, *range(64, 1025, 64))


def prompt_sizes(most: int) -> list[int]:
    """Of prompts that a host launches about as slowly as a card computes them, up to the most tokens that one may have."""
    return [size for size in _SIZES if size <= most]


def _end(count: int, context: int, place: int) -> list[int]:
    return [0, count, 0, 0, context, 0, 0, 0, count - 1, 0, 0, 0, place, 0, 0, 0]


class PromptGraphs:
    """Of a model that takes no images. Has the block tables, the memory and the outputs of decode graphs."""

    def __init__(self, graphs: DecodeGraphs, sizes: Sequence[int], progress: Progress) -> None:
        self._graphs = graphs
        self._sizes = list(sizes)
        device, length = graphs.logits.device, 3 * self._sizes[-1] + _END
        self._areas = [Staging(length, device) for _ in range(2)]
        self._turn = 0
        self._flat = torch.zeros(length, dtype=torch.int32, device=device)
        self._last_layer = graphs.num_layers - 1
        self._stored = CountedPasses(device)
        self._replays = graphs.capture("short prompts", self._sizes, self._pad_all, self._pass, progress)
        self._stored.begin()

    def takes(self, rows: list[Row]) -> bool:
        """Whether the step can be replayed: one prompt that ends, or its rest, without adapter and prompt logprobs."""
        row = rows[0]
        is_plain = row.samples == 1 and not row.prompt_logprobs and row.sequence.adapter is None
        return len(rows) == 1 and is_plain and 1 < row.count <= self._sizes[-1]

    def run(self, row: Row) -> Fence:
        """The fence passes when the row's KV is stored in all layers."""
        graphs, count = self._graphs, row.count
        size = next(size for size in self._sizes if size >= count)
        self._turn = 1 - self._turn
        area = self._areas[self._turn]
        area.wait()
        used = 3 * size + _END
        columns = area.array[: 3 * size].reshape(3, size)
        positions = np.arange(row.start, row.start + count)
        place, slots = graphs.slots_of(row, positions)
        columns[0, :count] = row.sequence.tokens[row.start : row.start + count]
        columns[1, :count] = positions
        columns[2, :count] = slots
        columns[:, count:] = np.array([0, 0, graphs.scratch_slot])[:, None]
        area.array[3 * size : used] = _end(count, row.start + count, place)
        graphs.send_tables()
        area.send(used, self._flat[:used])
        self._replays[size]()
        return self._stored.launched()

    def _pass(self, size: int) -> None:
        flat = self._flat[: 3 * size + _END]
        wide = flat.long()
        graphs, columns, end = self._graphs, wide[: 3 * size].view(3, size), flat[3 * size :]
        batch = ForwardBatch(
            token_ids=columns[0],
            positions=columns[1],
            slots=columns[2],
            attention=AttentionBatch(
                query_start=end[:2],
                context_lens=end[4:5],
                block_tables=graphs.gathered(end[12:13]),
                max_query=size,
                max_context=max(graphs.max_context, size) + 1,  # more than a row's tokens: there may be a prefix
            ),
            logit_rows=wide[3 * size + 8 : 3 * size + 9],
            name=pass_name("short prompts", size),
        )
        graphs.compute(batch, self._on_layer)

    def _on_layer(self, layer: int) -> None:
        if layer == self._last_layer:
            self._stored.mark()

    def _pad_all(self, size: int) -> None:
        """A prompt of nothing but padding."""
        graphs = self._graphs
        used = 3 * size + _END
        self._flat[:used].zero_()
        self._flat[2 * size : 3 * size] = graphs.scratch_slot
        self._flat[3 * size : used] = torch.tensor(_end(size, size, graphs.no_place), dtype=torch.int32)
