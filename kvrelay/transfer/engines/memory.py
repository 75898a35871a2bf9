"""Engines of one process, joined by a `MemoryNetwork`.

A move copies and completes at the next `poll`. The copy happens as late as the contract allows, at the poll that reports it, so
that a caller who lets go of memory too early is found out.
"""

from __future__ import annotations

import itertools
import threading

from kvrelay.ids import WorkerId
from kvrelay.transfer.copy import copy_ranges
from kvrelay.transfer.engines.base import Completion, MoveId, Mover, Ranges, TransferError
from kvrelay.transfer.engines.links import CANCELLED, CLOSED, PEER_REMOVED
from kvrelay.transfer.engines.moves import Move, MoveBook
from kvrelay.transfer.engines.ranges import coalesce
from kvrelay.transfer.region import Region


class MemoryNetwork:
    """Knows the engines that can reach each other. Several threads may use its engines, each engine only one."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._names = itertools.count(1)
        self._engines: dict[str, MemoryEngine] = {}

    def join(self, engine: MemoryEngine) -> str:
        with self.lock:
            name = f"memory-{next(self._names)}"
            self._engines[name] = engine
            return name

    def find(self, name: str) -> MemoryEngine | None:
        """None once it has closed."""
        with self.lock:
            return self._engines.get(name)

    def leave(self, engine: MemoryEngine) -> None:
        with self.lock:
            self._engines = {name: known for name, known in self._engines.items() if known is not engine}


class MemoryEngine:
    """Plays either mover, so that both paths of the relay can be tested."""

    name = "memory"

    def __init__(self, worker: WorkerId, network: MemoryNetwork, *, mover: Mover = Mover.PRODUCER) -> None:
        self.worker = worker
        self.mover = mover
        self.region: Region | None = None
        self._network = network
        self._name_in_network = ""
        self._peers: dict[WorkerId, str] = {}
        self._book = MoveBook()

    def register(self, region: Region) -> None:
        if self.region is not None:
            raise TransferError("memory: a region is already registered")
        if region.device != "cpu":
            raise TransferError(f"memory moves host memory, not memory on {region.device}")
        self.region = region
        self._name_in_network = self._network.join(self)

    def local_info(self) -> bytes:
        self._registered()
        return self._name_in_network.encode()

    def add_peer(self, peer: WorkerId, info: bytes) -> None:
        self._registered()
        name = info.decode(errors="replace")
        engine = self._network.find(name)
        if engine is None or engine.worker != peer:
            raise TransferError(f"memory: the info of {peer} makes no sense: {name[:80]!r}")
        self.remove_peer(peer)
        self._peers[peer] = name

    def remove_peer(self, peer: WorkerId) -> None:
        if self._peers.pop(peer, None) is not None:
            self._book.end_all(PEER_REMOVED, peer)

    def write(self, peer: WorkerId, ranges: Ranges) -> MoveId:
        if self.mover is Mover.CONSUMER:
            raise TransferError("memory: only the consumer moves")
        return self._submit(peer, ranges, writes=True)

    def read(self, peer: WorkerId, ranges: Ranges) -> MoveId:
        return self._submit(peer, ranges, writes=False)

    def poll(self) -> list[Completion]:
        with self._network.lock:
            for move in self._book.open_moves():
                self._advance(move)
        return self._book.take()

    def cancel(self, move: MoveId) -> None:
        self._book.stop(move, CANCELLED)

    def close(self) -> None:
        self._network.leave(self)
        self._book.end_all(CLOSED)
        self._peers.clear()
        self.region = None

    def _submit(self, peer: WorkerId, ranges: Ranges, *, writes: bool) -> MoveId:
        region = self._registered()
        if peer not in self._peers:
            raise TransferError(f"memory: unknown peer {peer}")
        remote = self._remote(peer)
        joined = coalesce(ranges, region.size_bytes, remote.size_bytes if remote else region.size_bytes)
        return self._book.open(peer, joined, writes=writes).id

    def _advance(self, move: Move) -> None:
        """Of one that is open."""
        if self._remote(move.peer) is None:
            self._book.end(move, "the peer died")
        else:
            self._copy(move, move.ranges)
            self._book.end(move)

    def _copy(self, move: Move, ranges: Ranges) -> None:
        with self._network.lock:
            here, there = self._registered(), self._remote(move.peer)
            if there is None or not len(ranges):
                return
            if move.writes:
                copy_ranges(there.address, here.address, ranges[:, [1, 0, 2]], move.stop)
            else:
                copy_ranges(here.address, there.address, ranges, move.stop)

    def _remote(self, peer: WorkerId) -> Region | None:
        engine = self._network.find(self._peers.get(peer, ""))
        return engine.region if engine is not None else None

    def _registered(self) -> Region:
        if self.region is None:
            raise TransferError("memory: no region is registered, or the engine was closed")
        return self.region
