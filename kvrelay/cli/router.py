"""`kvrelay router`: the router alone, for workers that are started elsewhere."""

from __future__ import annotations

from kvrelay.cli.model_command import add_model_options, parse
from kvrelay.config import ClusterOptions, ModelOptions, Options, RouterOptions
from kvrelay.log import configure
from kvrelay.options import Parser

GROUPS: list[type[Options]] = [ModelOptions, RouterOptions, ClusterOptions]
_OF_WORKERS = frozenset(ModelOptions.__struct_fields__) - {"model"} | {"whole", "prefill", "decode", "encode"}
_EPILOG = """\
examples:
  kvrelay router smollm2 --registry-listen tcp://10.0.0.1:5600     workers register there
  kvrelay router smollm2 --registry static:tcp://10.0.0.2:5700     a worker that is there already
  kvrelay router smollm2 --registry etcd://10.0.0.9:2379           one of several routers

MODEL is needed for its tokenizer only; workers load the weights.
"""


def build_parser() -> Parser:
    parser = Parser(prog="kvrelay router", description="The router alone.", epilog=_EPILOG)
    return add_model_options(parser, GROUPS, skip=_OF_WORKERS)


def run(argv: list[str]) -> int:
    chosen = parse(build_parser(), argv, GROUPS)
    configure(chosen.environment.log_level, "router")
    from kvrelay.launch import serve as launch
    from kvrelay.launch.console import console_progress

    return launch.route(
        chosen.of(ModelOptions), chosen.of(RouterOptions), chosen.of(ClusterOptions), chosen.environment, console_progress()
    )
