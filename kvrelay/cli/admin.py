"""`kvrelay drain WORKER` and `kvrelay role WORKER ROLE`: an operator's words to one worker of a running server.

    GET /cluster: which worker is meant -> POST /admin/drain or /admin/role -> GET /cluster until it has left, or is back

The worker does the rest by itself, whether anybody waits or not.
"""

from __future__ import annotations

import sys
import time
from typing import TypeVar

import httpx
import msgspec

from kvrelay.errors import ConfigError, KVRelayError, UnavailableError
from kvrelay.options import Parser
from kvrelay.states import Role

A = TypeVar("A", bound=msgspec.Struct)

_LOOK_EVERY_S = 0.3
_BUSY = ("running", "waiting", "transferring", "swapped")
_DRAIN_EPILOG = """\
The worker takes nothing new, finishes what it has, leaves and ends; kvrelay serve does not replace it.

examples:
  kvrelay drain decode-1f            WORKER is an id of GET /cluster, or as much of its beginning as is unique
  kvrelay drain decode-1f --no-wait  returns as soon as the worker has been told
"""
_ROLE_EPILOG = """\
The worker finishes what it has, leaves, and comes back as a new worker of the same process.

examples:
  kvrelay role prefill-7c decode
  kvrelay role prefill-7c whole --url http://10.0.0.1:8000 --api-key secret
"""


class _Worker(msgspec.Struct, frozen=True):
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
    workers: list[_Worker]


class _Order(msgspec.Struct, frozen=True):
    worker: str
    warning: str


def drain(argv: list[str]) -> int:
    parser = _parser("kvrelay drain", "Lets a worker finish what it has and leave.", _DRAIN_EPILOG)
    arguments = parser.parse_strictly(argv)
    with _client(arguments.url, arguments.api_key) as client:
        worker = _find(client, arguments.worker)
        _post(client, "/admin/drain", {"worker": worker.id})
        if arguments.no_wait:
            return _say(f"{worker.id} drains")
        _wait_until_gone(client, worker, time.monotonic() + arguments.timeout)
        return _say(f"{worker.id} has left")


def role(argv: list[str]) -> int:
    parser = _parser("kvrelay role", "Lets a worker finish what it has and come back in another role.", _ROLE_EPILOG)
    parser.add_argument("role", choices=[role.value for role in Role], metavar="ROLE", help="whole, prefill, decode or encode")
    arguments = parser.parse_strictly(argv)
    with _client(arguments.url, arguments.api_key) as client:
        worker = _find(client, arguments.worker)
        _post(client, "/admin/role", {"worker": worker.id, "role": arguments.role})
        if arguments.no_wait:
            return _say(f"{worker.id} drains, to come back as a {arguments.role} worker")
        deadline = time.monotonic() + arguments.timeout
        _wait_until_gone(client, worker, deadline)
        back = _wait_until_back(client, worker, deadline)
        return _say(f"{worker.id} is back as {back.id}")


def _parser(prog: str, description: str, epilog: str) -> Parser:
    parser = Parser(prog=prog, description=description, epilog=epilog)
    parser.add_argument("worker", metavar="WORKER", help="a worker's id, or the beginning of one")
    parser.add_argument("--url", default="http://127.0.0.1:8000", metavar="URL", help="server (default http://127.0.0.1:8000)")
    parser.add_argument("--api-key", default="", metavar="KEY", help="key the server wants")
    parser.add_argument("--no-wait", action="store_true", help="return as soon as the worker has been told")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="X", help="seconds to wait at most (default 600)")
    return parser


def _client(url: str, api_key: str) -> httpx.Client:
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    return httpx.Client(base_url=url.rstrip("/"), headers=headers, timeout=30.0)


def _find(client: httpx.Client, name: str) -> _Worker:
    workers = _workers(client)
    found = [worker for worker in workers if worker.id == name] or [worker for worker in workers if worker.id.startswith(name)]
    if len(found) == 1:
        return found[0]
    listed = ", ".join(worker.id for worker in found or workers) or "none"
    if found:
        raise ConfigError(f"{name!r} is the beginning of several workers: {listed}")
    raise ConfigError(f"no worker's id begins with {name!r}; there are: {listed}")


def _wait_until_gone(client: httpx.Client, worker: _Worker, deadline: float) -> None:
    line = _Line()
    while (now := next((each for each in _workers(client) if each.id == worker.id), None)) is not None:
        busy = [(count, what) for what in _BUSY if (count := msgspec.structs.asdict(now)[what])]
        line.show(f"{worker.id} is {now.state}: {', '.join(f'{count} {what}' for count, what in busy) or 'idle'}")
        _sleep_until(deadline, f"{worker.id} has not left yet; it goes on draining")
    line.end()


def _wait_until_back(client: httpx.Client, worker: _Worker, deadline: float) -> _Worker:
    line = _Line()
    while True:
        for now in _workers(client):
            if now.place == worker.place and now.id != worker.id and now.state == "ready":
                line.end()
                return now
        line.show(f"{worker.id} has left and starts again")
        _sleep_until(deadline, f"{worker.id} has left and is not back yet; the log of its process says why")


def _sleep_until(deadline: float, excuse: str) -> None:
    if time.monotonic() > deadline:
        raise UnavailableError(excuse)
    time.sleep(_LOOK_EVERY_S)


class _Line:
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


def _say(text: str) -> int:
    print(text, flush=True)
    return 0


def _workers(client: httpx.Client) -> list[_Worker]:
    return _ask(client, "GET", "/cluster", None, _Cluster).workers


def _post(client: httpx.Client, path: str, body: dict[str, str]) -> None:
    order = _ask(client, "POST", path, body, _Order)
    if order.warning:
        print(f"warning: {order.warning}", file=sys.stderr)


def _ask(client: httpx.Client, method: str, path: str, body: dict[str, str] | None, kind: type[A]) -> A:
    try:
        response = client.request(method, path, json=body)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(f"no server answers at {client.base_url}: {error}") from error
    if response.status_code != 200:
        raise _refusal(response)
    try:
        return msgspec.json.decode(response.content, type=kind)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{client.base_url} is no kvrelay server") from error


def _refusal(response: httpx.Response) -> KVRelayError:
    try:
        reason = str(msgspec.json.decode(response.content)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        reason = f"the server answered with status {response.status_code}"
    return ConfigError(reason)
