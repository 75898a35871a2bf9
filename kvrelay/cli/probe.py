"""`kvrelay probe`: asks one process whether it can take requests, for health checks of containers and scripts.

    tcp://HOST:PORT    a worker's serving address: says Hello there, as a router does; Welcome tells the worker's state
    http://HOST:PORT   a router: GET /health

Exit status 0 if it is ready, 1 if it is anything else, 2 if the question itself was wrong. A worker answers between two steps
of its engine, so one that is stuck does not answer; give a busy one a few seconds.
"""

from __future__ import annotations

import sys
import urllib.parse

import zmq

from kvrelay.config import read_environment
from kvrelay.errors import ConfigError, UnavailableError
from kvrelay.ids import new_router_id
from kvrelay.options import Parser
from kvrelay.planes.cluster_key import key_file, load_key
from kvrelay.planes.curve import connecting, exchange, keyed
from kvrelay.states import WorkerState
from kvrelay.wire import PROTOCOL_VERSION
from kvrelay.wire.codec import Decoder, encode
from kvrelay.wire.serving import Hello, Refused, StepOutputs, ToRouter, Welcome

_EPILOG = """\
examples:
  kvrelay probe tcp://10.0.0.2:5700                     ready to take requests?
  kvrelay probe tcp://10.0.0.2:5700 --alive             does it answer at all? (also while it drains)
  kvrelay probe tcp://10.0.0.2:5700 --state             print its state
  kvrelay probe http://10.0.0.1:8000                    a router: is any worker ready behind it?
"""
_FORGET_S = 0.5  # how long the worker remembers us
_NOT_READY = "not ready"


def build_parser() -> Parser:
    parser = Parser(prog="kvrelay probe", description="Asks a worker or a router whether it is ready.", epilog=_EPILOG)
    parser.add_argument("address", metavar="ADDRESS", help="tcp://HOST:PORT of a worker, or http://HOST:PORT of a router")
    parser.add_argument("--alive", action="store_true", help="any answer will do: it may be draining, or lack workers")
    parser.add_argument("--state", action="store_true", help="print the state that was answered")
    parser.add_argument("--timeout-s", type=float, default=5.0, metavar="X", help="seconds to wait for an answer (default 5)")
    parser.add_argument("--cluster-key", default="", metavar="FILE", help="the cluster's key file, if it has one")
    return parser


def run(argv: list[str]) -> int:
    arguments = build_parser().parse_strictly(argv)
    if not arguments.timeout_s > 0:
        raise ConfigError(f"--timeout-s {arguments.timeout_s:g}: must be more than 0")
    try:
        with keyed(load_key(key_file(arguments.cluster_key, read_environment()))):
            state = ask(arguments.address, arguments.timeout_s)
    except UnavailableError as error:
        print(f"{arguments.address}: {error}", file=sys.stderr)
        return 1
    if arguments.state:
        print(state)
    return 0 if arguments.alive or state == WorkerState.READY else 1


def ask(address: str, timeout_s: float) -> str:
    """The state of the worker or router at that address. Raises UnavailableError if there is no answer."""
    kind = urllib.parse.urlsplit(address).scheme
    if kind == "tcp":
        return worker_state(address, timeout_s)
    if kind in ("http", "https"):
        return _router_state(address, timeout_s)
    raise ConfigError(f"{address!r} is neither tcp://HOST:PORT of a worker nor http://HOST:PORT of a router")


def worker_state(address: str, timeout_s: float) -> str:
    """Says Hello once. Outputs meant for another router never come here, but a load report of ours may."""
    decoder: Decoder[ToRouter] = Decoder(ToRouter)
    with connecting(zmq.DEALER) as socket:
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            raise ConfigError(f"{address!r} is no address to connect to: {error.strerror or error}") from error
        hello = encode(Hello(version=PROTOCOL_VERSION, router_id=new_router_id(), silence_s=_FORGET_S))
        for answer in exchange(socket, hello, timeout_s):
            match decoder.decode(answer):
                case Welcome(worker=worker):
                    return worker.state.value
                case Refused(reason=reason):
                    raise UnavailableError(f"refused: {reason}")
                case StepOutputs():
                    continue
    raise UnavailableError(f"no answer within {timeout_s:g} s")


def _router_state(url: str, timeout_s: float) -> str:
    import httpx  # a probe of a worker, which runs every few seconds, has no use for it

    from kvrelay.cli.client import connect

    try:
        with connect(url) as client:
            answer = client.get("/health", follow_redirects=True, timeout=timeout_s)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UnavailableError(str(error)) from error
    if answer.status_code == 503:
        return _NOT_READY
    if answer.is_error:
        raise UnavailableError(f"/health answered {answer.status_code}")
    return WorkerState.READY.value
