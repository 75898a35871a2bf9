"""What splitting a model among two ranks costs and gains: decode steps of one rank and of two, one thread each, in turns; and
of a step of two, what rank 0 spends on plans (until the other rank has read them) and sums, and how long it waits for the other
rank's share of a sum, as two that do equal work never take equally long."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import NamedTuple, ParamSpec, TypeVar
from unittest import mock

import msgspec
from rich.console import Console

from kvrelay.bench.engine.own import EngineSubject
from kvrelay.bench.engine.work import CONTEXT, STEPS, WARM_STEPS
from kvrelay.bench.harness.engine import build_engine
from kvrelay.bench.harness.report import Target
from kvrelay.bench.harness.scenario import Results
from kvrelay.config import EngineOptions, ModelOptions
from kvrelay.kernels.ranks import Ranks
from kvrelay.runner.ranks import leading
from kvrelay.runner.ranks.group import RankGroup
from kvrelay.runner.ranks.passes import spread_inputs, to_pass

BATCHES = (1, 16)
TARGETS = {"ranks_cost_ms_b1": Target("<=", 0.5)}
_BLOCK_SIZE = 16
_LONGEST = CONTEXT + 1 + WARM_STEPS + max(STEPS.values()) + 1

P = ParamSpec("P")
T = TypeVar("T")


class _Watch:
    """What rank 0 spends on others in each pass, in seconds."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._told_s: list[float] = []  # in what is watched
        self._met_s: list[tuple[float, float]] = []  # until the pass began

    def last(self, count: int) -> tuple[float, float]:
        """The medians of so many passes: in plans and sums, and in waiting for the other rank's share of them."""
        passes = list(zip(self._told_s, self._met_s, [*self._met_s[1:], self._ranks.spent_s], strict=True))[-count:]
        costs = [told_s + after[0] - before[0] for told_s, before, after in passes]
        return median(costs), median(after[1] - before[1] for _, before, after in passes)

    def begins(self, function: Callable[P, T]) -> Callable[P, T]:
        """Each call of it begins a pass."""
        inside = self.inside(function)

        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            self._told_s.append(0.0)
            self._met_s.append(self._ranks.spent_s)
            return inside(*args, **kwargs)

        return call

    def inside(self, function: Callable[P, T]) -> Callable[P, T]:
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            begun, (spent_s, _) = time.perf_counter(), self._ranks.spent_s
            try:
                return function(*args, **kwargs)
            finally:  # what was spread is counted by the ranks
                self._told_s[-1] += time.perf_counter() - begun - (self._ranks.spent_s[0] - spent_s)

        return call


def measure(model: ModelOptions, prompts: list[list[int]], rounds: int, console: Console) -> Results:
    options = EngineOptions(
        block_size=_BLOCK_SIZE, kv_blocks=2 * max(BATCHES) * -(-_LONGEST // _BLOCK_SIZE), max_batch=max(BATCHES), swap_blocks=0
    )
    one, _ = build_engine(msgspec.structs.replace(model, threads=1), options)
    two, runner = build_engine(msgspec.structs.replace(model, threads=2, tp=2), options)
    alone, split = EngineSubject(one, prompts), EngineSubject(two, prompts)
    assert runner.ranks is not None
    try:
        with console.status("decoding in one rank and in two"), _watched(runner.ranks) as watch:
            rounds_of = {batch: [_round(alone, split, watch, batch) for _ in range(rounds + 1)][1:] for batch in BATCHES}
    finally:
        alone.close()
        split.close()
    results: Results = {"ranks_samples": float(rounds)}
    for batch, timed in rounds_of.items():
        results |= {
            f"ranks_1_ms_b{batch}": median(each.one_s for each in timed) * 1e3,
            f"ranks_2_ms_b{batch}": median(each.two_s for each in timed) * 1e3,
            f"ranks_speedup_b{batch}": median(each.one_s / each.two_s for each in timed),
            f"ranks_cost_ms_b{batch}": median(each.cost_s for each in timed) * 1e3,
            f"ranks_waiting_ms_b{batch}": median(each.waiting_s for each in timed) * 1e3,
        }
    return results


class _Round(NamedTuple):
    one_s: float  # a step of one rank
    two_s: float
    cost_s: float  # of the latter: rank 0's plans and sums
    waiting_s: float  # and until the other rank had its share of a sum


def _round(alone: EngineSubject, split: EngineSubject, watch: _Watch, batch: int) -> _Round:
    one_s, two_s = (median(subject.decode(batch, STEPS[batch])) for subject in (alone, split))
    return _Round(one_s, two_s, *watch.last(STEPS[batch]))


@contextlib.contextmanager
def _watched(group: RankGroup) -> Iterator[_Watch]:
    watch = _Watch(group.ranks)
    with (
        mock.patch.object(leading, "to_pass", watch.begins(to_pass)),
        mock.patch.object(group, "tell", watch.inside(group.tell)),
        mock.patch.object(leading, "spread_inputs", watch.inside(spread_inputs)),
    ):
        yield watch
