"""The HTTP client of every command that asks a running server.

What a user can cause, a wrong address or a wrong key, is a ConfigError of one line.
"""

from __future__ import annotations

import argparse
from typing import TypeVar

import httpx
import msgspec

from kvrelay.errors import ConfigError

A = TypeVar("A", bound=msgspec.Struct)

_TIMEOUT_S = 30.0


def add_url(options: argparse._ActionsContainer) -> None:
    options.add_argument("--url", default="http://127.0.0.1:8000", metavar="URL", help="server (default http://127.0.0.1:8000)")


def add_api_key(options: argparse._ActionsContainer) -> None:
    options.add_argument("--api-key", default="", metavar="KEY", help="key the server wants")


def connect(url: str, api_key: str = "", *, read_timeout_s: float | None = _TIMEOUT_S) -> httpx.Client:
    """Nothing is sent yet. `read_timeout_s` of None waits for an answer however long it takes."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = httpx.Timeout(_TIMEOUT_S, read=read_timeout_s)
    return httpx.Client(base_url=url.rstrip("/"), headers=headers, timeout=timeout)


def ask(
    client: httpx.Client, method: str, path: str, kind: type[A], body: dict[str, str] | None = None, *, server: str = "kvrelay"
) -> A:
    """The JSON of an answer. `server` is the kind of server that gives such an answer."""
    try:
        response = client.request(method, path, json=body)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(f"no server answers at {client.base_url}: {error} (start one with kvrelay serve)") from error
    if response.status_code != 200:
        raise ConfigError(error_text(response.status_code, response.content))
    try:
        return msgspec.json.decode(response.content, type=kind)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{client.base_url} is no {server} server") from error


def error_text(status: int, body: bytes) -> str:
    """The message in an OpenAI error object."""
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return f"the server answered with status {status}"
