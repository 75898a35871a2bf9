"""`kvrelay bench simulate`: runs, and compares like with like. How close a prediction comes is for a quiet machine to say."""

from __future__ import annotations

import pytest
from rich.console import Console
from tiny_models import tiny_model

from kvrelay.bench.main import find_scenario
from kvrelay.bench.serve.client import Asked
from kvrelay.bench.simulate.calibrate import Measured, costs_of
from kvrelay.bench.simulate.scenario import COMPARED, SimulateBench, predict
from kvrelay.simulate.costs import Costs, line

COSTS = Costs(prefill=line(10.0, 1.0), decode=line(10.0, 1.0), router_ms=0.0, latency_ms=1.0, kv_bytes_per_token=1000)


def asked(sent_at: float, prompt_tokens: int, output_tokens: int) -> Asked:
    return Asked(sent_at, [sent_at + 1.0], "text", prompt_tokens, output_tokens)


def test_the_requests_that_were_asked_are_simulated() -> None:
    requests = [asked(100.0 + 10 * number, 190, 11) for number in range(5)]
    found = predict(1, COSTS, requests, SimulateBench())
    assert found["requests"] == found["finished"] == 5
    assert found["ttft_ms_p50"] == pytest.approx(200.0)
    assert found["itl_ms_p50"] == pytest.approx(11.0)
    crowded = predict(1, COSTS, [asked(100.0, 190, 11)] * 5, SimulateBench())
    assert crowded["ttft_ms_p99"] > found["ttft_ms_p99"]
    assert predict(2, COSTS, [asked(100.0, 190, 11)] * 5, SimulateBench())["ttft_ms_p99"] < crowded["ttft_ms_p99"]


def test_costs_are_those_of_a_pass_alone_and_how_much_others_slow_it() -> None:
    """Batches were measured with both decode workers busy; a round on a busier machine has the same ratios."""
    found = Measured(
        prompts={100: [50.0, 60.0, 90.0]},
        steps={1: [15.0, 18.0, 27.0], 4: [30.0, 36.0, 54.0]},
        shared_prompts={1: [50.0, 60.0, 90.0], 3: [100.0, 120.0, 180.0]},
        shared_steps={1: [10.0, 12.0, 18.0], 2: [15.0, 18.0, 27.0]},
        hand_overs=[2.0, 3.0, 4.0],
        jitter=[0.9, 1.0, 1.1],
    )
    costs = costs_of(found, pairs=2)
    assert costs.decode == ((1, pytest.approx(12.0)), (4, pytest.approx(24.0)))
    assert costs.prefill_sharing == ((1, 1.0), (3, 2.0))
    assert costs.decode_sharing == ((1, 1.0), (2, 1.5))
    assert (min(costs.jitter), max(costs.jitter)) == (0.9, 1.1)
    assert costs.latency_ms == 3.0


def test_a_real_cluster_and_its_simulation_answer_the_same_requests() -> None:
    options = SimulateBench(model=str(tiny_model("llama")), only="1p1d", sessions=4, input_tokens=12, output_tokens=6)
    results = find_scenario("simulate").measure(options, Console(stderr=True))
    assert results["requests_1p1d"] == 4
    assert results["failed_1p1d"] == 0
    for figure in COMPARED:
        assert results[f"real_{figure}_1p1d"] > 0
        assert results[f"simulated_{figure}_1p1d"] > 0
        assert f"error_{figure}_1p1d" in results
