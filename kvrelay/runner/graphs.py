"""Steps that only decode, at fixed sizes and addresses, so that a step is one replay of a CUDA graph.

    sizes      1, 2, 4, 8, then every 8th up to a full batch: a step is padded to the next one
    inputs     six int32 numbers a row, written to pinned memory and sent by one copy; block tables stay on the device
    pass       the model over static tensors, then the likeliest token of each row; captured once per size at start
    outputs    logits and tokens, at one address for all sizes, until the next replay

A padding row computes one token of a block that no sequence has. A row whose token is not known on the host yet (`source`)
takes it from the tokens of the launch before.

Where there is no card the pass is called instead of replayed: the same code, for tests.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import as_completed
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.engine.interfaces import Row, SequenceView
from kvrelay.kernels.base import AttentionBatch, ForwardBatch
from kvrelay.models.registry import Model
from kvrelay.progress import Progress
from kvrelay.runner.batch import BatchBuilder
from kvrelay.runner.ends import ends_on
from kvrelay.runner.inputs import SentInputs, Staging

_COLUMNS = 6  # token id, source, position, slot, context length, place in the block tables
_NOT_KNOWN = 0  # stands for a token that the device knows; a token that the host knows has the 0 behind `tokens` as its source


def graph_sizes(max_batch: int) -> list[int]:
    """Rising; the last one is a full batch."""
    return sorted({size for size in (1, 2, 4, *range(8, max_batch, 8)) if size < max_batch} | {max_batch})


class DecodeGraphs:
    """Owns the static tensors and the graphs. `run` follows the runner's own stream order; nothing waits."""

    def __init__(
        self,
        model: Model,
        kv: torch.Tensor,
        builder: BatchBuilder,
        *,
        sizes: Sequence[int],
        max_context: int,
        progress: Progress,
        on_replay: Callable[[str], None] | None = None,
    ) -> None:
        """`kv`'s last block is the one that padding rows write. `on_replay` is told the name of each pass that is replayed, for
        the other ranks."""
        assert builder.tables.twin is not None, "decode graphs read block tables on the device"
        self._model = model
        self._kv = kv
        self._builder = builder
        self._twin = builder.tables.twin
        self._sizes = list(sizes)
        self.max_context = max_context
        device, most = kv.device, self._sizes[-1]
        self._block_size = kv.shape[3]
        self.scratch_slot = (kv.shape[2] - 1) * self._block_size
        self._twin[-1] = kv.shape[2] - 1
        self._areas = [Staging(_COLUMNS * most, device) for _ in range(2)]
        self._turn = 0
        self._ends = ends_on(device)
        self._changes = SentInputs(4 * most, device)
        self._flat = torch.zeros(_COLUMNS * most, dtype=torch.int32, device=device)
        self._block_tables = torch.zeros(most, self._twin.shape[1], dtype=torch.int32, device=device)
        self._counting = torch.arange(most + 1, device=device)
        self._query_start = self._counting.int()
        self._chosen = torch.zeros(most + 1, dtype=torch.int64, device=device)
        self.tokens = self._chosen[:most]  # of the last launch, of a graph or not; behind them is a 0
        self.logits = torch.zeros(most, model.spec.vocab_size, dtype=model.dtype, device=device)
        self._memory = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._on_replay = on_replay
        self._replays = self.capture("decode steps", self._sizes, self._fill_with_padding, self._pass, progress)

    @property
    def max_rows(self) -> int:
        return self._sizes[-1]

    @property
    def num_layers(self) -> int:
        return self._kv.shape[0]

    @property
    def _padding(self) -> list[int]:
        """Columns of a row of padding."""
        return [0, self.max_rows, 0, self.scratch_slot, 1, self.no_place]

    @property
    def no_place(self) -> int:
        """In the block tables, that of padding."""
        return self._twin.shape[0] - 1

    def takes(self, rows: list[Row]) -> bool:
        """Whether the step can be replayed: one token a row, none of an image, no adapter, and no prompt logprobs."""
        if len(rows) > self.max_rows:
            return False
        if not all(row.count == 1 and not row.prompt_logprobs and row.sequence.adapter is None for row in rows):
            return False
        return self._builder.images is None or all(not row.sequence.images or row.start >= _image_end(row) for row in rows)

    def run(self, rows: list[Row], sources: Sequence[int]) -> None:
        """`sources`: for each row the place of its token among `tokens`, or -1 if the sequence has it."""
        count, builder = len(rows), self._builder
        size = self._size_of(count)
        self._turn = 1 - self._turn
        area = self._areas[self._turn]
        area.wait()
        columns = area.array[: _COLUMNS * size].reshape(_COLUMNS, size)
        starts = np.array([row.start for row in rows], dtype=np.int64)
        places = np.array(builder.tables.places(rows), dtype=np.int64)
        columns[0, :count] = [
            row.sequence.tokens[row.start] if source < 0 else _NOT_KNOWN for row, source in zip(rows, sources, strict=True)
        ]
        columns[1, :count] = [source if source >= 0 else self.max_rows for source in sources]
        columns[2, :count] = starts
        if builder.images is not None:
            found = builder.images.fill(rows, np.arange(count + 1), columns[0, :count], columns[2, :count])
            assert found is None, "a step with tokens of an image is not replayed"
        blocks, offsets = np.divmod(starts, self._block_size)
        columns[3, :count] = builder.tables.at(places, blocks) * self._block_size + offsets
        columns[4, :count] = starts + 1
        columns[5, :count] = places
        columns[:, count:] = np.array(self._padding)[:, None]
        self.send_tables()
        area.send(_COLUMNS * size, self._flat[: _COLUMNS * size])
        self._replays[size]()

    @torch.inference_mode()
    def expect(self, sequences: Sequence[SequenceView]) -> None:
        self._builder.tables.places([Row(sequence, 0, 0, 0) for sequence in sequences])
        self.send_tables()

    def send_tables(self) -> None:
        """What of block tables the device lacks."""
        tables = self._builder.tables
        if tables.num_changed:
            self._changes.begin()
            tables.fill_changed(self._changes)
            self._changes.send()
            tables.take_changed(self._changes)

    def slots_of(self, row: Row, positions: NDArray[np.int64]) -> tuple[int, NDArray[np.int64]]:
        """The row's place in the block tables, and where tokens at those positions are stored."""
        tables = self._builder.tables
        place = tables.places([row])[0]
        blocks, offsets = np.divmod(positions, self._block_size)
        return place, tables.at(np.full(len(positions), place), blocks) * self._block_size + offsets

    def gathered(self, places: torch.Tensor) -> torch.Tensor:
        """Block tables by row: the same memory in every pass."""
        return torch.index_select(self._twin, 0, places, out=self._block_tables[: places.shape[0]])

    def compute(self, batch: ForwardBatch, on_layer: Callable[[int], None] | None = None) -> None:
        """A pass, then the likeliest token of each row of logits."""
        logits = self._model.forward(batch, self._kv, on_layer)
        self._ends.keep_likeliest(logits, self.logits[: logits.shape[0]], self.tokens[: logits.shape[0]])

    def replay_again(self, count: int) -> None:
        """A step of `count` rows with the inputs that the last one left."""
        self._replays[self._size_of(count)]()

    def _size_of(self, count: int) -> int:
        return next(size for size in self._sizes if size >= count)

    def _pass(self, size: int) -> None:
        columns = self._flat[: _COLUMNS * size].view(_COLUMNS, size)
        tables = self._block_tables[:size]
        token_ids, positions, slots = self._ends.step_inputs(columns, self._chosen, self._twin, tables)
        batch = ForwardBatch(
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            attention=AttentionBatch(
                query_start=self._query_start[: size + 1],
                context_lens=columns[4],
                block_tables=tables,
                max_query=1,
                max_context=self.max_context,
            ),
            logit_rows=self._counting[:size],
            name=pass_name("decode steps", size),
        )
        self.compute(batch)

    @torch.inference_mode()
    def capture(
        self, what: str, sizes: Sequence[int], pad: Callable[[int], None], run: Callable[[int], None], progress: Progress
    ) -> dict[int, Callable[[], object]]:
        """`run` of each size over inputs that `pad` wrote. The largest first: the smaller ones find the memory of its temporary
        tensors free."""
        if self._kv.device.type != "cuda":
            return {size: _call(run, size) for size in sizes}
        passes = {size: functools.partial(_padded, pad, run, size) for size in reversed(sizes)}
        if self._on_replay is None:  # other ranks take part in a pass that has a name once, and capture it then
            compile_passes(what, passes.values(), progress)
        replays: dict[int, Callable[[], object]] = {}
        progress.start(f"capturing {what}", len(sizes), unit="sizes")
        try:
            for size, compute in passes.items():
                compute()  # loads kernels, compiles what is missing, and has libraries choose theirs: a capture cannot
                torch.cuda.synchronize(self._kv.device)
                replays[size] = self._told(pass_name(what, size), captured(_call(run, size), self._memory))
                progress.advance(1)
        finally:
            progress.done()
        torch.cuda.synchronize(self._kv.device)
        return replays

    def _told(self, name: str, graph: torch.cuda.CUDAGraph) -> Callable[[], object]:
        on_replay = self._on_replay
        if on_replay is None:
            return graph.replay

        def replay() -> None:
            on_replay(name)
            graph.replay()

        return replay

    def _fill_with_padding(self, size: int) -> None:
        row = torch.tensor(self._padding, dtype=torch.int32)
        self._flat[: _COLUMNS * size].view(_COLUMNS, size).copy_(row[:, None].expand(_COLUMNS, size))


