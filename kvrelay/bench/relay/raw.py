"""NIXL and Mooncake driven as well as they can be without our layer: all ranges asked for at once, as far as the library takes
them, then waiting without a pause. Mooncake is driven in two ways, of which the faster counts: whole batches one after another,
and ranges one by one with as many in flight as our engine has.

No thread, queue, book-keeping, check or cancelling of ours is in the way: what our engines are compared with.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

import msgspec
import numpy as np

from kvrelay.errors import BenchError
from kvrelay.transfer.engines import mooncake, nixl
from kvrelay.transfer.engines.base import Ranges
from kvrelay.transfer.region import Region

_MOONCAKE_BATCH = 1024  # ranges a call: about twice as many, and its queue refuses the rest


class RawMover(Protocol):
    """Writes ranges of our region into the peer's. Every call blocks."""

    def info(self) -> bytes: ...

    def meet(self, info: bytes) -> None: ...

    def write(self, ranges: Ranges) -> None:
        """In the library's own batches."""

    def write_one_by_one(self, ranges: Ranges) -> None:
        """Asynchronously, with the depth of our engine."""


class RawInfo(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    address: int
    metadata: bytes = b""


def open_raw(engine: str, worker: str, region: Region) -> RawMover | None:
    """None where there is no library below our engine."""
    match engine:
        case "nixl":
            return RawNixl(f"raw-{worker}", region)
        case "mooncake":
            return RawMooncake(region)
    return None


class RawNixl:
    """Two agents that know each other."""

    def __init__(self, name: str, region: Region) -> None:
        self._nixl: Any = nixl.load_bindings()
        self._name = name
        self._region = region
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = 10_000
        self._agent = self._nixl.nixlAgent(name, config)
        self._backend = self._agent.createBackend("UCX", {"engine_config": "NET_DEVICES=lo"})
        rows = [(region.address, region.size_bytes, 0, "")]
        self._agent.registerMem(self._nixl.nixlRegDList(self._nixl.DRAM_SEG, rows), [self._backend])
        self._peer = RawInfo(name="", address=0)

    def info(self) -> bytes:
        metadata = bytes(self._agent.getLocalMD())
        return msgspec.json.encode(RawInfo(name=self._name, address=self._region.address, metadata=metadata))

    def meet(self, info: bytes) -> None:
        self._peer = msgspec.json.decode(info, type=RawInfo)
        self._agent.loadRemoteMD(self._peer.metadata)

    def write(self, ranges: Ranges) -> None:
        here = self._descriptors(ranges[:, 0] + self._region.address, ranges[:, 2])
        there = self._descriptors(ranges[:, 1] + self._peer.address, ranges[:, 2])
        handle = self._agent.createXferReq(self._nixl.NIXL_WRITE, here, there, self._peer.name, b"", [self._backend])
        status = self._agent.postXferReq(handle, b"")
        while status == self._nixl.NIXL_IN_PROG:
            status = self._agent.getXferStatus(handle)
        self._agent.releaseXferReq(handle)
        if status != self._nixl.NIXL_SUCCESS:
            raise BenchError(f"nixl by itself failed: {status.name}")

    def write_one_by_one(self, ranges: Ranges) -> None:
        """Our engine makes the same one request of all ranges."""
        self.write(ranges)

    def _descriptors(self, addresses: Ranges, sizes: Ranges) -> Any:
        rows = np.column_stack((addresses, sizes, np.zeros_like(sizes))).astype(np.uint64)
        return self._nixl.nixlXferDList(self._nixl.DRAM_SEG, rows)


class RawMooncake:
    """Two engines; the peer is named by its address."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self._engine = mooncake.make_engine(mooncake.load_library(), "127.0.0.1")
        if self._engine.register_memory(region.address, region.size_bytes) != 0:
            raise BenchError("mooncake by itself could not register memory")
        self._peer = RawInfo(name="", address=0)

    def info(self) -> bytes:
        return msgspec.json.encode(RawInfo(name=f"127.0.0.1:{self._engine.get_rpc_port()}", address=self._region.address))

    def meet(self, info: bytes) -> None:
        self._peer = msgspec.json.decode(info, type=RawInfo)

    def write_one_by_one(self, ranges: Ranges) -> None:
        columns = (ranges[:, 0] + self._region.address, ranges[:, 1] + self._peer.address, ranges[:, 2])
        flight: deque[int] = deque()
        for here, there, size in zip(*(column.tolist() for column in columns), strict=True):
            flight.append(self._engine.batch_transfer_async_write(self._peer.name, [here], [there], [size]))
            if len(flight) >= mooncake.WINDOW:
                self._await(flight.popleft())
        while flight:
            self._await(flight.popleft())

    def _await(self, batch: int) -> None:
        status = self._engine.transfer_check_status(batch) if batch else -1
        while status == 0:
            status = self._engine.transfer_check_status(batch)
        if status < 0:
            raise BenchError("mooncake by itself failed")

    def write(self, ranges: Ranges) -> None:
        for start in range(0, len(ranges), _MOONCAKE_BATCH):
            batch = ranges[start : start + _MOONCAKE_BATCH]
            here = (batch[:, 0] + self._region.address).tolist()
            there = (batch[:, 1] + self._peer.address).tolist()
            if self._engine.batch_transfer_sync_write(self._peer.name, here, there, batch[:, 2].tolist()) != 0:
                raise BenchError("mooncake by itself failed")
