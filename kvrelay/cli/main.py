"""The `kvrelay` command: finds the module of a command, which has `build_parser()` and `run(argv)`.

A command's module is imported when the command runs, so that --help is instant. What a user can cause ends in one line
`error: ...` on standard error and exit status 2, never in a traceback.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from kvrelay.errors import ConfigError, KVRelayError
from kvrelay.options import Parser, suggest

COMMANDS = {
    "serve": "run a model behind an OpenAI-compatible server on this machine",
    "router": "the router alone; workers on any host register with it",
    "worker": "one worker, for a router that runs elsewhere",
    "chat": "talk to a running server in the terminal",
    "drain": "let a worker finish what it has and leave",
    "role": "let a worker finish what it has and come back in another role",
    "events": "show live what the workers' KV caches do",
    "top": "show live what a server's workers and requests do",
    "bench": "measure this installation",
    "simulate": "what a cluster would do, in virtual time",
    "doctor": "check this machine and say what to do",
    "probe": "ask a worker or a router whether it is ready",
    "keygen": "make the key that routers and workers share",
    "completion": "print a script by which bash, zsh or fish completes",
    "version": "print the version",
}
_EPILOG = """\
commands:
{commands}

examples:
  kvrelay serve                         a small chat model on http://127.0.0.1:8000
  kvrelay chat                          talk to it
  kvrelay serve Qwen/Qwen3-0.6B --port 9000 --whole 2

`kvrelay COMMAND --help` tells all about one command. Environment: KVRELAY_CACHE (folder of models),
KVRELAY_LOG (debug, info, warning, error), KVRELAY_OFFLINE=1 (never download), KVRELAY_NATIVE=0 (no C kernels),
KVRELAY_CLUSTER_KEY (its file), CONTEXTPILOT_INDEX_URL (a context index).
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
        print(build_parser().format_help(), end="")
        return 0 if arguments else 2
    name, rest = ("version", []) if arguments[0] in ("-V", "--version") else (arguments[0], arguments[1:])
    if name not in COMMANDS:
        raise ConfigError(f"unknown command {name!r}{suggest(name, COMMANDS)} (see kvrelay --help)")
    module = "kvrelay.bench.main" if name == "bench" else f"kvrelay.cli.{name}"
    status: int = importlib.import_module(module).run(rest)
    return status


def build_parser() -> Parser:
    return Parser(
        prog="kvrelay",
        usage="kvrelay COMMAND [OPTIONS]",
        description="Serves language models with encode, prefill and decode on separate workers.",
        epilog=_EPILOG.format(commands="\n".join(f"  {name:10} {text}" for name, text in COMMANDS.items())),
        add_help=False,
    )
