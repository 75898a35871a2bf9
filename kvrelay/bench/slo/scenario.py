"""`kvrelay bench slo`: the highest rate of requests that meets the targets: `whole`, 1P1D and 2P1D on the same cores.

Each cluster is `kvrelay serve` as users run it and meets the traffic of `bench serve` at one rate after another, upwards
until too few of its answers are good.
"""

from __future__ import annotations

import pathlib
from typing import Annotated

from msgspec import Meta
from rich.console import Console

from kvrelay.bench.harness.plot import Lines, write_plot
from kvrelay.bench.harness.scenario import Part, Results, Scenario, local_model
from kvrelay.bench.harness.server import serve
from kvrelay.bench.serve.client import Target, find_model
from kvrelay.bench.serve.scenario import Traffic, figures, run_sessions
from kvrelay.bench.serve.sessions import make_sessions
from kvrelay.config import ModelOptions
from kvrelay.errors import ConfigError

CLUSTERS = {"whole": (1, 0, 0), "1p1d": (0, 1, 1), "2p1d": (0, 2, 1)}  # whole, prefill and decode workers


class SloBench(Traffic, frozen=True, kw_only=True):
    """The model, the traffic and the rates."""

    model: Annotated[str, Meta(description="smollm2, a folder, a .gguf file or a hub id")] = "smollm2"
    rates: Annotated[str, Meta(description="sessions per second, ascending, separated by commas")] = "0.25,0.5,1,2,4,8"
    good_share: Annotated[float, Meta(gt=0, le=1, description="a rate is met if this share of its answers is good")] = 0.9
    plot: Annotated[str, Meta(description="file of the drawing")] = "build/slo.svg"

    def ascending(self) -> list[float]:
        """Raises ConfigError."""
        try:
            rates = [float(word) for word in self.rates.split(",")]
        except ValueError as error:
            raise ConfigError(f"--rates {self.rates}: {error}") from error
        if rates != sorted(rates) or rates[0] <= 0:
            raise ConfigError(f"--rates {self.rates}: they must ascend from above 0")
        return rates


def measure(options: SloBench, console: Console) -> Results:
    rates, model = options.ascending(), local_model(options.model)
    results: Results = {}
    curves: dict[str, list[tuple[float, float]]] = {}
    for name in CLUSTERS:
        curve, found = _climb(name, model, rates, options, console)
        met = [rate for rate, share in curve if share >= options.good_share]
        results |= {f"slo_rps_{name}": max(met, default=0.0)} | found
        curves[name] = curve
    write_plot(pathlib.Path(options.plot), [Lines("share of good answers by sessions per second", curves)])
    console.print(f"wrote {options.plot}")
    return results


def _climb(
    name: str, model: ModelOptions, rates: list[float], options: SloBench, console: Console
) -> tuple[list[tuple[float, float]], Results]:
    """(rate, share of good answers) of each rate up to the first that is not met, and their figures."""
    curve: list[tuple[float, float]] = []
    results: Results = {}
    whole, prefill, decode = CLUSTERS[name]
    with serve(model, {}, whole=whole, prefill=prefill, decode=decode) as server:
        target = Target(server.url, find_model(server.url, {}), {}, ignore_eos=True)
        for number, rate in enumerate(rates):
            sessions = make_sessions(options.traffic, options.wanted(rate, options.seed + number))
            asked, wall_s = run_sessions(target, sessions, 0, f"{name}: {rate:g} sessions per second")
            found = figures(asked, wall_s, options, console)
            curve.append((rate, found["good_share"]))
            results |= {f"{key}_{name}_at_{rate:g}": found[key] for key in ("good_share", "ttft_ms_p99", "itl_ms_p99")}
            if found["good_share"] < options.good_share:
                break
    return curve, results


SCENARIO = Scenario(SloBench, {"slo": Part("rates that meet the targets", measure, {})})
