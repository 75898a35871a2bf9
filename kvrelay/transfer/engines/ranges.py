"""Arithmetic on ranges that several engines need. What every move passes through is native where there is a compiler."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import numpy as np

from kvrelay.native.compile import load_native
from kvrelay.transfer.engines.base import Ranges, TransferError
from kvrelay.transfer.region import MAX_BYTES

_OUTSIDE, _NOT_IN_ORDER = -1, -2


def coalesce(ranges: Ranges, local_size_bytes: int = MAX_BYTES, remote_size_bytes: int = MAX_BYTES) -> Ranges:
    """Joins neighbours that are contiguous on both sides. Order of local offsets; empty ranges vanish. Raises TransferError if
    anything lies outside either region, or is no range."""
    if ranges.ndim != 2 or ranges.shape[1] != 3 or ranges.dtype != np.int64:
        raise TransferError(f"ranges must be int64 [count, 3], not {ranges.dtype} {ranges.shape}")
    join = _native_join()
    ranges = np.ascontiguousarray(ranges)
    joined = np.empty_like(ranges)
    left = _NOT_IN_ORDER
    if join is not None:
        left = join(ranges.ctypes.data, len(ranges), local_size_bytes, remote_size_bytes, joined.ctypes.data)
    elif not _are_inside(ranges, local_size_bytes, remote_size_bytes):
        left = _OUTSIDE
    if left == _OUTSIDE:
        raise TransferError(f"ranges outside the regions of {local_size_bytes} and {remote_size_bytes} bytes")
    return _sort_and_join(ranges) if left == _NOT_IN_ORDER else joined[:left]


def prepare() -> None:
    """Compiles, so that the first move does not wait for it."""
    _native_join()


@functools.cache
def _native_join() -> Callable[[int, int, int, int, int], int] | None:
    library = load_native(__file__)
    if library is None:
        return None
    join: Callable[[int, int, int, int, int], int] = library.kvrelay_join
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.kvrelay_join.argtypes, library.kvrelay_join.restype = [pointer, number, number, number, pointer], number
    return join


def _are_inside(ranges: Ranges, local_size_bytes: int, remote_size_bytes: int) -> bool:
    room = np.array([local_size_bytes, remote_size_bytes]) - ranges[:, 2:3]
    return not len(ranges) or bool(ranges.min() >= 0 and np.all(ranges[:, :2] <= room))


def _sort_and_join(ranges: Ranges) -> Ranges:
    ranges = ranges[ranges[:, 2] > 0]
    if len(ranges) < 2:
        return ranges
    local, remote, size = np.ascontiguousarray(ranges.T)
    order = np.argsort(local, kind="stable")
    local, remote, size = local[order], remote[order], size[order]
    continues = (local[:-1] + size[:-1] == local[1:]) & (remote[:-1] + size[:-1] == remote[1:])
    first = np.flatnonzero(np.concatenate(([True], ~continues)))
    return np.stack((local[first], remote[first], np.add.reduceat(size, first)), axis=1)


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
