"""The viewer of `bench router --only feed`, on a real feed; and how its rounds are summed up."""

from __future__ import annotations

import pytest

from kvrelay.bench.router.feed import Round, Viewer, summarise
from tests.frontend.serving import fake_backend, make_app, running_server


def test_a_viewer_reads_the_feed_while_it_is_open() -> None:
    app = make_app(fake_backend())
    with running_server(app) as url:
        viewer = Viewer(int(url.rpartition(":")[2]))
        for _ in range(2):
            viewer.open()
            assert viewer.close() >= 1


def test_the_ratio_is_the_middle_one_of_pairs_that_a_busy_machine_slowed() -> None:
    def rounds(cpu_ms: float, ratio: float) -> tuple[Round, Round]:
        return Round(rps=100.0, cpu_ms=cpu_ms, ttft_ms=2.0), Round(rps=90.0, cpu_ms=cpu_ms * ratio, ttft_ms=3.0)

    results = summarise([rounds(1.0, 1.01), rounds(3.0, 1.02), rounds(1.5, 2.0)])
    assert results["feed_cpu_ratio"] == pytest.approx(1.02)
    assert results["feed_cpu_ms_per_request_without"] == pytest.approx(1.5)
    assert results["feed_rps_with"] == pytest.approx(90.0)
    assert results["feed_ttft_ms_p50_with"] == pytest.approx(3.0)
