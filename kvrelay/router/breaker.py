"""Keeps requests away from a worker that keeps failing, and tries it again now and then.

    CLOSED     requests pass; so many failures in a row open it
    OPEN       none pass, for a pause that doubles each time
    HALF_OPEN  the pause is over: one request passes; its success closes the breaker, its failure opens it again

Only what a worker does wrong counts: a request that the client got wrong, or that a full queue turned away, does not.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kvrelay.states import BREAKER_EDGES, BreakerState, advance

FAILURES = 3
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0


class Breaker:
    """Of one worker."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._state = BreakerState.CLOSED
        self._failures = 0
        self._pause_s = FIRST_PAUSE_S
        self._open_until = 0.0
        self._probing = False

    @property
    def state(self) -> BreakerState:
        if self._state is BreakerState.OPEN and self._clock() >= self._open_until:
            self._become(BreakerState.HALF_OPEN)
            self._probing = False
        return self._state

    @property
    def passes(self) -> bool:
        """Whether a request may be sent now."""
        if self._state is BreakerState.CLOSED:  # by far the most common case
            return True
        return self.state is BreakerState.HALF_OPEN and not self._probing

    def sent(self) -> None:
        if self._state is BreakerState.HALF_OPEN:
            self._probing = True

    def succeeded(self) -> None:
        self._failures = 0
        if self._state is BreakerState.HALF_OPEN:
            self._become(BreakerState.CLOSED)
            self._pause_s = FIRST_PAUSE_S

    def abandoned(self) -> None:
        """A request ended without telling whether the worker works: it was aborted, or was the client's mistake."""
        self._probing = False

    def failed(self) -> None:
        self._failures += 1
        if self._state is BreakerState.HALF_OPEN or (self._state is BreakerState.CLOSED and self._failures >= FAILURES):
            self._become(BreakerState.OPEN)
            self._open_until = self._clock() + self._pause_s
            self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s)

    def _become(self, state: BreakerState) -> None:
        self._state = advance(BREAKER_EDGES, self._state, state)
