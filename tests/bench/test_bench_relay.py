"""The relay's benchmark: what it moves, what it computes from times, its drawing, and one whole run on a tiny model."""

from __future__ import annotations

import io
import json
import pathlib
import shutil
import xml.etree.ElementTree as ElementTree

import msgspec
import pytest
from rich.console import Console
from test_bench_work import SMOLLM2
from tiny_models import tiny_model

from kvrelay.bench import main
from kvrelay.bench.harness.pair import EngineMissing, open_pair
from kvrelay.bench.harness.plot import Dots, draw, write_plot
from kvrelay.bench.relay import scenario as relay
from kvrelay.bench.relay import transfer
from kvrelay.bench.relay.peer import How, Peer
from kvrelay.bench.relay.scenario import Gaps, summarise_gaps
from kvrelay.bench.relay.transfer import kv_ranges, layout_of, move, rewrite_and_move, tokens_for
from kvrelay.checkpoint.spec import ModelSpec
from kvrelay.errors import BenchError, ConfigError


@pytest.fixture
def spec() -> ModelSpec:
    return SMOLLM2


def test_scattered_blocks_are_many_ranges_and_blocks_in_order_are_one_a_plane(spec: ModelSpec) -> None:
    layout = layout_of(spec, 640)
    scattered, in_order = (kv_ranges(layout, 640, scattered=scattered) for scattered in (True, False))
    assert scattered[:, 2].sum() == in_order[:, 2].sum() == layout.size_bytes
    assert len(in_order) == 1  # of a full pool even the planes are neighbours
    assert len(kv_ranges(layout, 320, scattered=False)) == 2 * layout.num_layers
    assert len(scattered) > 0.8 * 2 * layout.num_layers * layout.num_blocks


def test_the_working_set_is_as_large_as_asked(spec: ModelSpec) -> None:
    for payload in (1, 1_000_000):
        tokens = tokens_for(spec, payload)
        assert tokens % transfer.BLOCK_SIZE == 0
        assert layout_of(spec, tokens).size_bytes >= payload
    assert transfer.last_cache_bytes() >= 32 << 20


@pytest.mark.parametrize(("engine", "how"), [("shm", "read"), ("nixl", "write"), ("mooncake", "write")])
def test_two_processes_move_what_they_say(spec: ModelSpec, engine: str, how: How) -> None:
    layout = layout_of(spec, 320)
    ranges = kv_ranges(layout, 320)
    assert ranges[:, 2].sum() == layout.size_bytes
    with open_pair(Peer, engine, layout.size_bytes) as pair:
        with pytest.raises(BenchError, match="are not those that were sent"):
            pair.check(ranges)
        assert move(pair, how, ranges) > 0
        pair.check(ranges)
        if engine != "shm":
            for raw in ("raw", "raw_one_by_one"):
                assert rewrite_and_move(pair, raw, ranges) > 0
                pair.check(ranges)
        (pair.other if how == "read" else pair.mover).ask(Peer.rewrite)
        with pytest.raises(BenchError, match="are not those that were sent"):
            pair.check(ranges)  # what was moved before does not pass for what is to be moved
        assert move(pair, "memcpy", kv_ranges(layout, 160)) > 0


def test_an_engine_that_cannot_work_here_is_told_from_a_failure(spec: ModelSpec) -> None:
    with (
        pytest.raises(EngineMissing, match="no transfer engine is called 'pigeon'"),
        open_pair(Peer, "pigeon", layout_of(spec, 16).size_bytes),
    ):
        pass


def test_the_ratio_of_gaps_is_of_their_99th_percentiles() -> None:
    apart = Gaps([(float(i), 0.05) for i in range(99)] + [(99.0, 0.4)], 5, 30.0)
    together = Gaps([(float(i), 0.05) for i in range(90)] + [(90.0 + i, 0.5) for i in range(10)], 10, 30.0)
    results = summarise_gaps(apart, together, together)
    assert results["itl_p99_ratio"] == pytest.approx(0.1)
    assert results["itl_max_ms_1p1d"] == pytest.approx(400.0)
    assert results["itl_p50_ms_whole"] == pytest.approx(50.0)
    assert (results["long_prompts_per_min_1p1d"], results["long_prompts_per_min_whole"]) == (10.0, 20.0)


def test_the_drawing_is_svg_with_every_token_and_name(tmp_path: pathlib.Path) -> None:
    panels = [Dots("times", {"a < b": [(0.0, 10.0), (1.0, 20.0)], "c": [(0.5, 2000.0)]})]
    root = ElementTree.fromstring(draw(panels))
    texts = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert any(text.startswith("a < b: p99 20 ms") for text in texts)
    assert any(text.startswith("c: p99 2000 ms") for text in texts)
    dots = [element.attrib["d"].count("M") for element in root.iter("{http://www.w3.org/2000/svg}path")]
    assert dots == [2, 1]
    write_plot(tmp_path / "new" / "plot.svg", panels)
    assert (tmp_path / "new" / "plot.svg").read_text() == draw(panels)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--plot: cannot write"):
        write_plot(tmp_path / "file" / "plot.svg", panels)


def test_a_missing_library_is_left_out_and_said(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(engine: str, spec: ModelSpec) -> dict[str, float]:
        if engine == "nixl":
            raise EngineMissing("nixl is not usable here: pip install it")
        return {f"{engine}_over_raw": 1.0}

    monkeypatch.setattr(relay, "measure_library", measure)
    monkeypatch.setattr(relay, "measure_shm", lambda *_: {"shm_over_memcpy": 0.7})
    console = Console(file=io.StringIO(), width=200)
    results = relay.measure_transports(spec, (0, 1), console)
    assert results == {"shm_over_memcpy": 0.7, "mooncake_over_raw": 1.0}
    assert isinstance(console.file, io.StringIO)
    assert "nixl is left out: nixl is not usable here" in console.file.getvalue()


@pytest.mark.long
def test_a_whole_run_on_a_tiny_model_gives_every_figure(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model("llama"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
    monkeypatch.setattr(relay, "HANDOVERS", 3)
    monkeypatch.setattr(relay, "SETTLE_S", 0.0)
    monkeypatch.setattr(transfer, "ROUNDS", 1)
    monkeypatch.setattr(transfer, "last_cache_bytes", lambda: 1 << 18)
    monkeypatch.setattr(transfer, "LIBRARY_PAYLOAD_BYTES", 1 << 20)
    result, plot = tmp_path / "relay.json", tmp_path / "plot.svg"
    arguments = ["relay", "--model", str(folder), "--seconds", "1", "--json", str(result), "--plot", str(plot)]
    assert main.run(arguments) == 0
    written = msgspec.json.decode(result.read_bytes())
    assert set(relay.TARGETS) <= set(written["results"])
    assert 0 <= written["results"]["unsent_share_2048"] <= 1
    assert all(
        written["results"][name] > 0
        for name in relay.TARGETS
        if name not in ("unsent_share_2048", "handover_beyond_step_ms_p50")
    )
    assert "whole, same cores" in plot.read_text()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["relay", "--second", "3"], "unknown option --second; did you mean --seconds?"),
        (["relay", "--seconds", "0"], "--seconds 0: expected int >= 1"),
    ],
)
def test_a_wrong_option_is_explained(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(argv) == 2
    assert message in capsys.readouterr().err
