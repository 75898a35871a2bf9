"""One HTTP request as handlers see it: headers, body, one answer or one stream, and whether its client is still there."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any, TypeVar

import msgspec

from kvrelay.errors import InvalidRequestError, RequestError, TooLargeError
from kvrelay.frontend.http.errors import (
    JSON_TYPE,
    MESSAGES_PATHS,
    ClientGoneError,
    error_body,
    error_event,
    invalid_body,
    message_error_body,
    message_error_event,
)
from kvrelay.ids import new_answer_id

Scope = MutableMapping[str, Any]
AsgiMessage = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[AsgiMessage]]
Send = Callable[[AsgiMessage], Awaitable[None]]
Header = tuple[bytes, bytes]
T = TypeVar("T")

_EVENT_STREAM: list[Header] = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_TRACE_HEADERS = (b"traceparent", b"tracestate")
_MAX_RANK_DIGITS = 9
_MAX_HEADER_ID = 256


class Call:
    """Handlers read the body first, then either `answer` once, or `start_stream`, `write` often and `end_stream` once."""

    __slots__ = (
        "_headers",
        "_receive",
        "_send",
        "arrived",
        "error_body",
        "error_event",
        "id",
        "request_id",
        "scope",
        "started",
        "status",
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self._receive = receive
        self._send = send
        self._headers: list[Header] = scope["headers"]
        self.arrived = time.perf_counter()  # which is the monotonic clock wherever this runs
        self.status = 0  # of the answer, once it began
        self.started = False
        is_message = scope["path"] in MESSAGES_PATHS
        self.error_body: Callable[[RequestError], bytes] = message_error_body if is_message else error_body
        self.error_event: Callable[[RequestError], bytes] = message_error_event if is_message else error_event  # ends a stream
        self.id = ""  # of the answer, such as chatcmpl-...
        self.request_id = ""  # what the client calls the request

    def name(self, prefix: str, chosen: str | None) -> None:
        """Gives the answer its id, and the request its name: from the body (`chosen`), else from a header, else that id."""
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
        """The client's name for the conversation that the request belongs to; empty if there is none."""
        named = (self.header(b"x-session-id") or b"").decode("latin-1")
        if len(named) > _MAX_HEADER_ID or not (named.isascii() and (named.isprintable() or not named)):
            raise InvalidRequestError(
                f"x-session-id must be at most {_MAX_HEADER_ID} printable ASCII characters", param="x-session-id"
            )
        return named

    def trace(self) -> dict[str, str]:
        """As the client sent it."""
        return {key.decode(): value.decode("latin-1") for key, value in self._headers if key in _TRACE_HEADERS}

    def remaining_s(self, field: float | None, server_limit_s: float) -> float | None:
        """Seconds left of what the field `timeout`, else the header, else the server allows; None: there is no limit."""
        limit_s = self._timeout_header() if field is None else field
        limit_s = limit_s or server_limit_s
        return max(0.0, limit_s - (time.perf_counter() - self.arrived)) if limit_s else None

    def _timeout_header(self) -> float | None:
        header = self.header(b"x-request-timeout")
        if header is None:
            return None
        try:
            limit_s = float(header)
        except ValueError:
            limit_s = math.nan
        if not (math.isfinite(limit_s) and limit_s > 0.0):
            raise InvalidRequestError("x-request-timeout must be a number of seconds above 0", param="x-request-timeout")
        return limit_s

    def data_parallel_rank(self, field: int | None) -> int | None:
        """That of the field, else of vLLM's header; None: any will do."""
        header = self.header(b"x-data-parallel-rank")
        if header is None:
            return field
        if not header.isdigit() or len(header) > _MAX_RANK_DIGITS:
            raise InvalidRequestError("x-data-parallel-rank must be a number from 0 on", param="x-data-parallel-rank")
        if field not in (None, int(header)):
            reason = f"x-data-parallel-rank is {int(header)} and data_parallel_rank is {field}"
            raise InvalidRequestError(reason, param="data_parallel_rank")
        return int(header)

    async def read(self, decoder: msgspec.json.Decoder[T], limit: int) -> T:
        """The body as one of our structs, or the 400 that says where it is wrong. The content type is not looked at: OpenAI
        takes JSON under any name."""
        body = await self.body(limit)
        try:
            return decoder.decode(body)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise invalid_body(error) from error

    async def body(self, limit: int) -> bytes:
        """All of it. Stops reading, and raises TooLargeError, as soon as there are more than `limit` bytes."""
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

    async def answer_json(self, value: msgspec.Struct | Mapping[str, object], headers: Iterable[Header] = ()) -> None:
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
    return TooLargeError(f"the body has more than {limit} bytes", code="body_too_large")


def _not_empty(body: bytes) -> bytes:
    if not body:
        raise InvalidRequestError("the body is empty; it must be a JSON object", code="invalid_json")
    return body


class Watch:
    """Calls `act` once if the client leaves before `cancel`. The body must have been read.

    Its task ends with the answer, or with the client. Cancelling the task instead would leave an error with its frames, and a
    circle for the garbage collector, behind every request."""

    __slots__ = ("_act", "_task")

    def __init__(self, call: Call, act: Callable[[], object]) -> None:
        self._act: Callable[[], object] | None = act
        self._task = asyncio.get_running_loop().create_task(self._run(call))

    def cancel(self) -> None:
        self._act = None

    async def _run(self, call: Call) -> None:
        await call.disconnected()
        if self._act is not None:
            self._act()
