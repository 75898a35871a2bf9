"""`kvrelay bench simulate`: what `kvrelay simulate` predicts, held against real clusters of this machine: 1P1D and 2P2D.

    1. `kvrelay serve` as users run it meets the traffic of `bench serve`, in parts; before, between and after them it is
       measured what prompts and steps cost on it (`calibrate`)
    2. the same requests, with the lengths that they really had, meet the simulated cluster with those costs

The simulation knows nothing of how the traffic was answered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

from msgspec import Meta
from rich.console import Console

from kvrelay.bench.harness.report import Target as Aim
from kvrelay.bench.harness.scenario import Part, Results, Scenario, local_model
from kvrelay.bench.harness.server import serve
from kvrelay.bench.serve.client import Asked, Target, find_model
from kvrelay.bench.serve.scenario import Traffic, figures, run_sessions
from kvrelay.bench.serve.sessions import Session, make_sessions
from kvrelay.bench.simulate.calibrate import Calibration
from kvrelay.config import EngineOptions, ModelOptions
from kvrelay.simulate.cluster import Layout
from kvrelay.simulate.costs import Costs
from kvrelay.simulate.figures import figures as simulated_figures
from kvrelay.simulate.run import Targets, simulate
from kvrelay.simulate.traffic import Session as SimulatedSession
from kvrelay.simulate.traffic import Turn

CLUSTERS = {"1p1d": 1, "2p2d": 2}  # workers of each role
COMPARED = ("ttft_ms_p50", "ttft_ms_p99", "itl_ms_p50", "itl_ms_p99")
_PARTS = 4  # of the traffic
_WITHIN = {"p50": 0.2, "p99": 0.35}


class SimulateBench(Traffic, frozen=True, kw_only=True):
    """The model and the traffic."""

    model: Annotated[str, Meta(description="smollm2, a folder, a .gguf file or a hub id")] = "smollm2"
    load: Annotated[
        float, Meta(gt=0, le=1, description="share of what the prefill workers can compute that comes as prompts")
    ] = 0.4


def measure(name: str, options: SimulateBench, console: Console) -> Results:
    pairs, model = CLUSTERS[name], local_model(options.model)
    real, calibration, asked = _run_real(pairs, model, options, console)
    costs = calibration.costs
    predicted = predict(pairs, costs, asked, options)
    results: Results = {f"cost_prefill_{count}_ms_{name}": ms for count, ms in costs.prefill}
    results |= {f"cost_decode_b{count}_ms_{name}": ms for count, ms in costs.decode}
    results |= {f"slower_prefill_of_{count}_{name}": factor for count, factor in costs.prefill_sharing}
    results |= {f"slower_decode_of_{count}_{name}": factor for count, factor in costs.decode_sharing}
    results |= {f"hand_over_ms_{name}": costs.latency_ms, f"drift_{name}": calibration.drift}
    for figure in COMPARED:
        results[f"real_{figure}_{name}"] = real[figure]
        results[f"simulated_{figure}_{name}"] = predicted[figure]
        results[f"error_{figure}_{name}"] = abs(predicted[figure] / max(real[figure], 1e-9) - 1.0)
    return results | {f"requests_{name}": real["requests"], f"failed_{name}": real["failed"]}


def _run_real(
    pairs: int, model: ModelOptions, options: SimulateBench, console: Console
) -> tuple[Results, Calibration, Sequence[Asked]]:
    with serve(model, {"local-prefill-tokens": 0}, prefill=pairs, decode=pairs) as server:
        target = Target(server.url, find_model(server.url, {}), {}, ignore_eos=True, shows_special=True)
        calibration = Calibration(target, pairs, options.input_tokens)
        calibration.round()
        rate = options.load * pairs / calibration.prompt_s
        sessions = make_sessions(options.traffic, options.wanted(rate, options.seed))
        asked: list[Asked] = []
        wall_s = 0.0
        for part in _parts(sessions):
            answered, took_s = run_sessions(target, part, 0, f"{pairs}P{pairs}D under {options.traffic} traffic")
            asked += answered
            wall_s += took_s
            calibration.round()
        return figures(asked, wall_s, options, console), calibration, asked


def _parts(sessions: Sequence[Session]) -> Iterator[list[Session]]:
    """One after the other, each from its own beginning."""
    size = -(-len(sessions) // _PARTS)
    for first in range(0, len(sessions), size):
        part = sessions[first : first + size]
        yield [Session(session.at_s - part[0].at_s, session.questions) for session in part]


def predict(pairs: int, costs: Costs, asked: Sequence[Asked], options: SimulateBench) -> Results:
    """For requests as they were: when they were sent, and how long they and their answers were."""
    begun = min(one.sent_at for one in asked)
    sessions = [
        SimulatedSession(
            at_s=one.sent_at - begun,
            number=number,
            turns=(Turn(prompt_tokens=one.prompt_tokens, output_tokens=one.output_tokens),),
        )
        for number, one in enumerate(sorted(asked, key=lambda one: one.sent_at))
        if not one.problem
    ]
    layout = Layout(
        prefill=pairs,
        decode=pairs,
        local_prefill_tokens=0,
        engine=EngineOptions().for_device("cpu"),
        max_model_len=8192,
    )
    targets = Targets(ttft_ms=options.ttft_ms, itl_ms=options.itl_ms)
    return simulated_figures(simulate(layout, costs, sessions), targets)


def _part(name: str) -> Part[SimulateBench]:
    aims = {f"error_{figure}_{name}": Aim("<=", _WITHIN[figure[-3:]]) for figure in COMPARED}
    return Part(f"{name}: the prediction and the real thing", lambda options, console: measure(name, options, console), aims)


SCENARIO = Scenario(SimulateBench, {name: _part(name) for name in CLUSTERS})
