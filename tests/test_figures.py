"""The figures of README and docs/scale.md are those of the result files, a machine's files are of one commit that the history
has, and every figure is documented."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import msgspec
import pytest
import torch

from kvrelay.bench import everything
from kvrelay.bench.harness import report
from kvrelay.bench.main import find_scenario, run

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import figures  # noqa: E402
from figure_rows import CARD_ROWS, CPU_ROWS, SCALE_ROWS  # noqa: E402

MACHINES = sorted(figures.RESULTS.iterdir())
IN_HISTORY = (ROOT / ".git").exists()
OF_A_MACHINE = pytest.mark.parametrize("folder", MACHINES, ids=lambda folder: folder.name)
OF_A_ROW = pytest.mark.parametrize("row", [*CPU_ROWS, *CARD_ROWS, *SCALE_ROWS], ids=lambda row: row.what)


def results_of(folder: pathlib.Path) -> list[report.BenchResult]:
    return [msgspec.json.decode(path.read_bytes(), type=report.BenchResult) for path in sorted(folder.glob("*.json"))]


def documented(scenario: str) -> re.Pattern[str]:
    """What its section of docs/benchmarks.md has in backquotes. Capitals stand for anything, as does `*`; a name that begins
    with `_` replaces as many words at the end of the one before it."""
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    section = page.partition(f"\n## `{scenario}`\n")[2].partition("\n## ")[0]
    names: list[str] = []
    for name in re.findall(r"`([A-Za-z0-9_*]*[a-z][A-Za-z0-9_*]*)`", section):
        words = name.removeprefix("_").split("_")
        names.append("_".join([*names[-1].split("_")[: -len(words)], *words]) if name.startswith("_") else name)
    return re.compile("|".join(re.sub(r"\*|[A-Z]+", "[a-z0-9_]+", name) for name in names))


@pytest.mark.parametrize("page", figures.PAGES)
def test_a_page_shows_the_figures_of_the_files(page: str) -> None:
    assert (ROOT / page).read_text(encoding="utf-8") == figures.written(page), "run python tools/figures.py"


@OF_A_MACHINE
def test_a_machines_files_are_of_one_commit(folder: pathlib.Path) -> None:
    (commit,) = {result.commit for result in results_of(folder)}
    assert not commit.endswith("+changes")


@pytest.mark.skipif(not IN_HISTORY, reason="an exported tree has no history")
@OF_A_MACHINE
def test_that_commit_is_in_the_history(folder: pathlib.Path) -> None:
    commit = results_of(folder)[0].commit
    assert subprocess.run(["git", "merge-base", "--is-ancestor", commit, "HEAD"], cwd=ROOT, check=False).returncode == 0


@OF_A_MACHINE
def test_a_file_was_written_by_the_command_that_it_names(folder: pathlib.Path) -> None:
    for result in results_of(folder):
        assert result.command.split()[:3] == ["kvrelay", "bench", result.scenario]


@OF_A_MACHINE
def test_every_figure_of_a_file_is_documented(folder: pathlib.Path) -> None:
    for result in results_of(folder):
        known = documented(result.scenario)
        assert [name for name in result.results if not known.fullmatch(name)] == []


@OF_A_ROW
def test_a_row_names_documented_figures_of_a_scenario(row: figures.Row) -> None:
    known = documented(row.scenario)
    assert [name for name in (*row.figures(), *row.counts()) if not known.fullmatch(name)] == []
    assert row.statistic


@pytest.mark.parametrize("name", ["engine", "router", "relay", "kv", "two-stage", "encode", "gpu", "vllm"])
def test_every_target_is_of_a_documented_figure(name: str) -> None:
    known = documented(name)
    assert [figure for figure in find_scenario(name).targets if not known.fullmatch(figure)] == []


def test_names_are_documented_with_places_and_shortly() -> None:
    known = documented("router")
    assert known.fullmatch("decision_us_p99")
    assert known.fullmatch("multiturn_ttft_ms_p99_round_robin")
    assert not known.fullmatch("decision_us_p98")
    assert not known.fullmatch("decision_us")


def test_a_row_says_what_was_missed() -> None:
    row = figures.Row("idle", "router", "{idle_cpu_percent:.1f} %", " %")
    assert row.target() == "<= 2 %"
    assert row.cell({"idle_cpu_percent": 1.5}) == "1.5 %"
    assert row.cell({"idle_cpu_percent": 2.5}) == "2.5 % (missed)"
    assert row.cell({}) == "not measured"


def test_a_row_says_of_how_many_samples_its_figures_are() -> None:
    row = figures.Row("swap", "kv", "{swap_round_trip_over_memcpy:.2f}", statistic="median of {swap_samples:.0f}")
    assert row.counts() == ["swap_samples"]
    assert row.statistics([{}, {"swap_samples": 5.0}, {"swap_samples": 5.0}]) == "median of 5"
    assert row.statistics([{"swap_samples": 5.0}, {"swap_samples": 7.0}]) == "median of 5; median of 7"
    assert row.statistics([{}]) == "median of n"


def test_a_row_about_contextpilot_shows_no_stand_in() -> None:
    row = figures.Row("stopped", "kv", "{stopped_index_step_ratio:.2f}", provided="index_is_contextpilot")
    assert row.cell({"stopped_index_step_ratio": 1.0, "index_is_contextpilot": 1.0}) == "1.00"
    assert row.cell({"stopped_index_step_ratio": 1.0, "index_is_contextpilot": 0.0}) == "not measured"


def test_a_missed_target_that_no_row_shows_is_told_below_the_table() -> None:
    missed = {"engine": {"lora_over_base_b8": 1.5, "decode_b1_over_weights_read": 9.0}}
    assert figures.missed_elsewhere(CPU_ROWS, missed) == ["`lora_over_base_b8` 1.50 (<= 1.25)"]
    assert figures.missed_elsewhere(CPU_ROWS, {"engine": {"lora_over_base_b8": 1.2}}) == []


def test_all_refuses_a_tree_with_changes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(everything, "current_commit", lambda: "0123456789abcdef+changes")
    assert run(["all", "--only", "kv"]) == 2
    assert "the tree differs from its commit (0123456789ab): commit first, or measure a --draft" in capsys.readouterr().err


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Arguments of `kvrelay bench` of all that was to run."""
    found: list[list[str]] = []

    def record(python: str, arguments: list[str]) -> int:
        assert python == everything.python_for(arguments[0])
        found.append(arguments)
        return 0

    monkeypatch.setattr(everything, "_run", record)
    return found


