"""One side of a measured transfer: memory of a process with a transfer engine, and the same library used without our layer."""

from __future__ import annotations

import ctypes
import hashlib
import time
from collections.abc import Sequence
from typing import Literal, assert_never

import numpy as np

from kvrelay.bench.relay.raw import RawMover, open_raw
from kvrelay.errors import BenchError
from kvrelay.ids import WorkerId
from kvrelay.transfer.engines.base import MoveId, Ranges
from kvrelay.transfer.engines.choose import make_engine
from kvrelay.transfer.region import shared_region

# By our engine, by the library alone (in its batches, or range by range), or within this process by one memcpy.
How = Literal["read", "write", "raw", "raw_one_by_one", "memcpy"]
_POLL_S = 0.00005
_MOVE_S = 60.0


class Peer:
    """Implements `Side`. Ranges are local offset, remote offset, size."""

    def __init__(self, engine: str, worker: WorkerId, size_bytes: int) -> None:
        """Raises TransferError where the engine cannot work."""
        self._engine = make_engine(engine, worker)
        region = shared_region(size_bytes)
        assert region.buffer is not None
        self._memory = np.frombuffer(region.buffer, dtype=np.uint8)
        self._random = np.random.default_rng(list(worker.encode()))  # no two peers hold the same
        self.rewrite()
        self._engine.register(region)
        self._raw: RawMover | None = open_raw(engine, worker, region)
        self._peer = worker
        self._copies: tuple[np.ndarray[tuple[int], np.dtype[np.uint8]], ...] = ()

    def info(self) -> Sequence[bytes]:
        """Of the engine, and of the library alone."""
        return self._engine.local_info(), b"" if self._raw is None else self._raw.info()

    def meet(self, peer: WorkerId, info: Sequence[bytes]) -> None:
        engine_info, raw_info = info
        self._peer = peer
        self._engine.add_peer(peer, engine_info)
        if self._raw is not None:
            self._raw.meet(raw_info)

    def rewrite(self) -> None:
        """As a worker does before a hand-over: what another process has just written is slower to read."""
        self._memory[:] = np.frombuffer(self._random.bytes(self._memory.size), dtype=np.uint8)

    def move(self, how: How, ranges: Ranges) -> float:
        """Bytes per second."""
        size = int(ranges[:, 2].sum())
        if how == "memcpy" and (not self._copies or self._copies[0].size < size):
            self._copies = (np.full(size, 2, dtype=np.uint8), np.full(size, 1, dtype=np.uint8))  # with every page there
        start = time.perf_counter()
        match how:
            case "read":
                self._wait_for(self._engine.read(self._peer, ranges))
            case "write":
                self._wait_for(self._engine.write(self._peer, ranges))
            case "raw":
                assert self._raw is not None
                self._raw.write(ranges)
            case "raw_one_by_one":
                assert self._raw is not None
                self._raw.write_one_by_one(ranges)
            case "memcpy":
                ctypes.memmove(self._copies[0].ctypes.data, self._copies[1].ctypes.data, size)
            case _:
                assert_never(how)
        return size / (time.perf_counter() - start)

    def _wait_for(self, move: MoveId) -> None:
        deadline = time.monotonic() + _MOVE_S
        while not (ended := self._engine.poll()):
            if time.monotonic() > deadline:
                raise BenchError(f"{self._engine.name} did not move anything within {_MOVE_S:g} s")
            time.sleep(_POLL_S)
        for completion in ended:
            if completion.id != move or completion.error:
                raise BenchError(f"{self._engine.name}: {completion.error or 'another move ended'}")

    def digest(self, places: Ranges) -> str:
        """Of the bytes at these places: offset, size."""
        digest = hashlib.blake2b()
        for start, size in places.tolist():
            digest.update(self._memory[start : start + size].data)
        return digest.hexdigest()
