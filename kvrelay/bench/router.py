"""`kvrelay bench router`: what the router costs, and what its choices are worth. In parts, each by itself with `--only`.

decision     choosing workers for a prompt, with many workers and blocks     router_decision.py
idle         what a cluster takes that has nothing to do                     router_idle.py
http         what the router adds to a request, and how many it carries      router_http.py
multiturn    choosing by caches against choosing in turn                     router_multiturn.py
failover     kill -9 of a decode worker under streams                        router_failover.py
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import msgspec
from rich.console import Console

from kvrelay.bench import router_decision, router_failover, router_http, router_idle, router_multiturn
from kvrelay.bench.parts import Part, all_targets, parse_parts, run_parts
from kvrelay.checkpoint.fetch import resolve
from kvrelay.config import ModelOptions, read_environment
from kvrelay.launch.console import ConsoleProgress


@dataclass(frozen=True, kw_only=True)
class RouterBench:
    """What the command line asked for."""

    model: str
    load: Literal["auto", "dummy"]
    seconds: int
    streams: int
    only: tuple[str, ...]

    def measure(self, console: Console) -> dict[str, float]:
        return run_parts(PARTS, self.only, self, console)

    def local_model(self) -> ModelOptions:
        """For workers: a folder, fetched once."""
        folder = resolve(self.model, read_environment(), ConsoleProgress())
        return msgspec.structs.replace(ModelOptions(dtype="float32"), model=str(folder), load=self.load)


PARTS: dict[str, Part[RouterBench]] = {
    "http": Part(
        "http: what the router adds to a request",
        lambda bench, console: router_http.measure(bench.model, bench.seconds, bench.streams, console),
        router_http.TARGETS,
    ),
    "decision": Part(
        "decision: choosing workers for a prompt",
        lambda bench, console: router_decision.measure(console),
        router_decision.TARGETS,
    ),
    "idle": Part(
        "idle: a cluster with nothing to do",
        lambda bench, console: router_idle.measure(bench.local_model(), console),
        router_idle.TARGETS,
    ),
    "multiturn": Part(
        "multiturn: choosing by caches against choosing in turn",
        lambda bench, console: router_multiturn.measure(bench.local_model(), console),
        router_multiturn.TARGETS,
    ),
    "failover": Part(
        "failover: kill -9 of a decode worker",
        lambda bench, console: router_failover.measure(bench.local_model(), console),
        router_failover.TARGETS,
    ),
}

TARGETS = all_targets(PARTS)
parse = functools.partial(parse_parts, PARTS)
