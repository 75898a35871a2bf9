"""`kvrelay serve`: a router and its workers on this machine."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.cli.model_command import add_model_options, parse
from kvrelay.config import CardOptions, ClusterOptions, EngineOptions, ModelOptions, Options, RouterOptions, TransferOptions
from kvrelay.errors import ConfigError
from kvrelay.log import configure
from kvrelay.options import Given, Parser, RoleOptions, add_role_options, flag_of
from kvrelay.states import Role

GROUPS: list[type[Options]] = [ModelOptions, EngineOptions, RouterOptions, ClusterOptions, CardOptions, TransferOptions]
PER_ROLE: list[type[Options]] = [ModelOptions, EngineOptions]
_EPILOG = """\
examples:
  kvrelay serve                                        SmolLM2, fetched on first use, on 1 prefill + 1 decode worker
  kvrelay serve --prefill 2 --decode 2                 two of each
  kvrelay serve ./my-model --whole 2 --threads 4       two workers with four threads each
  kvrelay serve model.gguf --port 0 --api-key secret   any free port; clients need the key
  kvrelay serve --routers 2 --decode 4 --prefill 2     two router processes, for more requests than one can carry
  kvrelay serve --config server.yaml --max-batch 128   flags win over the file
  kvrelay serve --prefill-threads 6 --decode-threads 2 options of the model and the engine for the workers of one role

A config file holds options as `name: value` lines, such as `max_batch: 128`; what is said of one role may be a block,
such as `decode: {workers: 2, max_batch: 64}`.
When every worker is up, one line `kvrelay ready on URL` is printed. Ctrl-C stops everything.
"""


def build_parser() -> Parser:
    parser = Parser(prog="kvrelay serve", description="Serves a model on this machine.", epilog=_EPILOG)
    add_role_options(parser, PER_ROLE)
    return add_model_options(parser, GROUPS)


def run(argv: list[str]) -> int:
    chosen = parse(build_parser(), argv, GROUPS, PER_ROLE)
    configure(chosen.environment.log_level, "router" if chosen.of(ClusterOptions).routers == 1 else "serve")
    from kvrelay.launch import serve as launch
    from kvrelay.launch.cluster import worker_roles
    from kvrelay.launch.console import console_progress

    return launch.serve(
        chosen.of(ModelOptions),
        chosen.of(EngineOptions),
        chosen.of(RouterOptions),
        chosen.of(ClusterOptions),
        chosen.of(TransferOptions),
        chosen.environment,
        console_progress(),
        options_per_role(chosen.given, worker_roles(chosen.of(ClusterOptions))),
        chosen.of(CardOptions),
    )


def options_per_role(said: Given, started: Sequence[Role]) -> dict[Role, RoleOptions]:
    """What the workers of each role are told. Raises ConfigError for an option of a role that has no use for it."""
    for role in Role:
        flags = [flag for group in PER_ROLE for flag in said.of_role(group, role)]
        if flags and role not in started:
            raise ConfigError(f"{flags[0]}: no {role.value} worker is started here (--{role.value} N)")
    _check_models(said, started)
    encode_tp = flag_of("tp", Role.ENCODE)
    if encode_tp in said.of_role(ModelOptions, Role.ENCODE) and said.value(ModelOptions, Role.ENCODE).tp > 1:
        raise ConfigError(f"{encode_tp}: encode workers are not split; without it, --tp is for the other roles")
    return {role: RoleOptions(model=said.value(ModelOptions, role), engine=said.value(EngineOptions, role)) for role in started}


def _check_models(said: Given, started: Sequence[Role]) -> None:
    """The router reads the tokenizer and the limits of the one model that all workers have."""
    model = said.value(ModelOptions).model
    for role in started:
        its = said.value(ModelOptions, role).model
        if its != model:
            flag = flag_of("model", role)
            raise ConfigError(f"{flag} {its}: the router and all workers serve one model, and --model is {model}")
