"""`kvrelay bench simulate`: runs, and compares like with like. How close a prediction comes is for a quiet machine to say."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from rich.console import Console
from tiny_models import tiny_model

from kvrelay.bench.main import find_scenario
from kvrelay.bench.serve.client import Asked, Target
from kvrelay.bench.serve.sessions import Session
from kvrelay.bench.simulate import calibrate
from kvrelay.bench.simulate.calibrate import Calibration, Measured, costs_of
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
    """Batches were measured with both decode workers busy."""
    found = Measured(
        prompts={1.0: [(99, 50.0), (100, 60.0), (101, 90.0)]},
        steps={1: [15.0, 18.0, 27.0], 4: [30.0, 36.0, 54.0]},
        shared_prompts={1: [1.0, 1.0, 1.0], 3: [1.9, 2.0, 2.3]},
        shared_steps={1: [1.0, 1.0, 1.0], 2: [1.5, 1.5, 1.6]},
        hand_overs=[2.0, 3.0, 4.0],
        jitter=[0.9, 1.0, 1.1],
    )
    costs = costs_of(found, pairs=2)
    assert costs.decode == ((1, pytest.approx(12.0)), (4, pytest.approx(24.0)))
    assert costs.prefill == ((100, 60.0),)
    assert costs.prefill_sharing == ((1, 1.0), (3, 2.0))
    assert costs.decode_sharing == ((1, 1.0), (2, 1.5))
    assert (min(costs.jitter), max(costs.jitter)) == (0.9, 1.1)
    assert costs.latency_ms == 3.0


def meet_a_machine(target: Target, sessions: Sequence[Session], concurrency: int, title: str) -> tuple[list[Asked], float]:
    """One on which a prompt takes a millisecond a word and a step 10; but while prompts and streams are under way, twice that.
    A prompt that hardly has an answer is no stream."""
    has_both = len({question.max_tokens for session in sessions for question in session.questions}) > 1
    factor = 2.0 if has_both else 1.0
    found = []
    for session in sessions:
        (question,) = session.questions
        words = len(question.text.split()) - 1
        first = 100.0 + session.at_s + (factor if session.at_s else 1.0) * words / 1e3
        times = [first, *(first + 0.015 + factor * 0.01 * number for number in range(question.max_tokens - 1))]
        found.append(Asked(100.0 + session.at_s, times, "text", words, question.max_tokens))
    return found, 1.0


@pytest.mark.parametrize("pairs", [1, 2])
def test_a_machine_is_measured_as_it_is(pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "run_sessions", meet_a_machine)
    calibration = Calibration(Target("", "", {}, ignore_eos=True), pairs, 200)
    for _ in range(3):
        calibration.round()
    costs = calibration.costs
    assert costs.prefill == ((100, pytest.approx(100.0)), (200, pytest.approx(200.0)), (300, pytest.approx(300.0)))
    assert [ms for _, ms in costs.decode] == pytest.approx([10.0, 10.0, 10.0])
    assert dict(costs.prefill_sharing)[2 * pairs] == pytest.approx(2.0)
    assert dict(costs.decode_sharing)[2 * pairs] == pytest.approx(2.0)
    assert costs.latency_ms == pytest.approx(5.0)
    assert calibration.drift == pytest.approx(1.0)


def test_a_slower_round_is_compared_with_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if in another one no step was seen beside the prompts, as all streams were over when these came."""
    slowness = [1.0]

    def meet(target: Target, sessions: Sequence[Session], concurrency: int, title: str) -> tuple[list[Asked], float]:
        found, seconds = meet_a_machine(target, sessions, concurrency, title)
        has_later = any(session.at_s for session in sessions)
        for one, session in zip(found, sessions, strict=True):
            one.times[:] = [one.sent_at + slowness[0] * (at - one.sent_at) for at in one.times]
            if slowness == [1.0] and has_later and not session.at_s:
                del one.times[3:]
        return found, seconds

    monkeypatch.setattr(calibrate, "run_sessions", meet)
    calibration = Calibration(Target("", "", {}, ignore_eos=True), 2, 200)
    for slowness[0] in (1.0, 2.0, 4.0):
        calibration.round()
    assert len(calibration.measured.shared_steps[4]) == 2
    assert dict(calibration.costs.prefill_sharing)[4] == pytest.approx(2.0)
    assert dict(calibration.costs.decode_sharing)[4] == pytest.approx(2.0)
    assert calibration.drift == pytest.approx(4.0)


def test_a_real_cluster_and_its_simulation_answer_the_same_requests() -> None:
    options = SimulateBench(model=str(tiny_model("llama")), only="1p1d", sessions=4, input_tokens=12, output_tokens=6)
    results = find_scenario("simulate").measure(options, Console(stderr=True))
    assert results["requests_1p1d"] == 4
    assert results["failed_1p1d"] == 0
    for figure in COMPARED:
        assert results[f"real_{figure}_1p1d"] > 0
        assert results[f"simulated_{figure}_1p1d"] > 0
        assert f"error_{figure}_1p1d" in results
