"""The embedded registry of another process: a router that joins it sees the same workers (`--registry tcp://HOST:PORT`).

While that process does not answer, the router goes on with the workers that it knows. One that is missing when it answers again
stays for a registration's length: a registry that has restarted knows only those that have renewed since.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import assert_never

from kvrelay.discovery.base import Loss, OnChanged, OnJoined, OnLeft
from kvrelay.discovery.members import Members
from kvrelay.errors import ConfigError, ProtocolError
from kvrelay.ids import RouterId, WorkerId
from kvrelay.log import Log
from kvrelay.planes.connection import Connection
from kvrelay.wire.codec import Decoder, encode
from kvrelay.wire.registry import Gone, Listing, RegistryRefused, RouterRecord, Seen, ToWatcher, Watch

log = Log("discovery")


class JoinedMembership:
    """A router's end. `on_reachable` hears whether the registry answers."""

    is_shared = True

    def __init__(
        self,
        address: str,
        *,
        router: RouterRecord,
        registration_s: float,
        clock: Callable[[], float] = time.monotonic,
        on_malformed: Callable[[], None] = lambda: None,
        on_reachable: Callable[[bool], None] = lambda _: None,
        on_retry: Callable[[], None] = lambda: None,
    ) -> None:
        self.address = address
        self._watch = encode(Watch(router=router, silence_s=registration_s))
        self._registration_s = registration_s
        self._clock = clock
        self._on_malformed, self._on_reachable, self._on_retry = on_malformed, on_reachable, on_retry
        self._decoder: Decoder[ToWatcher] = Decoder(ToWatcher)
        self._missing: dict[WorkerId, float] = {}  # not listed: until when they may come back
        self._routers = [router]
        self._leader: RouterId | None = None
        self._is_answered = False
        self._connection: Connection | None = None
        self._ticker: asyncio.TimerHandle | None = None

    @property
    def routers(self) -> list[RouterRecord]:
        return self._routers

    @property
    def leader(self) -> RouterId | None:
        return self._leader

    def start(self, on_joined: OnJoined, on_changed: OnChanged, on_left: OnLeft) -> None:
        """Raises ConfigError for what is no address."""
        assert self._connection is None, "started twice"
        self._members: Members[WorkerId] = Members(on_joined, on_changed, on_left)
        try:
            self._connection = Connection(
                self.address,
                identity=None,
                silence_s=self._registration_s,
                on_up=self._ask,
                on_down=self._lost,
                on_message=self._on_message,
            )
        except ProtocolError as error:
            raise ConfigError(f"--registry {self.address}: {error}") from error
        self._schedule_tick()

    def close(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
        if self._connection is not None:
            self._connection.close()

    def _ask(self) -> None:
        assert self._connection is not None
        self._is_answered = False
        self._connection.send(self._watch)

    def _lost(self) -> None:
        log.warning("the registry is out of reach; the workers known so far stay", address=self.address)
        self._leader = None  # another router may have it meanwhile
        self._on_reachable(False)

    def _on_message(self, frame: bytes) -> None:
        try:
            self._handle(self._decoder.decode(frame))
        except ProtocolError as error:
            self._on_malformed()
            log.seldom("malformed message of the registry", reason=error)

    def _handle(self, message: ToWatcher) -> None:
        match message:
            case Listing():
                self._listed(message)
            case Seen():
                self._members.put(message.record.id, message.record)
                self._missing.pop(message.record.id, None)
            case Gone():
                self._missing.pop(message.worker_id, None)
                self._members.leave(message.worker_id, Loss.LEFT if message.said_so else Loss.EXPIRED)
            case RegistryRefused():
                self._is_answered = True
                log.warning("the registry refused this router", reason=message.reason)
            case _:
                assert_never(message)

    def _listed(self, message: Listing) -> None:
        self._routers, self._leader, self._is_answered = message.routers, message.leader, True
        self._on_reachable(True)
        for record in message.workers:
            self._members.put(record.id, record)
        listed, now = {record.id for record in message.workers}, self._clock()
        self._missing = {
            worker_id: self._missing.get(worker_id, now + self._registration_s)
            for worker_id in self._members
            if worker_id not in listed
        }
        for worker_id in [worker_id for worker_id, until in self._missing.items() if until <= now]:
            del self._missing[worker_id]
            self._members.vanished(worker_id)

    def _schedule_tick(self) -> None:
        self._ticker = asyncio.get_running_loop().call_later(self._registration_s / 3, self._tick)

    def _tick(self) -> None:
        if not self._is_answered:
            self._on_retry()
        self._ask()
        self._schedule_tick()
