"""One host for all workers: those that compute share its cores, one for each as long as there are enough."""

from __future__ import annotations


class Host:
    """`num_cores` 0: every worker has its own."""

    def __init__(self, num_cores: int) -> None:
        self.num_cores = num_cores
        self._ends: list[float] = []  # of the passes under way

    def takes(self, seconds: float, now: float) -> float:
        """What a pass of so many seconds takes that begins now. What begins while it runs does not slow it any further."""
        if not self.num_cores or not seconds:
            return seconds
        self._ends = [end for end in self._ends if end > now]
        seconds *= max(1.0, (len(self._ends) + 1) / self.num_cores)
        self._ends.append(now + seconds)
        return seconds
