"""One HTTP request, as the handlers see it: its body, one answer or one stream, and whether its client is still there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

import msgspec

from kvrelay.errors import InvalidRequestError, TooLargeError
from kvrelay.frontend.http.errors import JSON_TYPE, ClientGoneError
from kvrelay.ids import new_answer_id

Scope = MutableMapping[str, Any]
AsgiMessage = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[AsgiMessage]]
Send = Callable[[AsgiMessage], Awaitable[None]]
Header = tuple[bytes, bytes]

_EVENT_STREAM: list[Header] = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_TRACE_HEADERS = (b"traceparent", b"tracestate")
_MAX_HEADER_ID = 256


class Call:
    """Handlers read the body first, then either `answer` once, or `start_stream`, `write` often and `end_stream` once."""

    __slots__ = ("_headers", "_receive", "_send", "arrived", "id", "request_id", "scope", "started", "status")

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self._receive = receive
        self._send = send
        self._headers: list[Header] = scope["headers"]
        self.arrived = time.perf_counter()
        self.status = 0  # of the answer, once it began
        self.started = False
        self.id = ""  # of the answer, such as chatcmpl-...
        self.request_id = ""  # what the client calls the request

    def name(self, prefix: str, chosen: str | None) -> None:
        """Gives the answer its id, and finds the client's name of the request: from the body, a header, or that id."""
        self.id = new_answer_id(prefix)
        named = chosen or (self.header(b"x-request-id") or b"").decode("latin-1")
        usable = 0 < len(named) <= _MAX_HEADER_ID and named.isascii() and named.isprintable()
        self.request_id = named if usable else self.id

    def header(self, name: bytes) -> bytes | None:
        for key, value in self._headers:
            if key == name:
                return value
        return None

    def session(self) -> str:
        """What the client calls the conversation that the request belongs to; empty if it does not say."""
        named = (self.header(b"x-session-id") or b"").decode("latin-1")
        if len(named) > _MAX_HEADER_ID or not (named.isascii() and (named.isprintable() or not named)):
            raise InvalidRequestError(
                f"x-session-id is at most {_MAX_HEADER_ID} printable ASCII characters", param="x-session-id"
            )
        return named

    def trace(self) -> dict[str, str]:
        return {key.decode(): value.decode("latin-1") for key, value in self._headers if key in _TRACE_HEADERS}

    async def body(self, limit: int) -> bytes:
        """All of it. Stops reading, and raises TooLargeError, as soon as it is over `limit` bytes."""
        declared = self.header(b"content-length")
        if declared is not None and declared.isdigit() and int(declared) > limit:
            raise _too_large(limit)
        chunks: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            chunk = message.get("body", b"")
            size += len(chunk)
            if size > limit:
                raise _too_large(limit)
            if not message.get("more_body", False):
                if not chunks:
                    return _not_empty(chunk)
                chunks.append(chunk)
                return _not_empty(b"".join(chunks))
            chunks.append(chunk)

    async def disconnected(self) -> None:
        """Returns when the client has gone (or the answer is complete). The body must have been read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def answer(self, status: int, body: bytes, headers: Iterable[Header] = (JSON_TYPE,)) -> None:
        self.status, self.started = status, True
        fields = [*headers, (b"content-length", str(len(body)).encode())]
        if self.request_id:
            fields.append((b"x-request-id", self.request_id.encode()))
        await self._send({"type": "http.response.start", "status": status, "headers": fields})
        await self._send({"type": "http.response.body", "body": body})

    async def answer_json(self, value: msgspec.Struct | dict[str, Any], headers: Iterable[Header] = ()) -> None:
        await self.answer(200, msgspec.json.encode(value), [JSON_TYPE, *headers])

    async def start_stream(self, headers: Iterable[Header] = ()) -> None:
        self.status, self.started = 200, True
        fields = [*_EVENT_STREAM, (b"x-request-id", self.request_id.encode()), *headers]
        await self._send({"type": "http.response.start", "status": 200, "headers": fields})

    async def write(self, events: bytes) -> None:
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def end_stream(self, events: bytes = b"") -> None:
        await self._send({"type": "http.response.body", "body": events, "more_body": False})


def _too_large(limit: int) -> TooLargeError:
    return TooLargeError(f"the body is larger than {limit} bytes", code="body_too_large")


def _not_empty(body: bytes) -> bytes:
    if not body:
        raise InvalidRequestError("the body is empty; it must be a JSON object", code="invalid_json")
    return body


class DisconnectWatch:
    """Calls `gone` once when the client leaves. One task per request: it sleeps until then, whatever the stream does."""

    __slots__ = ("_task",)

    def __init__(self, call: Call, gone: Callable[[], None]) -> None:
        self._task = asyncio.get_running_loop().create_task(self._watch(call, gone))

    @staticmethod
    async def _watch(call: Call, gone: Callable[[], None]) -> None:
        await call.disconnected()
        gone()

    def stop(self) -> None:
        self._task.cancel()
