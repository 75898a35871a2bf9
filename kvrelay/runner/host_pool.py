"""KV blocks on the host, and the copies between them and the pool.

A host block is one contiguous piece: what the pool keeps of a block in each layer, K and V, one after the other. So a CPU reads
or writes one side straight through, and a GPU's copy engine takes a block in one go (`plane_copies.py`).

    begin       returns a ticket at once; the copy runs beside the forward passes
    finished    the tickets of copies that have ended, each once

On a CPU a thread copies, in a native call per ticket and without Python's lock; where many blocks come back, which a request
waits for, a second one takes half of them. On CUDA a stream of its own does: it starts
after what was launched before, and nothing waits for it but a call that asks for its tickets; host memory is pinned.
"""

from __future__ import annotations

import ctypes
import functools
import math
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.errors import ConfigError
from kvrelay.native.compile import load_native
from kvrelay.runner.kv_pool import KVPool
from kvrelay.runner.plane_copies import PlaneCopies

_SHARE = 0.1  # of the free memory, for the host blocks of all workers of a host together
_MOST_BYTES = 4 * 2**30
_MANY_BLOCKS = 8  # that come back at once

Pairs = Sequence[tuple[int, int]]


class HostPool(Protocol):
    """One thread calls it. No call waits, except `finished` as long as it is told to."""

    @property
    def num_blocks(self) -> int: ...

    def begin(self, saves: Pairs, loads: Pairs) -> int:
        """`saves` are (block, host block), `loads` (host block, block)."""

    def finished(self, wait_s: float) -> list[int]: ...

    def close(self) -> None: ...


