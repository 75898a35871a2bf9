"""The sequences that wait to be admitted, by priority and arrival."""

from __future__ import annotations

import heapq

from kvrelay.engine.request import Sequence
from kvrelay.states import RequestState


class Queue:
    """A heap. Sequences that ended while they waited stay in it until they are met."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int, int], Sequence]] = []
        self._aside: list[Sequence] = []  # those that can do nothing until their images come
        self.num_waiting = 0

    def __bool__(self) -> bool:
        """Whether `first` may find one."""
        return bool(self._heap)

    @property
    def sequences(self) -> list[Sequence]:
        queued = [sequence for _, sequence in self._heap] + self._aside
        return [sequence for sequence in queued if sequence.state is RequestState.WAITING]

    def add(self, sequence: Sequence) -> None:
        heapq.heappush(self._heap, (sequence.order, sequence))
        self.num_waiting += 1

    def first(self) -> Sequence | None:
        while self._heap and self._heap[0][1].state is not RequestState.WAITING:
            heapq.heappop(self._heap)  # it ended meanwhile
        return self._heap[0][1] if self._heap else None

    def holds(self, num_tokens: int) -> bool:
        """Whether those that wait have so many tokens; what the cache has of them is not asked."""
        for _, sequence in self._heap:
            if num_tokens <= 0:
                break
            num_tokens -= len(sequence.tokens) if sequence.state is RequestState.WAITING else 0
        return num_tokens <= 0

    def pop(self) -> None:
        heapq.heappop(self._heap)
        self.num_waiting -= 1

    def ended(self) -> None:
        self.num_waiting -= 1

    def set_aside(self, sequence: Sequence) -> None:
        """It was the first, and waits on, without holding up the others."""
        self._aside.append(sequence)
        self.num_waiting += 1

    def recall(self) -> None:
        aside, self._aside = self._aside, []
        for sequence in aside:
            if sequence.state is RequestState.WAITING:
                heapq.heappush(self._heap, (sequence.order, sequence))
