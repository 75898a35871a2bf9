"""Connections: too many of them, and clients that never come to the point."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence

import pytest
import uvicorn
from patience import PATIENCE_S, until

from kvrelay.frontend.app import FrontEnd
from kvrelay.frontend.http import connections
from kvrelay.frontend.http.connections import limited
from kvrelay.launch.serve import HttpServer
from kvrelay.metrics import Metrics
from tests.frontend.serving import fake_backend, make_app

LIMIT = 4
GET = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"


@contextlib.contextmanager
def serving(app: FrontEnd, limit: int = LIMIT, turned_away: Sequence[int] | None = None) -> Iterator[tuple[str, int]]:
    """At the end these, and no others, were `turned_away`, if it is given."""
    metrics = Metrics()
    http = limited(limit, metrics)
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", loop="uvloop", http=http)
    server = HttpServer(config, app.feed)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[:2]
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)
    for status in () if turned_away is None else (400, 408, 431, 503):
        assert metrics.requests.labels("none", str(status))._value.get() == turned_away.count(status)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrelay.launch.serve._TICKS_PER_CHECK", 1)
    monkeypatch.setattr(connections, "HEADERS_WITHIN_S", 0.2)
    monkeypatch.setattr(connections, "BODY_WITHIN_S", 0.2)


def connect(address: tuple[str, int]) -> socket.socket:
    return socket.create_connection(address, timeout=PATIENCE_S)


def ask(client: socket.socket, request: bytes = GET) -> int:
    """The status of the answer, all of which is read. Zero: it was cut."""
    client.sendall(request)
    head = read_until(client, b"\r\n\r\n")
    if not head:
        return 0
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    received = len(head.partition(b"\r\n\r\n")[2])
    while received < length:
        received += len(client.recv(4096))
    return int(head.split()[1])


def read_until(client: socket.socket, end: bytes) -> bytes:
    received = b""
    while end not in received:
        piece = client.recv(4096)
        if not piece:
            return b""
        received += piece
    return received


def read_all(client: socket.socket) -> bytes:
    received = b""
    while piece := client.recv(4096):
        received += piece
    return received


def stream_of(num_tokens: int) -> bytes:
    body = json.dumps({"prompt": "a" * num_tokens, "max_tokens": num_tokens, "stream": True}).encode()
    return b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body


def test_one_connection_too_many_is_told_so_and_the_others_go_on() -> None:
    with serving(make_app(fake_backend())) as address, contextlib.ExitStack() as stack:
        served = [stack.enter_context(connect(address)) for _ in range(LIMIT)]
        assert [ask(client) for client in served] == [200] * LIMIT
        for request in (
            GET,
            stream_of(4),
            b"POST /v1/completions HTTP/1.1\r\ncontent-length: 9000000\r\n\r\n" + bytes(100_000),
        ):
            refused = stack.enter_context(connect(address))
            refused.sendall(request)
            head, _, body = read_all(refused).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503 ")
            assert b"retry-after: 1" in head
            assert json.loads(body)["error"]["code"] == "too_many_connections"
            assert [ask(client) for client in served] == [200] * LIMIT
        served[0].close()
        until(lambda: can_connect(address))


def can_connect(address: tuple[str, int]) -> bool:
    with connect(address) as client:
        return ask(client) == 200


def test_one_too_many_that_says_nothing_is_told_so_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_REFUSE_WITHIN_S", 0.1)
    app = make_app(fake_backend())
    with serving(app, 1, turned_away=[503]) as address, connect(address) as served, connect(address) as refused:
        assert read_all(refused).startswith(b"HTTP/1.1 503 ")
        assert ask(served) == 200


def test_a_flood_beyond_the_refusals_is_cut_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_MAX_REFUSALS", 2)
    monkeypatch.setattr(connections, "_REFUSE_WITHIN_S", PATIENCE_S)
    with serving(make_app(fake_backend()), limit=1) as address, connect(address) as served, contextlib.ExitStack() as stack:
        assert ask(served) == 200
        waiting = [stack.enter_context(connect(address)) for _ in range(2)]
        with connect(address) as cut, contextlib.suppress(ConnectionResetError):
            assert read_all(cut) == b""
        for client in waiting:
            assert ask(client) == 503
            client.close()
        until(lambda: connections._Refusal.num_open == 0)
        assert ask(served) == 200


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    "start",
    [
        b"",
        b"GET / HTTP/1.1\r\nhost:",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{",
        GET + b"POST /v1/comp",
    ],
    ids=["nothing", "headers", "body", "second request"],
)
def test_a_request_that_never_ends_is_cut(start: bytes) -> None:
    turned_away = [] if b"content-length" in start else [408]  # a slow body is its endpoint's to count
    with serving(make_app(fake_backend()), turned_away=turned_away) as address, connect(address) as slow:
        slow.sendall(start)
        with contextlib.suppress(ConnectionResetError):
            answered = read_all(slow)  # returns because the server closes
            assert answered.startswith(b"HTTP/1.1 200") is start.startswith(GET)
        with connect(address) as client:
            assert ask(client) == 200


@pytest.mark.usefixtures("impatient")
def test_a_long_answer_is_not_slow() -> None:
    """Nor is the part of a next request that came meanwhile."""
    num_tokens = 40
    with serving(make_app(fake_backend(tick_s=0.02))) as address, connect(address) as client:
        client.sendall(stream_of(num_tokens) + b"GET /ver")
        received = read_until(client, b"data: [DONE]")
        assert received.count(b'"text"') >= num_tokens


@pytest.mark.usefixtures("impatient")
def test_an_idle_connection_is_kept() -> None:
    with serving(make_app(fake_backend())) as address, connect(address) as client:
        assert ask(client) == 200
        client.settimeout(0.6)
        with pytest.raises(TimeoutError):
            client.recv(1)
        client.settimeout(PATIENCE_S)
        assert ask(client) == 200


def test_endless_headers_are_refused() -> None:
    with serving(make_app(fake_backend()), turned_away=[431]) as address, connect(address) as client:
        client.sendall(b"GET / HTTP/1.1\r\n")
        received = b""
        with contextlib.suppress(ConnectionError):
            for number in range(200):
                client.sendall(b"x-%d: %s\r\n" % (number, b"a" * 1000))
            received = read_all(client)
        assert received in (b"", connections._plain(431, "Request Header Fields Too Large"))
        with connect(address) as other:
            assert ask(other) == 200
            assert ask(other, b"GET /version HTTP/1.1\r\nx: " + b"a" * 30_000 + b"\r\n\r\n") == 200
