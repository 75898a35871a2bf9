"""`kvrelay simulate`: what a cluster would do, by the real router and engines in virtual time (docs/simulate.md)."""

from __future__ import annotations

import pathlib
import shlex
from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta
from rich.console import Console

from kvrelay.bench.harness import report
from kvrelay.bench.harness.plot import Dots, write_plot
from kvrelay.config import Options
from kvrelay.launch.console import console_progress
from kvrelay.log import configure
from kvrelay.options import Parser, add_options, given
from kvrelay.simulate.figures import figures
from kvrelay.simulate.options import ClusterOptions, CostOptions, TrafficOptions
from kvrelay.simulate.run import Outcome, simulate

_EPILOG = """\
examples:
  kvrelay simulate --prefill 2 --decode 2 --rate 8
  kvrelay simulate --costs bench/results/nvidia-h200/gpu.json --prefill 50 --decode 50 --rate 200 --seconds 600
  kvrelay simulate --traffic conversation --fail 30:decode --json result.json --plot result.svg
"""
_MOST_DOTS = 4000


class ResultOptions(Options, frozen=True, kw_only=True):
    """The result."""

    json: Annotated[str, Meta(description="write the result to this file, in the form of `kvrelay bench`")] = ""
    plot: Annotated[str, Meta(description="draw the times of first and further tokens into this file (SVG)")] = ""


GROUPS = (ClusterOptions, TrafficOptions, CostOptions, ResultOptions)


def build_parser() -> Parser:
    description = "Runs the router and the engines in virtual time, over workers that compute nothing and only cost time."
    parser = Parser(prog="kvrelay simulate", description=description, epilog=_EPILOG)
    add_options(parser, GROUPS)
    return parser


def run(argv: list[str]) -> int:
    said = given(build_parser().parse_strictly(argv), GROUPS, None)
    cluster, traffic = said.value(ClusterOptions), said.value(TrafficOptions)
    costs, result = said.value(CostOptions), said.value(ResultOptions)
    configure("error", "simulate")
    outcome = simulate(
        cluster.layout(),
        costs.model(),
        traffic.sessions(),
        failures=cluster.failures(),
        duration_s=traffic.seconds,
        progress=console_progress(),
    )
    found = figures(outcome, traffic.targets)
    _show(found, outcome, argv, result)
    return 0


def _show(found: dict[str, float], outcome: Outcome, argv: Sequence[str], options: ResultOptions) -> None:
    console = Console(stderr=True)
    made = report.BenchResult(
        scenario="simulate",
        commit=report.current_commit(),
        hardware="simulated",
        command=shlex.join(["kvrelay", "simulate", *argv]),
        results=found,
    )
    report.show(made, {}, console, "kvrelay")
    console.print(f"{outcome.cpu_s:.1f} s of processor time", highlight=False)
    if options.json:
        report.write(made, pathlib.Path(options.json))
        console.print(f"wrote {options.json}")
    if options.plot:
        _draw(outcome, pathlib.Path(options.plot))
        console.print(f"wrote {options.plot}")


def _draw(outcome: Outcome, path: pathlib.Path) -> None:
    finished = [answer for answer in outcome.answers if answer.outcome == "finished"]
    shown = finished[:: max(1, len(finished) // _MOST_DOTS)]
    first = {"to first token": [(answer.asked_at, 1000 * answer.ttft_s) for answer in shown]}
    further = {"between tokens": [(answer.asked_at, 1000 * answer.mean_itl_s) for answer in shown]}
    write_plot(path, [Dots("time to first token", first), Dots("mean time between tokens", further)])
