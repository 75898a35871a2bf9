"""The registry inside a router's process, or inside that which launched several routers: a ZMQ ROUTER socket to which workers'
DEALER sockets talk, and those of routers that join it (wire/registry.py).

Nothing is kept on disk. A registry that restarts answers a worker's next renewal with Unknown, and the worker registers
again, so the membership is whole after one renewal interval.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

import msgspec
import zmq

from kvrelay.discovery.base import Loss, OnChanged, OnJoined, OnLeft
from kvrelay.discovery.members import Members, check_ttl
from kvrelay.discovery.watchers import Watchers
from kvrelay.errors import ConfigError, ProtocolError
from kvrelay.ids import RouterId, WorkerId
from kvrelay.log import Log
from kvrelay.planes.curve import Socket, connecting, exchange, listening
from kvrelay.planes.loop_socket import LoopSocket, bound_address
from kvrelay.states import WorkerState
from kvrelay.wire import PROTOCOL_VERSION, check_version
from kvrelay.wire.codec import Decoder, encode
from kvrelay.wire.registry import (
    FromRegistry,
    Gone,
    Leave,
    Listing,
    Register,
    Registered,
    RegistryRefused,
    Renew,
    RouterRecord,
    Seen,
    ToRegistry,
    Unknown,
    Watch,
    WorkerLoad,
    WorkerRecord,
)

log = Log("discovery")

_MAX_MESSAGE_BYTES = 1 << 20
_TICK_S = 0.2
_REGISTERED = Registered(version=PROTOCOL_VERSION)
_STALL_S = 0.5  # a tick later than this shows that this process was stopped, not that the workers were silent


@dataclass(slots=True)
class _Until:
    """Until when a registration counts."""

    ttl_s: float
    deadline: float


class EmbeddedMembership:
    """The registry and its watch in one. Binds at once, so that `address` can be handed to workers before `start`."""

    def __init__(
        self,
        listen: str,
        *,
        router: RouterRecord | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_malformed: Callable[[], None] = lambda: None,
        on_refused: Callable[[], None] = lambda: None,
    ) -> None:
        """`router` is the one in this process, if there is one. `on_refused` is called on another thread."""
        self._watchers = Watchers(router, clock)
        self._socket = listening(zmq.ROUTER, {zmq.MAXMSGSIZE: _MAX_MESSAGE_BYTES}, on_refused)
        try:
            self._socket.bind(listen)
        except zmq.ZMQError as error:
            self._socket.close()
            raise ConfigError(f"the registry cannot listen on {listen}: {error.strerror or error}") from error
        self.address = bound_address(self._socket)
        self._clock = clock
        self._on_malformed = on_malformed
        self._decoder: Decoder[ToRegistry] = Decoder(ToRegistry)
        self._times: dict[WorkerId, _Until] = {}
        self._reader: LoopSocket | None = None
        self._ticker: asyncio.TimerHandle | None = None

    @property
    def is_shared(self) -> bool:
        return len(self._watchers) > 0

    @property
    def routers(self) -> list[RouterRecord]:
        return self._watchers.records

    @property
    def leader(self) -> RouterId | None:
        return self._watchers.leader

    def start(self, on_joined: OnJoined, on_changed: OnChanged, on_left: OnLeft) -> None:
        assert self._reader is None, "started twice"

        def joined(record: WorkerRecord) -> None:
            on_joined(record)
            self._tell(Seen(record=record))

        def changed(record: WorkerRecord) -> None:
            on_changed(record)
            self._tell(Seen(record=record))

        def left(worker_id: WorkerId, loss: Loss) -> None:
            on_left(worker_id, loss)
            self._tell(Gone(worker_id=worker_id, said_so=loss is Loss.LEFT))

        self._members: Members[WorkerId] = Members(joined, changed, left)
        self._reader = LoopSocket(self._socket, self._receive)
        self._schedule_tick()

    def close(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
        if self._reader is not None:
            self._reader.close()
        else:
            self._socket.close(linger=0)

    def expire(self) -> None:
        """Takes out workers that have not renewed their registration in time."""
        now = self._clock()
        for worker_id in [worker_id for worker_id, until in self._times.items() if until.deadline <= now]:
            self._remove(worker_id, Loss.EXPIRED)
        self._watchers.expire()

    def _tell(self, message: Seen | Gone) -> None:
        """Every router that has joined. One that misses it asks for everything soon."""
        if self._watchers:
            frame = encode(message)
            for identity in self._watchers.identities:
                assert self._reader is not None
                if not self._reader.send([identity, frame]):
                    self._watchers.lost(identity)

    def _receive(self, frames: list[bytes]) -> None:
        identity, payload = frames[0], frames[1:]
        assert self._reader is not None
        self._reader.send([identity, encode(self._answer(identity, payload))])

    def _answer(self, identity: bytes, payload: list[bytes]) -> FromRegistry | Listing:
        try:
            if len(payload) != 1:
                raise ProtocolError(f"a message of {len(payload)} frames where one belongs")
            message = self._decoder.decode(payload[0])
            return self._listing(identity, message) if isinstance(message, Watch) else self._handle(message)
        except ProtocolError as error:
            self._on_malformed()
            log.seldom("refused on the registry plane", reason=error)
            return RegistryRefused(reason=str(error))

    def _listing(self, identity: bytes, message: Watch) -> Listing:
        self._watchers.heard(identity, message)
        workers = [record for worker_id in self._members if (record := self._members.get(worker_id)) is not None]
        return Listing(workers=workers, routers=self.routers, leader=self.leader)

    def _handle(self, message: Register | Renew | Leave) -> FromRegistry:
        match message:
            case Register():
                return self._register(message)
            case Renew():
                return self._renew(message)
            case Leave():
                self._remove(message.worker_id, Loss.LEFT)
                return _REGISTERED
            case _:
                assert_never(message)

    def _register(self, message: Register) -> FromRegistry:
        check_ttl(message.ttl_s)
        self._members.put(message.record.id, message.record)
        self._times[message.record.id] = _Until(message.ttl_s, self._clock() + message.ttl_s)
        return _REGISTERED

    def _renew(self, message: Renew) -> FromRegistry:
        record = self._members.get(message.worker_id)
        if record is None:
            return Unknown(worker_id=message.worker_id)
        until = self._times[message.worker_id]
        until.deadline = self._clock() + until.ttl_s
        self._members.put(record.id, msgspec.structs.replace(record, state=message.state, load=message.load))
        return _REGISTERED

    def _remove(self, worker_id: WorkerId, loss: Loss) -> None:
        self._times.pop(worker_id, None)
        self._members.leave(worker_id, loss)

    def _schedule_tick(self) -> None:
        self._tick_due = self._clock() + _TICK_S
        self._ticker = asyncio.get_running_loop().call_later(_TICK_S, self._tick)

    def _tick(self) -> None:
        """If this process itself stood still, the renewals of that time are still on their way: registrations grow by it."""
        late_s = self._clock() - self._tick_due
        if late_s > _STALL_S:
            for until in self._times.values():
                until.deadline += late_s
            self._watchers.grow(late_s)
        self.expire()
        self._schedule_tick()


class EmbeddedRegistration:
    """A worker's end of the embedded registry."""

    def __init__(self, address: str, *, timeout_s: float = 1.0, on_retry: Callable[[], None] = lambda: None) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._on_retry = on_retry
        self._decoder: Decoder[FromRegistry] = Decoder(FromRegistry)
        self._registered: Register | None = None
        self._socket = self._connect()

    def register(self, record: WorkerRecord, ttl_s: float) -> bool:
        message = Register(record=record, ttl_s=ttl_s)
        answer = self._ask(message)
        if answer is None:
            return False
        _check_answer(answer)
        self._registered = message
        return True

    def renew(self, state: WorkerState, load: WorkerLoad) -> bool:
        assert self._registered is not None, "renew before register"
        record = msgspec.structs.replace(self._registered.record, state=state, load=load)
        answer = self._ask(Renew(worker_id=record.id, state=state, load=load))
        if answer is None:
            return False
        if isinstance(answer, Unknown):
            return self.register(record, self._registered.ttl_s)
        _check_answer(answer)
        return True

    def leave(self) -> None:
        if self._registered is not None:
            self._ask(Leave(worker_id=self._registered.record.id))
            self._registered = None

    def close(self) -> None:
        self._socket.close(linger=0)

    def _connect(self) -> Socket:
        socket = connecting(zmq.DEALER, {zmq.MAXMSGSIZE: _MAX_MESSAGE_BYTES, zmq.RECONNECT_IVL_MAX: 1000})
        try:
            socket.connect(self._address)
        except zmq.ZMQError as error:
            socket.close()
            raise ConfigError(f"{self._address!r} is no registry address such as tcp://127.0.0.1:5600") from error
        return socket

    def _ask(self, message: Register | Renew | Leave) -> FromRegistry | None:
        """One question, one answer. After a silence the socket is new, so that a late answer meets no other question."""
        answer = next(exchange(self._socket, encode(message), self._timeout_s), None)
        if answer is not None:
            return self._decoder.decode(answer)
        self._on_retry()
        self._socket.close(linger=0)
        self._socket = self._connect()
        return None


def _check_answer(answer: FromRegistry) -> None:
    match answer:
        case Registered():
            check_version("the registry", answer.version)
        case RegistryRefused():
            raise ProtocolError(f"the registry refused this worker: {answer.reason}")
        case Unknown():
            raise ProtocolError("the registry answered a registration with Unknown")
        case _:
            assert_never(answer)
