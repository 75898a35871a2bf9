"""The `kvrelay` command. Each subcommand imports what it needs when it runs, so that --help is instant.

What a user can cause ends in one line `error: ...` on standard error and exit status 2, never in a traceback.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import msgspec

from kvrelay.config import (
    ClusterOptions,
    EngineOptions,
    Environment,
    ModelOptions,
    Options,
    RouterOptions,
    TransferOptions,
    WorkerOptions,
    read_environment,
)
from kvrelay.errors import ConfigError, KVRelayError
from kvrelay.log import configure
from kvrelay.options import Parser, add_options, collect, suggest
from kvrelay.states import Role

if TYPE_CHECKING:
    from kvrelay.worker.launcher import LauncherTie

O = TypeVar("O", bound=Options)

_EPILOG = """\
commands:
  serve      run a model behind an OpenAI-compatible server on this machine
  router     the router alone; workers on any host register with it
  worker     one worker, for a router that runs elsewhere
  chat       talk to a running server in the terminal
  drain      let a worker finish what it has and leave
  role       let a worker finish what it has and come back in another role
  events     show live what the workers' KV caches do
  bench      measure this installation
  doctor     check this machine and say what to do
  keygen     make the key that routers and workers share
  probe      ask a worker or a router whether it is ready
  version    print the version

examples:
  kvrelay serve                         a small chat model on http://127.0.0.1:8000
  kvrelay chat                          talk to it
  kvrelay serve Qwen/Qwen3-0.6B --port 9000 --whole 2

`kvrelay COMMAND --help` tells all about one command. Environment: KVRELAY_CACHE (folder of models),
KVRELAY_LOG (debug, info, warning), KVRELAY_OFFLINE=1 (never download), KVRELAY_CLUSTER_KEY (its file).
"""

_SERVE_EPILOG = """\
examples:
  kvrelay serve                                        SmolLM2, fetched on first use, on 1 prefill + 1 decode worker
  kvrelay serve --prefill 2 --decode 2                 two of each
  kvrelay serve ./my-model --whole 2 --threads 4       two workers with four threads each
  kvrelay serve model.gguf --port 0 --api-key secret   any free port; clients need the key
  kvrelay serve --config server.yaml --max-batch 128   flags win over the file

A config file holds options as `name: value` lines, such as `max_batch: 128`.
When every worker is up, one line `kvrelay ready on URL` is printed. Ctrl-C stops everything.
"""

_ROUTER_EPILOG = """\
examples:
  kvrelay router smollm2 --registry-listen tcp://10.0.0.1:5600     workers register there
  kvrelay router smollm2 --registry static:tcp://10.0.0.2:5700     a worker that is there already
  kvrelay router smollm2 --registry etcd://10.0.0.9:2379           one of several routers

MODEL is needed for its tokenizer only; workers load the weights.
"""

_WORKER_EPILOG = """\
examples:
  kvrelay worker smollm2 --registry tcp://10.0.0.1:5600 --worker-host 10.0.0.2
  kvrelay worker smollm2 --registry static --worker-host 10.0.0.2 --worker-port 5700

