"""Clients that send their next request before the answer to the last one, and then go or speak nonsense."""

from __future__ import annotations

import json

import pytest
from patience import PATIENCE_S

from kvrelay.log import configure
from tests.frontend.serving import fake_backend, make_app, wait_until_idle
from tests.frontend.test_connections import connect, read_until, serving


def long_request() -> bytes:
    body = json.dumps({"prompt": "hello", "max_tokens": 400, "ignore_eos": True, "stream": True}).encode()
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body


def test_a_client_that_leaves_ends_all_that_it_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    configure("info", "router")
    backend = fake_backend("x " * 200, tick_s=0.01)
    with serving(make_app(backend)) as address:
        client = connect(address)
        client.sendall(long_request() * 3)
        read_until(client, b"data: ")
        client.close()
        wait_until_idle(backend)
        assert backend.num_aborted == 1  # the others had not begun, and never do
        assert len(backend.submitted) == 1
    assert "Traceback" not in capsys.readouterr().err


def test_nonsense_after_a_request_ends_it_without_an_error_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    configure("info", "router")
    backend = fake_backend("x " * 200, tick_s=0.01)
    with serving(make_app(backend)) as address:
        client = connect(address)
        client.sendall(long_request())
        read_until(client, b"data: ")
        client.sendall(long_request() + b"\0 nonsense\r\n\r\n")
        client.settimeout(PATIENCE_S)
        try:
            while client.recv(65536):
                pass
        except (TimeoutError, ConnectionError):
            pytest.fail("the connection was not closed in order")
        wait_until_idle(backend)
    assert "Traceback" not in capsys.readouterr().err
