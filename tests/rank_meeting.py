"""Ranks that meet in memory they share, all in this process: each is a thread's."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest

from kvrelay.kernels.ranks import SharedRanks, shared_bytes, shared_functions


@contextlib.contextmanager
def ranks_in_memory(count: int) -> Iterator[list[SharedRanks]]:
    library = shared_functions()
    if library is None:
        pytest.skip("no C compiler")
    descriptor = os.memfd_create("ranks")
    os.ftruncate(descriptor, shared_bytes(count))
    try:
        yield [SharedRanks(library, descriptor, rank, count) for rank in range(count)]
    finally:
        os.close(descriptor)
