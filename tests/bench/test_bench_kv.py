"""The parts of `kvrelay bench kv`, with little to do."""

from __future__ import annotations

import pathlib

import pytest
from rich.console import Console

from kvrelay.bench.kv import index, preempt, scheduler
from kvrelay.bench.kv.scenario import SCENARIO
from kvrelay.bench.kv.scheduler import KVBench
from kvrelay.config import ModelOptions
from kvrelay.errors import BenchError, ConfigError
from kvrelay.events.contextpilot import ContextPilotIndex
from tests.tiny_models import tiny_model

QUIET = Console(quiet=True)


def test_parts_run_in_their_own_order_and_unknown_ones_are_refused() -> None:
    assert SCENARIO.chosen_parts("index, scheduler") == ["scheduler", "index"]
    with pytest.raises(ConfigError, match="did you mean preempt"):
        SCENARIO.chosen_parts("prempt")


def test_the_part_that_needs_a_gpu_runs_only_when_asked_for() -> None:
    assert SCENARIO.chosen_parts("") == ["scheduler", "swap", "preempt", "index"]


def test_the_scheduler_is_timed_without_the_runner(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SEQUENCES": 4, "BLOCKS": 400, "STEPS": 5}.items():
        monkeypatch.setattr(scheduler, name, value)
    figures = scheduler.measure(KVBench(rounds=2, profile=str(tmp_path / "results" / "profile.txt")), QUIET)
    assert 0 < figures["scheduler_step_best_ms"] <= figures["scheduler_step_ms"]
    assert "schedule" in (tmp_path / "results" / "profile.txt").read_text()
    with pytest.raises(ConfigError, match="--profile"):
        scheduler.measure(KVBench(rounds=1, profile="/proc/profile.txt"), QUIET)


@pytest.mark.long
def test_a_preempted_sequence_goes_on_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preempt, "draw", lambda seed, count: [10 + (seed + 7 * n) % 290 for n in range(count)])
    model = ModelOptions(model=str(tiny_model("llama")), dtype="float32")
    for swap in (False, True):
        times_s = preempt.resumes_s(model, 64, swap=swap)
        assert len(times_s) == preempt.RACES
        assert min(times_s) > 0


async def test_requests_have_ids_that_contextpilot_has_indexed(contextpilot_python: pathlib.Path) -> None:
    with index.open_index(str(contextpilot_python)) as opened:
        names = [*opened.name_requests(0), *opened.name_requests(1)]
        told = ContextPilotIndex(opened.url)
        removal = await told.remove_requests(names)
        await told.close()
    assert removal.num_removed == len(set(names)) == 400


def test_a_python_without_contextpilot_is_named() -> None:
    with pytest.raises(BenchError, match="/no/such/python does not run"), index.open_index("/no/such/python"):
        pass
