"""Copies many ranges of memory in one native call, without Python's lock, and stops on request."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import numpy as np

from kvrelay.native.compile import compile_and_load
from kvrelay.transfer.engines.base import Ranges

_SLICE_BYTES = 1 << 20  # between two looks at the stop flag: about 0.1 ms of copying

_SOURCE = """
#include <stdint.h>
#include <string.h>

/* Scattered small ranges wait for memory more than they copy: ask for the next one's pages ahead of time. */
static void expect(const char *range, int64_t size) {
    for (int64_t page = 0; page < size; page += 4096)
        for (int64_t line = 0; line < 1024 && page + line < size; line += 64)
            __builtin_prefetch(range + page + line, 0, 0);
}

/* Returns how many ranges were copied whole; fewer than count means that *stop was set. */
int64_t kvrelay_copy(char *to, const char *from, const int64_t *ranges, int64_t count, int64_t slice,
                     const volatile int32_t *stop) {
    for (int64_t i = 0; i < count; i++, ranges += 3) {
        if (i + 1 < count && ranges[5] <= 32768)
            expect(from + ranges[4], ranges[5]);
        for (int64_t done = 0; done < ranges[2]; done += slice) {
            if (*stop)
                return i;
            int64_t left = ranges[2] - done;
            memcpy(to + ranges[0] + done, from + ranges[1] + done, left < slice ? left : slice);
        }
    }
    return count;
}
"""

_Copy = Callable[[int, int, Ranges, ctypes.c_int32], bool]


def copy_ranges(to_address: int, from_address: int, ranges: Ranges, stop: ctypes.c_int32) -> bool:
    """Copies `ranges` (offset at `to`, offset at `from`, size). False if `stop` became non-zero first.

    Another thread may set `stop.value` meanwhile. The two memories must not overlap. Nothing is checked here.
    """
    return _best_copy()(to_address, from_address, np.ascontiguousarray(ranges), stop)


@functools.cache
def _best_copy() -> _Copy:
    library = compile_and_load("copy", _SOURCE)
    if library is None:
        return _copy_by_ctypes
    function = library.kvrelay_copy
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = [pointer, pointer, pointer, number, number, ctypes.POINTER(ctypes.c_int32)]
    function.restype = number

    def copy(to_address: int, from_address: int, ranges: Ranges, stop: ctypes.c_int32) -> bool:
        copied = function(to_address, from_address, ranges.ctypes.data, len(ranges), _SLICE_BYTES, ctypes.byref(stop))
        return bool(copied == len(ranges))

    return copy


def _copy_by_ctypes(to_address: int, from_address: int, ranges: Ranges, stop: ctypes.c_int32) -> bool:
    """Where there is no compiler: one call per slice, good for large ranges and slow for thousands of small ones."""
    for to_offset, from_offset, size in ranges.tolist():
        for done in range(0, size, _SLICE_BYTES):
            if stop.value:
                return False
            ctypes.memmove(to_address + to_offset + done, from_address + from_offset + done, min(_SLICE_BYTES, size - done))
    return True
