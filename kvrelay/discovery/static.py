"""No registry: the workers' serving addresses are fixed, and membership is what answers there.

The router says Hello to each address every `registration_s` / 3, on a connection of its own that carries nothing else; Welcome
brings the worker's record with its state and load. A worker is lost as soon as its connection breaks (a dead process closes it;
ZMQ's own heartbeats, answered by its I/O thread even during a long step, find a dead host within `registration_s`), or when
nothing was answered for `silence_s`: a stuck engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import assert_never

import msgspec

from kvrelay.discovery.base import OnChanged, OnJoined, OnLeft
from kvrelay.discovery.members import Members
from kvrelay.errors import ConfigError, ProtocolError
from kvrelay.ids import RouterId
from kvrelay.log import Log
from kvrelay.planes.connection import Connection
from kvrelay.states import WorkerState
from kvrelay.wire import PROTOCOL_VERSION
from kvrelay.wire.adapters import AdaptersTold
from kvrelay.wire.codec import Decoder, encode
from kvrelay.wire.registry import WorkerLoad, WorkerRecord
from kvrelay.wire.serving import (
    Forgotten,
    Hello,
    KeptTold,
    Refused,
    StepOutputs,
    ToRouter,
    Welcome,
)
from kvrelay.wire.timelines import TimelineMessage

log = Log("discovery")


class StaticMembership:
    """Watches a fixed list of tcp://HOST:PORT."""

    address = ""  # workers need not register

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        router_id: RouterId,
        registration_s: float,
        silence_s: float = 120.0,
        clock: Callable[[], float] = time.monotonic,
        on_malformed: Callable[[], None] = lambda: None,
    ) -> None:
        if not addresses:
            raise ConfigError("a static registry needs at least one worker address")
        if len(set(addresses)) != len(addresses):
            raise ConfigError("a static registry lists the same worker address twice")
        self._addresses = list(addresses)
        self.hello = encode(Hello(version=PROTOCOL_VERSION, router_id=router_id, silence_s=registration_s))
        self.registration_s = registration_s
        self.on_malformed = on_malformed
        self._silence_s = max(silence_s, registration_s)
        self._clock = clock
        self._watches: list[_Watch] = []
        self._ticker: asyncio.TimerHandle | None = None

    def start(self, on_joined: OnJoined, on_changed: OnChanged, on_left: OnLeft) -> None:
        assert self._ticker is None, "started twice"
        self.members: Members[str] = Members(on_joined, on_changed, on_left)
        self._watches = [_Watch(self, address) for address in self._addresses]
        self._schedule_tick()

    def close(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
        for watch in self._watches:
            watch.connection.close()

    def expire(self) -> None:
        """Takes out workers that are connected but have not answered for `silence_s`."""
        now = self._clock()
        for watch in self._watches:
            if watch.heard_at + self._silence_s <= now:
                self.members.vanished(watch.address)

    def heard(self, watch: _Watch, record: WorkerRecord) -> None:
        """Raises ProtocolError. Another id means that another process answers at this address now."""
        self.members.put(watch.address, record)
        watch.heard_at = self._clock()

    def _schedule_tick(self) -> None:
        self._ticker = asyncio.get_running_loop().call_later(self.registration_s / 3, self._tick)

    def _tick(self) -> None:
        self.expire()
        for watch in self._watches:
            watch.say_hello()
        self._schedule_tick()


class _Watch:
    """One address: its connection, and the worker that answers there."""

    def __init__(self, membership: StaticMembership, address: str) -> None:
        self._membership = membership
        self._decoder: Decoder[ToRouter] = Decoder(ToRouter)
        self.address = address
        self.heard_at = 0.0
        self.connection = Connection(
            address,
            identity=None,
            silence_s=membership.registration_s,
            on_up=self.say_hello,
            on_down=lambda: membership.members.vanished(address),
            on_message=self._on_message,
        )

    def say_hello(self) -> None:
        self.connection.send(self._membership.hello)

    def _on_message(self, frame: bytes) -> None:
        try:
            self._handle(self._decoder.decode(frame))
        except ProtocolError as error:
            self._membership.on_malformed()
            log.seldom("malformed answer of a worker", address=self.address, reason=error)

    def _handle(self, message: ToRouter) -> None:
        match message:
            case Welcome():
                self._membership.heard(self, message.worker)
            case Refused():
                log.warning("worker refused", address=self.address, reason=message.reason)
            case StepOutputs():
                record = self._membership.members.get(self.address)
                if record is not None and record.id == message.worker_id:
                    self._membership.heard(self, msgspec.structs.replace(record, load=message.load))
            case KeptTold() | Forgotten() | TimelineMessage():
                pass  # of no concern on this connection
            case AdaptersTold():
                record = self._membership.members.get(self.address)
                if record is not None:
                    self._membership.heard(self, msgspec.structs.replace(record, adapters=message.adapters))
            case _:
                assert_never(message)


class StaticRegistration:
    """A worker's end: routers know its address already."""

    def register(self, record: WorkerRecord, ttl_s: float) -> bool:
        return True

    def renew(self, state: WorkerState, load: WorkerLoad) -> bool:
        return True

    def leave(self) -> None:
        pass

    def close(self) -> None:
        pass
