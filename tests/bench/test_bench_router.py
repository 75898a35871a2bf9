"""The parts of `kvrelay bench router`: what is asked for, and the arithmetic behind the figures."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE_S, until

from kvrelay.bench import main
from kvrelay.bench.harness.child import Command
from kvrelay.bench.harness.cluster import Answer
from kvrelay.bench.router import decision, failover, idle, multiturn, routers
from kvrelay.bench.router.decision import median_of_rounds
from kvrelay.bench.router.failover import Struck
from kvrelay.bench.router.scenario import SCENARIO
from kvrelay.errors import BenchError
from tests.tiny_models import tiny_model


def test_parts_run_in_their_own_order() -> None:
    assert SCENARIO.chosen_parts("failover, decision") == ["decision", "failover"]


def test_every_part_has_targets_of_its_own() -> None:
    named = [name for part in SCENARIO.parts.values() for name in part.targets]
    assert len(named) == len(set(named)) == len(SCENARIO.targets)


# Several turns


def answered(ttft_s: float, *, cached: int = 0, prompt: int = 100) -> Answer:
    return Answer(prompt, submitted_at=10.0, tokens=[1], tokens_at=[10.0 + ttft_s], cached_tokens=cached)


def test_policies_are_compared_by_medians_and_cached_tokens() -> None:
    figures = multiturn.summarise(
        {
            "prefix_aware": [answered(0.1, cached=90), answered(0.2, cached=50), answered(0.9)],
            "round_robin": [answered(0.4, cached=10), answered(0.6), answered(0.8)],
        }
    )
    assert figures["multiturn_ttft_p50_ratio"] == pytest.approx(3.0)
    assert figures["multiturn_ttft_ms_p99_prefix_aware"] == pytest.approx(900.0)
    assert figures["multiturn_cached_share_prefix_aware"] == pytest.approx(140 / 300)
    assert figures["multiturn_cached_share_round_robin"] == pytest.approx(10 / 300)


def test_a_request_that_failed_is_no_time() -> None:
    failed = Answer(100, problem="no worker")
    with pytest.raises(BenchError, match="no worker"):
        multiturn.summarise({"prefix_aware": [failed], "round_robin": [answered(0.4)]})


def test_a_conversation_keeps_what_was_said() -> None:
    conversation = multiturn.Conversation([1, 2, 3], random.Random(1), range(50))
    first = list(conversation.question())
    conversation.answered([7, 8])
    second = list(conversation.question())
    assert first[:3] == [1, 2, 3]
    assert second[: len(first) + 2] == [*first, 7, 8]
    assert len(second) == len(first) + 2 + multiturn.QUESTION_TOKENS


def test_a_cache_holds_more_than_its_share_of_the_conversations_but_not_all() -> None:
    all_blocks = multiturn.CONVERSATIONS * multiturn.longest_tokens() / 16
    assert all_blocks / 2 < multiturn.pool_blocks() < all_blocks


# Fail-over


def struck(detected_s: float, next_token_s: list[float], prefill_s: list[float], num_right: int = 4) -> Struck:
    return Struck(detected_s, next_token_s, prefill_s, num_right, num_streams=4, problems=[])


def test_failover_is_compared_with_detection_and_one_prefill() -> None:
    figures = failover.summarise([struck(0.1, [0.5, 0.7], [1.0, 1.2]), struck(0.3, [0.6, 2.0], [1.1], num_right=3)])
    assert figures["failover_next_token_ms_p50"] == pytest.approx(600.0)
    assert figures["failover_next_token_ms_max"] == pytest.approx(2000.0)
    assert figures["failover_over_bound"] == pytest.approx(0.6 / (0.2 + 1.1))
    assert figures["failover_right_share"] == pytest.approx(7 / 8)
    assert figures["failover_struck_streams"] == 4


def test_failover_without_another_token_is_no_figure() -> None:
    with pytest.raises(BenchError, match="no stream of a killed worker"):
        failover.summarise([struck(0.1, [], [1.0])])


# Idle


def test_two_routers_are_compared_with_one_round_by_round() -> None:
    one = [routers.Run(100.0, 1.0), routers.Run(50.0, 1.2), routers.Run(80.0, 1.1)]
    two = [routers.Run(110.0, 0.5), routers.Run(100.0, 0.8), routers.Run(80.0, 0.6)]
    assert routers.summarise(one, two) == {
        "routers_samples": 3.0,
        "routers_1_rps": 80.0,
        "routers_2_rps": 100.0,
        "routers_2_over_1": pytest.approx(1.1),
        "routers_2_over_1_on_cores_of_their_own": pytest.approx(1.1 / 0.6),
    }


def test_idle_time_is_a_share_of_a_core() -> None:
    figures = idle.summarise([1.0, 2.0, 3.0], [1.1, 2.05, 3.02], wall_s=10.0)
    assert figures["idle_cpu_percent"] == pytest.approx(1.7)
    assert figures["idle_cpu_percent_router"] == pytest.approx(1.0)
    assert figures["idle_cpu_percent_worker_max"] == pytest.approx(0.5)


# Decisions


def test_one_bad_round_does_not_make_the_figure() -> None:
    rounds = [[1.0, 2.0, 3.0], [1.0, 2.0, 500.0], [1.0, 2.0, 4.0]]
    assert median_of_rounds(rounds, 99) == 4.0
    assert median_of_rounds(rounds, 50) == 2.0


def test_prompts_are_unknown_known_in_part_and_known_as_a_whole() -> None:
    assert [decision.cached_blocks(number) for number in range(5)] == [0, 63, 127, 127, 0]


def test_decisions_among_a_few_workers_give_every_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("PROMPTS", 8), ("ROUNDS", 1)):
        monkeypatch.setattr(decision, name, value)
    path = tmp_path / "router.json"
    assert main.run(["router", "--only", "decision", "--workers", "6", "--blocks", "3000", "--json", str(path)]) == 0
    figures = json.loads(path.read_text())["results"]
    figures.pop("index_bytes_per_block")  # of so few, nothing can be said
    assert figures.pop("decision_samples") == 1
    assert set(figures) == {
        f"decision_us_{share}{policy}" for share in ("p50", "p99") for policy in ("", "_least_loaded", "_round_robin")
    }
    assert all(figure > 0 for figure in figures.values())


def test_a_run_that_is_told_to_end_takes_along_what_it_started() -> None:
    arguments = ["bench", "router", "--only", "routers", "--model", str(tiny_model("llama"))]
    with subprocess.Popen([sys.executable, "-m", "kvrelay", *arguments], stderr=subprocess.DEVNULL) as bench:
        until(lambda: any("router" in command for command in started_by(bench.pid).values()))
        router = next(pid for pid, command in started_by(bench.pid).items() if "router" in command)
        bench.terminate()
        assert bench.wait(PATIENCE_S) == 130
    assert not Path(f"/proc/{router}").exists()


def test_an_interrupt_while_a_command_is_started_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            started.append(self)
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    usual = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as `kvrelay bench` has it
    try:
        with pytest.raises(KeyboardInterrupt), Command(["0"], module="http.server"):
            pytest.fail("it was to be interrupted")
    finally:
        signal.signal(signal.SIGTERM, usual)
    assert [process.returncode for process in started] == [-signal.SIGTERM]


def started_by(parent: int) -> dict[int, list[str]]:
    """Command lines, by process."""
    pids = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return {int(pid): Path(f"/proc/{pid}/cmdline").read_text().split("\0") for pid in pids}


# All of it on a tiny model


@pytest.mark.long
def test_a_whole_run_on_a_tiny_model_gives_every_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model("llama"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
    monkeypatch.setattr(multiturn, "ROUNDS", 1)
    monkeypatch.setattr(failover, "ROUNDS", 1)
    monkeypatch.setattr(idle, "SETTLE_S", 0.5)
    monkeypatch.setattr(idle, "WINDOW_S", 1.0)
    path = tmp_path / "router.json"
    arguments = ["router", "--only", "idle,multiturn,failover", "--model", str(folder), "--json", str(path)]
    assert main.run(arguments) == 0
    figures = json.loads(path.read_text())["results"]
    targets = {*idle.PART.targets, *multiturn.PART.targets, *failover.PART.targets}
    assert targets <= set(figures)
    assert figures["failover_right_share"] == 1.0
    assert figures["multiturn_cached_share_prefix_aware"] > figures["multiturn_cached_share_round_robin"]
