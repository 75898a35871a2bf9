"""What the transfer thread does, turn by turn, and what its owner hears of it.

    owner's thread                       transfer thread
      calls                       --->     commands, in order
                                           messages <-> signal plane, moves <-> transfer engines, leases
      take                        <---     news

The owner's calls only leave a note. A socket of a producer that is closed tells consumers that nothing of this worker can write
their memory any more; so it stays open if a transport does not close.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import Any, ClassVar, Generic, TypeVar

import zmq

from kvrelay.errors import ProtocolError
from kvrelay.ids import WorkerId
from kvrelay.transfer.relay.consumer import ConsumerMachine
from kvrelay.transfer.relay.desk import Desk
from kvrelay.transfer.relay.fenced import IDLE_S
from kvrelay.transfer.relay.kind import Kind, Layout
from kvrelay.transfer.relay.machine import Machine
from kvrelay.transfer.relay.parts import RelayParts
from kvrelay.transfer.relay.producer import ProducerMachine
from kvrelay.transfer.relay.signal import ConsumerSockets, ProducerSocket
from kvrelay.transfer.relay.thread import TransferThread, clock
from kvrelay.wire.codec import encode

_TICK_S = 1.0  # at most
_PROBE_S = 0.02  # between looks at a connection attempt

L = TypeVar("L", bound=Layout)
N = TypeVar("N")
M = TypeVar("M", bound=Machine[Any, Any, Any])


class _Turns(TransferThread, Generic[M, L, N]):
    """What both halves of the thread do."""

    _owner_waits: ClassVar[bool]
    machine: M
    sockets: ProducerSocket | ConsumerSockets

    def __init__(
        self, kind: Kind[L], parts: RelayParts[L], no_news: Callable[[], N], look: Callable[[], float] = lambda: IDLE_S
    ) -> None:
        """`look` is called in every turn, and returns the longest pause until the next."""
        super().__init__(f"{kind.name}-{parts.worker_id}", on_end=parts.on_news)
        self._look = look
        self._kind = kind
        self._parts = parts
        self._no_news = no_news
        self._lock = threading.Lock()
        self._news: list[N] = []
        self.is_unreachable = False  # every transport is closed: no peer can write this worker's memory any more

    def _open_desk(self) -> Desk[L, N]:
        return Desk(self._parts.register(self._kind), self._parts.settings, self._no_news)

    @property
    def moving(self) -> bool:
        return self.machine.counts.num_moves > 0

    def take_news(self) -> list[N]:
        """By the owner."""
        with self._lock:
            news, self._news = self._news, []
        return news

    @property
    def has_news(self) -> bool:
        return bool(self._news)

    def _poll_engines(self) -> None:
        for engine in self._parts.engines:
            for completion in engine.poll():
                self.machine.on_completion(engine, completion)

    def _say(self) -> None:
        """First to the side that waits: for a producer the peers, for a consumer the owner."""
        if self._owner_waits:
            self._tell_owner()
        for peer, message in self.machine.take_outgoing():
            self.sockets.send(peer, encode(message))
        if not self._owner_waits:
            self._tell_owner()
        self.machine.desk.write_log()

    def _tell_owner(self) -> None:
        news = self.machine.take_news()
        if news is not None:
            with self._lock:
                self._news.append(news)
            self._parts.on_news()


class ProducerTurns(_Turns[ProducerMachine[Any, L, N], L, N]):
    _owner_waits = False

    def __init__(
        self,
        kind: Kind[L],
        parts: RelayParts[L],
        no_news: Callable[[], N],
        listen: tuple[str, int],
        look: Callable[[], float] = lambda: IDLE_S,
    ) -> None:
        super().__init__(kind, parts, no_news, look)
        self._listen = listen
        self._tick_at = 0.0

    def begin(self, poller: zmq.Poller) -> None:
        self.sockets = self.socket = ProducerSocket(*self._listen)
        try:
            self.machine = ProducerMachine(self._open_desk())
        except BaseException:
            self.socket.close()
            raise
        self.socket.register(poller)

    def turn(self) -> float:
        self.run_commands()
        self._look()
        now = clock()
        for peer, frame in self.socket.receive(self.machine.on_stranger):
            try:
                self.machine.on_message(peer, self._kind.decode_for_producer(frame), now)
            except ProtocolError as error:
                self.machine.on_malformed(peer, error)
        self._poll_engines()
        if now >= self._tick_at:
            self._tick_at = now + min(_TICK_S, self._parts.settings.lease_s / 10)
            self.machine.tick(now)
        self.machine.pump(now)
        self._say()
        return min(self._tick_at - now, self._look())  # messages of this turn may have made it urgent

    def finish(self, reason: str) -> None:
        try:
            self.machine.close(reason, drained=True)
        finally:
            self._parts.close_engines()
            self.is_unreachable = True
            try:
                self._poll_engines()
                self._say()
            finally:
                self.socket.close()


class ConsumerTurns(_Turns[ConsumerMachine[Any, L, N], L, N]):
    _owner_waits = True

    def begin(self, poller: zmq.Poller) -> None:
        self._poller = poller
        self.machine = ConsumerMachine(self._open_desk())
        self.sockets = self.dealers = ConsumerSockets(self._parts.worker_id)

    def turn(self) -> float:
        self.run_commands()
        look_s = self._look()
        self._connect()
        now = clock()
        for peer, frame in self.dealers.receive():
            try:
                self.machine.on_message(peer, self._kind.decode_for_consumer(frame), now)
            except ProtocolError as error:
                self.machine.on_malformed(peer, error)
        for peer in self.dealers.find_dead():
            self.machine.peer_died(peer, "no process listens at its address any more")
        self._poll_engines()
        now = clock()  # after the copies: leases are judged by it
        self.machine.tick(now)
        self.machine.pump(now)
        self._say()
        within_s = min(self.machine.next_tick(now), look_s)
        return min(within_s, _PROBE_S) if self.dealers.probing else within_s

    def _connect(self) -> None:
        producers = self.machine.producers()
        self.dealers.disconnect_all_but(producers, self._poller)
        for peer in producers:
            reason = self.dealers.connect(peer, self.machine.address_of(peer), self._poller)
            if reason:
                self.machine.peer_died(peer, reason)

    def finish(self, reason: str) -> None:
        try:
            self.machine.close(reason, drained=False)
            self._say()
        finally:
            try:
                self._parts.close_engines()
                self.is_unreachable = True
                self._poll_engines()
                self.machine.close(reason, drained=True)
                self._say()
            finally:
                self.dealers.close(self._poller)


TU = TypeVar("TU", bound=ProducerTurns[Any, Any] | ConsumerTurns[Any, Any])


class Front(Generic[TU]):
    """One half of a relay as its owner's thread sees it. What it expects is in `_open` until the owner has been told its end,
    so that it is told one even if the transfer thread dies."""

    _open: Collection[Any]

    def __init__(self, turns: TU) -> None:
        """Raises what `begin` raises."""
        self._turns = turns
        turns.start()

    def peer_lost(self, worker_id: WorkerId) -> None:
        self._turns.call(lambda: self._turns.machine.peer_lost(worker_id, "a router considers it gone"))

    @property
    def has_news(self) -> bool:
        return self._turns.has_news or self._turns.has_ended or bool(self._turns.ended and self._open)

    @property
    def num_links(self) -> int:
        return self._turns.machine.num_links

    @property
    def num_live(self) -> int:
        return self._turns.machine.table.num_live

    def close(self) -> None:
        self._turns.close()
