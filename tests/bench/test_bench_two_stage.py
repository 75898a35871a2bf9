"""The two-stage benchmark: its sizes, what it makes of times and answers, its drawing, and one whole run on a tiny model."""

from __future__ import annotations

import json
import pathlib
import shutil
import xml.etree.ElementTree as ElementTree

import pytest

from kvrelay.bench import main
from kvrelay.bench.harness.plot import draw
from kvrelay.bench.two_stage.client import Answer, CachedTokens, Choice, TokenCounts
from kvrelay.bench.two_stage.scenario import TARGETS, WAYS, Outcome, TwoStageBench, TwoStageRun, is_same, panels
from tests.tiny_models import tiny_model


def answer(beams: list[tuple[list[int], float]], *, prompt: int = 705, cached: int = 0) -> Answer:
    return Answer([Choice(tokens, total) for tokens, total in beams], TokenCounts(prompt, CachedTokens(cached)))


BEAMS = [([1, 2], -1.0), ([3, 4], -2.0), ([5, 6], -3.0)]


def test_results_are_the_same_but_for_ties() -> None:
    one = answer(BEAMS)
    assert is_same(one, answer(BEAMS))
    assert is_same(one, answer([BEAMS[0], ([3, 4], -2.00001), BEAMS[2]]))
    assert is_same(one, answer([*BEAMS[:2], ([7, 8], -3.0001)]))  # as likely as the worst, which it replaced
    assert not is_same(one, answer([BEAMS[1], BEAMS[0], BEAMS[2]]))
    assert not is_same(one, answer([([9, 9], -1.0), *BEAMS[1:]]))
    assert not is_same(one, answer([([1, 2], -1.1), *BEAMS[1:]]))


def test_tied_results_may_change_places() -> None:
    one = answer([([1], -1.0), ([2], -1.0001), ([3], -4.0)])
    assert is_same(one, answer([([2], -1.0001), ([1], -1.0), ([3], -4.0)]))


def bench_with(calm: dict[str, float], pressed: dict[str, float]) -> TwoStageRun:
    bench = TwoStageRun(TwoStageBench(requests=1), 100)
    for outcomes, times, on_device in ((bench.calm, calm, [88]), (bench.pressed, pressed, [0, 44])):
        for way, seconds in times.items():
            outcomes[way] = Outcome([seconds], 2.0, [705], [705], 7, {0: answer(BEAMS)}, [way == "continuation"] * 2, on_device)
    bench.at_once = Outcome([0.07])
    bench.separate_s, bench.together_s = [4.0, 3.0, 3.0], [1.0, 0.5, 0.1]
    return bench


TIMES = {"sequential": 3.0, "pipelined": 5.0, "prefix_cache": 0.2, "continuation": 0.05}


def test_ways_are_compared_within_one_run() -> None:
    bench = bench_with(TIMES, {**TIMES, "prefix_cache": 4.0, "continuation": 0.06})
    figures = bench.summarise()
    assert figures["ttft_reprefill_over_continuation"] == pytest.approx(60.0)
    assert figures["ttft_continuation_pressure_over_calm"] == pytest.approx(1.2)
    assert figures["ttft_continuation_at_once_over_calm"] == pytest.approx(1.4)
    assert figures["ttft_prefix_cache_pressure_over_calm"] == pytest.approx(20.0)
    assert figures["separate_requests_over_beam"] == pytest.approx(6.0)
    assert figures["identical_outputs"] == 1.0
    assert figures["leases_kept"] == 1.0
    assert figures["kept_blocks_moved"] == 44
    assert figures["kept_share_moved"] == pytest.approx(0.5)
    assert figures["ttft_ms_continuation_pressure"] == pytest.approx(60.0)
    assert set(TARGETS) <= set(figures)


def test_one_search_that_differs_is_seen() -> None:
    bench = bench_with(TIMES, TIMES)
    bench.pressed["continuation"].beams[0] = answer([([9, 9], -1.0), *BEAMS[1:]])
    assert bench.summarise()["identical_outputs"] == pytest.approx(6 / 7)


def test_kept_kv_that_did_not_last_is_seen() -> None:
    bench = bench_with(TIMES, TIMES)
    bench.pressed["continuation"].from_kept_kv[1] = False
    assert bench.summarise()["leases_kept"] == pytest.approx(3 / 4)


def test_a_pool_holds_the_kept_kv_and_one_search_beside_it() -> None:
    work = TwoStageBench()
    settings = {name: str(value) for name, value in work.settings().items()}
    pinned = int(float(settings["kept-kv-share"]) * work.pool_blocks)
    assert pinned >= work.kept_blocks == 3 * 44
    search = 45 + 31 * 2  # the prompt, and for every other beam its output and a copy of the tail
    assert work.pool_blocks - pinned >= search
    assert int(settings["max-model-len"]) >= 500 + 200 + 5 + 3
    blocks_of_press = 32 * (work.press_tokens + 4) // 16
    assert work.pool_blocks - 44 < blocks_of_press < work.pool_blocks, "beside it there is no room for the KV of one parent"


def test_the_drawing_shows_every_way_twice() -> None:
    bench = bench_with(TIMES, TIMES)
    root = ElementTree.fromstring(draw(panels(bench.calm, bench.pressed)))
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert all(texts.count(way) == 2 for way in WAYS)
    assert texts.count("50") == 2  # milliseconds of the continuation
    assert texts.count("2") == 8  # seconds of wall time


@pytest.mark.long
def test_a_whole_run(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model("llama"), model)
    sizes = ["--requests=1", "--prompt-tokens=100", "--thinking-tokens=40", "--beam-width=4"]
    files = ["--json", str(tmp_path / "result.json"), "--plot", str(tmp_path / "plot.svg")]
    assert main.run(["two-stage", "--model", str(model), *sizes, *files]) == 0
    results = json.loads((tmp_path / "result.json").read_text())["results"]
    assert results["identical_outputs"] == 1.0
    assert results["leases_kept"] == 1.0
    for suffix in ("", "_pressure"):
        assert results[f"prefilled_tokens_continuation{suffix}"] == results[f"ttft_prefilled_tokens_continuation{suffix}"] == 6
        assert results[f"prefilled_tokens_sequential{suffix}"] == results[f"prefilled_tokens_pipelined{suffix}"] == 145
    assert results["prefilled_tokens_prefix_cache"] < 32 < results["prefilled_tokens_prefix_cache_pressure"]
    assert results["ttft_prefilled_tokens_prefix_cache"] < 32 < results["ttft_prefilled_tokens_prefix_cache_pressure"]
    assert results["evictions_continuation_pressure"] > 0
    assert results["kept_share_moved"] == 1.0
    assert results["kept_blocks_moved"] > 0
    assert (tmp_path / "plot.svg").read_text().startswith("<svg")
