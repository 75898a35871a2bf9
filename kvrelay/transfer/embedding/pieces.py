"""An embedding outside of any pool: one `Piece`, or several in a row. Rows may be on a card; numbers are always on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

Rows = torch.Tensor
"""[tokens, row_bytes] bytes, on any device: what they mean is the models' business."""
Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Tokens of an embedding from `start` on."""

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
        copy(self.rows[here], piece.rows)
        self.fill_ids[here], self.positions[here] = piece.fill_ids, piece.positions
        return Piece(piece.start, self.rows[here], self.fill_ids[here], self.positions[here], self)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Embedding:
    """What a producer offers. `aux` holds up to `aux_items - 1` numbers; the number of tokens is put before them."""

    rows: Rows
    fill_ids: Ints
    positions: Ints
    aux: Sequence[int] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.fill_ids)


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """On the caller's stream, where a card has a part in it. Within the host it is NumPy that copies: PyTorch would have
    threads for it, beside those that compute."""
    if target.is_cpu and source.is_cpu:
        np.copyto(target.numpy(), source.numpy())
    else:
        target.copy_(source)


def empty_piece(num_tokens: int, row_bytes: int, device: torch.device) -> Piece:
    """Memory for a whole embedding. Raises RuntimeError or MemoryError."""
    rows = torch.empty((num_tokens, row_bytes), dtype=torch.uint8, device=device)
    return Piece(0, rows, np.empty(num_tokens, dtype=np.int32), np.empty((num_tokens, 3), dtype=np.int32))


def owned(pieces: Sequence[Piece]) -> Piece:
    """All tokens of an embedding, in memory that is its holder's own, for use on the caller's stream. What is at home already
    is not copied again. On a card the copy is only launched: pieces in a pool are needed until a fence behind it has passed."""
    home = pieces[0].home
    if home is None:
        home = empty_piece(pieces[-1].stop, pieces[0].rows.shape[1], pieces[0].rows.device)
    for piece in pieces:
        if piece.home is not home:
            home.put(piece)
    if home.rows.is_cuda:  # it may be another stream's: once let go, it is not used there before this one is done with it
        home.rows.record_stream(torch.cuda.current_stream(home.rows.device))
    return home
