"""Which of the workers that could take a request gets it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, Protocol, TypeVar

from kvrelay.router.backend import GenerateRequest

_EXPECTED_OUTPUT_TOKENS = 256  # max_tokens is a bound, often far above what comes; beyond this it says little
_FOREIGN_REQUEST_TOKENS = 512  # what a request of another router is taken to cost


class Candidate(Protocol):
    @property
    def num_tokens_in_flight(self) -> int: ...

    @property
    def num_foreign_requests(self) -> int: ...


C = TypeVar("C", bound=Candidate)


class Policy:
    """Chooses among at least one candidate. Equal ones take turns."""

    def __init__(self, name: Literal["round_robin", "least_loaded", "prefix_aware"]) -> None:
        self._by_load = name != "round_robin"
        self._turn = 0

    def choose(self, candidates: Sequence[C]) -> C:
        self._turn += 1
        if len(candidates) == 1:
            return candidates[0]
        first = self._turn % len(candidates)
        if not self._by_load:
            return candidates[first]
        in_turn = [*candidates[first:], *candidates[:first]]
        return min(in_turn, key=_load)


def _load(candidate: Candidate) -> int:
    return candidate.num_tokens_in_flight + _FOREIGN_REQUEST_TOKENS * candidate.num_foreign_requests


def tokens_of(request: GenerateRequest) -> int:
    """What a request is expected to cost a worker."""
    params = request.params
    return len(request.prompt) + params.n * min(params.max_tokens, _EXPECTED_OUTPUT_TOKENS)


class CompletionRate:
    """How many requests end per second, of late. Tells a refused client when to come back."""

    _WINDOW_S = 10.0

    def __init__(self) -> None:
        self._weight = 0.0
        self._updated_at = 0.0

    def completed(self, now: float) -> None:
        self._weight = self._decayed(now) + 1.0
        self._updated_at = now

    def retry_after_s(self, num_in_flight: int, now: float) -> int:
        """Whole seconds until about half of what is in flight has ended, from 1 to 60."""
        per_second = self._decayed(now) / self._WINDOW_S
        if per_second <= 0.0:
            return 1
        return min(60, max(1, math.ceil(num_in_flight / 2 / per_second)))

    def _decayed(self, now: float) -> float:
        return self._weight * math.exp((self._updated_at - now) / self._WINDOW_S)
