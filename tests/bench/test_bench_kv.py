"""The parts of `kvrelay bench kv`, with little to do."""

from __future__ import annotations

import argparse
import pathlib

import pytest
from rich.console import Console

from kvrelay.bench import kv, kv_preempt, kv_scheduler
from kvrelay.errors import ConfigError
from tests.tiny_models import tiny_model

QUIET = Console(quiet=True)


def test_parts_run_in_their_own_order_and_unknown_ones_are_refused() -> None:
    assert kv.parse("index, scheduler") == ("scheduler", "index")
    with pytest.raises(argparse.ArgumentTypeError, match="did you mean preempt"):
        kv.parse("prempt")


def test_the_scheduler_is_timed_without_the_runner(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SEQUENCES": 4, "BLOCKS": 400, "STEPS": 5}.items():
        monkeypatch.setattr(kv_scheduler, name, value)
    figures = kv_scheduler.measure(2, tmp_path / "results" / "profile.txt", QUIET)
    assert 0 < figures["scheduler_step_best_ms"] <= figures["scheduler_step_ms"]
    assert "schedule" in (tmp_path / "results" / "profile.txt").read_text()
    with pytest.raises(ConfigError, match="--profile"):
        kv_scheduler.measure(1, pathlib.Path("/proc/profile.txt"), QUIET)


@pytest.mark.long
def test_a_preempted_sequence_goes_on_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_preempt, "random_prompt", lambda length, seed: [10 + (seed + 7 * n) % 290 for n in range(length)])
    assert kv_preempt._resume_s(str(tiny_model("llama")), "auto", 64, swap=False) > 0
