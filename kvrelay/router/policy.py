"""Which of the workers that could take a request gets it.

    round_robin     each in turn
    least_loaded    the one with the fewest tokens in flight
    prefix_aware    the one with the lowest cost:   load_weight * tokens in flight - prompt tokens that it has cached

Cost is counted in prompt tokens that are to be computed before the first token comes. For a prefill worker, what is in
flight is still to be computed, so it weighs as much as the prompt's own tokens. A worker that generates has computed most of
what it has in flight; there it weighs a quarter. So a cache is followed until its worker is that much busier than the others;
then another one computes the prefix, has it from then on too, and takes its share. Where no worker has
anything cached, or none publishes events, this is least_loaded. Equal ones take turns, so that none is always the first choice.

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
    """Chooses among at least one candidate. Equal ones take turns. Each router has its own `first_turn`, or its requests would
    go where those of another one have just gone."""

    def __init__(self, name: PolicyName, load_weight: float = 1.0, first_turn: int = 0) -> None:
        self._by_load = name != "round_robin"
        self._load_weight = load_weight
        self._turn = first_turn

    def choose(self, candidates: Sequence[C], cached: Mapping[WorkerId, int], by_id: Mapping[WorkerId, C] | None = None) -> C:
        """`cached` has the prompt tokens that workers hold; those that hold none may be left out. `by_id`, if the caller has
        it, saves the time of making it."""
        self._turn += 1
        if len(candidates) == 1:
            return candidates[0]
        first = self._turn % len(candidates)
        if not self._by_load:
            return candidates[first]
        loads = [each.load_tokens for each in candidates]
        lowest = min(loads)
        try:
            best = candidates[loads.index(lowest, first)]
        except ValueError:  # only before `first`
            best = candidates[loads.index(lowest)]
        return self._best_cached(best, cached, by_id or {each.id: each for each in candidates}) if cached else best

    def _best_cached(self, best: C, cached: Mapping[WorkerId, int], by_id: Mapping[WorkerId, C]) -> C:
        """The least loaded one, or one that holds so much more that it is worth its load. Few hold anything, so only they are
        looked at; equal ones take turns in being met first or last."""
        weight, last_wins = self._load_weight, self._turn & 1
        lowest = weight * best.load_tokens - cached.get(best.id, 0)
        for worker_id, tokens in cached.items():
            each = by_id.get(worker_id)
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
