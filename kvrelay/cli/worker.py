"""`kvrelay worker`: one worker. `kvrelay serve` starts its workers by this command too, tied to it by --launcher-fd."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING

import msgspec

from kvrelay.cli.model_command import Chosen, add_model_options, parse, run_tied
from kvrelay.config import EngineOptions, ModelOptions, Options, TransferOptions, WorkerOptions
from kvrelay.log import configure
from kvrelay.options import Parser
from kvrelay.states import Role

if TYPE_CHECKING:
    from kvrelay.worker.launcher import LauncherTie

GROUPS: list[type[Options]] = [ModelOptions, EngineOptions, WorkerOptions, TransferOptions]
_EPILOG = """\
examples:
  kvrelay worker smollm2 --registry tcp://10.0.0.1:5600 --worker-host 10.0.0.2
  kvrelay worker smollm2 --registry static --worker-host 10.0.0.2 --worker-port 5700

SIGTERM drains the worker: it finishes what it has, leaves and ends.
"""


def build_parser() -> Parser:
    parser = Parser(prog="kvrelay worker", description="One worker, for routers elsewhere.", epilog=_EPILOG)
    parser.add_argument("--launcher-fd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--progress", choices=["bars", "plain", "none"], default="bars", help=argparse.SUPPRESS)
    parser.add_argument("--quiet", action="store_true", help=argparse.SUPPRESS)
    return add_model_options(parser, GROUPS)


def run(argv: list[str]) -> int:
    chosen = parse(build_parser(), argv, GROUPS)
    if chosen.namespace.quiet and chosen.environment.log_level == "info":
        chosen = dataclasses.replace(chosen, environment=msgspec.structs.replace(chosen.environment, log_level="warning"))
    configure(chosen.environment.log_level, "worker")
    return run_tied(chosen, lambda tie: _run_worker(chosen, tie))


def _run_worker(chosen: Chosen, tie: LauncherTie | None) -> int:
    from kvrelay.launch.console import console_progress
    from kvrelay.progress import Silent
    from kvrelay.worker.build import stage_of
    from kvrelay.worker.worker import run_worker

    place, transfer, shown = chosen.of(WorkerOptions), chosen.of(TransferOptions), chosen.namespace.progress
    engine = chosen.of(EngineOptions)
    return run_worker(
        chosen.of(ModelOptions),
        engine,
        place,
        chosen.environment,
        Silent() if shown == "none" else console_progress(plain=shown == "plain"),
        lambda setup: stage_of(Role(place.role), transfer, place.worker_host, place.signal_port, engine.engine)(setup),
        tie=tie,
    )
