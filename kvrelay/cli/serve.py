"""`kvrelay serve`: a router and its workers on this machine."""

from __future__ import annotations

from kvrelay.cli.model_command import add_model_options, parse
from kvrelay.config import ClusterOptions, EngineOptions, ModelOptions, Options, RouterOptions, TransferOptions
from kvrelay.log import configure
from kvrelay.options import Parser

GROUPS: list[type[Options]] = [ModelOptions, EngineOptions, RouterOptions, ClusterOptions, TransferOptions]
_EPILOG = """\
examples:
  kvrelay serve                                        SmolLM2, fetched on first use, on 1 prefill + 1 decode worker
  kvrelay serve --prefill 2 --decode 2                 two of each
  kvrelay serve ./my-model --whole 2 --threads 4       two workers with four threads each
  kvrelay serve model.gguf --port 0 --api-key secret   any free port; clients need the key
  kvrelay serve --config server.yaml --max-batch 128   flags win over the file

A config file holds options as `name: value` lines, such as `max_batch: 128`.
When every worker is up, one line `kvrelay ready on URL` is printed. Ctrl-C stops everything.
"""


def build_parser() -> Parser:
    parser = Parser(prog="kvrelay serve", description="Serves a model on this machine.", epilog=_EPILOG)
    return add_model_options(parser, GROUPS)


def run(argv: list[str]) -> int:
    chosen = parse(build_parser(), argv, GROUPS)
    configure(chosen.environment.log_level, "router")
    from kvrelay.launch import serve as launch
    from kvrelay.launch.console import console_progress

    return launch.serve(
        chosen.of(ModelOptions),
        chosen.of(EngineOptions),
        chosen.of(RouterOptions),
        chosen.of(ClusterOptions),
        chosen.of(TransferOptions),
        chosen.environment,
        console_progress(),
    )