def choose_host_blocks(pool: KVPool, *, free_bytes: int, core_share: float) -> int:
    """As many as the pool has, if a share of the free memory holds them. Of the host's memory, as of its cores, a worker takes
    only its part: `serve` divides the cores among the workers it starts."""
    budget = min(int(free_bytes * _SHARE * core_share), _MOST_BYTES)
    block_bytes = len(pool.shares) * pool.tensor.numel() * pool.tensor.element_size() // pool.num_blocks
    return min(pool.num_blocks, budget // block_bytes)


def make_host_pool(pool: KVPool, num_blocks: int) -> HostPool:
    """Raises ConfigError where there is no memory for them."""
    if not num_blocks:
        return NoHostPool()
    try:
        return CpuHostPool(pool, num_blocks) if pool.tensor.device.type == "cpu" else CudaHostPool(pool, num_blocks)
    except (RuntimeError, MemoryError) as error:
        raise ConfigError(f"--swap-blocks {num_blocks}: no host memory for so many KV blocks: {error}") from error


class NoHostPool:
    """Of a worker without host blocks: KV that must make room is computed again."""

    num_blocks = 0

    def begin(self, saves: Pairs, loads: Pairs) -> int:
        raise AssertionError("there are no host blocks")

    def finished(self, wait_s: float) -> list[int]:
        return []

    def close(self) -> None: ...


class CpuHostPool:
    """Copies in threads that start with the first copy."""

    def __init__(self, pool: KVPool, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._pool = _bytes_of(pool.shares)
        layers, two, _, *block = pool.tensor.shape
        self._num_planes = len(pool.shares) * layers * two
        self._piece_bytes = math.prod(block) * pool.tensor.element_size()
        self._host = np.zeros(num_blocks * self._num_planes * self._piece_bytes, dtype=np.uint8)  # no page is touched yet
        self._copy = _best_copy()
        self._num_begun = 0
        self._jobs: queue.SimpleQueue[tuple[int, NDArray[np.int64], NDArray[np.int64]] | None] = queue.SimpleQueue()
        self._ended: deque[int] = deque()
        self._news = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, saves: Pairs, loads: Pairs) -> int:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kv-copies", daemon=True)
            self._thread.start()
        self._num_begun += 1
        self._jobs.put(
            (self._num_begun, _host_and_pool([(host_block, block) for block, host_block in saves]), _host_and_pool(loads))
        )
        return self._num_begun

    def finished(self, wait_s: float) -> list[int]:
        if wait_s > 0.0 and not self._ended:
            self._news.wait(wait_s)
        self._news.clear()
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def close(self) -> None:
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        with ThreadPoolExecutor(1, "kv-loads") as second:
            while (job := self._jobs.get()) is not None:
                ticket, saves, loads = job
                self._move(saves, to_host=True)
                half = len(loads) // 2 if len(loads) >= _MANY_BLOCKS else 0
                beside = second.submit(self._move, loads[:half], to_host=False) if half else None
                self._move(loads[half:], to_host=False)
                if beside is not None:
                    beside.result()
                self._ended.append(ticket)
                self._news.set()

    def _move(self, pairs: NDArray[np.int64], *, to_host: bool) -> None:
        if len(pairs):
            self._copy(self._host, self._pool, pairs, self._num_planes, self._piece_bytes, to_host)


class CudaHostPool:
    """Copies on a stream of its own, without a kernel."""

    def __init__(self, pool: KVPool, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        layers, two, _, *block = pool.tensor.shape
        self._device = pool.tensor.device
        self._host = torch.empty((len(pool.shares), num_blocks, layers, two, *block), dtype=pool.tensor.dtype, pin_memory=True)
        self._copies = [PlaneCopies(share, host, layers * two) for share, host in zip(pool.shares, self._host, strict=True)]
        self._stream = torch.cuda.Stream(device=self._device)  # type: ignore[no-untyped-call]
        self._num_begun = 0
        self._under_way: deque[tuple[int, torch.cuda.Event]] = deque()

    def begin(self, saves: Pairs, loads: Pairs) -> int:
        self._num_begun += 1
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        stream = self._stream.cuda_stream
        for copies in self._copies:
            for block, host_block in saves:
                copies.copy(block, host_block, to_host=True, stream=stream)
            for host_block, block in loads:
                copies.copy(block, host_block, to_host=False, stream=stream)
        ended = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ended.record(self._stream)
        self._under_way.append((self._num_begun, ended))
        return self._num_begun

    def finished(self, wait_s: float) -> list[int]:
        """Tickets end in order. Waiting is for the oldest one, whose end is near: an event of CUDA knows no time-out."""
        tickets = []
        while self._under_way and self._under_way[0][1].query():  # type: ignore[no-untyped-call]
            tickets.append(self._under_way.popleft()[0])
        if wait_s > 0.0 and not tickets and self._under_way:
            threading.Event().wait(min(wait_s, 0.0002))
        return tickets

    def close(self) -> None:
        self._stream.synchronize()
        self._under_way.clear()


_Copy = Callable[[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.int64], int, int, bool], None]


@functools.cache
def _best_copy() -> _Copy:
    library = load_native(__file__)
    if library is None:
        return _copy_by_numpy
    function = library.kvrelay_copy_blocks
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = [pointer, pointer, pointer, number, number, number, number, ctypes.c_int32]
    function.restype = None

    def copy(
        host: NDArray[np.uint8], pool: NDArray[np.uint8], pairs: NDArray[np.int64], planes: int, piece: int, to_host: bool
    ) -> None:
        plane_bytes = len(pool) // planes
        function(host.ctypes.data, pool.ctypes.data, pairs.ctypes.data, len(pairs), planes, piece, plane_bytes, to_host)

    return copy


def _copy_by_numpy(
    host: NDArray[np.uint8], pool: NDArray[np.uint8], pairs: NDArray[np.int64], planes: int, piece: int, to_host: bool
) -> None:
    """Where there is no compiler."""
    host_blocks, blocks = host.reshape(-1, planes, piece), pool.reshape(planes, -1, piece)
    if to_host:
        host_blocks[pairs[:, 0]] = blocks[:, pairs[:, 1]].swapaxes(0, 1)
    else:
        blocks[:, pairs[:, 1]] = host_blocks[pairs[:, 0]].swapaxes(0, 1)


def _bytes_of(shares: Sequence[torch.Tensor]) -> NDArray[np.uint8]:
    """Their memory, which is one piece."""
    first = shares[0].view(torch.uint8)
    array: NDArray[np.uint8] = first.as_strided((len(shares) * first.numel(),), (1,)).numpy()
    return array


def _host_and_pool(pairs: Pairs) -> NDArray[np.int64]:
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)
