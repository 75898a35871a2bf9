"""Memory for packed weights: large pieces in huge pages, with weights side by side. A piece is freed with the last of them."""

from __future__ import annotations

import threading
from collections.abc import Callable

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

    def _new_piece(self, size_bytes: int) -> torch.Tensor:
        size_bytes = -(-size_bytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        memory = torch.empty(size_bytes + _HUGE_PAGE_BYTES, dtype=torch.uint8)
        skipped = -memory.data_ptr() % _HUGE_PAGE_BYTES
        piece = memory[skipped:][:size_bytes]
        self._prefer_huge_pages(piece.data_ptr(), size_bytes)
        return piece
