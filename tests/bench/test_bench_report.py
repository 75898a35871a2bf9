"""The result file and the command line of `kvrelay bench`."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from kvrelay.bench import machine, main
from kvrelay.bench.harness import report
from kvrelay.bench.harness.report import BenchResult, Target
from kvrelay.errors import ConfigError

RESULT = BenchResult(
    scenario="router",
    commit="abc",
    hardware="a machine",
    command="kvrelay bench router",
    results={"lost_512": 3.0, "rps": 950.5},
)


def test_the_file_has_exactly_the_promised_fields(tmp_path: Path) -> None:
    report.write(RESULT, tmp_path / "new" / "result.json")
    assert json.loads((tmp_path / "new" / "result.json").read_text()) == {
        "scenario": "router",
        "commit": "abc",
        "hardware": "a machine",
        "command": "kvrelay bench router",
        "results": {"lost_512": 3.0, "rps": 950.5},
    }


def test_a_file_that_cannot_be_written_is_an_error_that_names_the_option(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--json: cannot write .*file"):
        report.write(RESULT, tmp_path / "file" / "result.json")


def test_the_table_says_which_targets_were_met() -> None:
    console = Console(file=io.StringIO(), width=100)
    report.show(RESULT, {"lost_512": Target("<=", 0.0), "rps": Target(">=", 900.0)}, console)
    assert isinstance(console.file, io.StringIO)
    lines = {line.split()[1]: line for line in console.file.getvalue().splitlines() if "_512" in line or "rps" in line}
    assert "missed" in lines["lost_512"]
    assert "met" in lines["rps"]


@pytest.mark.parametrize(("figure", "text"), [(3.0, "3"), (0.12345, "0.123"), (123.456, "123.5"), (1234.5, "1234")])
def test_figures_are_short(figure: float, text: str) -> None:
    assert report.format_figure(figure) == text


@pytest.mark.parametrize(
    ("argv", "status", "message"),
    [
        (["rooter"], 2, "unknown scenario 'rooter'; did you mean router?"),
        (["router", "--only", "idle,fail-over"], 2, "--only: unknown part 'fail-over'; did you mean failover?"),
        (["router", "--stream", "5"], 2, "unknown option --stream; did you mean --streams?"),
        (["engine", "--rounds", "0"], 2, "--rounds 0: expected int >= 1"),
        (["engine", "--peer", "vlm"], 2, "unknown peer 'vlm'"),
        (["engine", "--model", "/no/such/folder", "--rounds", "1"], 1, "/no/such/folder"),
    ],
)
def test_a_wrong_command_line_is_explained(
    argv: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(argv) == status
    assert message in capsys.readouterr().err


def test_help_lists_the_scenarios(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in main.SCENARIOS)


def test_the_machine_scenario_writes_its_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "GEMV_ROWS", 64)
    monkeypatch.setattr(machine, "GEMM_SIZE", 16)
    path = tmp_path / "machine.json"
    assert main.run(["machine", "--json", str(path)]) == 0
    written = json.loads(path.read_text())
    assert set(written) == {"scenario", "commit", "hardware", "command", "results"}
    assert written["command"] == f"kvrelay bench machine --json {path}"
    assert all(figure > 0 for figure in written["results"].values())
    assert "threads" in written["hardware"]


@pytest.mark.parametrize("name", main.SCENARIOS)
def test_every_part_is_documented(name: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert f"kvrelay bench {name}" in page
    section = page.partition(f"\n## `{name}`\n")[2].partition("\n## ")[0]
    scenario = main.find_scenario(name)
    parts = scenario.parts if len(scenario.parts) > 1 else {}
    assert [part for part in parts if f"`{part}`" not in section] == []


@pytest.mark.parametrize("name", main.SCENARIOS)
def test_help_shows_a_scenario_with_its_options_and_parts(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main.run([name, "--help"])
    text, scenario = capsys.readouterr().out, main.find_scenario(name)
    assert "--json" in text
    assert ("--only" in text) == (len(scenario.parts) > 1)
    assert all(part.title in text for part in scenario.parts.values() if len(scenario.parts) > 1)
