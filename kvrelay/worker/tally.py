"""What a worker counts of its planes beside the engine, and tells with its load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvrelay.planes.curve import num_refused
from kvrelay.wire.registry import PlaneCounts


@dataclass(eq=False)
class Tally:
    """Each number is written by one thread, and read by the engine's."""

    serving_malformed: int = 0
    registry_retries: int = 0
    events_malformed: Callable[[], int] = lambda: 0

    def registry_retried(self) -> None:
        self.registry_retries += 1

    def counts(self) -> PlaneCounts:
        return PlaneCounts(
            serving_malformed=self.serving_malformed,
            events_malformed=self.events_malformed(),
            refused_peers=num_refused(),
            registry_retries=self.registry_retries,
        )
