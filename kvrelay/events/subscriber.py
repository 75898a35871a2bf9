"""A subscriber's side of the event plane (`wire/events.py`): follows one worker's cache, and repairs what it missed.

    Events with the next number        applied
    a number that was applied before   ignored
    a later one, or a Beat naming one  a gap: Replay(first missing), again and again with growing pauses, until every number
                                       has come; later batches wait meanwhile
    Snapshot                           replaces everything, and the numbers go on after it

A new subscriber has a gap too: it asks for batch 1. While there is a gap, what is known may be wrong in single blocks; if the
worker does not close it within `_GIVE_UP_S`, all of it is dropped rather than believed, and asking goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Protocol, assert_never

import zmq

from kvrelay.errors import ProtocolError
from kvrelay.ids import WorkerId
from kvrelay.log import Log
from kvrelay.planes.curve import Options, Socket, connecting
from kvrelay.planes.loop_socket import LoopSocket
from kvrelay.wire import check_version
from kvrelay.wire.codec import Decoder, encode
from kvrelay.wire.events import (
    EVENTS_VERSION,
    MAX_EVENTS_BYTES,
    Beat,
    CacheEvent,
    Cleared,
    Events,
    Replay,
    Snapshot,
    ToSubscriber,
    read_events,
)

log = Log("events")

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
_GIVE_UP_S = 10.0
_MAX_WAITING = 4096  # batches after a gap; those beyond it have to come again too
_OPTIONS: Options = {
    zmq.MAXMSGSIZE: MAX_EVENTS_BYTES,
    zmq.RECONNECT_IVL: 100,
    zmq.RECONNECT_IVL_MAX: 1000,
    zmq.HEARTBEAT_IVL: 5000,
    zmq.HEARTBEAT_TIMEOUT: 10_000,  # a connection on which even ZMQ's own heartbeat stopped is made anew
}

_decoder: Decoder[ToSubscriber] = Decoder(ToSubscriber)


class EventOwner(Protocol):
    """Keeps what a subscriber learns. Called on the event loop's thread; nothing here may raise."""

    def happened(self, worker_id: WorkerId, event: CacheEvent) -> None: ...

    def replaced(self, worker_id: WorkerId, hashes: Iterable[bytes]) -> None:
        """These are in the cache, and nothing else."""

    def gap(self, worker_id: WorkerId) -> None:
        """Batches were missed."""

    def repaired(self, worker_id: WorkerId, *, by_snapshot: bool) -> None:
        """After `gap`: nothing is missing any more."""

    def malformed(self, worker_id: WorkerId, reason: str) -> None: ...


