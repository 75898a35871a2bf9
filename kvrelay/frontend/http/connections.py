"""HTTP connections: how many may be open, and how long a client may take to send a request.

    accepted -> within the limit     served, until its client is too slow or idle for too long
             -> over the limit       503 with Retry-After, then closed; connections that are being served go on

uvicorn's own limit also hits connections that are being served already, and uvicorn has no time limit for a request that never
ends: a client that opens connections and sends nothing would keep all others out for ever.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Iterable
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from kvrelay.errors import UnavailableError
from kvrelay.frontend.http.errors import error_body
from kvrelay.log import Log
from kvrelay.metrics import Metrics

log = Log("frontend")

HEADERS_WITHIN_S = 30.0
BODY_WITHIN_S = 300.0
MAX_HEADER_BYTES = 64 * 1024
_TOO_SLOW = 408  # for the metrics: the connection is closed without an answer
_MAX_REFUSALS = 256  # connections that are being refused at a time; any more are cut
_REFUSE_WITHIN_S = 1.0  # time for the request to come: many clients expect no answer before they have asked
_LINGER_S = 1.0  # closing while the client still sends would destroy the answer on its way


class _Part(enum.Enum):
    """The part of a request that the client has still to send."""

    HEADERS = enum.auto()
    BODY = enum.auto()
    NOTHING = enum.auto()


class LimitedProtocol(HttpToolsProtocol):
    """One connection. Subclasses set how many may be open, and what counts those that are turned away (`limited`)."""

    max_connections: int
    metrics: Metrics

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._part = _Part.HEADERS
        self._since = self.loop.time()
        self._header_bytes = 0
        self._unanswered: list[RequestResponseCycle] = []  # the first of them is being answered, the others wait

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) < self.max_connections:
            super().connection_made(transport)
        else:
            self.metrics.turned_away(503)
            transport.set_protocol(_Refusal(transport, self.loop))

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._part is _Part.HEADERS:
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
                self.metrics.turned_away(431)
                self.transport.write(_plain(431, "Request Header Fields Too Large"))
                self.transport.close()
                self._give_up()

    def on_message_begin(self) -> None:
        self._part, self._since, self._header_bytes = _Part.HEADERS, self.loop.time(), 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._part = _Part.BODY
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not None and self.cycle is not before:
            self._unanswered.append(self.cycle)

    def on_message_complete(self) -> None:
        self._part = _Part.NOTHING
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._count(400)
        super().send_400_response(msg)
        self._give_up()

    def connection_lost(self, exc: Exception | None) -> None:
        self._give_up()
        super().connection_lost(exc)

    def _give_up(self) -> None:
        """No client waits for answers any more. Of several requests on one connection, uvicorn tells only the last."""
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()

    def on_response_complete(self) -> None:
        del self._unanswered[:1]
        self._since = self.loop.time()
        super().on_response_complete()

    def close_slow(self) -> None:
        self._count(_TOO_SLOW)
        self.transport.close()

    def _count(self, status: int) -> None:
        """A request whose headers have come is its endpoint's to count."""
        if self._part is not _Part.BODY:
            self.metrics.turned_away(status)

    def is_slow(self, now: float) -> bool:
        """Whether all this connection does is wait for a client that takes too long to send its request."""
        if self.transport.is_closing():
            return False
        answering = self.cycle is not None and not self.cycle.response_complete
        match self._part:
            case _Part.NOTHING:
                return False
            case _Part.HEADERS:  # while the request before is answered, the next one may take its time
                return not answering and now - self._since > HEADERS_WITHIN_S
            case _Part.BODY:  # a request that came early is not read on before its turn
                return not self.pipeline and now - self._since > BODY_WITHIN_S


class _Refusal(asyncio.Protocol):
    """Answers one client that too many connections are open, and closes."""

    num_open = 0

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._answered = False
        _Refusal.num_open += 1
        self._timer = loop.call_later(_REFUSE_WITHIN_S, self._answer)
        if _Refusal.num_open > _MAX_REFUSALS:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        self._answer()

    def connection_lost(self, exc: Exception | None) -> None:
        _Refusal.num_open -= 1
        self._timer.cancel()

    def _answer(self) -> None:
        if self._answered or self._transport.is_closing():
            return
        self._answered = True
        self._timer.cancel()
        self._transport.write(_TOO_MANY)
        self._transport.write_eof()
        self._timer = self._loop.call_later(_LINGER_S, self._transport.close)


def limited(max_connections: int, metrics: Metrics) -> type[LimitedProtocol]:
    """The protocol that uvicorn makes for each connection."""

    class Limited(LimitedProtocol):
        pass

    Limited.max_connections, Limited.metrics = max_connections, metrics
    return Limited


def close_slow(connections: Iterable[object], now: float) -> int:
    """Closes connections whose clients are too slow; called periodically. Returns how many there were."""
    slow = [each for each in connections if isinstance(each, LimitedProtocol) and each.is_slow(now)]
    for connection in slow:
        connection.close_slow()
    if slow:
        log.warning("closed connections whose requests did not arrive in time", connections=len(slow))
    return len(slow)


def _plain(status: int, reason: str) -> bytes:
    return f"HTTP/1.1 {status} {reason}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".encode()


def _too_many() -> bytes:
    body = error_body(UnavailableError("too many connections are open; try again soon", code="too_many_connections"))
    head = "HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body


_TOO_MANY = _too_many()
