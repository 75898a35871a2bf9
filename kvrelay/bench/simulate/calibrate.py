"""What passes cost on a running cluster, as its clients see it.

A round tries, one after the other:

    prompts     one at a time, of three lengths; and one on each prefill worker
    streams     one; one on each decode worker; several on each
    both        prompts while each decode worker has a stream

Of each, the time to first token or between tokens. Alone they give the curves; beside others, how much passes slow each other:
on a machine with fewer cores than workers, or with one memory bus, a lot. Rounds are taken between the parts of the traffic, so
that the machine is the same for both; the costs are the medians of all of them.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvrelay.bench.serve.client import Asked, Target
from kvrelay.bench.serve.scenario import run_sessions
from kvrelay.bench.serve.sessions import WORDS, Question, Session
from kvrelay.errors import BenchError
from kvrelay.simulate.costs import Costs, Point, interpolate

_LENGTHS = (1.0, 0.5, 1.5)  # of prompts, of that of the traffic
_BATCHES = (2, 4)  # streams on each decode worker
_STREAM_TOKENS, _MOST_TOKENS = 32, 256
_JITTER_STEPS = 100
_KV_BYTES, _LAYERS, _GB_PER_S = 46_080, 30, 5.0  # of SmolLM2-135M in float32; shared memory


@dataclass(slots=True)
class Measured:
    """Milliseconds, and how many times longer passes took beside others than alone in the same round."""

    prompts: dict[float, list[Point]] = field(default_factory=dict)  # tokens and time, by length as a share of the traffic's
    steps: dict[int, list[float]] = field(default_factory=dict)  # by sequences on each decode worker, all of them busy
    shared_prompts: dict[int, list[float]] = field(default_factory=dict)  # slower, by passes under way; of the traffic's length
    shared_steps: dict[int, list[float]] = field(default_factory=dict)  # slower, by passes under way; of one sequence
    hand_overs: list[float] = field(default_factory=list)  # beyond a step
    jitter: list[float] = field(default_factory=list)  # of steps, as shares of their median


class Calibration:
    """Of one cluster with as many prefill as decode workers."""

    def __init__(self, target: Target, pairs: int, words: int) -> None:
        self._target = target
        self._pairs = pairs
        self._words = words
        self._marks = itertools.count()  # no prompt begins as another one did
        self.measured = Measured()
        self._ask([self._question(4)] * pairs, "warming up")

    def round(self) -> None:
        found = self.measured
        for share in _LENGTHS:
            (one,) = self._ask([self._question(2, share)], "measuring a prompt")
            found.prompts.setdefault(share, []).append((one.prompt_tokens, _ms(one.ttft_s)))
            if share == 1.0:
                prompt_ms = _ms(one.ttft_s)
                _add(found.shared_prompts, 1, 1.0)
        (stream,) = self._ask([self._question(_STREAM_TOKENS)], "measuring a stream")
        step_ms = statistics.median(gaps := _gaps([stream]))
        _add(found.shared_steps, 1, 1.0)
        all_ms = step_ms
        found.jitter += [gap / step_ms for gap in gaps]
        found.hand_overs.append(_ms(stream.times[1] - stream.times[0]) - step_ms)
        for count in range(2, self._pairs + 1):
            prompts = self._ask([self._question(2) for _ in range(count)], "measuring prompts")
            _add(found.shared_prompts, count, _mean_ttft_ms(prompts) / prompt_ms)
            all_ms = self._streams_ms(count)
            _add(found.shared_steps, count, all_ms / step_ms)
        _add(found.steps, 1, all_ms)
        for count in _BATCHES:
            _add(found.steps, count, self._streams_ms(count * self._pairs))
        for count in range(1, self._pairs + 1):
            self._both(count, prompt_ms, step_ms)

    def _streams_ms(self, count: int) -> float:
        return statistics.median(_gaps(self._ask([self._question(_STREAM_TOKENS) for _ in range(count)], "measuring streams")))

    def _both(self, count: int, prompt_ms: float, step_ms: float) -> None:
        """So many prompts, which come when each decode worker has a stream and end before it does."""
        lead_ms = 2 * self._pairs * prompt_ms
        most = min(_MOST_TOKENS, max(_STREAM_TOKENS, self._words))  # as prompts, so that small models have room for both
        num_tokens = min(most, math.ceil((lead_ms + 4 * self._pairs * prompt_ms) / step_ms))
        streams = [self._question(num_tokens) for _ in range(self._pairs)]
        prompts = [self._question(2) for _ in range(count)]
        asked = self._ask([*streams, *prompts], "measuring both", later=count, later_s=lead_ms / 1e3)
        begun = max(one.sent_at for one in asked[self._pairs :])
        ended = min(one.times[0] for one in asked[self._pairs :])
        num_passes = self._pairs + count
        _add(self.measured.shared_prompts, num_passes, _mean_ttft_ms(asked[self._pairs :]) / prompt_ms)
        if beside := _gaps_within(asked[: self._pairs], begun, ended):
            _add(self.measured.shared_steps, num_passes, statistics.median(beside) / step_ms)

    def _question(self, max_tokens: int, share: float = 1.0) -> Question:
        mark = next(self._marks)
        words = random.Random(mark).choices(WORDS, k=max(1, round(share * self._words)))
        return Question(" ".join([f"{mark}", *words]), max_tokens)

    def _ask(self, questions: Sequence[Question], title: str, *, later: int = 0, later_s: float = 0.0) -> list[Asked]:
        """The last `later` of them come `later_s` after the others. Raises BenchError."""
        first = len(questions) - later
        sessions = [Session(0.0 if place < first else later_s, (question,)) for place, question in enumerate(questions)]
        asked, _ = run_sessions(self._target, sessions, 0, title)
        for one, question in zip(asked, questions, strict=True):
            if one.problem or len(one.times) < min(3, question.max_tokens // 2):
                raise BenchError(f"a request failed: {one.problem or 'it had hardly any text'}")
        return asked

    @property
    def drift(self) -> float:
        """How many times longer the slowest round was than the quickest: 1 on a machine that did nothing else."""
        return max(self.measured.steps[1]) / min(self.measured.steps[1])

    @property
    def prompt_s(self) -> float:
        """Of the traffic's length, alone."""
        return statistics.median(ms for _, ms in self.measured.prompts[1.0]) / 1e3

    @property
    def costs(self) -> Costs:
        return costs_of(self.measured, self._pairs)