class EventSubscriber:
    """Of one worker, from the moment it is made (on a running loop) until `close`. Raises ProtocolError for an address that is
    none."""

    def __init__(self, worker_id: WorkerId, events_address: str, replay_address: str, owner: EventOwner) -> None:
        self._worker_id = worker_id
        self._owner = owner
        self.in_step = False  # nothing is known to be missing
        self.sequence = 0  # every batch up to this one is applied
        self._latest = 0  # the last that is known to exist
        self.batch_time: float | None = None  # while a batch is applied: when it happened, if its worker says so
        self._waiting: dict[int, tuple[float | None, list[CacheEvent]]] = {}
        self._is_new = True
        self._by_snapshot = False
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._pause_s = _FIRST_PAUSE_S
        self._behind_since = self._loop.time()
        published = _connect(zmq.SUB, events_address)
        try:
            answers = _connect(zmq.DEALER, replay_address)
        except ProtocolError:
            published.close()
            raise
        self._published = LoopSocket(published, self._on_frames)
        self._answers = LoopSocket(answers, self._on_frames)
        self._ask()

    def close(self) -> None:
        """Silent: the owner is not told."""
        self._stop_asking()
        self._published.close()
        self._answers.close()

    # In

    def _on_frames(self, frames: list[bytes]) -> None:
        for frame in frames:
            try:
                self._handle(frame)
            except ProtocolError as error:
                self._owner.malformed(self._worker_id, str(error))

    def _handle(self, frame: bytes) -> None:
        message = _decoder.decode(frame)
        check_version("the worker", message.version, EVENTS_VERSION, "event")
        if message.worker_id != self._worker_id:
            raise ProtocolError(f"events of {message.worker_id[:80]!r} where {self._worker_id} was")
        if message.sequence < 0:
            raise ProtocolError(f"a batch with the number {message.sequence}")
        match message:
            case Events():
                self._on_events(message)
            case Snapshot():
                self._on_snapshot(message)
            case Beat():
                pass
            case _:
                assert_never(message)
        self._latest = max(self._latest, message.sequence)
        if self.sequence < self._latest:
            self._fell_behind()
        elif not isinstance(message, Events):  # a batch does not say that it is the last, and a new subscriber has to know
            self._caught_up()

    def _on_events(self, message: Events) -> None:
        if message.sequence <= self.sequence:
            return
        events = read_events(message)
        if message.sequence == self.sequence + 1:
            self._apply(message.time, events)
            self._apply_waiting()
        elif len(self._waiting) < _MAX_WAITING:
            self._waiting[message.sequence] = (message.time, events)

    def _on_snapshot(self, message: Snapshot) -> None:
        """One that is older than what is known has been overtaken by batches."""
        if message.sequence < self.sequence or self.in_step:
            return
        self._owner.replaced(self._worker_id, message.hashes)
        self.sequence = message.sequence
        self._by_snapshot = True
        self._waiting = {number: batch for number, batch in self._waiting.items() if number > self.sequence}
        self._apply_waiting()

    def _apply_waiting(self) -> None:
        while self._waiting and (batch := self._waiting.pop(self.sequence + 1, None)) is not None:
            self._apply(*batch)

    def _apply(self, batch_time: float | None, events: list[CacheEvent]) -> None:
        self.sequence += 1
        self.batch_time = batch_time
        for event in events:
            self._owner.happened(self._worker_id, event)
        self.batch_time = None

    # Repair

    def _fell_behind(self) -> None:
        if self.in_step:
            self.in_step = False
            self._behind_since = self._loop.time()
            self._owner.gap(self._worker_id)
            self._ask()

    def _caught_up(self) -> None:
        if self.in_step:
            return
        self.in_step = True
        self._stop_asking()
        if not self._is_new:
            self._owner.repaired(self._worker_id, by_snapshot=self._by_snapshot)
        self._is_new = self._by_snapshot = False

    def _ask(self) -> None:
        self._answers.send((encode(Replay(worker_id=self._worker_id, first=self.sequence + 1)),))
        self._timer = self._loop.call_later(self._pause_s, self._ask_again)
        self._pause_s = min(_LONGEST_PAUSE_S, 2 * self._pause_s)

    def _ask_again(self) -> None:
        if self.sequence and self._loop.time() - self._behind_since > _GIVE_UP_S:
            log.warning("a worker does not repeat the events that were lost; what it holds is unknown", worker=self._worker_id)
            self.sequence = self._latest = 0
            self._waiting.clear()
            self._owner.happened(self._worker_id, Cleared())
        self._ask()

    def _stop_asking(self) -> None:
        self._pause_s = _FIRST_PAUSE_S
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _connect(kind: int, address: str) -> Socket:
    socket = connecting(kind, _OPTIONS)
    if kind == zmq.SUB:
        socket.setsockopt(zmq.SUBSCRIBE, b"")
    else:
        socket.setsockopt(zmq.IMMEDIATE, 1)  # what no worker is there to answer is asked again, not piled up
    try:
        socket.connect(address)
    except zmq.ZMQError as error:
        socket.close()
        raise ProtocolError(f"{address[:80]!r} is no address to connect to: {error.strerror or error}") from error
    return socket
