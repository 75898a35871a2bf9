"""What splitting a model among two ranks costs and gains: decode steps of one rank and of two, one thread each, in turns; and
of a step of two, what rank 0 spends on telling its plan to the other and on sums, waiting for the other included."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import ParamSpec, TypeVar
from unittest import mock

import msgspec
from rich.console import Console

from kvrelay.bench.engine.own import EngineSubject
from kvrelay.bench.engine.work import CONTEXT, STEPS, WARM_STEPS
from kvrelay.bench.harness.engine import build_engine
from kvrelay.bench.harness.report import Target
from kvrelay.bench.harness.scenario import Results
from kvrelay.config import EngineOptions, ModelOptions
from kvrelay.runner.ranks import leading
from kvrelay.runner.ranks.group import RankGroup
from kvrelay.runner.ranks.passes import to_pass

BATCHES = (1, 16)
TARGETS = {"ranks_cost_ms_b1": Target("<=", 0.5)}
_BLOCK_SIZE = 16
_LONGEST = CONTEXT + 1 + WARM_STEPS + max(STEPS.values()) + 1

P = ParamSpec("P")
T = TypeVar("T")


class _Watch:
    """Seconds of each pass that were spent in what is watched."""

    def __init__(self) -> None:
        self.passes: list[float] = []

    def begins(self, function: Callable[P, T]) -> Callable[P, T]:
        """Each call of it begins a pass."""
        inside = self.inside(function)

        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            self.passes.append(0.0)
            return inside(*args, **kwargs)

        return call

    def inside(self, function: Callable[P, T]) -> Callable[P, T]:
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            begun = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.passes[-1] += time.perf_counter() - begun

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
    results: Results = {}
    for batch, timed in rounds_of.items():
        results |= {
            f"ranks_1_ms_b{batch}": median(one_s for one_s, _, _ in timed) * 1e3,
            f"ranks_2_ms_b{batch}": median(two_s for _, two_s, _ in timed) * 1e3,
            f"ranks_speedup_b{batch}": median(one_s / two_s for one_s, two_s, _ in timed),
            f"ranks_cost_ms_b{batch}": median(cost_s for _, _, cost_s in timed) * 1e3,
        }
    return results


def _round(alone: EngineSubject, split: EngineSubject, watch: _Watch, batch: int) -> tuple[float, float, float]:
    """Seconds of a step of one rank, of two, and of the latter's plans and sums."""
    one_s = median(alone.decode(batch, STEPS[batch]))
    watch.passes.clear()
    two_s = median(split.decode(batch, STEPS[batch]))
    return one_s, two_s, median(watch.passes[-STEPS[batch] :])


@contextlib.contextmanager
def _watched(group: RankGroup) -> Iterator[_Watch]:
    watch = _Watch()
    with (
        mock.patch.object(leading, "to_pass", watch.begins(to_pass)),
        mock.patch.object(group, "tell", watch.inside(group.tell)),
        mock.patch.object(group.ranks, "spread", watch.inside(group.ranks.spread)),
        mock.patch.object(group.ranks, "add_up", watch.inside(group.ranks.add_up)),
    ):
        yield watch
