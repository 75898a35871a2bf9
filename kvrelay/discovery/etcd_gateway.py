"""etcd's JSON gateway (POST /v3/...): its requests and answers as structs, and all that is odd about it in one place.

- Keys and values are base64, which is how msgspec writes bytes; 64-bit numbers are strings, so answers are read leniently; a
  field that has its default value is absent, so every field of an answer has a default here too.
- A keepalive of a lease that has ended is answered 200, without a TTL. A put under such a lease is answered 404.
- A watch is one answer without end, a JSON object a line. A line can be megabytes long: all keys of a lease end in one. An etcd
  that ends says so in a last line without a newline; one that is stopped says nothing, and its watches stay silent.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from typing import TypeVar

import httpx
import msgspec

from kvrelay.errors import ConfigError

_SCHEME = "etcd://"
_LABEL = r"[A-Za-z0-9_-]{1,63}"
_ENDPOINT = re.compile(rf"(?:\[[0-9A-Fa-f:.]+\]|{_LABEL}(?:\.{_LABEL})*):[0-9]{{1,5}}")
_REFUSALS = frozenset({400, 401, 403})
_MAX_REASON = 200  # characters of an answer that is shown
_SHORTEST_TRY_S = 0.05

A = TypeVar("A")


class NoAnswerError(Exception):
    """No endpoint answered, or not what was asked: another try, or another endpoint, may do better."""


class RefusedError(Exception):
    """etcd understood and will not do it, however often it is asked: wrong request, or no permission."""


class LeaseEndedError(NoAnswerError):
    """A put under a lease that etcd does not know (any more)."""


class _Part(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Of a request or an answer. Unknown fields of an answer are skipped."""


# Requests


class GrantLease(_Part, frozen=True, kw_only=True):
    ttl_s: int = msgspec.field(name="TTL")


class LeaseRequest(_Part, frozen=True, kw_only=True):
    """Keepalive and revoke."""

    lease: int = msgspec.field(name="ID")


class Range(_Part, frozen=True, kw_only=True):
    """Half-open: from `key` up to, not including, `range_end`."""

    key: bytes
    range_end: bytes
    limit: int = 0
    sort_order: str = ""
    sort_target: str = ""
    keys_only: bool = False


class Put(_Part, frozen=True, kw_only=True):
    key: bytes
    value: bytes
    lease: int


class Compare(_Part, frozen=True, kw_only=True):
    key: bytes
    target: str
    result: str
    value: bytes | None = None
    lease: int = 0


class Operation(_Part, frozen=True, kw_only=True):
    request_put: Put


class Transaction(_Part, frozen=True, kw_only=True):
    """What is in `failure` happens unless every comparison holds."""

    compare: list[Compare]
    failure: list[Operation]


class WatchRange(_Part, frozen=True, kw_only=True):
    key: bytes
    range_end: bytes
    start_revision: int


class Watch(_Part, frozen=True, kw_only=True):
    create_request: WatchRange


# Answers


class Header(_Part, frozen=True, kw_only=True):
    revision: int = 0


class KeyValue(_Part, frozen=True, kw_only=True):
    key: bytes = b""
    value: bytes = b""
    mod_revision: int = 0


class Done(_Part, frozen=True, kw_only=True):
    """Of a request whose answer says no more than that."""


class LeaseGranted(_Part, frozen=True, kw_only=True):
    lease: int = msgspec.field(name="ID", default=0)
    ttl_s: int = msgspec.field(name="TTL", default=0)


class LeaseKept(_Part, frozen=True, kw_only=True):
    """`result.ttl_s` is 0 if the lease has ended."""

    result: LeaseGranted = LeaseGranted()


class RangeAnswer(_Part, frozen=True, kw_only=True):
    """`count` is of the whole range, however few keys were asked for."""

    header: Header = Header()
    kvs: list[KeyValue] = []
    count: int = 0


class Event(_Part, frozen=True, kw_only=True):
    type: str = "PUT"
    kv: KeyValue = KeyValue()


class WatchNews(_Part, frozen=True, kw_only=True):
    canceled: bool = False
    cancel_reason: str = ""
    compact_revision: int = 0  # what was asked for is older than what etcd still has
    events: list[Event] = []


class WatchError(_Part, frozen=True, kw_only=True):
    message: str = ""


class WatchLine(_Part, frozen=True, kw_only=True):
    result: WatchNews = WatchNews()
    error: WatchError | None = None


class _Error(_Part, frozen=True, kw_only=True):
    """Older versions of etcd say `error`, newer ones only `message`."""

    code: int
    message: str = ""
    error: str = ""


# Where etcd is


class Endpoints:
    """The members of one etcd, from etcd://HOST:PORT[,HOST:PORT...]. One is used until it fails, then the next."""

    def __init__(self, address: str) -> None:
        listed = address.removeprefix(_SCHEME).split(",")
        if not address.startswith(_SCHEME) or not all(_is_endpoint(endpoint) for endpoint in listed):
            raise ConfigError(f"--registry {address[:200]!r} is not etcd://HOST:PORT[,HOST:PORT...]")
        if len(set(listed)) != len(listed):
            raise ConfigError(f"--registry {address[:200]!r} lists the same endpoint twice")
        self._urls = [f"http://{endpoint}" for endpoint in listed]

    @property
    def current(self) -> str:
        return self._urls[0]

    def __len__(self) -> int:
        return len(self._urls)

    def next(self) -> None:
        self._urls.append(self._urls.pop(0))


