"""A worker's side of the event plane (`wire/events.py`): numbers the batches, sends them, keeps what may be asked for again.

    engine's thread    publish(events) -> a short queue -> wake
    this thread        queue -> number, remember, send to all subscribers
                       Replay -> the batches from there on, or a snapshot, if that is much smaller
                       nothing for a while -> Beat

The engine never waits for this thread: while the queue is full (`has_room`) the caller keeps its events. Neither does this
thread wait for a subscriber: one that does not keep up misses batches, notices, and asks. What was sent is kept in a ring; a
copy of the cache's hashes, for snapshots, is kept up to date by applying every batch here too.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from typing import assert_never

import msgspec
import zmq

from kvrelay.errors import ConfigError, ProtocolError
from kvrelay.ids import WorkerId
from kvrelay.log import Log
from kvrelay.planes.curve import Socket, listening
from kvrelay.planes.loop_socket import bound_address
from kvrelay.wire import check_version
from kvrelay.wire.codec import Decoder, encode
from kvrelay.wire.events import (
    EVENTS_VERSION,
    MAX_REPLAY_BYTES,
    Beat,
    CacheEvent,
    Cleared,
    Events,
    Freed,
    FreedForNow,
    Removed,
    Replay,
    Restored,
    Snapshot,
    Stored,
    Swapped,
    ToPublisher,
    pack_events,
)

log = Log("events")

_BYTES_PER_HASH = 18  # in a message
_CHEAP_REPLAY_BYTES = 1 << 20
_ANSWERS_PER_TURN = 64  # then batches have their turn
_UNREAD_ANSWERS = 16  # of one subscriber; more are dropped, and asked for again
_UNREAD_BATCHES = 10_000  # of one subscriber, likewise


class PublisherSettings(msgspec.Struct, frozen=True, kw_only=True):
    beat_s: float = 1.0  # how long an idle worker says nothing
    ring_batches: int = 1024
    ring_bytes: int = 4 << 20
    queue_batches: int = 256  # published and not yet taken


class EventPublisher:
    """Owns both sockets and the thread. Bound when it is made; `start`, then `publish` as often as needed, then `close`."""

    def __init__(
        self,
        worker_id: WorkerId,
        *,
        host: str,
        events_port: int = 0,
        replay_port: int = 0,
        settings: PublisherSettings | None = None,
    ) -> None:
        self._worker_id = worker_id
        self._settings = settings or PublisherSettings()
        self._publishing = _bind(zmq.PUB, host, events_port, "--events-port", _UNREAD_BATCHES)
        self._replaying = _bind(zmq.ROUTER, host, replay_port, "--replay-port", _UNREAD_ANSWERS)
        self.events_address = bound_address(self._publishing)
        self.replay_address = bound_address(self._replaying)
        self._decoder: Decoder[ToPublisher] = Decoder(ToPublisher)
        self._queue: deque[list[CacheEvent]] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._sequence = 0
        self._ring: deque[bytes] = deque()  # the last batches as they were sent, the newest with the number `_sequence`
        self._ring_bytes = 0
        self._cached: dict[bytes, None] = {}  # what the cache holds after batch `_sequence`
        self._beat_at = 0.0
        self._stopping = False
        self.num_malformed = 0
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def has_room(self) -> bool:
        return len(self._queue) < self._settings.queue_batches

    def publish(self, events: list[CacheEvent]) -> None:
        """One batch. From one thread, without waiting."""
        self._queue.append(events)
        os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """What was published before still goes out."""
        self._stopping = True
        os.eventfd_write(self._wake_fd, 1)
        if self._thread.ident is not None:
            self._thread.join()
        self._publishing.close(linger=200)
        self._replaying.close(linger=0)
        os.close(self._wake_fd)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._replaying, zmq.POLLIN)
        poller.register(self._wake_fd, zmq.POLLIN)
        self._beat()
        while True:
            ready = dict(poller.poll(max(0, round((self._beat_at - time.monotonic()) * 1000))))
            stopping = self._stopping  # looked at before the queue, so that nothing is left in it
            if self._wake_fd in ready:
                os.eventfd_read(self._wake_fd)
            while self._queue:
                self._send_batch(self._queue.popleft())
            if stopping:
                return
            if self._replaying in ready:
                self._answer_all()
            if time.monotonic() >= self._beat_at:
                self._beat()

    # To all subscribers

    def _send_batch(self, events: list[CacheEvent]) -> None:
        self._sequence += 1
        for event in events:
            self._apply(event)
        packed = pack_events(events)
        frame = encode(Events(worker_id=self._worker_id, sequence=self._sequence, time=time.time(), events=packed))
        self._ring.append(frame)
        self._ring_bytes += len(frame)
        while len(self._ring) > self._settings.ring_batches or self._ring_bytes > self._settings.ring_bytes:
            self._ring_bytes -= len(self._ring.popleft())
        self._send(frame)

    def _beat(self) -> None:
        self._send(encode(Beat(worker_id=self._worker_id, sequence=self._sequence)))

    def _send(self, frame: bytes) -> None:
        self._beat_at = time.monotonic() + self._settings.beat_s
        with contextlib.suppress(zmq.Again):
            self._publishing.send(frame, zmq.DONTWAIT)

    def _apply(self, event: CacheEvent) -> None:
        match event:
            case Stored():
                self._cached.update(dict.fromkeys(event.hashes))
            case Removed():
                for digest in event.hashes:
                    self._cached.pop(digest, None)
            case Cleared():
                self._cached.clear()
            case Swapped() | Restored() | FreedForNow() | Freed():
                pass  # they tell of requests; what is findable has its own events
            case _:
                assert_never(event)

    # To one subscriber

    def _answer_all(self) -> None:
        for _ in range(_ANSWERS_PER_TURN):
            try:
                frames = self._replaying.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            try:
                self._answer(frames[0], frames[1:])
            except ProtocolError as error:
                self.num_malformed += 1
                log.seldom("refused on the event plane", reason=error)

    def _answer(self, identity: bytes, payload: list[bytes]) -> None:
        if len(payload) != 1:
            raise ProtocolError(f"a message of {len(payload)} frames where one belongs")
        message = self._decoder.decode(payload[0])
        check_version("the subscriber", message.version, EVENTS_VERSION, "event")
        if message.worker_id != self._worker_id:
            raise ProtocolError(f"events of {message.worker_id[:80]!r} asked of {self._worker_id}")
        with contextlib.suppress(zmq.Again):
            self._replaying.send_multipart([identity, *self._missed(message)], zmq.DONTWAIT)

    def _missed(self, replay: Replay) -> list[bytes]:
        """The frames of the one message that brings a subscriber up to date: it arrives whole or not at all."""
        count = self._sequence + 1 - replay.first
        if 0 <= count <= len(self._ring):
            frames = list(self._ring)[len(self._ring) - count :]
            # Preferred even if they are more: only they tell what became of requests.
            if sum(map(len, frames)) <= max(_CHEAP_REPLAY_BYTES, _BYTES_PER_HASH * (len(self._cached) + 64)):
                return [*frames, encode(Beat(worker_id=self._worker_id, sequence=self._sequence))]
        return [encode(Snapshot(worker_id=self._worker_id, sequence=self._sequence, hashes=list(self._cached)))]


def _bind(kind: int, host: str, port: int, option: str, unread: int) -> Socket:
    socket = listening(kind, {zmq.MAXMSGSIZE: MAX_REPLAY_BYTES, zmq.SNDHWM: unread})
    address = f"tcp://{host}:{port or '*'}"
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close()
        reason = error.strerror or error
        raise ConfigError(f"the worker cannot publish events on {address} (--worker-host, {option}): {reason}") from error
    return socket
