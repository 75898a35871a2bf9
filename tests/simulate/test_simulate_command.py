"""`kvrelay simulate`: traces, options, files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import commands_of

from kvrelay.cli import main
from kvrelay.errors import ConfigError
from kvrelay.simulate.cluster import Layout
from kvrelay.simulate.find import Prices, cheapest
from kvrelay.simulate.options import ClusterOptions
from kvrelay.simulate.traffic import read_trace
from kvrelay.states import Role

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = ROOT / "bench" / "results"


def test_a_trace_has_sessions_and_prefixes(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"at_s": 3.0, "prompt_tokens": 20, "output_tokens": 5, "session": "a"},
        {"at_s": 1.0, "prompt_tokens": 100, "output_tokens": 10, "session": "a"},
        {"at_s": 2.0, "prompt_tokens": 80, "output_tokens": 7, "prefix": "x", "prefix_tokens": 64},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    conversation, single = read_trace(path)
    assert [turn.prompt_tokens for turn in conversation.turns] == [100, 20]
    assert conversation.turns[1].pause_s == 2.0
    assert len(conversation.first_prompt().tokens) == 100
    assert len(conversation.next_prompt(conversation.first_prompt(), 1).tokens) == 100 + 10 + 20
    assert len(single.first_prompt().tokens) == 80
    assert single.at_s == 2.0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--trace", "nowhere.jsonl"], "--trace"),
        (["--costs", "nowhere.json"], "--costs"),
        (["--fail", "soon:decode"], "--fail"),
        (["--fail", "3:decode:later"], "--fail"),
        (["--decode", "0"], "--decode"),
        (["--image-share", "0.5"], "--encode"),
        (["--kv-blocks", "4"], "--kv-blocks"),
        (["--prefil", "2"], "--prefill"),
    ],
)
def test_what_is_wrong_is_named(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["simulate", *arguments]) == 2
    assert named in capsys.readouterr().err


def test_failures_are_read() -> None:
    failures = ClusterOptions(fail=("30:decode", "2.5:prefill:gone")).failures()
    assert [(one.at_s, one.role, one.comes_back) for one in failures] == [(30.0, Role.DECODE, True), (2.5, Role.PREFILL, False)]
    with pytest.raises(ConfigError):
        ClusterOptions(fail=("x",)).failures()


def test_the_command_prints_writes_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result, drawing = tmp_path / "result.json", tmp_path / "result.svg"
    arguments = ["simulate", "--prefill", "2", "--rate", "5", "--seconds", "4", "--fail", "2:prefill", "--rebalance", "on"]
    assert main.main([*arguments, "--json", str(result), "--plot", str(drawing)]) == 0
    written = json.loads(result.read_text())
    assert written["scenario"] == "simulate"
    assert written["results"]["finished"] == written["results"]["requests"] > 0
    assert 0 < written["results"]["router_us_p50"] <= written["results"]["router_us_p99"]
    assert "<svg" in drawing.read_text()
    assert "ttft_ms_p50" in capsys.readouterr().err


def test_the_command_gives_the_same_figures_again_but_for_the_time_that_its_router_took(tmp_path: Path) -> None:
    results = []
    for name in ("first.json", "again.json"):
        assert main.main(["simulate", "--rate", "5", "--seconds", "2", "--seed", "3", "--json", str(tmp_path / name)]) == 0
        results.append(json.loads((tmp_path / name).read_text())["results"])
    first, again = ({name: figure for name, figure in each.items() if not name.startswith("router_us")} for each in results)
    assert first == again


@pytest.mark.parametrize("words", commands_of("docs/simulate.md", "tests/simulate/test_simulate_command.py"), ids=" ".join)
def test_the_commands_of_the_page(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For less time."""
    (tmp_path / "bench").symlink_to(ROOT / "bench")
    monkeypatch.chdir(tmp_path)
    assert main.main([*words[1:], "--seconds", "1"]) == 0
    assert all((tmp_path / name).exists() for name in words if name.startswith("result."))


def test_find_gives_the_cheapest_cluster_that_meets_the_targets() -> None:
    """Which is known here: a cluster does if it has 3 prefill and 5 decode workers, or one more of each than 1 and 6."""
    tried: list[tuple[int, int]] = []

    def meets(layout: Layout) -> bool:
        tried.append((layout.prefill, layout.decode))
        return (layout.prefill >= 3 and layout.decode >= 5) or (layout.prefill >= 2 and layout.decode >= 7)

    found = cheapest(meets, Layout(), Prices(), most_workers=40)
    assert found is not None
    assert (found.prefill, found.decode) == (3, 5)
    assert len(tried) == len(set(tried)) < 20
    dear_prefill = cheapest(meets, Layout(), Prices(prefill=10.0), most_workers=40)
    assert dear_prefill is not None
    assert (dear_prefill.prefill, dear_prefill.decode) == (2, 7)
    assert cheapest(lambda layout: False, Layout(), Prices(), most_workers=40) is None


def test_find_tries_clusters_of_uneven_roles_up_to_the_limit() -> None:
    def meets(layout: Layout) -> bool:
        return layout.prefill >= 8 and layout.decode >= 2

    found = cheapest(meets, Layout(), Prices(), most_workers=10)
    assert found is not None
    assert (found.prefill, found.decode) == (8, 2)
    assert cheapest(meets, Layout(), Prices(), most_workers=9) is None


def test_find_on_shared_cores_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["simulate", "--rate", "5", "--seconds", "1", "--find", "--cores", "2"]) == 2
    assert "--find: --cores: it takes for granted" in " ".join(capsys.readouterr().err.split())


def test_find_by_simulation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A prompt takes 100 ms and 25 come each second: 3 prefill workers, and no fewer, keep up."""
    result = tmp_path / "found.json"
    traffic = ["--rate", "25", "--seconds", "8", "--input-tokens", "99", "--output-tokens", "4", "--ttft-ms", "500"]
    costs = ["--prefill-ms", "1", "--step-ms", "1", "--sequence-ms", "0.01", "--local-prefill-tokens", "0"]
    search = ["--find", "--most-workers", "8", "--good-share", "0.9"]
    assert main.main(["simulate", *traffic, *costs, *search, "--json", str(result)]) == 0
    found = json.loads(result.read_text())["results"]
    assert (found["prefill"], found["decode"]) == (3, 1)
    assert found["good_share"] >= 0.9
    assert "3 prefill and 1 decode" in capsys.readouterr().err
    assert main.main(["simulate", *traffic, *costs, *search[:2], "2"]) == 2
    assert "--find" in capsys.readouterr().err
