"""All that connects a router with the world: lines to workers, subscriptions to their events, and the clock.

`Outside()` is the real world: sockets, and the monotonic clock. A simulation (`kvrelay/simulate/`) brings its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvrelay.errors import ProtocolError
from kvrelay.events.subscriber import EventOwner, EventSubscriber
from kvrelay.ids import RouterId, WorkerId
from kvrelay.planes.connection import Connection
from kvrelay.wire.codec import Decoder, encode
from kvrelay.wire.registry import WorkerRecord
from kvrelay.wire.serving import Ping, ToRouter, ToWorker

_decoder: Decoder[ToRouter] = Decoder(ToRouter)
_PING = encode(Ping())


class LineOwner(Protocol):
    """What a line tells of its worker. None of these may raise."""

    def line_up(self) -> None:
        """Connected (again): what the worker knew of this router before is lost."""

    def line_down(self) -> None: ...

    def heard(self, message: ToRouter) -> None: ...

    def malformed(self, reason: str) -> None: ...


class Line(Protocol):
    """The way to one worker and back, from when it is opened until `close`."""

    def send(self, message: ToWorker) -> bool:
        """False: the line is down, or the worker does not keep up."""

    def drain(self) -> None:
        """Hands on what has arrived."""

    def close(self) -> None:
        """The owner is told nothing afterwards."""


class OpenLine(Protocol):
    def __call__(self, record: WorkerRecord, owner: LineOwner, *, router_id: RouterId, silence_s: float) -> Line:
        """Raises ProtocolError for an address that is none."""


class Subscription(Protocol):
    def close(self) -> None:
        """Silent: the owner is not told."""


class Subscribe(Protocol):
    def __call__(self, worker_id: WorkerId, events_address: str, replay_address: str, owner: EventOwner) -> Subscription:
        """Raises ProtocolError for an address that is none."""


class SocketLine:
    """A connection and its codec."""

    def __init__(self, record: WorkerRecord, owner: LineOwner, *, router_id: RouterId, silence_s: float) -> None:
        self._owner = owner
        self._connection = Connection(
            record.serving_address,
            identity=router_id.encode(),
            silence_s=silence_s,
            on_up=owner.line_up,
            on_down=owner.line_down,
            on_message=self._on_message,
        )

    def send(self, message: ToWorker) -> bool:
        return self._connection.send(_PING if isinstance(message, Ping) else encode(message))

    def drain(self) -> None:
        self._connection.drain()

    def close(self) -> None:
        self._connection.close()

    def _on_message(self, frame: bytes) -> None:
        try:
            message = _decoder.decode(frame)
        except ProtocolError as error:
            self._owner.malformed(str(error))
            return
        self._owner.heard(message)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outside:
    open_line: OpenLine = SocketLine
    subscribe: Subscribe = EventSubscriber
    clock: Callable[[], float] = time.monotonic
