"""A step of the engine without a model: 256 sequences decode, 100,000 blocks are there, and the runner's time is taken off.

What is left is Python: deciding, blocks, hashes, the plan, committing. The profile of the same steps is kept beside the result.
"""

from __future__ import annotations

import cProfile
import io
import pathlib
import pstats
import statistics
import time
from collections.abc import Callable
from typing import Annotated

from msgspec import Meta
from rich.console import Console

from kvrelay.bench.harness.engine import engine_over
from kvrelay.bench.harness.report import Target, write_file
from kvrelay.bench.harness.scenario import ModelBench, Part, Results
from kvrelay.bench.harness.workload import draw, submission
from kvrelay.config import EngineOptions, Positive
from kvrelay.engine.engine import Engine
from kvrelay.engine.interfaces import StepPlan, StepResult
from kvrelay.engine.memory.events import EventRecorder
from kvrelay.errors import BenchError
from kvrelay.runner.fake import FakeRunner

SEQUENCES = 256
BLOCKS = 100_000
STEPS = 100  # a round: each sequence fills six blocks
_PROMPT_TOKENS = 512
_VOCABULARY = 32_000
_PROFILE_LINES = 40


class KVBench(ModelBench, frozen=True, kw_only=True):
    """What is measured, and how often."""

    rounds: Annotated[Positive, Meta(description="rounds; figures are medians over them")] = 5
    contextpilot: Annotated[
        str, Meta(description="Python that has ContextPilot, whose server is then the index; default is a stand-in")
    ] = ""
    profile: Annotated[str, Meta(description="file of the scheduler's profile")] = "build/kv-scheduler-profile.txt"


class TimedRunner(FakeRunner):
    """Counts the time that the engine spends inside of it."""

    def __init__(self) -> None:
        super().__init__(num_blocks=BLOCKS, vocab_size=_VOCABULARY, verify=False)
        self.inside_s = 0.0

    def launch(self, plan: StepPlan) -> None:
        start = time.perf_counter()
        super().launch(plan)
        self.inside_s += time.perf_counter() - start

    def collect(self) -> StepResult:
        start = time.perf_counter()
        result = super().collect()
        self.inside_s += time.perf_counter() - start
        return result


def measure(options: KVBench, console: Console) -> Results:
    runner = TimedRunner()
    engine = _running_engine(runner)
    events = engine.kv.record_events()  # as a worker does, which takes them after every step
    with console.status(f"{SEQUENCES} sequences, {BLOCKS} blocks"):
        medians = [statistics.median(_steps(engine, runner, events)) for _ in range(options.rounds)]
        _write_profile(pathlib.Path(options.profile), lambda: _steps(engine, runner, events))
    engine.close()
    return {
        "scheduler_samples": float(options.rounds),
        "scheduler_step_ms": statistics.median(medians) * 1e3,
        "scheduler_step_best_ms": min(medians) * 1e3,
    }


def _running_engine(runner: TimedRunner) -> Engine:
    """Every sequence has its first token."""
    options = EngineOptions(max_batch=SEQUENCES, token_budget=16 * _PROMPT_TOKENS, max_queue=SEQUENCES)
    engine = engine_over(runner, options, runner.vocab_size)
    for seed in range(SEQUENCES):
        engine.submit(submission(draw(seed, _PROMPT_TOKENS), 1_000_000))
    while len(engine.step().outputs) < SEQUENCES:
        pass
    return engine


def _steps(engine: Engine, runner: TimedRunner, events: EventRecorder) -> list[float]:
    """Seconds of each step, less the runner's."""
    times = []
    for _ in range(STEPS):
        inside_s, start = runner.inside_s, time.perf_counter()
        outputs = engine.step().outputs
        events.take()
        times.append(time.perf_counter() - start - (runner.inside_s - inside_s))
        if len(outputs) != SEQUENCES:
            raise BenchError(f"a step of {SEQUENCES} sequences gave {len(outputs)} tokens")
    return times


def _write_profile(path: pathlib.Path, work: Callable[[], object]) -> None:
    profiler = cProfile.Profile()
    profiler.runcall(work)
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(_PROFILE_LINES)
    here = str(pathlib.Path(__file__).parents[3]) + "/"
    write_file("--profile", path, text.getvalue().replace(here, "").encode())


PART = Part("a step of pure Python", measure, {"scheduler_step_ms": Target("<=", 1.0)})
