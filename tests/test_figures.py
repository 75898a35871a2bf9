"""README's figures are those of the result files, and a machine's files are of one commit that the history has."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import msgspec
import pytest

from kvrelay.bench import everything
from kvrelay.bench.harness import report
from kvrelay.bench.main import find_scenario, run

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import figures  # noqa: E402

MACHINES = sorted(folder for folder in figures.RESULTS.iterdir())
WHOLE = [folder for folder in MACHINES if folder.name != figures.MIXED]
IN_HISTORY = (ROOT / ".git").exists()


def results_of(folder: pathlib.Path) -> list[report.BenchResult]:
    return [msgspec.json.decode(path.read_bytes(), type=report.BenchResult) for path in sorted(folder.glob("*.json"))]


def test_readme_shows_the_figures_of_the_files() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme == figures.written(readme), "run python tools/figures.py"


@pytest.mark.parametrize("folder", MACHINES, ids=lambda folder: folder.name)
def test_a_machines_files_are_of_one_commit(folder: pathlib.Path) -> None:
    commits = {result.commit for result in results_of(folder)}
    assert commits, "a folder without results"
    if folder.name != figures.MIXED:
        assert len(commits) == 1
        assert not commits.pop().endswith("+changes")


@pytest.mark.skipif(not IN_HISTORY, reason="an exported tree has no history")
@pytest.mark.parametrize(
    "folder", [folder for folder in MACHINES if folder.name != figures.MIXED], ids=lambda folder: folder.name
)
def test_that_commit_is_in_the_history(folder: pathlib.Path) -> None:
    commit = results_of(folder)[0].commit
    assert subprocess.run(["git", "merge-base", "--is-ancestor", commit, "HEAD"], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize(
    "folder", [folder for folder in MACHINES if folder.name != figures.MIXED], ids=lambda folder: folder.name
)
def test_a_file_was_written_by_the_command_that_it_names(folder: pathlib.Path) -> None:
    for result in results_of(folder):
        assert result.command.split()[:3] == ["kvrelay", "bench", result.scenario]


@pytest.mark.parametrize("row", [*figures.CPU_ROWS, *figures.CARD_ROWS], ids=lambda row: row.what)
def test_a_row_names_a_scenario_and_figures_of_its_files(row: figures.Row) -> None:
    find_scenario(row.scenario)
    measured = [machine.get(row.scenario, {}) for machine in map(figures.read_machine, MACHINES)]
    assert any(name in results for results in measured for name in row.figures())


def test_a_row_says_what_was_missed() -> None:
    row = figures.Row("idle", "router", "{idle_cpu_percent:.1f} %", " %")
    assert row.target() == "<= 2 %"
    assert row.cell({"idle_cpu_percent": 1.5}) == "1.5 %"
    assert row.cell({"idle_cpu_percent": 2.5}) == "2.5 % (missed)"
    assert row.cell({}) == "not measured"


def test_all_refuses_a_tree_with_changes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(everything, "current_commit", lambda: "0123456789abcdef+changes")
    assert run(["all", "--only", "kv"]) == 2
    assert "the tree differs from its commit (0123456789ab): commit first, or measure a --draft" in capsys.readouterr().err


def test_all_runs_scenarios_that_exist_with_options_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    def record(python: str, arguments: list[str]) -> int:
        assert python == everything.python_for(arguments[0])
        started.append(arguments)
        return 0

    monkeypatch.setattr(everything, "_run", record)
    assert run(["all", "--draft"]) == 0
    assert [words[0] for words in started] == ["engine", "router", "relay", "kv", "two-stage", "encode", "vllm"]
    for words in started:
        known = {f"--{name.replace('_', '-')}" for name in find_scenario(words[0]).options.__struct_fields__}
        assert {word for word in words if word.startswith("--")} <= known


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
