"""Arithmetic on ranges that several engines need. What every move passes through is native where there is a compiler."""

from __future__ import annotations

import ctypes
import functools

import numpy as np

from kvrelay.native.compile import compile_and_load
from kvrelay.transfer.engines.base import Ranges, TransferError

_SOURCE = """
#include <stdint.h>

/* Whether no range leaves its region. Not offset + size, which could overflow. */
int32_t kvrelay_inside(const int64_t *range, int64_t count, int64_t local_bytes, int64_t remote_bytes) {
    for (int64_t i = 0; i < count; i++, range += 3)
        if (range[2] < 0 || range[0] < 0 || range[1] < 0 ||
            range[0] > local_bytes - range[2] || range[1] > remote_bytes - range[2])
            return 0;
    return 1;
}

/* Joins neighbours; returns how many are left, or -1 where local offsets are not in order. */
int64_t kvrelay_join(const int64_t *range, int64_t count, int64_t *out) {
    int64_t left = 0;
    for (int64_t i = 0; i < count; i++, range += 3) {
        int64_t *next = out + 3 * left;
        if (range[2] <= 0)
            continue;
        if (left && range[0] < next[-3])
            return -1;
        if (left && next[-3] + next[-1] == range[0] && next[-2] + next[-1] == range[1]) {
            next[-1] += range[2];
        } else {
            next[0] = range[0], next[1] = range[1], next[2] = range[2];
            left++;
        }
    }
    return left;
}
"""


def check_ranges(ranges: Ranges, local_size_bytes: int, remote_size_bytes: int) -> None:
    """Raises TransferError if anything lies outside either region."""
    if ranges.ndim != 2 or ranges.shape[1] != 3 or ranges.dtype != np.int64:
        raise TransferError(f"ranges must be int64 [count, 3], not {ranges.dtype} {ranges.shape}")
    library = native()
    if library is None:
        is_inside = _is_inside(ranges, local_size_bytes, remote_size_bytes)
    else:
        ranges = np.ascontiguousarray(ranges)
        is_inside = library.kvrelay_inside(ranges.ctypes.data, len(ranges), local_size_bytes, remote_size_bytes)
    if not is_inside:
        raise TransferError(f"ranges outside the regions of {local_size_bytes} and {remote_size_bytes} bytes")


def coalesce(ranges: Ranges) -> Ranges:
    """Joins neighbours that are contiguous on both sides. Order of local offsets; empty ranges vanish."""
    library = native()
    if library is not None:
        ranges = np.ascontiguousarray(ranges)
        joined = np.empty_like(ranges)
        left = library.kvrelay_join(ranges.ctypes.data, len(ranges), joined.ctypes.data)
        if left >= 0:
            return joined[:left]
    return _sort_and_join(ranges)


@functools.cache
def native() -> ctypes.CDLL | None:
    """Compiles when called first."""
    library = compile_and_load("ranges", _SOURCE)
    if library is not None:
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        library.kvrelay_inside.argtypes, library.kvrelay_inside.restype = [pointer, number, number, number], ctypes.c_int32
        library.kvrelay_join.argtypes, library.kvrelay_join.restype = [pointer, number, pointer], number
    return library


def _is_inside(ranges: Ranges, local_size_bytes: int, remote_size_bytes: int) -> bool:
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
