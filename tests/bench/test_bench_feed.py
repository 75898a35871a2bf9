"""The viewer of `bench router --only feed`, on a real feed; and how its rounds are summed up."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from patience import PATIENCE_S

from kvrelay.bench.router.feed import Group, Round, SteadyLoad, Viewer, summarise
from kvrelay.bench.router.load import LoadRequest
from kvrelay.errors import BenchError
from tests.frontend.serving import fake_backend, make_app, running_server


def test_a_viewer_reads_the_feed_while_it_is_open() -> None:
    app = make_app(fake_backend())
    with running_server(app) as url:
        viewer = Viewer(int(url.rpartition(":")[2]))
        for _ in range(2):
            viewer.open()
            assert viewer.close() >= 1


def test_the_ratio_is_the_middle_one_of_groups_that_a_busy_machine_slowed() -> None:
    def group(cpu_ms: float, ratio: float, drift: float = 0.0) -> Group:
        """`drift`: how much slower each round is than the one before it, for other reasons."""
        without, watched = [Round(rps=rps, cpu_ms=cpu_ms, ttft_ms=ttft) for rps, ttft in ((100.0, 2.0), (90.0, 3.0))]
        costs = [cpu_ms, cpu_ms * ratio + drift, cpu_ms * ratio + 2 * drift, cpu_ms + 3 * drift]
        rounds = (without, watched, watched, without)
        return Group(*(replace(one, cpu_ms=cost) for one, cost in zip(rounds, costs, strict=True)))

    assert group(1.0, 1.0, drift=0.2).cpu_ratio == pytest.approx(1.0)
    results = summarise([group(1.0, 1.01), group(3.0, 1.02), group(1.5, 2.0)])
    assert results["feed_cpu_ratio"] == pytest.approx(1.02)
    assert results["feed_cpu_ratio_low"] == pytest.approx(1.01)
    assert results["feed_cpu_ratio_high"] == pytest.approx(2.0)
    assert results["feed_cpu_ms_per_request_without"] == pytest.approx(1.5)
    assert results["feed_rps_with"] == pytest.approx(90.0)
    assert results["feed_ttft_ms_p50_with"] == pytest.approx(3.0)


def test_the_bounds_of_many_groups_leave_the_outer_ones_out() -> None:
    even = Round(rps=100.0, cpu_ms=1.0, ttft_ms=2.0)
    groups = [Group(even, *[replace(even, cpu_ms=1 + number / 100)] * 2, even) for number in range(20)]
    results = summarise(groups)
    assert results["feed_cpu_ratio_low"] == pytest.approx(1.05)
    assert results["feed_cpu_ratio_high"] == pytest.approx(1.14)


def test_a_load_that_loses_answers_measures_nothing() -> None:
    with running_server(make_app(fake_backend())) as url:
        load = SteadyLoad(LoadRequest("127.0.0.1", int(url.rpartition(":")[2]), "no such model", "Hello", 1, 2))
        deadline = time.monotonic() + PATIENCE_S
        while load.num_lost < 2:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        with pytest.raises(BenchError, match="status 404"):
            load.since_last()
