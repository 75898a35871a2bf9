"""Which of the workers that could take a request gets it.

    round_robin     each in turn
    least_loaded    the one with the fewest tokens in flight, among those whose turn is next
    prefix_aware    the one with the lowest cost, among these and those that have something cached:
                    load_weight * tokens in flight - prompt tokens that it has cached

Cost is counted in prompt tokens that are to be computed before the first token comes. For a prefill worker, what is in
flight is still to be computed, so it weighs as much as the prompt's own tokens. A worker that generates has computed most of
what it has in flight; there it weighs a quarter. So a cache is followed until its worker is that much busier than the others;
then another one computes the prefix, has it from then on too, and takes its share. Where no worker has
anything cached, or none publishes events, this is least_loaded.

The planner names the candidates in turn (plan.py), so that of equal ones none is always the first choice. It names at most 32:
the least loaded of so many is hardly busier than the least loaded of a thousand, and to look at a thousand takes far longer.

A session stays with its worker, whatever the policy, until that worker is overloaded: it has more than twice the tokens of
the least loaded one in flight, and some to spare.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, TypeVar

from kvrelay.ids import WorkerId
from kvrelay.router.backend import GenerateRequest
from kvrelay.states import Role

PolicyName = Literal["round_robin", "least_loaded", "prefix_aware"]

_EXPECTED_OUTPUT_TOKENS = 256  # max_tokens is a bound, often far above what comes; beyond this it says little
FOREIGN_REQUEST_TOKENS = 512  # what a request of another router is assumed to cost
_SPARE_TOKENS = 8192  # a session leaves its worker only for more than this

LOAD_WEIGHTS = {Role.PREFILL: 1.0, Role.DECODE: 0.25, Role.WHOLE: 0.25, Role.ENCODE: 1.0}


class Candidate(Protocol):
    @property
    def id(self) -> WorkerId: ...

    @property
    def load_tokens(self) -> int:
        """Tokens in flight, those of other routers' requests included."""


C = TypeVar("C", bound=Candidate)


class Policy:
    """Chooses among at least one candidate: of equal ones, the first."""

    def __init__(self, name: PolicyName, load_weight: float = 1.0) -> None:
        self._by_load = name != "round_robin"
        self._load_weight = load_weight
        self._last_wins = False

    def choose(self, candidates: Sequence[C], cached: Mapping[WorkerId, int], by_id: Mapping[WorkerId, C]) -> C:
        """`cached` has the prompt tokens that workers hold; those that hold none may be left out. Of these, the ones in `by_id`
        can be chosen too."""
        if not self._by_load or (len(candidates) == 1 and not cached):
            return candidates[0]
        loads = [each.load_tokens for each in candidates]
        best = candidates[loads.index(min(loads))]
        return self._best_cached(best, cached, by_id) if cached else best

    def _best_cached(self, best: C, cached: Mapping[WorkerId, int], by_id: Mapping[WorkerId, C]) -> C:
        """The least loaded one, or one that holds so much more that it is worth its load. Equal ones take turns in being met
        first or last."""
        self._last_wins = not self._last_wins
        weight, last_wins, held = self._load_weight, self._last_wins, cached.get(best.id, 0)
        lowest = weight * best.load_tokens - held
        for worker_id, tokens in cached.items():
            each = by_id.get(worker_id) if tokens > held else None
            if each is not None:
                cost = weight * each.load_tokens - tokens
                if cost < lowest or (cost == lowest and last_wins):
                    best, lowest = each, cost
        return best


def overloaded(candidate: Candidate, candidates: Sequence[Candidate]) -> bool:
    """So far above the least loaded that a session had better go there and compute its prompt anew."""
    return candidate.load_tokens > 2 * min(each.load_tokens for each in candidates) + _SPARE_TOKENS


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
