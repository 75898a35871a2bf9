"""Arithmetic on ranges that several engines need. What every move passes through is native where it can be."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import numpy as np

from kvrelay.native.compile import load_native
from kvrelay.transfer.engines.base import Ranges, TransferError
from kvrelay.transfer.region import MAX_BYTES

_OUTSIDE, _NOT_IN_ORDER = -1, -2


def coalesce(ranges: Ranges, local_size_bytes: int = MAX_BYTES, remote_size_bytes: int = MAX_BYTES) -> Ranges:
    """Joins neighbours that are contiguous on both sides. Order of local offsets; empty ranges vanish. Raises TransferError if
    anything lies outside either region, or is no range."""
    _check_shape(ranges)
    native = native_ranges()
    ranges = np.ascontiguousarray(ranges)
    joined = np.empty_like(ranges)
    left = _NOT_IN_ORDER
    if native is not None:
        left = native.kvrelay_join(ranges.ctypes.data, len(ranges), local_size_bytes, remote_size_bytes, joined.ctypes.data)
    elif not _are_inside(ranges, local_size_bytes, remote_size_bytes):
        left = _OUTSIDE
    if left == _OUTSIDE:
        raise _outside(local_size_bytes, remote_size_bytes)
    return _sort_and_join(ranges) if left == _NOT_IN_ORDER else joined[:left]


@functools.cache
def native_ranges() -> ctypes.CDLL | None:
    """ranges.c, compiled or loaded at the first call; None where it cannot be."""
    library = load_native(__file__)
    if library is not None:
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        library.kvrelay_join.argtypes, library.kvrelay_join.restype = [pointer, number, number, number, pointer], number
        library.kvrelay_scan.argtypes = [pointer, number, number, number, pointer]
        library.kvrelay_scan.restype = ctypes.c_int32
        library.kvrelay_runs.argtypes = [pointer, number, number, pointer, number, number, number, number, pointer]
        library.kvrelay_runs.restype = number
    return library


@dataclass(frozen=True, slots=True)
class Scanned:
    """Ranges, none of which leaves its region, and what they have together."""

    ranges: Ranges
    bits: int  # of all their numbers
    longest: int
    size_bytes: int


def scan(ranges: Ranges, local_size_bytes: int = MAX_BYTES, remote_size_bytes: int = MAX_BYTES) -> Scanned:
    """Raises TransferError as `coalesce`."""
    _check_shape(ranges)
    native = native_ranges()
    ranges = np.ascontiguousarray(ranges)
    if native is None:
        is_inside = _are_inside(ranges, local_size_bytes, remote_size_bytes)
        bits = int(np.bitwise_or.reduce(ranges.reshape(-1)))
        found = [bits, int(ranges[:, 2].max(initial=0)), int(ranges[:, 2].sum())]
    else:
        numbers = (ctypes.c_int64 * 3)()
        address = ctypes.addressof(numbers)
        is_inside = bool(native.kvrelay_scan(ranges.ctypes.data, len(ranges), local_size_bytes, remote_size_bytes, address))
        found = list(numbers)
    if not is_inside:
        raise _outside(local_size_bytes, remote_size_bytes)
    return Scanned(ranges, *found)


def _check_shape(ranges: Ranges) -> None:
    if ranges.ndim != 2 or ranges.shape[1] != 3 or ranges.dtype != np.int64:
        raise TransferError(f"ranges must be int64 [count, 3], not {ranges.dtype} {ranges.shape}")


def _outside(local_size_bytes: int, remote_size_bytes: int) -> TransferError:
    return TransferError(f"ranges outside the regions of {local_size_bytes} and {remote_size_bytes} bytes")


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