def _is_endpoint(text: str) -> bool:
    if _ENDPOINT.fullmatch(text) is None or not 1 <= int(text.rpartition(":")[2]) <= 65535:
        return False
    try:
        httpx.URL(f"http://{text}")  # knows what is no IPv6 address
    except httpx.InvalidURL:
        return False
    return True


# Asking


def read_answer(response: httpx.Response, kind: type[A]) -> A:
    """Raises RefusedError, LeaseEndedError or NoAnswerError."""
    if response.status_code != 200:
        raise _error_of(response)
    try:
        return msgspec.json.decode(response.content, type=kind, strict=False)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise NoAnswerError(f"{response.url} does not answer as etcd does: {error}") from error


def _error_of(response: httpx.Response) -> NoAnswerError | RefusedError:
    try:
        told = msgspec.json.decode(response.content, type=_Error)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return NoAnswerError(f"{response.url} answers with status {response.status_code}")
    reason = (told.message or told.error)[:_MAX_REASON]
    if response.status_code == 404:
        return LeaseEndedError(reason)
    return RefusedError(reason) if response.status_code in _REFUSALS else NoAnswerError(reason)


class Gateway:
    """Asks from a thread. No call takes longer than about `timeout_s`, however many endpoints there are. `on_retry` hears of
    every endpoint that is asked because another did not answer."""

    def __init__(self, endpoints: Endpoints, *, timeout_s: float, on_retry: Callable[[], None] = lambda: None) -> None:
        self._endpoints = endpoints
        self._on_retry = on_retry
        self._timeout_s = timeout_s
        # No proxy of the environment: etcd is reached directly.
        self._client = httpx.Client(trust_env=False, headers={"accept-encoding": "identity"})

    def ask(self, path: str, request: msgspec.Struct, kind: type[A]) -> A:
        """Raises RefusedError, LeaseEndedError, and NoAnswerError when no endpoint did better."""
        deadline = time.monotonic() + self._timeout_s
        body = msgspec.json.encode(request)
        failure = NoAnswerError("there was no time to ask")
        for attempt in range(len(self._endpoints)):
            left_s = deadline - time.monotonic()
            if left_s < _SHORTEST_TRY_S:
                break
            if attempt > 0:
                self._on_retry()
            try:
                response = self._client.post(self._endpoints.current + path, content=body, timeout=left_s)
                return read_answer(response, kind)
            except LeaseEndedError:
                raise
            except NoAnswerError as error:
                failure = error
            except httpx.HTTPError as error:
                failure = NoAnswerError(f"{self._endpoints.current}: {error or type(error).__name__}")
            self._endpoints.next()
        raise failure

    def keep_alive(self, lease: int) -> bool:
        """False if it has ended. Raises as `ask` does."""
        return self.ask("/v3/lease/keepalive", LeaseRequest(lease=lease), LeaseKept).result.ttl_s > 0

    def close(self) -> None:
        self._client.close()


@dataclass(frozen=True, slots=True)
class AsyncGateway:
    """One endpoint, asked from an event loop. Its client belongs to the caller."""

    client: httpx.AsyncClient
    url: str
    timeout_s: float

    async def range(self, request: Range) -> RangeAnswer:
        """Raises NoAnswerError and RefusedError. etcd answers only while it is in touch with the majority of its members."""
        try:
            async with asyncio.timeout(self.timeout_s):
                response = await self.client.post(f"{self.url}/v3/kv/range", content=msgspec.json.encode(request))
        except (httpx.HTTPError, TimeoutError) as error:
            raise self._no_answer(error) from error
        return read_answer(response, RangeAnswer)

    async def watch(self, request: Watch) -> AsyncGenerator[WatchNews, None]:
        """Ends with NoAnswerError or RefusedError only. Silence is no error here: the caller finds out what it means."""
        try:
            body = msgspec.json.encode(request)
            async with self.client.stream("POST", f"{self.url}/v3/watch", content=body) as response:
                if response.status_code != 200:
                    await response.aread()
                    raise _error_of(response)
                async for line in _lines(response.aiter_raw()):
                    yield _read_line(line)
        except httpx.HTTPError as error:
            raise self._no_answer(error) from error
        raise NoAnswerError(f"{self.url} ended the watch")

    def _no_answer(self, error: Exception) -> NoAnswerError:
        return NoAnswerError(f"{self.url}: {str(error) or type(error).__name__}")


def new_async_client(timeout_s: float) -> httpx.AsyncClient:
    """No time limit on reading: a watch is silent for as long as nothing changes."""
    timeout = httpx.Timeout(timeout_s, read=None)
    return httpx.AsyncClient(trust_env=False, headers={"accept-encoding": "identity"}, timeout=timeout)


async def _lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Also the last one, which may lack its newline. What has arrived is searched once, however long the line."""
    parts: list[bytes] = []
    async for chunk in chunks:
        *ended, rest = chunk.split(b"\n")
        for piece in ended:
            yield b"".join((*parts, piece))
            parts = []
        parts.append(rest)
    yield b"".join(parts)


def _read_line(line: bytes) -> WatchNews:
    if not line.strip():
        return WatchNews()
    try:
        read = msgspec.json.decode(line, type=WatchLine, strict=False)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise NoAnswerError(f"a line of the watch is not etcd's: {error}") from error
    if read.error is not None:
        raise NoAnswerError(f"the watch ended: {read.error.message[:_MAX_REASON]}")
    return read.result
