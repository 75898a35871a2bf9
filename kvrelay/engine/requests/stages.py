"""What a worker did for a request, stage after stage, by its own clock. The router is told when the request has ended here.

A request is in one stage at a time, that of its first sequence; so the stages fill the time from its arrival to its end without
a gap, and how long each took is exact, whatever the clocks of other processes say.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kvrelay.ids import RequestId
from kvrelay.states import RequestState, Stage
from kvrelay.wire.serving import LegTimes

_MOST = 64  # a request that is preempted over and over; what it does after so many is part of the last


class Stages:
    """Of one request."""

    __slots__ = ("_clock", "entered")

    def __init__(self, first: Stage = Stage.QUEUE, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.entered: list[tuple[Stage, float]] = [(first, clock())]

    def enter(self, stage: Stage) -> None:
        """Nothing new if it is there already."""
        if self.entered[-1][0] is not stage and len(self.entered) < _MOST:
            self.entered.append((stage, self._clock()))

    def follow(self, state: RequestState, *, has_prompt: bool) -> None:
        """The first sequence has come to this state. `has_prompt`: all that it was given has KV."""
        match state:
            case RequestState.WAITING:
                self.enter(Stage.QUEUE)
            case RequestState.TRANSFERRING:
                self.enter(Stage.TRANSFER if self.entered[-1][0] is Stage.RESERVE else Stage.RESTORE)
            case RequestState.RUNNING:
                self.enter(Stage.DECODE if has_prompt else Stage.PREFILL)
            case RequestState.SWAPPED:
                self.enter(Stage.SWAPPED)
            case RequestState.FINISHED:
                pass

    def seconds_in(self, stage: Stage) -> float:
        """Of the last time that it was in it, which may not have ended."""
        end = self._clock()
        for one, at in reversed(self.entered):
            if one is stage:
                return end - at
            end = at
        return 0.0

    def times(self, request_id: RequestId, resumed_s: float = 0.0) -> LegTimes:
        return LegTimes(request_id, self.entered, self._clock(), resumed_s)
