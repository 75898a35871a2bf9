"""`kvrelay bench simulate`: what `kvrelay simulate` predicts, held against real clusters of this machine: 1P1D and 2P2D.

    1. `kvrelay serve` as users run it; what prompts and steps cost is measured on it, with all of its workers busy
    2. it meets the traffic of `bench serve`
    3. the same requests, with the lengths that they really had, meet the simulated cluster with those costs

The simulation knows nothing of the second step but its requests.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta
from rich.console import Console

from kvrelay.bench.harness.report import Target as Aim
from kvrelay.bench.harness.scenario import Part, Results, Scenario, local_model
from kvrelay.bench.harness.server import serve
from kvrelay.bench.serve.client import Asked, Target, find_model
from kvrelay.bench.serve.scenario import Traffic, figures, run_sessions
from kvrelay.bench.serve.sessions import Question, Session, make_sessions
from kvrelay.config import EngineOptions, ModelOptions
from kvrelay.errors import BenchError
from kvrelay.simulate.cluster import Layout
from kvrelay.simulate.costs import Costs, Point
from kvrelay.simulate.figures import figures as simulated_figures
from kvrelay.simulate.run import Targets, simulate
from kvrelay.simulate.traffic import Session as SimulatedSession
from kvrelay.simulate.traffic import Turn

CLUSTERS = {"1p1d": 1, "2p2d": 2}  # workers of each role
COMPARED = ("ttft_ms_p50", "ttft_ms_p99", "itl_ms_p50", "itl_ms_p99")
_PROMPTS = (0.5, 1.0, 1.5)  # of the length that the traffic has
_STREAMS = (1, 2, 4)  # at once, on each decode worker
_STREAM_TOKENS = 48  # at most
_ROUNDS = 3
_WITHIN = {"p50": 0.2, "p99": 0.35}
_KV_BYTES, _LAYERS, _GB_PER_S = 46_080, 30, 5.0  # of SmolLM2-135M in float32; shared memory


class SimulateBench(Traffic, frozen=True, kw_only=True):
    """The model and the traffic."""

    model: Annotated[str, Meta(description="smollm2, a folder, a .gguf file or a hub id")] = "smollm2"
    load: Annotated[
        float, Meta(gt=0, le=1, description="share of what the prefill workers can compute that comes as prompts")
    ] = 0.4


def measure(name: str, options: SimulateBench, console: Console) -> Results:
    pairs, model = CLUSTERS[name], local_model(options.model)
    real, costs, asked = _run_real(pairs, model, options, console)
    predicted = predict(pairs, costs, asked, options)
    results: Results = {f"cost_prefill_{count}_ms_{name}": ms for count, ms in costs.prefill}
    results |= {f"cost_decode_b{count}_ms_{name}": ms for count, ms in costs.decode}
    for figure in COMPARED:
        results[f"real_{figure}_{name}"] = real[figure]
        results[f"simulated_{figure}_{name}"] = predicted[figure]
        results[f"error_{figure}_{name}"] = abs(predicted[figure] / max(real[figure], 1e-9) - 1.0)
    return results | {f"requests_{name}": real["requests"], f"failed_{name}": real["failed"]}


def _run_real(
    pairs: int, model: ModelOptions, options: SimulateBench, console: Console
) -> tuple[Results, Costs, Sequence[Asked]]:
    with serve(model, {"local-prefill-tokens": 0}, prefill=pairs, decode=pairs) as server:
        target = Target(server.url, find_model(server.url, {}), {}, ignore_eos=True)
        costs = fit(target, pairs, options.input_tokens, min(_STREAM_TOKENS, options.output_tokens))
        rate = options.load * pairs / costs.pass_s(options.input_tokens, 0)
        sessions = make_sessions(options.traffic, options.wanted(rate, options.seed))
        asked, wall_s = run_sessions(target, sessions, 0, f"{pairs}P{pairs}D under {options.traffic} traffic")
        return figures(asked, wall_s, options, console), costs, asked


def fit(target: Target, pairs: int, words: int, stream_tokens: int) -> Costs:
    """What a client sees: the router and HTTP are part of what prompts and steps cost. Every worker is busy meanwhile."""
    _ask_together(target, [Question("to be warm", 4)] * pairs, "warming up")
    stream = Question(_again(words // 2), stream_tokens)
    decode = [_stream_point(target, pairs, count, stream) for count in _STREAMS]
    prefill = sorted(_prompt_point(target, pairs, int(share * words), stream) for share in _PROMPTS)
    (handed_over,) = _ask_together(target, [Question(f"hand-over {stream.text}", 8)], "measuring a hand-over")
    latency_ms = 1e3 * (handed_over.times[1] - handed_over.times[0]) - decode[0][1]
    return Costs(
        prefill=tuple(prefill),
        decode=tuple(decode),
        gb_per_s=_GB_PER_S,
        latency_ms=max(0.05, latency_ms / 2),
        router_ms=0.0,
        kv_bytes_per_token=_KV_BYTES,
        num_layers=_LAYERS,
    )


def _prompt_point(target: Target, pairs: int, words: int, stream: Question) -> Point:
    """A prompt for each prefill worker, while each decode worker has a stream."""
    found: list[Asked] = []
    for number in range(_ROUNDS):
        mark = f"{words} {number}"
        streams = [Question(f"{mark} {pair} {stream.text}", stream.max_tokens) for pair in range(pairs)]
        prompts = [Question(f"{mark} -{pair} {_again(words)}", 2) for pair in range(pairs)]
        found += _ask_together(target, [*streams, *prompts], "measuring prompts", apart_s=1.0)[pairs:]
    return found[0].prompt_tokens, 1e3 * statistics.median(one.ttft_s for one in found)


def _stream_point(target: Target, pairs: int, count: int, stream: Question) -> Point:
    """As many streams on each decode worker."""
    questions = [Question(f"{count} {number} {stream.text}", stream.max_tokens) for number in range(count * pairs)]
    found = _ask_together(target, questions, "measuring steps")
    begun, ended = max(one.times[0] for one in found), min(one.times[-1] for one in found)
    gaps = [(earlier, later) for one in found for earlier, later in itertools.pairwise(one.times)]
    together = [later - earlier for earlier, later in gaps if begun <= earlier and later <= ended]
    return count, 1e3 * statistics.median(together or [later - earlier for earlier, later in gaps])


def _again(words: int) -> str:
    return " ".join(["again"] * words)


def _ask_together(target: Target, questions: Sequence[Question], title: str, apart_s: float = 0.0) -> list[Asked]:
    """The second half comes `apart_s` after the first. Raises BenchError."""
    sessions = [
        Session(apart_s if place >= len(questions) // 2 else 0.0, (question,)) for place, question in enumerate(questions)
    ]
    asked, _ = run_sessions(target, sessions, 0, title)
    for one in asked:
        if one.problem or len(one.times) < 2:
            raise BenchError(f"a request failed: {one.problem or 'it had a single token'}")
    return asked


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
