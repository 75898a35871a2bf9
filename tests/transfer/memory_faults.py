"""The memory engine with every fault a transport can have: a fate is drawn for each move."""

from __future__ import annotations

import enum
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from kvrelay.ids import WorkerId
from kvrelay.transfer.engines.base import Completion, MoveId, Mover, Ranges
from kvrelay.transfer.engines.memory import MemoryEngine, MemoryNetwork
from kvrelay.transfer.engines.moves import Move


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


def random_faults(
    *,
    seed: int,
    drop: float = 0.0,
    delay: float = 0.0,
    max_delay_polls: int = 10,
    duplicate: float = 0.0,
    corrupt: float = 0.0,
) -> Iterator[Fate]:
    """The same fates for the same seed. Each number is the share of moves that meet that fault."""
    drawn = random.Random(seed)
    while True:
        yield Fate(
            is_dropped=drawn.random() < drop,
            delay_polls=drawn.randint(1, max_delay_polls) if drawn.random() < delay else 0,
            copies_twice=drawn.random() < duplicate,
            corruption=Corruption.REPORTED if drawn.random() < corrupt else Corruption.NONE,
        )


class FaultyEngine(MemoryEngine):
    """`faults` are the fates of its moves in turn; then there are none."""

    def __init__(
        self, worker: WorkerId, network: MemoryNetwork, *, mover: Mover = Mover.PRODUCER, faults: Iterable[Fate] = ()
    ) -> None:
        super().__init__(worker, network, mover=mover)
        self._faults = iter(faults)
        self._fates: dict[MoveId, Fate] = {}
        self._polls_left: dict[MoveId, int] = {}
        self._is_dead = False

    def die(self) -> None:
        """As the death of its process: its moves stop where they are and are never reported, those of others with it fail."""
        self._network.leave(self)
        self.region = None
        self._is_dead = True

    def poll(self) -> list[Completion]:
        return [] if self._is_dead else super().poll()

    def _submit(self, peer: WorkerId, ranges: Ranges, *, writes: bool) -> MoveId:
        move_id = super()._submit(peer, ranges, writes=writes)
        move = next(move for move in self._book.open_moves() if move.id == move_id)
        fate = self._fates[move_id] = next(self._faults, Fate())
        self._polls_left[move_id] = fate.delay_polls
        remote = self._network.find(self._peers[peer])
        if fate.kills_peer and isinstance(remote, FaultyEngine):
            remote.die()
        if fate.copies_twice or fate.is_dropped:
            self._copy(move, move.ranges[: len(move.ranges) // 2] if fate.is_dropped else move.ranges)
        return move_id

    def _advance(self, move: Move) -> None:
        fate = self._fates[move.id]
        if self._remote(move.peer) is not None:
            self._polls_left[move.id] -= 1
            if fate.is_dropped or self._polls_left[move.id] >= 0:
                return
            if fate.corruption is not Corruption.NONE:
                self._copy(move, move.ranges)
                self._corrupt(move)
                self._book.end(move, "the bytes arrived wrong" if fate.corruption is Corruption.REPORTED else "")
                return
        super()._advance(move)

    def _corrupt(self, move: Move) -> None:
        """Flips the first byte of every range where it arrived."""
        target = self._remote(move.peer) if move.writes else self.region
        assert target is not None
        assert target.buffer is not None
        memory = np.frombuffer(target.buffer, dtype=np.uint8)
        memory[move.ranges[:, 1 if move.writes else 0]] ^= 0xFF
