"""Engines of one process, joined by a `MemoryNetwork`: for tests, with every fault a transport can have.

A fate is drawn for each move. Without faults a move copies and completes at the next `poll`. The copy happens as late as the
contract allows, at the poll that reports it, so that a caller who lets go of memory too early is found out.
"""

from __future__ import annotations

import enum
import itertools
import random
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from kvrelay.ids import WorkerId
from kvrelay.transfer.copy import copy_ranges
from kvrelay.transfer.engines.base import Completion, MoveId, Mover, Ranges, TransferError, check_ranges, coalesce
from kvrelay.transfer.engines.links import CANCELLED, CLOSED, PEER_REMOVED
from kvrelay.transfer.engines.moves import Move, MoveBook
from kvrelay.transfer.region import Region


class Corruption(enum.Enum):
    """What happens to the bytes of a move."""

    NONE = "none"
    REPORTED = "reported"  # some arrive wrong, and the move fails
    SILENT = "silent"  # some arrive wrong, and the move claims success: no transport may do this


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """What becomes of one move."""

    is_dropped: bool = False  # half of its ranges are copied, and it ends only by cancel, remove_peer or close
    delay_polls: int = 0  # `poll` calls before the one that reports it
    copies_twice: bool = False  # once when it starts, again when it ends; it is reported once
    corruption: Corruption = Corruption.NONE
    kills_peer: bool = False  # the peer vanishes as the move starts


class FaultPolicy(Protocol):
    """Decides the fate of the next move of an engine."""

    def draw(self) -> Fate: ...


class ScriptedFaults:
    """These fates in turn, then none."""

    def __init__(self, fates: Iterable[Fate]) -> None:
        self._fates = iter(fates)

    def draw(self) -> Fate:
        return next(self._fates, Fate())


@dataclass(slots=True, kw_only=True)
class RandomFaults:
    """The same fates for the same seed. Each number is the share of moves that meet that fault."""

    seed: int
    drop: float = 0.0
    delay: float = 0.0
    max_delay_polls: int = 10
    duplicate: float = 0.0
    corrupt: float = 0.0
    corrupt_silently: float = 0.0
    die: float = 0.0
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def draw(self) -> Fate:
        drop, delay, duplicate, corrupt, silent, die = (self._random.random() for _ in range(6))
        delay_polls = self._random.randint(1, self.max_delay_polls)
        corruption = Corruption.NONE
        if corrupt < self.corrupt:
            corruption = Corruption.REPORTED
        elif silent < self.corrupt_silently:
            corruption = Corruption.SILENT
        return Fate(
            is_dropped=drop < self.drop,
            delay_polls=delay_polls if delay < self.delay else 0,
            copies_twice=duplicate < self.duplicate,
            corruption=corruption,
            kills_peer=die < self.die,
        )


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
        """None once it has closed or died."""
        with self.lock:
            return self._engines.get(name)

    def leave(self, engine: MemoryEngine) -> None:
        with self.lock:
            self._engines = {name: known for name, known in self._engines.items() if known is not engine}

    def kill(self, worker: WorkerId) -> None:
        """Its process vanishes: its moves stop where they are and are never reported, those of others with it fail."""
        with self.lock:
            for engine in [engine for engine in self._engines.values() if engine.worker == worker]:
                engine.die()


@dataclass(slots=True, eq=False)
class _InFlight:
    move: Move
    fate: Fate
    polls_left: int


class MemoryEngine:
    """Plays either mover, so that both paths of the relay can be tested."""

    name = "memory"

    def __init__(
        self, worker: WorkerId, network: MemoryNetwork, *, mover: Mover = Mover.PRODUCER, faults: FaultPolicy | None = None
    ) -> None:
        self.worker = worker
        self.mover = mover
        self.region: Region | None = None
        self._network = network
        self._faults = faults or ScriptedFaults([])
        self._name_in_network = ""
        self._peers: dict[WorkerId, str] = {}
        self._book = MoveBook()
        self._in_flight: list[_InFlight] = []
        self._is_dead = False

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
            if self._is_dead:
                return []
            open_moves = {move.id for move in self._book.open_moves()}
            self._in_flight = [
                flight for flight in self._in_flight if flight.move.id in open_moves and not self._advance(flight)
            ]
        return self._book.take()

    def cancel(self, move: MoveId) -> None:
        self._book.stop(move, CANCELLED)

    def close(self) -> None:
        self._network.leave(self)
        self._book.end_all(CLOSED)
        self._peers.clear()
        self.region = None

    def die(self) -> None:
        """As the death of the process: nothing of it moves or reports any more. For tests; see `MemoryNetwork.kill`."""
        self._network.leave(self)
        self._is_dead = True

    def _submit(self, peer: WorkerId, ranges: Ranges, *, writes: bool) -> MoveId:
        region = self._registered()
        if peer not in self._peers:
            raise TransferError(f"memory: unknown peer {peer}")
        remote = self._remote(peer)
        check_ranges(ranges, region.size_bytes, remote.size_bytes if remote else region.size_bytes)
        move = self._book.open(peer, coalesce(ranges), writes=writes)
        fate = self._faults.draw()
        if fate.kills_peer:
            self._network.kill(peer)
        if fate.copies_twice or fate.is_dropped:
            self._copy(move, move.ranges[: len(move.ranges) // 2] if fate.is_dropped else move.ranges)
        self._in_flight.append(_InFlight(move, fate, fate.delay_polls))
        return move.id

    def _advance(self, flight: _InFlight) -> bool:
        """Whether it has ended."""
        move, fate = flight.move, flight.fate
        if self._remote(move.peer) is None:
            self._book.end(move, "the peer died")
            return True
        flight.polls_left -= 1
        if fate.is_dropped or flight.polls_left >= 0:
            return False
        self._copy(move, move.ranges)
        if fate.corruption is not Corruption.NONE:
            self._corrupt(move)
        self._book.end(move, "the bytes arrived wrong" if fate.corruption is Corruption.REPORTED else "")
        return True

    def _copy(self, move: Move, ranges: Ranges) -> None:
        with self._network.lock:
            here, there = self._registered(), self._remote(move.peer)
            if there is None or not len(ranges):
                return
            if move.writes:
                copy_ranges(there.address, here.address, ranges[:, [1, 0, 2]], move.stop)
            else:
                copy_ranges(here.address, there.address, ranges, move.stop)

    def _corrupt(self, move: Move) -> None:
        """Flips the first byte of every range where it arrived."""
        target = self._remote(move.peer) if move.writes else self.region
        if target is None or target.buffer is None:
            return
        memory = np.frombuffer(target.buffer, dtype=np.uint8)
        memory[move.ranges[:, 1 if move.writes else 0]] ^= 0xFF

    def _remote(self, peer: WorkerId) -> Region | None:
        engine = self._network.find(self._peers.get(peer, ""))
        return engine.region if engine is not None else None

    def _registered(self) -> Region:
        if self.region is None or self._is_dead:
            raise TransferError("memory: no region is registered, or the engine was closed")
        return self.region
