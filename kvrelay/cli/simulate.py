"""`kvrelay simulate`: what a cluster would do, by the real router and engines in virtual time (docs/simulate.md)."""

from __future__ import annotations

import pathlib
import shlex
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated

from msgspec import Meta
from rich.console import Console

from kvrelay.bench.harness import report
from kvrelay.bench.harness.plot import Dots, write_plot
from kvrelay.config import Options
from kvrelay.errors import ConfigError
from kvrelay.launch.console import console_progress
from kvrelay.log import configure
from kvrelay.options import Parser, add_options, given
from kvrelay.simulate.cluster import Layout
from kvrelay.simulate.figures import figures, router_times
from kvrelay.simulate.find import Prices, cheapest
from kvrelay.simulate.options import ClusterOptions, CostOptions, TrafficOptions
from kvrelay.simulate.run import Outcome, Targets, simulate

_EPILOG = """\
examples:
  kvrelay simulate --prefill 2 --decode 2 --rate 8
  kvrelay simulate --costs bench/results/nvidia-h200/gpu.json --prefill 50 --decode 50 --rate 200 --seconds 600
  kvrelay simulate --find --rate 40 --ttft-ms 200 --itl-ms 12
  kvrelay simulate --encode 1 --image-share 0.3 --image-tokens 1024
  kvrelay simulate --traffic conversation --fail 30:decode --json result.json --plot result.svg
"""
_MOST_DOTS = 4000


class FindOptions(Options, frozen=True, kw_only=True):
    """The search for a cluster."""

    find: Annotated[
        bool,
        Meta(
            description="find the least expensive numbers of prefill and decode workers whose answers are good; if there are"
            " images, of encode workers too"
        ),
    ] = False
    good_share: Annotated[float, Meta(gt=0.0, le=1.0, description="share of the answers that has to be good")] = 0.99
    prefill_price: Annotated[float, Meta(gt=0.0, description="of a prefill worker, in any unit")] = 1.0
    decode_price: Annotated[float, Meta(gt=0.0, description="of a decode worker, in the same unit")] = 1.0
    encode_price: Annotated[float, Meta(gt=0.0, description="of an encode worker, in the same unit")] = 1.0
    most_workers: Annotated[int, Meta(ge=2, le=1000, description="that the cluster may have, of all roles together")] = 64


class ResultOptions(Options, frozen=True, kw_only=True):
    """The result."""

    json: Annotated[str, Meta(description="write the result to this file, in the form of `kvrelay bench`")] = ""
    plot: Annotated[str, Meta(description="draw the times of first and further tokens into this file (SVG)")] = ""


GROUPS = (ClusterOptions, TrafficOptions, CostOptions, FindOptions, ResultOptions)


def build_parser() -> Parser:
    description = "Runs the router and the engines in virtual time, over workers that compute nothing and only cost time."
    parser = Parser(prog="kvrelay simulate", description=description, epilog=_EPILOG)
    add_options(parser, GROUPS)
    return parser


def run(argv: list[str]) -> int:
    said = given(build_parser().parse_strictly(argv), GROUPS, None)
    cluster, traffic = said.value(ClusterOptions), said.value(TrafficOptions)
    costs, search, result = said.value(CostOptions), said.value(FindOptions), said.value(ResultOptions)
    configure("error", "simulate")
    sessions, fit = list(traffic.sessions()), costs.fit()
    _warn(fit.assumed)
    has_images = any(turn.images for session in sessions for turn in session.turns)
    layout = cluster.layout(takes_images=has_images)
    run_one = partial(simulate, costs=fit.costs, sessions=sessions, failures=cluster.failures(), duration_s=traffic.seconds)
    if search.find:
        layout = _find(layout, run_one, traffic.targets, search)
    outcome = run_one(layout, progress=console_progress())
    _show(_counts(layout) | figures(outcome, traffic.targets), outcome, argv, result)
    return 0


def _warn(assumed: Sequence[str]) -> None:
    if assumed:
        console = Console(stderr=True)
        console.print(f"[yellow]--costs:[/] no file tells all: {'; '.join(assumed)}", highlight=False, soft_wrap=True)


def _find(layout: Layout, run_one: Callable[[Layout], Outcome], targets: Targets, options: FindOptions) -> Layout:
    """Raises ConfigError if no cluster will do."""
    console = Console(stderr=True)

    def meets(tried: Layout) -> bool:
        share = figures(run_one(tried), targets)["good_share"]
        console.print(f"{_named(tried, ', ')}: {share:.1%} are good", highlight=False)
        return share >= options.good_share

    prices = Prices(prefill=options.prefill_price, decode=options.decode_price, encode=options.encode_price)
    if layout.cores:
        raise ConfigError("--find: --cores: it takes for granted that more workers do better, which on shared cores is not so")
    if layout.takes_images and options.most_workers < 3:
        raise ConfigError(
            "--find: --most-workers: with images a cluster has at least 3 workers, an encode, a prefill and a decode one"
        )
    found = cheapest(meets, layout, prices, options.most_workers)
    if found is None:
        raise ConfigError(f"--find: no cluster of up to {options.most_workers} workers (--most-workers) meets the targets")
    price = prices.of((found.prefill, found.decode, found.encode))
    console.print(f"least expensive: {_named(found, ' and ')} workers, at {price:g}", highlight=False)
    return found


def _named(layout: Layout, between: str) -> str:
    encode = [f"{layout.encode} encode"] if layout.takes_images else []
    return between.join([*encode, f"{layout.prefill} prefill", f"{layout.decode} decode"])


def _counts(layout: Layout) -> dict[str, float]:
    return {role.value: float(count) for role, count in layout.counts.items()} | {"routers": float(layout.routers)}


def _show(found: dict[str, float], outcome: Outcome, argv: Sequence[str], options: ResultOptions) -> None:
    console = Console(stderr=True)
    made = report.BenchResult(
        scenario="simulate",
        commit=report.current_commit(),
        hardware="simulated",
        command=shlex.join(["kvrelay", "simulate", *argv]),
        results=found | router_times(outcome),
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
