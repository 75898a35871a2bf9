"""Copies many ranges of memory in one native call, without Python's lock, and stops on request."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import numpy as np

from kvrelay.native.compile import load_native
from kvrelay.transfer.engines.base import Ranges

_SLICE_BYTES = 1 << 20  # between two looks at the stop flag: about 0.1 ms of copying

_Copy = Callable[[int, int, Ranges, ctypes.c_int32], bool]


def copy_ranges(to_address: int, from_address: int, ranges: Ranges, stop: ctypes.c_int32) -> bool:
    """Copies `ranges` (offset at `to`, offset at `from`, size). False if `stop` became non-zero first.

    Another thread may set `stop.value` meanwhile. The two memories must not overlap. Nothing is checked here.
    """
    return _best_copy()(to_address, from_address, np.ascontiguousarray(ranges), stop)


@functools.cache
def _best_copy() -> _Copy:
    library = load_native(__file__)
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
    """Where there is no native code: one call per slice, good for large ranges and slow for thousands of small ones."""
    for to_offset, from_offset, size in ranges.tolist():
        for done in range(0, size, _SLICE_BYTES):
            if stop.value:
                return False
            ctypes.memmove(to_address + to_offset + done, from_address + from_offset + done, min(_SLICE_BYTES, size - done))
    return True
