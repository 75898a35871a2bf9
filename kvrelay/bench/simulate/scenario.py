"""`kvrelay bench simulate`: what `kvrelay simulate` predicts, held against real clusters of this machine: 1P1D and 2P2D.

    1. `kvrelay serve` as users run it meets the traffic of `bench serve`, in parts; before, between and after them it is
       measured what prompts and steps cost on it (`calibrate`)
    2. the same requests, with the lengths that they really had, meet the simulated cluster; each part with the costs that were
       measured before and after it

The simulation knows nothing of how the traffic was answered.
"""

from __future__ import annotations

import os
import pathlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Annotated

from msgspec import Meta
from rich.console import Console

from kvrelay.bench.harness.report import Target as Aim
from kvrelay.bench.harness.scenario import Part, Results, Scenario, local_model
from kvrelay.bench.harness.server import serve
from kvrelay.bench.serve.client import Asked, Target, find_model
from kvrelay.bench.serve.scenario import Kind, Traffic, figures, run_sessions
from kvrelay.bench.serve.sessions import Session, make_sessions
from kvrelay.bench.simulate.calibrate import Calibration, Round, costs_of
from kvrelay.config import EngineOptions, ModelOptions
from kvrelay.errors import ConfigError
from kvrelay.simulate.cluster import Layout
from kvrelay.simulate.costs import Costs, State, attended
from kvrelay.simulate.figures import times
from kvrelay.simulate.run import Outcome, simulate
from kvrelay.simulate.traffic import Session as SimulatedSession
from kvrelay.simulate.traffic import Turn

CLUSTERS = {"1p1d": 1, "2p2d": 2}  # workers of each role
COMPARED = ("ttft_ms_p50", "ttft_ms_p99", "itl_ms_p50", "itl_ms_p99")
_PARTS = 4  # of the traffic
_SHARED = ("conversation", "long-prefix")
_LONGEST = {"mixed": 4.0}  # prompts, of the usual length
_WITHIN = {"p50": 0.2, "p99": 0.35}


class SimulateBench(Traffic, frozen=True, kw_only=True):
    """The model and the traffic."""

    traffic: Annotated[Kind, Meta(description="what comes; prompts that share a beginning are refused")] = "mixed"
    model: Annotated[str, Meta(description="smollm2, a folder, a .gguf file or a hub id")] = "smollm2"
    load: Annotated[
        float,
        Meta(gt=0, le=1, description="share of what the prefill workers can compute, all workers busy, that comes as prompts"),
    ] = 0.4


def measure(name: str, options: SimulateBench, console: Console) -> Results:
    if options.traffic in _SHARED:
        raise ConfigError(
            f"--traffic {options.traffic}: prompts of the simulation share nothing, so it would have no cache hits"
        )
    pairs, model = CLUSTERS[name], local_model(options.model)
    before = _Processors()
    real, calibration, parts = _run_real(pairs, model, options, console)
    other_cores = before.others()
    predicted = predict(pairs, calibration.rounds, parts)
    results = _measured(costs_of(calibration.rounds, pairs), name)
    results |= {f"drift_{name}": calibration.drift, f"other_cores_{name}": other_cores}
    for figure in COMPARED:
        results[f"real_{figure}_{name}"] = real[figure]
        results[f"simulated_{figure}_{name}"] = predicted[figure]
        results[f"error_{figure}_{name}"] = abs(predicted[figure] / max(real[figure], 1e-9) - 1.0)
    return results | {f"requests_{name}": real["requests"], f"failed_{name}": real["failed"]}


def _measured(costs: Costs, name: str) -> Results:
    """The costs of all rounds together."""
    found: Results = {
        f"cost_prefill_{count}_ms_{name}": ms + costs.attention_ms_per_million_pairs * attended(0, count) / 1e6
        for count, ms in costs.prefill
    }
    found |= {f"cost_decode_b{count}_ms_{name}": ms for count, ms in costs.decode}
    found |= {f"slower_prefill_{_in(state)}_{name}": factor for state, factor in sorted(costs.prefill_sharing.items())}
    found |= {f"slower_decode_{_in(state)}_{name}": factor for state, factor in sorted(costs.decode_sharing.items())}
    return found | {f"hand_over_ms_{name}": costs.latency_ms}


def _in(state: State) -> str:
    num_prompts, num_steps = state
    return f"{num_prompts}p{num_steps}d"


def _run_real(
    pairs: int, model: ModelOptions, options: SimulateBench, console: Console
) -> tuple[Results, Calibration, list[list[Asked]]]:
    with serve(model, {"local-prefill-tokens": 0}, prefill=pairs, decode=pairs) as server:
        target = Target(server.url, find_model(server.url, {}), {}, ignore_eos=True, shows_special=True)
        calibration = Calibration(target, pairs, options.input_tokens, _LONGEST.get(options.traffic, 1.75))
        calibration.round()
        rate = options.load * pairs / calibration.prompt_s
        sessions = make_sessions(options.traffic, options.wanted(rate, options.seed))
        parts: list[list[Asked]] = []
        wall_s = 0.0
        for part in _parts(sessions):
            answered, took_s = run_sessions(target, part, 0, f"{pairs}P{pairs}D under {options.traffic} traffic")
            parts.append(answered)
            wall_s += took_s
            calibration.round()
        return figures([one for part in parts for one in part], wall_s, options, console), calibration, parts


def _parts(sessions: Sequence[Session]) -> Iterator[list[Session]]:
    """One after the other, each from its own beginning."""
    size = -(-len(sessions) // _PARTS)
    for first in range(0, len(sessions), size):
        part = sessions[first : first + size]
        yield [Session(session.at_s - part[0].at_s, session.questions) for session in part]


def predict(pairs: int, rounds: Sequence[Round], parts: Sequence[Sequence[Asked]]) -> Results:
    """Of each part with the rounds before and after it."""
    outcomes = [
        run_simulated(pairs, costs_of(rounds[place : place + 2], pairs, rounds), part) for place, part in enumerate(parts)
    ]
    gaps_us = Counter[int]()
    for outcome in outcomes:
        gaps_us += outcome.gaps_us
    return times([answer for outcome in outcomes for answer in outcome.answers], gaps_us)


def run_simulated(pairs: int, costs: Costs, asked: Sequence[Asked]) -> Outcome:
    """Requests as they were: when they were sent, and how long they and their answers were."""
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
    return simulate(layout, costs, sessions)


class _Processors:
    """How many cores are busy with work that is not this process's nor its children's, on average since it was made."""

    def __init__(self) -> None:
        self._began_at = time.monotonic()
        self._began_s = self._others_s()

    def others(self) -> float:
        """Once the children have ended."""
        return max(0.0, self._others_s() - self._began_s) / (time.monotonic() - self._began_at)

    @staticmethod
    def _others_s() -> float:
        """Time that a hypervisor gave to others included."""
        user, nice, system, _, _, *interrupts = map(int, pathlib.Path("/proc/stat").read_text("ascii").split()[1:9])
        return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])


def _part(name: str) -> Part[SimulateBench]:
    aims = {f"error_{figure}_{name}": Aim("<=", _WITHIN[figure[-3:]]) for figure in COMPARED}
    return Part(f"{name}: the prediction and the real thing", lambda options, console: measure(name, options, console), aims)


SCENARIO = Scenario(SimulateBench, {name: _part(name) for name in CLUSTERS})
