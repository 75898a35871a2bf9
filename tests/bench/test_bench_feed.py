"""The viewer of `bench router --only feed`, on a real feed; and how its rounds are summed up."""

from __future__ import annotations

import pytest

from kvrelay.bench.router.feed import Viewer, summarise
from kvrelay.bench.router.load import LoadResult
from tests.frontend.serving import fake_backend, make_app, running_server


def test_a_viewer_reads_the_feed_while_it_is_open() -> None:
    app = make_app(fake_backend())
    with running_server(app) as url:
        viewer = Viewer(int(url.rpartition(":")[2]))
        for _ in range(2):
            viewer.open()
            assert viewer.close() >= 1


def test_ratios_are_of_with_to_without() -> None:
    def rounds(completed: int, cpu_s: float) -> list[tuple[LoadResult, float]]:
        return [(LoadResult(ttft_s=[0.002] * completed, wall_s=2.0), cpu_s) for _ in range(3)]

    results = summarise(rounds(100, 1.0), rounds(90, 0.99))
    assert results["feed_rps_ratio"] == pytest.approx(0.9)
    assert results["feed_cpu_ms_per_request_without"] == pytest.approx(10.0)
    assert results["feed_cpu_ms_per_request_with"] == pytest.approx(11.0)
    assert results["feed_ttft_ms_p50_with"] == pytest.approx(2.0)
