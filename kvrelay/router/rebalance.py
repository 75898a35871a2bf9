"""Which worker should change its role, by what each role has to do. It has neither sockets nor a clock of its own.

    Rebalancer(rules).observe(workers, now) -> moves        to be called about once a second

The pressure of a role is the mean over its workers, smoothed over `smooth_s`:

    prefill   0.9 x share of time with a prompt under way + prompts waiting per worker / `queue_high`
    decode    the larger of the batch's and the KV memory's share in use; more if sequences had to be swapped out
    encode    images waiting per worker / `queue_high`; only told, for encode workers never move
    whole     the larger of decode's and prompts waiting per worker / `queue_high`

A role is short at `short`, and has room for less if its pressure would stay at or below `calm` with one worker fewer. When a
role has been short for `patience_s` and another has had room for as long, one worker moves: the one with least to do. Then
nothing moves for `pause_s`, nor while any worker starts or leaves. The distance between the two bounds and the two times are
what keeps workers from going back and forth. The last worker of a role never moves, so no role ends and none begins.

Prompts that wait are not counted against decode workers: there they wait for the prefill worker.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from kvrelay.ids import WorkerId
from kvrelay.states import Role
from kvrelay.wire.registry import WorkerLoad

ROLES = (Role.PREFILL, Role.DECODE, Role.WHOLE)  # among which workers move
_MOST = 2.0  # of a pressure: a short burst is to be forgotten soon, however high it was
_BUSY = 0.9  # the pressure of a prefill worker that always computes and lets no prompt wait


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    short: Annotated[float, Meta(gt=0.0)] = 0.95
    calm: Annotated[float, Meta(ge=0.0)] = 0.6
    queue_high: Annotated[float, Meta(gt=0.0)] = 4.0  # prompts waiting per worker that make a role short by themselves
    smooth_s: float = 10.0
    patience_s: float = 20.0
    pause_s: float = 60.0


class WorkerSight(msgspec.Struct, frozen=True, kw_only=True):
    """What is seen of one worker at one moment."""

    id: WorkerId
    role: Role
    is_ready: bool  # else it starts or leaves
    max_batch: int = 1
    load: WorkerLoad = WorkerLoad()


class Move(msgspec.Struct, frozen=True, kw_only=True):
    worker: WorkerId
    role: Role  # that it has
    next_role: Role
    reason: str


class Rebalancer:
    """Remembers the smoothed pressures, since when a move has been due, and when the last one was."""

    def __init__(self, rules: Rules | None = None) -> None:
        self._rules = rules or Rules()
        self.pressures: dict[Role, float] = {}
        self._seen_at = -math.inf
        self._due: dict[tuple[Role, Role], float] = {}  # from, to: since when
        self._quiet_until = -math.inf

    def observe(self, workers: Sequence[WorkerSight], now: float) -> list[Move]:
        """At most one. The caller carries it out, or does not: what comes of it is seen in later observations."""
        ready = {role: [worker for worker in workers if worker.role is role and worker.is_ready] for role in Role}
        self._smooth({role: min(_MOST, self._pressure(role, those)) for role, those in ready.items() if those}, now)
        wanted = self._wanted(ready)
        self._due = {pair: self._due.get(pair, now) for pair in wanted}
        is_moving = any(not worker.is_ready for worker in workers if worker.role in ROLES)
        if is_moving or now < self._quiet_until:
            self._due.clear()
            return []
        for (giver, taker), since in self._due.items():
            if now - since >= self._rules.patience_s:
                self._due.clear()
                self._quiet_until = now + self._rules.pause_s
                return [self._move(ready[giver], giver, taker)]
        return []

    def _pressure(self, role: Role, workers: Sequence[WorkerSight]) -> float:
        computing = _mean(
            _BUSY * min(1, worker.load.running) + worker.load.waiting / self._rules.queue_high for worker in workers
        )
        generating = _mean(map(_share_in_use, workers))
        match role:
            case Role.PREFILL | Role.ENCODE:  # which runs no sequences
                return computing
            case Role.DECODE:
                return generating
            case _:
                queue = _mean(worker.load.waiting / self._rules.queue_high for worker in workers)
                return max(generating, queue)

    def _smooth(self, seen: dict[Role, float], now: float) -> None:
        weight = 1.0 - math.exp(-max(0.0, now - self._seen_at) / self._rules.smooth_s)
        self._seen_at = now
        self.pressures = {
            role: pressure if role not in self.pressures else self.pressures[role] + weight * (pressure - self.pressures[role])
            for role, pressure in seen.items()
        }

    def _wanted(self, ready: dict[Role, list[WorkerSight]]) -> list[tuple[Role, Role]]:
        """Moves that would help now, the best first."""
        short = sorted(
            (role for role, pressure in self.pressures.items() if role in ROLES and pressure >= self._rules.short),
            key=lambda role: -self.pressures[role],
        )
        without_one = {
            role: pressure * len(ready[role]) / (len(ready[role]) - 1)
            for role, pressure in self.pressures.items()
            if role in ROLES and len(ready[role]) > 1
        }
        givers = sorted((role for role, rest in without_one.items() if rest <= self._rules.calm), key=without_one.__getitem__)
        return [(giver, taker) for taker in short for giver in givers if giver is not taker]

    def _move(self, workers: Sequence[WorkerSight], giver: Role, taker: Role) -> Move:
        idlest = min(workers, key=lambda worker: (_num_requests(worker.load), worker.load.kept, worker.id))
        pressures = self.pressures
        reason = f"pressure of {taker.value} {pressures[taker]:.2f}, of {giver.value} {pressures[giver]:.2f}"
        return Move(worker=idlest.id, role=giver, next_role=taker, reason=reason)


def _mean(values: Iterable[float]) -> float:
    those = list(values)
    return sum(those) / len(those)


def _num_requests(load: WorkerLoad) -> int:
    return load.running + load.waiting + load.transferring + load.swapped


def _share_in_use(worker: WorkerSight) -> float:
    load, blocks = worker.load, worker.load.blocks
    batch = (load.running + load.transferring + load.swapped) / max(1, worker.max_batch)
    memory = (blocks.in_use + blocks.reserved) / max(1, blocks.total)
    return max(batch, memory, 1.0 if load.swapped else 0.0)
