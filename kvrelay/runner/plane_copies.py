"""Copies of whole KV blocks between a card's pool and pinned host memory, by the card's copy engine alone.

A block is one piece in each plane of the pool (a layer's keys or values) and one run of pieces on the host: two dimensions,
which the driver copies in one call. PyTorch would gather them by kernels first, which slow those of the passes.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

_MAX_PITCH = 2**31 - 1  # bytes from row to row, on every card
_HOST, _CARD = 1, 2  # CUmemorytype
_size = ctypes.c_size_t


def _side(name: str) -> tuple[tuple[str, Any], ...]:
    return (
        (f"{name}XInBytes", _size), (f"{name}Y", _size), (f"{name}MemoryType", ctypes.c_uint),
        (f"{name}Host", ctypes.c_void_p), (f"{name}Device", ctypes.c_uint64), (f"{name}Array", ctypes.c_void_p),
        (f"{name}Pitch", _size),
    )  # fmt: skip


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = (*_side("src"), *_side("dst"), ("WidthInBytes", _size), ("Height", _size))


@functools.cache
def _driver() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    library.cuMemcpy2DAsync_v2.argtypes = (ctypes.POINTER(_Copy2D), ctypes.c_void_p)
    library.cuMemcpy2DAsync_v2.restype = ctypes.c_int
    return library


class PlaneCopies:
    """One pool's. The pool is [planes ..., blocks, ...], the host memory [host blocks, planes ..., ...]; both contiguous."""

    def __init__(self, pool: torch.Tensor, host: torch.Tensor, num_planes: int) -> None:
        assert pool.is_contiguous()
        assert host.is_contiguous()
        self._pool, self._host = pool.data_ptr(), host.data_ptr()
        self._plane_bytes = pool.numel() * pool.element_size() // num_planes
        self._host_block_bytes = host.numel() * host.element_size() // host.shape[0]
        self._piece_bytes = self._host_block_bytes // num_planes
        self._num_planes = num_planes

    def copy(self, block: int, host_block: int, *, to_host: bool, stream: int) -> None:
        """Queued on the stream."""
        there, here = self._host + host_block * self._host_block_bytes, self._pool + block * self._piece_bytes
        height = self._num_planes if self._plane_bytes <= _MAX_PITCH else 1
        for plane in range(0, self._num_planes, height):
            host = there + plane * self._piece_bytes
            card = here + plane * self._plane_bytes
            pitch = self._plane_bytes if height > 1 else self._piece_bytes
            on_host = (0, 0, _HOST, host, 0, None, self._piece_bytes)
            on_card = (0, 0, _CARD, None, card, None, pitch)
            sides = (*on_card, *on_host) if to_host else (*on_host, *on_card)
            status = _driver().cuMemcpy2DAsync_v2(ctypes.byref(_Copy2D(*sides, self._piece_bytes, height)), stream)
            if status != 0:
                raise RuntimeError(f"a KV block was not copied: cuMemcpy2DAsync says {status}")
