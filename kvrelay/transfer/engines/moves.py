"""The moves of one engine: which are open, and how the others ended.

    open ──> waiting ──start()──> running ──end()──> ended ──take()──> forgotten
                 └──────stop(), end()───────────────^

The caller's thread opens, cancels and takes; a link's thread starts and ends. The one that ends a move first decides how it
ended, and `take` hands each out once: that is the contract's "every id appears in exactly one poll".
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from dataclasses import dataclass, field

from kvrelay.ids import WorkerId
from kvrelay.transfer.engines.base import Completion, MoveId, Ranges


@dataclass(slots=True, eq=False)
class Move:
    """One batch of ranges between this worker and `peer`. `stop` is read by native code while bytes move."""

    id: MoveId
    peer: WorkerId
    ranges: Ranges
    writes: bool
    stop: ctypes.c_int32 = field(default_factory=lambda: ctypes.c_int32(0))
    is_running: bool = False


class MoveBook:
    """Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        self._open: dict[MoveId, Move] = {}
        self._ended: list[Completion] = []

    def open(self, peer: WorkerId, ranges: Ranges, *, writes: bool) -> Move:
        move = Move(MoveId(next(self._ids)), peer, ranges, writes)
        with self._lock:
            self._open[move.id] = move
        return move

    def start(self, move: Move) -> bool:
        """False if it has ended while it waited: then it must not touch memory."""
        with self._lock:
            move.is_running = move.id in self._open
            return move.is_running

    def rest(self, move: Move) -> None:
        """It touches no memory now, but has not ended yet."""
        with self._lock:
            move.is_running = False

    def end(self, move: Move, error: str = "") -> None:
        with self._lock:
            self._end(move, error)

    def stop(self, move_id: MoveId, error: str) -> None:
        """Ends it if it still waits, else asks the one that runs it to stop. Harmless if it has ended."""
        with self._lock:
            move = self._open.get(move_id)
            if move is None:
                return
            move.stop.value = 1
            if not move.is_running:
                self._end(move, error)

    def stop_all(self, error: str, peer: WorkerId | None = None) -> None:
        for move in self.open_moves(peer):
            self.stop(move.id, error)

    def end_all(self, error: str, peer: WorkerId | None = None) -> None:
        for move in self.open_moves(peer):
            self.end(move, error)

    def open_moves(self, peer: WorkerId | None = None) -> list[Move]:
        with self._lock:
            return [move for move in self._open.values() if peer is None or move.peer == peer]

    def is_any_running(self) -> bool:
        with self._lock:
            return any(move.is_running for move in self._open.values())

    def take(self) -> list[Completion]:
        with self._lock:
            ended, self._ended = self._ended, []
            return ended

    def _end(self, move: Move, error: str) -> None:
        if self._open.pop(move.id, None) is not None:
            self._ended.append(Completion(move.id, error))
