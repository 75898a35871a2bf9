"""`kvrelay router`: the router alone, for workers that are started elsewhere. `kvrelay serve --routers N` starts its routers by
this command too, tied to it by --launcher-fd."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from kvrelay.cli.model_command import Chosen, add_model_options, parse, run_tied
from kvrelay.config import ClusterOptions, ModelOptions, Options, RouterOptions
from kvrelay.log import configure
from kvrelay.options import Parser

if TYPE_CHECKING:
    from kvrelay.launch.launch import Tie

GROUPS: list[type[Options]] = [ModelOptions, RouterOptions, ClusterOptions]
_NOT_HERE = frozenset(ModelOptions.__struct_fields__) - {"model"} | {"whole", "prefill", "decode", "encode", "routers"}
_EPILOG = """\
examples:
  kvrelay router smollm2 --registry-listen tcp://10.0.0.1:5600     workers register there
  kvrelay router smollm2 --registry static:tcp://10.0.0.2:5700     a worker that is there already
  kvrelay router smollm2 --registry tcp://10.0.0.1:5600            a second router, with the first one's workers
  kvrelay router smollm2 --registry etcd://10.0.0.9:2379           one of several routers

MODEL is needed for its tokenizer only; workers load the weights.
"""


def build_parser() -> Parser:
    parser = Parser(prog="kvrelay router", description="The router alone.", epilog=_EPILOG)
    parser.add_argument("--launcher-fd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--num-workers", type=int, default=0, help=argparse.SUPPRESS)
    return add_model_options(parser, GROUPS, skip=_NOT_HERE)


def run(argv: list[str]) -> int:
    chosen = parse(build_parser(), argv, GROUPS)
    configure(chosen.environment.log_level, "router")
    return run_tied(chosen, lambda tie: _run_router(chosen, tie))


def _run_router(chosen: Chosen, tie: Tie | None) -> int:
    from kvrelay.launch import serve as launch
    from kvrelay.launch.console import console_progress

    return launch.route(
        chosen.of(ModelOptions),
        chosen.of(RouterOptions),
        chosen.of(ClusterOptions),
        chosen.environment,
        console_progress(),
        num_workers=chosen.namespace.num_workers,
        tie=tie,
    )
