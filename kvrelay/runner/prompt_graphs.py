"""Short prompts at fixed sizes and addresses, so that one is computed by the replay of a CUDA graph.

A prompt of a few hundred tokens is computed about as fast as a host launches its kernels one by one. A pass of one row that
begins at its first token is padded to the next size instead and replayed; all others are launched.

    inputs     token ids, slots, then the numbers of `_TAIL`; written to pinned memory and sent by one copy
    pass       the model over static tensors; a padding token is stored nowhere, and no other token sees it
    outputs    the logits behind the last token, until the next replay

Where there is no card the pass is called instead of replayed: the same code, for tests.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch

from kvrelay.engine.interfaces import Row
from kvrelay.kernels.base import AttentionBatch, ForwardBatch
from kvrelay.models.registry import Model
from kvrelay.progress import Progress
from kvrelay.runner.batch import BatchBuilder
from kvrelay.runner.inputs import SentInputs, Staging

PROMPT_SIZES = (*range(64, 513, 64), *range(640, 1025, 128))
_TAIL = 5  # first query, number of tokens, context length, token whose logits are wanted, place in the block tables


def prompt_sizes(token_budget: int, max_model_len: int) -> list[int]:
    return [size for size in PROMPT_SIZES if size <= min(token_budget, max_model_len)]


class PromptGraphs:
    """Owns the static tensors and the graphs. `run` follows the runner's own stream order; nothing waits."""

    def __init__(
        self, model: Model, kv: torch.Tensor, builder: BatchBuilder, *, sizes: Sequence[int], progress: Progress
    ) -> None:
        assert builder.tables.twin is not None, "prompt graphs read block tables on the device"
        self._model = model
        self._kv = kv
        self._builder = builder
        self._twin = builder.tables.twin
        self._sizes = list(sizes)
        self._block_size = kv.shape[3]
        device, most = kv.device, self._sizes[-1]
        self._areas = [Staging(2 * most + _TAIL, device) for _ in range(2)]
        self._turn = 0
        self._changes = SentInputs(2 * self._twin.shape[1], device)
        self._flat = torch.zeros(2 * most + _TAIL, dtype=torch.int32, device=device)
        self._positions = torch.arange(most, device=device)
        self.logits = torch.zeros(1, model.spec.vocab_size, dtype=kv.dtype, device=device)
        self._replays = self._capture(progress)

    def takes(self, rows: list[Row]) -> bool:
        """Whether the step can be replayed: one prompt from its first token on, without images and prompt logprobs."""
        if len(rows) != 1 or rows[0].start or not 1 < rows[0].count <= self._sizes[-1]:
            return False
        row = rows[0]
        return not row.prompt_logprobs and not row.sequence.images and row.sequence.adapter is None

    def run(self, row: Row) -> None:
        count, tables = row.count, self._builder.tables
        size = next(size for size in self._sizes if size >= count)
        self._turn = 1 - self._turn
        area = self._areas[self._turn]
        area.wait()
        flat = area.array[: 2 * size + _TAIL]
        flat[:count] = row.sequence.tokens[:count]
        flat[count:size] = 0
        place = tables.places([row])[0]
        blocks, offsets = np.divmod(np.arange(count), self._block_size)
        flat[size : size + count] = tables.at(np.full(count, place), blocks) * self._block_size + offsets
        flat[size + count : 2 * size] = -1
        flat[2 * size :] = (0, count, count, count - 1, place)
        if tables.num_changed:
            self._changes.begin()
            tables.fill_changed(self._changes)
            self._changes.send()
            tables.take_changed(self._changes)
        area.send(len(flat), self._flat[: len(flat)])
        self._replays[size]()

    def _pass(self, size: int) -> None:
        flat = self._flat[: 2 * size + _TAIL]
        wide, tail = flat.long(), flat[2 * size :]
        batch = ForwardBatch(
            token_ids=wide[:size],
            positions=self._positions[:size],
            slots=wide[size : 2 * size],
            attention=AttentionBatch(
                query_start=tail[:2],
                context_lens=tail[2:3],
                block_tables=torch.index_select(self._twin, 0, tail[4:5]),
                max_query=size,
                max_context=size,
            ),
            logit_rows=wide[2 * size + 3 : 2 * size + 4],
        )
        self.logits.copy_(self._model.forward(batch, self._kv))

    @torch.inference_mode()
    def _capture(self, progress: Progress) -> dict[int, Callable[[], object]]:
        """The largest first: the smaller ones find the memory of its temporary tensors free."""
        if self._kv.device.type != "cuda":
            return {size: functools.partial(self._pass, size) for size in self._sizes}
        replays: dict[int, Callable[[], object]] = {}
        pool = torch.cuda.graph_pool_handle()
        progress.start("capturing prompts", len(self._sizes), unit="sizes")
        try:
            for size in reversed(self._sizes):
                flat = torch.tensor([0] * size + [-1] * size + [0, size, size, size - 1, self._twin.shape[0] - 1])
                self._flat[: len(flat)].copy_(flat)
                self._pass(size)  # compiles kernels and chooses them, which a capture cannot
                torch.cuda.synchronize(self._kv.device)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    self._pass(size)
                replays[size] = graph.replay
                progress.advance(1)
        finally:
            progress.done()
        torch.cuda.synchronize(self._kv.device)
        return replays
