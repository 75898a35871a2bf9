"""Keeps requests away from a service that keeps failing (a worker, a context index), and tries it again now and then.

    CLOSED     requests pass; a number of failures in a row opens the breaker
    OPEN       none pass, for a pause that doubles each time
    HALF_OPEN  the pause is over: one request passes; its success closes the breaker, its failure opens it again

Only what the service does wrong counts: a request that the client got wrong, or that a full queue turned away, does not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvrelay.states import BREAKER_EDGES, BreakerState, advance

FAILURES = 3
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0


@dataclass(slots=True, eq=False)
class Breaker:
    """Of one service."""

    clock: Callable[[], float] = time.monotonic
    max_failures: int = FAILURES
    first_pause_s: float = FIRST_PAUSE_S
    longest_pause_s: float = LONGEST_PAUSE_S
    _state: BreakerState = field(default=BreakerState.CLOSED, init=False)
    _failures: int = field(default=0, init=False)
    _pause_s: float = field(init=False)
    _open_until: float = field(default=0.0, init=False)
    _probing: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._pause_s = self.first_pause_s

    @property
    def state(self) -> BreakerState:
        if self._state is BreakerState.OPEN and self.clock() >= self._open_until:
            self._become(BreakerState.HALF_OPEN)
            self._probing = False
        return self._state

    @property
    def passes(self) -> bool:
        """Whether a request may be sent now."""
        if self._state is BreakerState.CLOSED:  # by far the most common case
            return True
        return self.state is BreakerState.HALF_OPEN and not self._probing

    @property
    def remaining_s(self) -> float:
        """Until the next request may be sent."""
        return max(0.0, self._open_until - self.clock())

    def sent(self) -> None:
        if self._state is BreakerState.HALF_OPEN:
            self._probing = True

    def succeeded(self) -> None:
        self._failures = 0
        if self._state is BreakerState.HALF_OPEN:
            self._become(BreakerState.CLOSED)
            self._pause_s = self.first_pause_s

    def abandoned(self) -> None:
        """A request ended without telling whether the service works: it was aborted, or was the client's mistake."""
        self._probing = False

    def failed(self) -> None:
        self._failures += 1
        is_too_many = self._state is BreakerState.CLOSED and self._failures >= self.max_failures
        if self._state is BreakerState.HALF_OPEN or is_too_many:
            self._become(BreakerState.OPEN)
            self._open_until = self.clock() + self._pause_s
            self._pause_s = min(self.longest_pause_s, 2 * self._pause_s)

    def _become(self, state: BreakerState) -> None:
        self._state = advance(BREAKER_EDGES, self._state, state)
