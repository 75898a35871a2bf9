"""Memory for packed weights: large pieces in huge pages, with weights side by side. A piece is freed with the last of them.

A piece may be a file's that several processes map: `SharedMemory`."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

_HUGE_PAGE_BYTES = 1 << 21
_PIECE_BYTES = 1 << 26
_LINE_BYTES = 64  # a cache line


class WeightRoom:
    """Hands out pieces front to back. What was never written to is not resident, so a piece that is not full costs nothing."""

    def __init__(self, prefer_huge_pages: Callable[[int, int], object]) -> None:
        self._prefer_huge_pages = prefer_huge_pages
        self._left = torch.empty(0, dtype=torch.uint8)
        self.num_bytes = 0  # handed out
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> torch.Tensor:
        """Uninitialised bytes, at the start of a cache line."""
        whole_lines = -(-num_bytes // _LINE_BYTES) * _LINE_BYTES
        with self._lock:
            if whole_lines > self._left.numel():
                self._left = self._new_piece(max(whole_lines, _PIECE_BYTES))
            self.num_bytes += whole_lines
            taken, self._left = self._left[:num_bytes], self._left[whole_lines:]
        return taken

    @contextmanager
    def inside(self, memory: torch.Tensor) -> Iterator[None]:
        """What is taken meanwhile is taken from `memory`, and must fill it."""
        with self._lock:
            before, self._left = self._left, memory
            end_bytes = self.num_bytes + memory.numel()
        try:
            yield
            assert self.num_bytes == end_bytes, "the memory is not that of these weights"
        finally:
            with self._lock:
                self._left = before

    def _new_piece(self, size_bytes: int) -> torch.Tensor:
        size_bytes = -(-size_bytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        memory = torch.empty(size_bytes + _HUGE_PAGE_BYTES, dtype=torch.uint8)
        skipped = -memory.data_ptr() % _HUGE_PAGE_BYTES
        piece = memory[skipped:][:size_bytes]
        self._prefer_huge_pages(piece.data_ptr(), size_bytes)
        return piece


class SharedMemory:
    """Maps files that other processes map, too. A mapping lives as long as its tensor and the weights in it."""

    def __init__(
        self,
        map_file: Callable[[int, int, int], int | None],
        settle: Callable[[int, int], object],
        unmap: Callable[[int, int], object],
    ) -> None:
        self._map_file = map_file
        self._settle = settle
        self._unmap = unmap

    def open(self, descriptor: int, size_bytes: int, *, writable: bool, on_free: Callable[[], object]) -> torch.Tensor:
        """Bytes; `on_free` is called when they are no longer used, at the end of the process at the latest. Raises OSError."""
        address = self._map_file(descriptor, size_bytes, writable)
        if not address:
            raise OSError("the file cannot be mapped")
        memory = (ctypes.c_uint8 * size_bytes).from_address(address)
        weakref.finalize(memory, on_free)
        weakref.finalize(memory, self._unmap, address, size_bytes).atexit = False  # threads may still compute
        return torch.frombuffer(memory, dtype=torch.uint8)

    def settle(self, memory: torch.Tensor) -> None:
        """All is written."""
        self._settle(memory.data_ptr(), memory.numel())
