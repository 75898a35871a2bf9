"""What is in the blocks of a pool, as one memory holds it: the host's or a card's.

On a card, `store` runs on the stream of its caller, behind the kernels that make the features, and returns before they have.
All else is the transfer thread's: it runs on a stream of its own, so that it waits for no pass of a model, and is done when
the call returns. A card copies gigabytes within a millisecond.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvrelay.transfer.embedding.layout import EmbeddingLayout
from kvrelay.transfer.embedding.pieces import Embedding, Piece, copy, empty_piece
from kvrelay.transfer.engines.base import TransferError
from kvrelay.transfer.region import Region, shared_region


class PoolMemory:
    """The planes of a pool in one region. It knows nothing of which blocks are free."""

    def __init__(self, layout: EmbeddingLayout, region: Region, memory: torch.Tensor) -> None:
        """`memory` has the bytes of the region."""
        assert memory.nbytes >= layout.size_bytes
        self.layout = layout
        self.region = region
        self.rows = memory[: layout.num_tokens * layout.row_bytes].view(layout.num_tokens, layout.row_bytes)
        self._fill_ids = _plane(memory, layout.fill_ids_offset, torch.int32, (layout.num_tokens,))
        self._positions = _plane(memory, layout.positions_offset, torch.int32, (layout.num_tokens, 3))
        self._aux = _plane(memory, layout.aux_offset, torch.int64, (layout.num_blocks, layout.aux_items))
        self._stream: Any = None  # of a card, for the transfer thread
        if memory.is_cuda:
            self._stream = torch.cuda.Stream(memory.device)  # type: ignore[no-untyped-call]

    def store(self, blocks: Sequence[int], embedding: Embedding) -> None:
        """By the owner's thread. On a card it is there when a fence behind this call has passed."""
        assert embedding.positions.shape == (embedding.num_tokens, 3)
        assert embedding.rows.shape == (embedding.num_tokens, self.layout.row_bytes)
        for start, places in self._runs(blocks, embedding.num_tokens):
            stop = start + places.stop - places.start
            copy(self.rows[places], embedding.rows[start:stop])
            _write(self._fill_ids[places], embedding.fill_ids[start:stop])
            _write(self._positions[places], embedding.positions[start:stop])
        aux = np.zeros(self.layout.aux_items, dtype=np.int64)
        aux[: 1 + len(embedding.aux)] = (embedding.num_tokens, *embedding.aux)
        _write(self._aux[blocks[0]], aux)

    def copy_from(self, other: PoolMemory, blocks: Sequence[int], num_tokens: int) -> None:
        """An embedding that was stored in the same blocks of a card's memory."""
        with other._beside():
            for _, places in self._runs(blocks, num_tokens):
                copy(self.rows[places], other.rows[places])
                copy(self._fill_ids[places], other._fill_ids[places])
                copy(self._positions[places], other._positions[places])
            copy(self._aux[blocks[0]], other._aux[blocks[0]])

    def aux(self, block: int) -> tuple[int, ...]:
        with self._beside():
            return tuple(self._aux[block].tolist())

    def pieces(self, blocks: Sequence[int], first_token: int, num_tokens: int) -> list[Piece]:
        """The tokens that the blocks hold from `first_token` on, one piece for each run of blocks side by side. Rows are views,
        and so are the numbers, but for those of a card."""
        with self._beside():
            return [
                Piece(
                    first_token + start,
                    self.rows[places],
                    self._fill_ids[places].cpu().numpy(),
                    self._positions[places].cpu().numpy(),
                )
                for start, places in self._runs(blocks, num_tokens)
            ]

    def home(self, num_tokens: int) -> Piece:
        """Memory of its own for a whole embedding. Raises TransferError if there is none."""
        try:
            with self._beside():
                return empty_piece(num_tokens, self.layout.row_bytes, self.rows.device)
        except (RuntimeError, MemoryError) as error:
            raise TransferError(f"no memory for an embedding of {num_tokens} tokens: {error}") from error

    def move_out(self, home: Piece, blocks: Sequence[int], first_token: int, num_tokens: int) -> tuple[Piece, ...]:
        """Copies what the blocks hold to its place at home; returns that."""
        with self._beside():
            return tuple(map(home.put, self.pieces(blocks, first_token, num_tokens)))

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
            self._stream.synchronize()  # without Python's lock

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


def host_memory(layout: EmbeddingLayout) -> PoolMemory:
    """That other processes can map. Pages are taken when they are first written."""
    region = shared_region(layout.size_bytes, "kvrelay-embeddings")
    assert region.buffer is not None
    return PoolMemory(layout, region, torch.frombuffer(region.buffer, dtype=torch.uint8))


def card_memory(layout: EmbeddingLayout, device: torch.device) -> PoolMemory:
    """Raises OutOfMemoryError of PyTorch."""
    memory = torch.zeros(layout.size_bytes, dtype=torch.uint8, device=device)
    torch.cuda.synchronize(memory.device)
    region = Region(address=memory.data_ptr(), size_bytes=memory.nbytes, device=str(memory.device))
    return PoolMemory(layout, region, memory)


def _plane(memory: torch.Tensor, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return memory[offset : offset + int(np.prod(shape)) * dtype.itemsize].view(dtype).view(shape)


def _write(plane: torch.Tensor, numbers: npt.NDArray[Any]) -> None:
    """To a card from pinned memory, so that the caller does not wait for what its stream was given before."""
    source = torch.from_numpy(np.ascontiguousarray(numbers))
    if plane.is_cuda:
        plane.copy_(source.pin_memory(), non_blocking=True)
    else:
        copy(plane, source)