SIGTERM drains the worker: it finishes what it has, leaves and ends.
"""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(arguments)
    except KVRelayError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output went away, as `head` does
        sys.stderr.close()
        return 141


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_top_parser().format_help(), end="")
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        return _version([])
    command = _COMMANDS.get(arguments[0])
    if command is None:
        raise ConfigError(f"unknown command {arguments[0]!r}{suggest(arguments[0], _COMMANDS)} (see kvrelay --help)")
    return command(arguments[1:])


def _top_parser() -> Parser:
    return Parser(
        prog="kvrelay",
        usage="kvrelay COMMAND [OPTIONS]",
        description="Serves language models with encode, prefill and decode on separate workers.",
        epilog=_EPILOG,
        add_help=False,
    )


@dataclass(frozen=True, slots=True)
class _Chosen:
    """The options of one run."""

    values: dict[type[Options], Options]
    namespace: argparse.Namespace
    environment: Environment

    def of(self, group: type[O]) -> O:
        value = self.values[group]
        assert isinstance(value, group)
        return value


def _parse(parser: Parser, argv: list[str], groups: list[type[Options]], skip: frozenset[str] = frozenset()) -> _Chosen:
    """MODEL, --config, and the options of the groups, less those in `skip`."""
    parser.add_argument(
        "positional_model", nargs="?", metavar="MODEL", help="smollm2 (default), a folder, a .gguf file, a hub id"
    )
    parser.add_argument("--config", type=pathlib.Path, metavar="FILE.yaml", help="a file of options; flags win over it")
    add_options(parser, groups, skip=skip)
    namespace = parser.parse_strictly(argv)
    if namespace.positional_model is not None:
        if "model" in namespace:
            raise ConfigError("the model is given twice: as MODEL and with --model")
        namespace.model = namespace.positional_model
    return _Chosen(collect(namespace, groups, namespace.config), namespace, read_environment())


def _serve(argv: list[str]) -> int:
    parser = Parser(prog="kvrelay serve", description="Serves a model on this machine.", epilog=_SERVE_EPILOG)
    chosen = _parse(parser, argv, [ModelOptions, EngineOptions, RouterOptions, ClusterOptions, TransferOptions])
    configure(chosen.environment.log_level, "router")
    from kvrelay.launch import serve as launch
    from kvrelay.launch.console import ConsoleProgress

    return launch.serve(
        chosen.of(ModelOptions),
        chosen.of(EngineOptions),
        chosen.of(RouterOptions),
        chosen.of(ClusterOptions),
        chosen.of(TransferOptions),
        chosen.environment,
        ConsoleProgress(),
    )


def _router(argv: list[str]) -> int:
    parser = Parser(prog="kvrelay router", description="The router alone.", epilog=_ROUTER_EPILOG)
    weights = frozenset(ModelOptions.__struct_fields__) - {"model"}
    counts = frozenset({"whole", "prefill", "decode", "encode"})
    chosen = _parse(parser, argv, [ModelOptions, RouterOptions, ClusterOptions], skip=weights | counts)
    configure(chosen.environment.log_level, "router")
    from kvrelay.launch import serve as launch
    from kvrelay.launch.console import ConsoleProgress

    return launch.route(
        chosen.of(ModelOptions), chosen.of(RouterOptions), chosen.of(ClusterOptions), chosen.environment, ConsoleProgress()
    )


def _worker(argv: list[str]) -> int:
    parser = Parser(prog="kvrelay worker", description="One worker, for routers elsewhere.", epilog=_WORKER_EPILOG)
    parser.add_argument("--launcher-fd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--progress", choices=["bars", "plain", "none"], default="bars", help=argparse.SUPPRESS)
    parser.add_argument("--quiet", action="store_true", help=argparse.SUPPRESS)
    chosen = _parse(parser, argv, [ModelOptions, EngineOptions, WorkerOptions, TransferOptions])
    if chosen.namespace.quiet and chosen.environment.log_level == "info":
        chosen = dataclasses.replace(chosen, environment=msgspec.structs.replace(chosen.environment, log_level="warning"))
    configure(chosen.environment.log_level, "worker")
    if chosen.namespace.launcher_fd is None:
        return _run_worker(chosen, None)
    from kvrelay.worker.launcher import LauncherTie

    tie = LauncherTie(chosen.namespace.launcher_fd)
    try:
        return _run_worker(chosen, tie)
    except KVRelayError as error:
        tie.report(str(error))
        return 2


def _run_worker(chosen: _Chosen, tie: LauncherTie | None) -> int:
    from kvrelay.launch.console import ConsoleProgress
    from kvrelay.progress import Silent
    from kvrelay.worker.worker import run_worker

    place, options = chosen.of(WorkerOptions), chosen.of(TransferOptions)
    from kvrelay.worker.build import stage_of

    build = stage_of(Role(place.role), options, place.worker_host, place.signal_port)
    shown = chosen.namespace.progress
    return run_worker(
        chosen.of(ModelOptions),
        chosen.of(EngineOptions),
        chosen.of(WorkerOptions),
        chosen.environment,
        Silent() if shown == "none" else ConsoleProgress(plain=shown == "plain"),
        build,
        tie=tie,
    )


def _chat(argv: list[str]) -> int:
    from kvrelay.cli import chat

    return chat.run(argv)


def _drain(argv: list[str]) -> int:
    from kvrelay.cli import admin

    return admin.drain(argv)


def _role(argv: list[str]) -> int:
    from kvrelay.cli import admin

    return admin.role(argv)


def _events(argv: list[str]) -> int:
    from kvrelay.cli import events as event_log

    return event_log.run(argv)


def _bench(argv: list[str]) -> int:
    from kvrelay.bench import main as bench

    return bench.run(argv)


def _doctor(argv: list[str]) -> int:
    from kvrelay.cli import doctor

    return doctor.run(argv)


def _probe(argv: list[str]) -> int:
    from kvrelay.cli import probe

    return probe.run(argv)


def _keygen(argv: list[str]) -> int:
    from kvrelay.planes import cluster_key

    parser = Parser(prog="kvrelay keygen", description="Makes the key that routers and workers of a cluster share.")
    default = pathlib.Path(cluster_key.DEFAULT_FILE)
    parser.add_argument("file", nargs="?", type=pathlib.Path, default=default, metavar="FILE", help=f"default {default}")
    file = parser.parse_strictly(argv).file
    cluster_key.write_new_key(file)
    print(f"wrote {file}: copy it to every host, and start routers and workers with --cluster-key {file}")
    return 0


def _version(argv: list[str]) -> int:
    Parser(prog="kvrelay version", description="Prints the version.").parse_strictly(argv)
    from kvrelay.version import version

    print(f"kvrelay {version()}")
    return 0


_COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "serve": _serve,
    "router": _router,
    "worker": _worker,
    "chat": _chat,
    "drain": _drain,
    "role": _role,
    "events": _events,
    "bench": _bench,
    "doctor": _doctor,
    "keygen": _keygen,
    "probe": _probe,
    "version": _version,
}
