"""What the engine's thread shows to the heartbeat's thread. Plain attributes, each written by one thread only."""

from __future__ import annotations

import time

from kvrelay.states import WORKER_EDGES, WorkerState, advance
from kvrelay.wire.registry import WorkerLoad


class Status:
    """Written by the engine's thread, read by the heartbeat."""

    def __init__(self, load: WorkerLoad) -> None:
        self.load = load
        self.state = WorkerState.READY
        self._step_began_at: float | None = None

    def advance(self, state: WorkerState) -> None:
        self.state = advance(WORKER_EDGES, self.state, state)

    def step_begins(self) -> None:
        self._step_began_at = time.monotonic()

    def step_ends(self) -> None:
        self._step_began_at = None

    def stuck_for_s(self) -> float:
        """How long the engine has been inside its present step; 0 between steps."""
        began_at = self._step_began_at
        return 0.0 if began_at is None else time.monotonic() - began_at
