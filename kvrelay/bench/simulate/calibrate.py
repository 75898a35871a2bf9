"""What passes cost on a running cluster, as its clients see it.

A round tries, one after the other:

    prompts     one at a time, of three lengths; and one on each prefill worker
    streams     one; one on each decode worker; several on each
    both        prompts of two lengths on one prefill worker or more while one decode worker or more have a stream each

Of each, the time to first token or between tokens. Alone they give the curves; beside others, how much passes slow each other:
on a machine with fewer cores than workers, or with one memory bus, a lot. What the HTTP server and the client take of it is in
these times. What grows with the square of a prompt's length is attention; steps have sequences of the traffic's length, and
longer ones take no longer. Rounds are taken between the parts of the traffic, so that the machine is the same for both.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from kvrelay.bench.serve.client import Asked, Target
from kvrelay.bench.serve.scenario import run_sessions
from kvrelay.bench.serve.sessions import WORDS, Question, Session
from kvrelay.errors import BenchError
from kvrelay.simulate.costs import ALONE, Costs, HandOvers, Point, State
from kvrelay.simulate.fit import attention_ms_of, beside_attention

_SHORTEST = 0.25  # of prompts, of the traffic's length
_BATCHES = (2, 4)  # streams on each decode worker
_REPEATS = 3  # of prompts alone, and of those beside each other
_STREAM_TOKENS, _MOST_TOKENS = 32, 512
_FEWEST_GAPS = 8
_NUM_CHANCES = 200
_KV_BYTES, _LAYERS, _GB_PER_S = 46_080, 30, 5.0  # of SmolLM2-135M in float32; shared memory


K = TypeVar("K")
V = TypeVar("V")


@dataclass(slots=True)
class Round:
    """Milliseconds."""

    prompts: dict[float, list[Point]] = field(default_factory=dict)  # tokens and time, alone; by share of the traffic's length
    shared_prompts: dict[State, list[float]] = field(default_factory=dict)  # of the traffic's length, beside other passes
    steps: dict[State, list[float]] = field(default_factory=dict)  # of one sequence
    batches: dict[int, list[float]] = field(default_factory=dict)  # steps by sequences on each decode worker, all of them busy
    hand_overs: list[float] = field(default_factory=list)  # from the first token to the second, alone
    shared_hand_overs: list[float] = field(default_factory=list)  # while a step was under way


class Calibration:
    """Of one cluster with as many prefill as decode workers. `longest`: of prompts, of the traffic's length."""

    def __init__(self, target: Target, pairs: int, words: int, longest: float = 1.75) -> None:
        self._target = target
        self._pairs = pairs
        self._words = words
        self._lengths = (1.0, _SHORTEST, longest)
        room = max(words, round((longest - 1.0) * words))  # for what follows a prompt: small models have no more
        self._most_tokens = min(_MOST_TOKENS, max(_STREAM_TOKENS, room))
        self._marks = itertools.count()  # no prompt begins as another one did
        self.rounds: list[Round] = []
        self._ask([self._question(4)] * pairs, "warming up")

    def round(self) -> None:
        found, counts = Round(), range(1, self._pairs + 1)
        self._measure_prompts(found)
        self._measure_streams(found)
        for state in itertools.product(counts, counts):
            self._measure_both(found, state)
        self.rounds.append(found)

    def _measure_prompts(self, found: Round) -> None:
        for share in self._lengths * _REPEATS:
            (one,) = self._ask([self._question(2, share)], "measuring a prompt")
            found.prompts.setdefault(share, []).append((one.prompt_tokens, _ms(one.ttft_s)))
            found.hand_overs += _first_gaps([one])
        for count in range(2, self._pairs + 1):
            for _ in range(_REPEATS):
                prompts = self._ask([self._question(2) for _ in range(count)], "measuring prompts")
                found.shared_prompts.setdefault((count, 0), []).append(_mean_ttft_ms(prompts))

    def _measure_streams(self, found: Round) -> None:
        found.steps[ALONE] = self._gaps_of([self._question(_STREAM_TOKENS)])
        for count in range(2, self._pairs + 1):
            found.steps[0, count] = self._gaps_of(self._streams(found, count))
        found.batches = {count: self._gaps_of(self._streams(found, count * self._pairs)) for count in _BATCHES}

    def _streams(self, found: Round, count: int) -> list[Question]:
        """So long that the first is still under way when the prompts of the others are computed."""
        num_tokens = _STREAM_TOKENS + math.ceil(count * _prompt_ms(found) / middle(found.steps[ALONE]))
        return [self._question(min(num_tokens, self._most_tokens)) for _ in range(count)]

    def _gaps_of(self, questions: Sequence[Question]) -> list[float]:
        return _gaps(self._ask(questions, "measuring streams"))

    def _measure_both(self, found: Round, state: State) -> None:
        """Prompts that come when the streams are under way and end before these do. A long one among them: more of it is
        attention, which may slow steps otherwise than products do."""
        num_prompts, num_streams = state
        shares = (1.0, self._lengths[2])
        pauses_ms = [2 * self._pairs * _prompt_ms(found, share) for share in (1.0, *shares)]
        num_tokens = min(self._most_tokens, math.ceil(sum(pauses_ms) / middle(found.steps[ALONE])))
        sessions = [Session(0.0, (self._question(num_tokens),)) for _ in range(num_streams)]
        for share, at_ms in zip(shares, itertools.accumulate(pauses_ms), strict=False):
            sessions += [Session(at_ms / 1e3, (self._question(2, share),)) for _ in range(num_prompts)]
        asked = self._meet(sessions, "measuring both")
        streams = asked[:num_streams]
        for share, first in zip(shares, range(num_streams, len(asked), num_prompts), strict=True):
            prompts = asked[first : first + num_prompts]
            begun, ended = max(one.sent_at for one in prompts), min(one.times[0] for one in prompts)
            if any(stream.times[1] > begun or stream.times[-1] < ended for stream in streams):
                continue  # they were not beside each other
            longer = _prompt_ms(found, share) / _prompt_ms(found)
            found.shared_prompts.setdefault(state, []).append(_mean_ttft_ms(prompts) / longer)
            found.steps.setdefault(state, []).extend(_gaps_within(streams, begun, ended))
            if state == (1, self._pairs):  # whoever takes it has a step under way, and no other prompt slows that
                found.shared_hand_overs += _first_gaps(prompts)

    def _question(self, max_tokens: int, share: float = 1.0) -> Question:
        mark = next(self._marks)
        words = random.Random(mark).choices(WORDS, k=max(1, round(share * self._words)))
        return Question(" ".join([f"{mark}", *words]), max_tokens)

    def _ask(self, questions: Sequence[Question], title: str) -> list[Asked]:
        return self._meet([Session(0.0, (question,)) for question in questions], title)

    def _meet(self, sessions: Sequence[Session], title: str) -> list[Asked]:
        """Raises BenchError."""
        asked, _ = run_sessions(self._target, sessions, 0, title)
        for one, session in zip(asked, sessions, strict=True):
            if one.problem or len(one.times) < min(3, session.questions[0].max_tokens // 2):
                raise BenchError(f"a request failed: {one.problem or 'it had hardly any text'}")
        return asked

    @property
    def drift(self) -> float:
        """How many times longer the slowest round was than the quickest: 1 on a machine that did nothing else."""
        steps = [middle(found.steps[ALONE]) for found in self.rounds]
        return max(steps) / min(steps)

    @property
    def prompt_s(self) -> float:
        """Of the traffic's length, while all workers are busy."""
        busy = [ms for found in self.rounds for ms in found.shared_prompts.get((self._pairs, self._pairs), [])]
        alone = [ms for found in self.rounds for _, ms in found.prompts[1.0]]
        return statistics.median(busy or alone) / 1e3


def costs_of(rounds: Sequence[Round], pairs: int, all_rounds: Sequence[Round] = ()) -> Costs:
    """What these rounds found, each time as good as the others. How much the steps of a state differ is taken from `all_rounds`
    or else from these: a single round has too few of the slowest steps."""
    prompts, steps = _joined(found.prompts for found in rounds), _joined(found.steps for found in rounds)
    prefill = {share: _middle_point(points) for share, points in sorted(prompts.items())}
    attention_ms = attention_ms_of(tuple(prefill.values()))
    steps = {state: gaps for state, gaps in steps.items() if gaps}
    step_ms = {state: middle(gaps) for state, gaps in steps.items()}
    alone_ms, together_ms = step_ms[ALONE], step_ms[0, pairs]
    batches = {count: middle(gaps) for count, gaps in _joined(found.batches for found in rounds).items()}
    shared_prompts = _joined(found.shared_prompts for found in rounds)
    hand_overs = [ms - alone_ms for found in rounds for ms in found.hand_overs]
    shared_hand_overs = [ms - 1.5 * together_ms for found in rounds for ms in found.shared_hand_overs]  # half a step was left
    return Costs(
        prefill=beside_attention(tuple(prefill.values()), attention_ms),
        attention_ms_per_million_pairs=attention_ms,
        decode=tuple((count, ms * alone_ms / together_ms) for count, ms in sorted({1: together_ms, **batches}.items())),
        prefill_sharing={(1, 0): 1.0}
        | {state: statistics.median(ms) / prefill[1.0][1] for state, ms in shared_prompts.items()},
        decode_sharing={state: ms / alone_ms for state, ms in step_ms.items()},
        jitter=_jitter(all_rounds or rounds),
        hand_over_ms=HandOvers(_quantiles(hand_overs), _quantiles(shared_hand_overs)),
        gb_per_s=_GB_PER_S,
        latency_ms=max(0.05, statistics.median(hand_overs)),
        router_ms=0.0,
        kv_bytes_per_token=_KV_BYTES,
        num_layers=_LAYERS,
    )


def _jitter(rounds: Sequence[Round]) -> dict[State, tuple[float, ...]]:
    """Of each state: a step's time over the usual one of its round, or of all rounds, where each has hardly any."""
    of_all = _joined(found.steps for found in rounds)
    ratios = {state: _over_middle(gaps) for state, gaps in of_all.items() if gaps}
    ratios |= _joined(
        {state: _over_middle(gaps) for state, gaps in found.steps.items() if len(gaps) >= _FEWEST_GAPS} for found in rounds
    )
    return {state: _quantiles(found) for state, found in ratios.items()}


def _over_middle(gaps: Sequence[float]) -> list[float]:
    usual = middle(gaps)
    return [ms / usual for ms in gaps]


def middle(values: Sequence[float]) -> float:
    """The mean of the middle half: neither a stall nor tokens that a late client reads at once count for much."""
    ordered = sorted(values)
    cut = len(ordered) // 4
    return statistics.mean(ordered[cut : len(ordered) - cut])


def _joined(rounds: Iterable[Mapping[K, Sequence[V]]]) -> dict[K, list[V]]:
    found: dict[K, list[V]] = {}
    for each in rounds:
        for name, values in each.items():
            found.setdefault(name, []).extend(values)
    return found


def _middle_point(points: Sequence[Point]) -> Point:
    """Prompts of as many words have about as many tokens."""
    return statistics.median_low(count for count, _ in points), statistics.median(ms for _, ms in points)


def _quantiles(values: Sequence[float]) -> tuple[float, ...]:
    """As many at most, none below 0."""
    ordered, count = sorted(values), min(len(values), _NUM_CHANCES)
    return tuple(max(0.0, ordered[len(ordered) * step // count]) for step in range(count))


def _gaps(asked: Sequence[Asked]) -> list[float]:
    """While all of them had tokens; or, if that was hardly ever, at all."""
    begun, ended = max(one.times[1] for one in asked), min(one.times[-1] for one in asked)
    gaps = _gaps_within(asked, begun, ended)
    return gaps if len(gaps) >= _FEWEST_GAPS else _gaps_within(asked, 0.0, math.inf)


def _gaps_within(asked: Sequence[Asked], begun: float, ended: float) -> list[float]:
    """Milliseconds between tokens; but for the first two, between which is the hand-over."""
    pairs = [pair for one in asked for pair in itertools.pairwise(one.times[1:])]
    return [_ms(later - earlier) for earlier, later in pairs if begun <= earlier and later <= ended]


def _prompt_ms(found: Round, share: float = 1.0) -> float:
    """Alone; `share` is of the traffic's length."""
    return statistics.median(ms for _, ms in found.prompts[share])


def _first_gaps(asked: Sequence[Asked]) -> list[float]:
    """Of those whose second token had text."""
    return [_ms(one.times[1] - one.times[0]) for one in asked if len(one.times) > 1]


def _mean_ttft_ms(asked: Sequence[Asked]) -> float:
    return _ms(statistics.mean(one.ttft_s for one in asked))


def _ms(seconds: float) -> float:
    return 1e3 * seconds