def pass_name(what: str, size: int) -> str:
    """By which the ranks of a worker know a captured pass."""
    return f"{what} {size}"


def captured(run: Callable[[], object], memory: Any) -> torch.cuda.CUDAGraph:
    """What `run` launches; temporary tensors are in `memory`, of `torch.cuda.graph_pool_handle`. Other threads may go on using
    the card meanwhile, as those of NCCL do."""
    graph = torch.cuda.CUDAGraph()
    with _no_garbage(), torch.cuda.graph(graph, pool=memory, capture_error_mode="thread_local"):
        run()
    return graph


def compile_passes(what: str, passes: Iterable[Callable[[], object]], progress: Progress) -> None:
    """Compiles the Triton kernels of these passes, as many at a time as there are cores. What the passes compute means
    nothing."""
    from kvrelay.kernels.cuda.launch import compiling  # needs Triton

    with compiling() as under_way:
        for compute in passes:
            compute()
        if not under_way:
            return
        progress.start(f"compiling kernels of {what}", len(under_way), unit="kernels")
        try:
            for _ in as_completed(under_way):
                progress.advance(1)
        finally:
            progress.done()


@contextlib.contextmanager
def _no_garbage() -> Iterator[None]:
    """A graph that the collector destroys while another is captured ends that capture with an error."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _padded(pad: Callable[[int], None], run: Callable[[int], None], size: int) -> None:
    pad(size)
    run(size)


def _call(function: Callable[[int], None], size: int) -> Callable[[], object]:
    return lambda: function(size)


def _image_end(row: Row) -> int:
    image = row.sequence.images[-1]
    return image.start + image.num_tokens
