"""`kvrelay drain WORKER`: lets one worker of a running server leave. `role.py` shares its steps:

    GET /cluster: which worker is meant -> POST /admin/drain or /admin/role -> GET /cluster until it has left, or is back

The worker does the rest by itself, whether this command waits for it or not.
"""

from __future__ import annotations

import sys
import time

import httpx
import msgspec

from kvrelay.cli import client as http
from kvrelay.errors import ConfigError, UnavailableError
from kvrelay.options import Parser

_LOOK_EVERY_S = 0.3
_BUSY = ("running", "waiting", "transferring", "swapped")
_EPILOG = """\
The worker takes nothing new, finishes what it has, leaves and ends; kvrelay serve does not replace it.

examples:
  kvrelay drain decode-1f            WORKER is an id of GET /cluster, or as much of its beginning as is unique
  kvrelay drain decode-1f --no-wait  returns as soon as the worker has been told
"""


class Worker(msgspec.Struct, frozen=True):
    """An entry of GET /cluster, as far as it matters here."""

    id: str
    role: str
    state: str
    host: str
    pid: int
    running: int
    waiting: int
    transferring: int
    swapped: int

    @property
    def place(self) -> tuple[str, int]:
        """Stays when it comes back."""
        return self.host, self.pid


class _Cluster(msgspec.Struct, frozen=True):
    workers: list[Worker]


class _Order(msgspec.Struct, frozen=True):
    worker: str
    warning: str


def build_parser() -> Parser:
    return order_parser("kvrelay drain", "Lets a worker finish what it has and leave.", _EPILOG)


def run(argv: list[str]) -> int:
    arguments = build_parser().parse_strictly(argv)
    with http.connect(arguments.url, arguments.api_key) as client:
        worker = find(client, arguments.worker)
        order(client, "/admin/drain", {"worker": worker.id})
        if arguments.no_wait:
            return say(f"{worker.id} drains")
        wait_until_gone(client, worker, time.monotonic() + arguments.timeout)
        return say(f"{worker.id} has left")


def order_parser(prog: str, description: str, epilog: str) -> Parser:
    parser = Parser(prog=prog, description=description, epilog=epilog)
    parser.add_argument("worker", metavar="WORKER", help="a worker's id, or the beginning of one")
    http.add_url(parser)
    http.add_api_key(parser)
    parser.add_argument("--no-wait", action="store_true", help="return as soon as the worker has been told")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="X", help="seconds to wait at most (default 600)")
    return parser


def workers_of(client: httpx.Client) -> list[Worker]:
    return http.ask(client, "GET", "/cluster", _Cluster).workers


def order(client: httpx.Client, path: str, body: dict[str, str]) -> None:
    answer = http.ask(client, "POST", path, _Order, body)
    if answer.warning:
        print(f"warning: {answer.warning}", file=sys.stderr)


def find(client: httpx.Client, name: str) -> Worker:
    workers = workers_of(client)
    found = [worker for worker in workers if worker.id == name] or [worker for worker in workers if worker.id.startswith(name)]
    if len(found) == 1:
        return found[0]
    listed = ", ".join(worker.id for worker in found or workers) or "none"
    if found:
        raise ConfigError(f"{name!r} is the beginning of several workers: {listed}")
    raise ConfigError(f"no worker's id begins with {name!r}; there are: {listed}")


def wait_until_gone(client: httpx.Client, worker: Worker, deadline: float) -> None:
    line = Line()
    while (now := next((each for each in workers_of(client) if each.id == worker.id), None)) is not None:
        busy = [(count, what) for what in _BUSY if (count := msgspec.structs.asdict(now)[what])]
        line.show(f"{worker.id} is {now.state}: {', '.join(f'{count} {what}' for count, what in busy) or 'idle'}")
        sleep_until(deadline, f"{worker.id} has not left yet; it goes on draining")
    line.end()


def sleep_until(deadline: float, excuse: str) -> None:
    if time.monotonic() > deadline:
        raise UnavailableError(excuse)
    time.sleep(_LOOK_EVERY_S)


class Line:
    """One line that changes in a terminal; elsewhere one line per change."""

    def __init__(self) -> None:
        self._shown = ""

    def show(self, text: str) -> None:
        if text == self._shown:
            return
        if sys.stderr.isatty():
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
        else:
            print(text, file=sys.stderr, flush=True)
        self._shown = text

    def end(self) -> None:
        if self._shown and sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def say(text: str) -> int:
    print(text, flush=True)
    return 0