def assert_options_are_taken(arguments: list[str]) -> None:
    scenario = find_scenario(arguments[0])
    known = {f"--{name.replace('_', '-')}" for name in scenario.options.__struct_fields__}
    assert {word for word in arguments if word.startswith("--")} <= known
    if "--only" in arguments:
        scenario.chosen_parts(arguments[arguments.index("--only") + 1])


def test_all_runs_scenarios_that_exist_with_options_they_take(started: list[list[str]]) -> None:
    assert run(["all", "--draft", "--model", "folder"]) == 0
    assert [words[0] for words in started] == ["engine", "router", "relay", "kv", "two-stage", "encode", "vllm"]
    assert [words[0] for words in started if "--model" not in words] == ["encode"]  # whose model takes images
    for words in started:
        assert_options_are_taken(words)


def test_all_of_a_card_is_three_files_in_its_folder(started: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert run(["all", "--draft", "--only", "gpu", "--model", "folder"]) == 0
    files = [words[words.index("--json") + 1] for words in started]
    assert files == [f"build/bench/nvidia-h200/{name}.json" for name in ("gpu", "gpu_relay", "router")]
    assert [words[0] for words in started if "--model" in words] == ["router"]
    parts = {part for words in started if words[0] == "gpu" for part in words[words.index("--only") + 1].split(",")}
    assert parts == set(find_scenario("gpu").parts)
    for words in started:
        assert_options_are_taken(words)


def test_all_of_a_card_needs_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(["all", "--draft", "--only", "gpu"]) == 2
    assert "there is no NVIDIA card here" in capsys.readouterr().err


def test_the_context_index_is_contextpilots_where_it_is_installed(
    started: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = tmp_path / "python"
    monkeypatch.setattr(everything, "CONTEXTPILOT_PYTHON", python)
    assert run(["all", "--draft", "--only", "kv"]) == 0
    assert "ContextPilot is left out" in capsys.readouterr().err
    python.touch()
    assert run(["all", "--draft", "--only", "kv"]) == 0
    first, second = started
    assert "--contextpilot" not in first
    assert second[second.index("--contextpilot") + 1] == str(python)
    assert_options_are_taken(second)


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("Intel(R) Xeon(R) Processor @ 2.50GHz, 2 cores", "intel-xeon-processor-2.50ghz-2-cores"),
        ("Arm Neoverse-N1, 2 cores", "arm-neoverse-n1-2-cores"),
        ("NVIDIA H200", "nvidia-h200"),
    ],
)
def test_a_machines_folder(name: str, folder: str) -> None:
    assert everything.slug(name) == folder