def costs_of(found: Measured, pairs: int) -> Costs:
    decode_sharing = _sharing(found.shared_steps)
    beside = max(1.0, interpolate(decode_sharing, pairs)) if pairs > 1 else 1.0  # batches were on all workers at once
    return Costs(
        prefill=tuple(_middle(points) for _, points in sorted(found.prompts.items())),
        decode=tuple((count, statistics.median(times) / beside) for count, times in sorted(found.steps.items())),
        prefill_sharing=_sharing(found.shared_prompts),
        decode_sharing=decode_sharing,
        jitter=_quantiles(found.jitter),
        gb_per_s=_GB_PER_S,
        latency_ms=max(0.05, statistics.median(found.hand_overs)),
        router_ms=0.0,
        kv_bytes_per_token=_KV_BYTES,
        num_layers=_LAYERS,
    )


def _middle(points: Sequence[Point]) -> Point:
    """Prompts of as many words have about as many tokens."""
    return statistics.median_low(count for count, _ in points), statistics.median(ms for _, ms in points)


def _sharing(slower: dict[int, list[float]]) -> tuple[Point, ...]:
    return tuple((count, statistics.median(rounds)) for count, rounds in sorted(slower.items()))


def _quantiles(values: Sequence[float]) -> tuple[float, ...]:
    ordered = sorted(values)
    return tuple(ordered[len(ordered) * step // _JITTER_STEPS] for step in range(_JITTER_STEPS))


def _gaps(asked: Sequence[Asked]) -> list[float]:
    """While all of them had tokens; or, if they never did at the same time, at all."""
    begun, ended = max(one.times[1] for one in asked), min(one.times[-1] for one in asked)
    return _gaps_within(asked, begun, ended) or _gaps_within(asked, 0.0, math.inf)


def _gaps_within(asked: Sequence[Asked], begun: float, ended: float) -> list[float]:
    """Milliseconds between tokens; but for the first two, between which is the hand-over."""
    pairs = [pair for one in asked for pair in itertools.pairwise(one.times[1:])]
    return [_ms(later - earlier) for earlier, later in pairs if begun <= earlier and later <= ended]


def _mean_ttft_ms(asked: Sequence[Asked]) -> float:
    return _ms(statistics.mean(one.ttft_s for one in asked))


def _ms(seconds: float) -> float:
    return 1e3 * seconds


def _add(found: dict[int, list[float]], count: int, value: float) -> None:
    found.setdefault(count, []).append(value)
