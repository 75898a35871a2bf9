"""Arithmetic on ranges that several engines need."""

from __future__ import annotations

import numpy as np

from kvrelay.transfer.engines.base import Ranges


def cut(ranges: Ranges, piece_bytes: int) -> Ranges:
    """The same bytes in ranges of at most `piece_bytes`."""
    num_pieces = -(-ranges[:, 2] // piece_bytes)
    row_of_piece = np.repeat(np.arange(len(ranges)), num_pieces)
    first_of_row = np.cumsum(num_pieces) - num_pieces
    start = (np.arange(len(row_of_piece)) - first_of_row[row_of_piece]) * piece_bytes
    pieces = ranges[row_of_piece]
    sizes = np.minimum(piece_bytes, pieces[:, 2] - start)
    return np.column_stack((pieces[:, 0] + start, pieces[:, 1] + start, sizes)).astype(np.int64)


def groups(ranges: Ranges, group_bytes: int) -> list[Ranges]:
    """The same bytes in groups of at most about `group_bytes`, in order."""
    if int(ranges[:, 2].sum()) <= group_bytes:
        return [ranges]
    pieces = cut(ranges, group_bytes)
    group_of_piece = (np.cumsum(pieces[:, 2]) - 1) // group_bytes
    return np.split(pieces, np.flatnonzero(np.diff(group_of_piece)) + 1)
