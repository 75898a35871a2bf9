"""The relay's consuming half: `engine.movers.Consumer` around a transfer thread. See `mover`."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import zmq

from kvrelay.engine.movers import Arrival, ConsumerNews
from kvrelay.errors import ProtocolError
from kvrelay.ids import RequestId, WorkerId
from kvrelay.transfer.kv_consumer import ConsumerMachine
from kvrelay.transfer.loop import Loop, clock
from kvrelay.transfer.relay_parts import RelayParts, RelayStats, check_ids, mapping_counts
from kvrelay.transfer.signal import ConsumerSockets
from kvrelay.wire.codec import encode
from kvrelay.wire.registry import MappingCounts, TransferCounts
from kvrelay.wire.serving import TransferInfo
from kvrelay.wire.transfer import decode_for_consumer

_PROBE_S = 0.02  # between looks at a connection attempt


class _ConsumerTurns:
    """What runs in the thread."""

    def __init__(self, parts: RelayParts) -> None:
        self._parts = parts
        self.loop: Loop  # set by the owner before the thread starts
        self.lock = threading.Lock()
        self.news = ConsumerNews()
        self.unreachable = False  # every transport is closed: nobody can write this worker's memory any more

    def begin(self, poller: zmq.Poller) -> None:
        self._poller = poller
        self.machine = ConsumerMachine(self._parts.register(), self._parts.settings)
        self.sockets = ConsumerSockets(self._parts.worker_id)

    def turn(self) -> float:
        self.loop.run_commands()
        self._connect()
        now = clock()
        for peer, frame in self.sockets.receive():
            try:
                self.machine.on_message(peer, decode_for_consumer(frame), now)
            except ProtocolError as error:
                self.machine.on_malformed(peer, error)
        for peer in self.sockets.find_dead():
            self.machine.peer_died(peer, "nobody listens at its address any more")
        self._poll_engines()
        now = clock()  # after the copies: leases are judged by it
        self.machine.tick(now)
        self.machine.pump(now)
        self._send()
        self._publish()
        within_s = self.machine.next_tick(now)
        return min(within_s, _PROBE_S) if self.sockets.probing else within_s

    def _connect(self) -> None:
        producers = self.machine.producers()
        self.sockets.disconnect_all_but(producers, self._poller)
        for peer in producers:
            reason = self.sockets.connect(peer, self.machine.address_of(peer), self._poller)
            if reason:
                self.machine.peer_died(peer, reason)

    def _poll_engines(self) -> None:
        for engine in self._parts.engines:
            for completion in engine.poll():
                self.machine.on_completion(engine, completion)

    def _send(self) -> None:
        for peer, message in self.machine.take_outgoing():
            self.sockets.send(peer, encode(message))

    def _publish(self) -> None:
        news = self.machine.take_news()
        if not (news.started or news.arrived or news.freed):
            return
        with self.lock:
            self.news.started += news.started
            self.news.arrived += news.arrived
            self.news.freed += news.freed
        self._parts.tell()

    @property
    def moving(self) -> bool:
        return self.machine.num_moves > 0

    def finish(self, reason: str) -> None:
        try:
            self.machine.close(reason)
            self._send()
        finally:
            try:
                self._parts.close_engines()
                self.unreachable = True
                self._poll_engines()
                self._send()
                self._publish()
            finally:
                self.sockets.close(self._poller)


@dataclass(slots=True)
class _Open:
    """What the engine has been told of a request, and what it gave."""

    told: bool = False
    holds_blocks: bool = False


class RelayConsumer:
    """Takes KV over for a decode worker; implements `engine.movers.Consumer`."""

    def __init__(self, parts: RelayParts) -> None:
        """Raises TransferError if a transport cannot register the region."""
        self._turns = _ConsumerTurns(parts)
        self._loop = Loop(f"transfer-{parts.worker_id}", self._turns, on_end=parts.tell)
        self._turns.loop = self._loop
        self._open: dict[RequestId, _Open] = {}
        self._loop.start()

    def expect(self, request_id: RequestId, transfer: TransferInfo, num_tokens: int) -> None:
        """Raises WrongIdError."""
        check_ids(request_id, transfer)
        self._open[request_id] = _Open()
        self._loop.call(lambda: self._turns.machine.expect(request_id, transfer, num_tokens, clock()))

    def reserve(self, request_id: RequestId, blocks: Sequence[int], skip_tokens: int) -> None:
        given = tuple(blocks)
        self._open.setdefault(request_id, _Open(told=True)).holds_blocks = True
        self._loop.call(lambda: self._turns.machine.reserve(request_id, given, skip_tokens, clock()))

    def unreserve(self, request_id: RequestId) -> None:
        self._loop.call(lambda: self._turns.machine.unreserve(request_id))

    def abort(self, request_id: RequestId) -> None:
        known = self._open.get(request_id)
        if known is not None:
            known.told = True
            self._forget_if_over(request_id)
        self._loop.call(lambda: self._turns.machine.abort(request_id))

    def peer_lost(self, worker_id: WorkerId) -> None:
        self._loop.call(lambda: self._turns.machine.peer_lost(worker_id, "a router takes it for gone"))

    @property
    def has_news(self) -> bool:
        news = self._turns.news
        return bool(news.started or news.arrived or news.freed or self._loop.has_ended) or bool(self._loop.ended and self._open)

    def poll(self) -> ConsumerNews:
        ended = self._loop.ended  # read first: what the thread said before its end must not be missed
        with self._turns.lock:
            news, self._turns.news = self._turns.news, ConsumerNews()
        for arrival in news.arrived:
            self._told(arrival)
        for request_id in news.freed:
            if request_id in self._open:
                self._open[request_id].holds_blocks = False
                self._forget_if_over(request_id)
        if ended and self._open:
            self._tell_the_end(news, ended)
        elif not (news.arrived or news.freed):
            self._loop.raise_failure()
        return news

    def _told(self, arrival: Arrival) -> None:
        known = self._open.get(arrival.request_id)
        if known is not None:
            known.told = True
            known.holds_blocks = known.holds_blocks and bool(arrival.error)
            self._forget_if_over(arrival.request_id)

    def _forget_if_over(self, request_id: RequestId) -> None:
        known = self._open[request_id]
        if known.told and not known.holds_blocks:
            del self._open[request_id]

    def _tell_the_end(self, news: ConsumerNews, reason: str) -> None:
        """The thread has ended. Blocks are safe if the transports are closed, and else stay quarantined for ever."""
        for request_id, known in list(self._open.items()):
            if not known.told:
                news.arrived.append(Arrival(request_id, [], error=reason))
                known.told = True
            if known.holds_blocks and self._turns.unreachable:
                news.freed.append(request_id)
                known.holds_blocks = False
            self._forget_if_over(request_id)

    def counts(self) -> TransferCounts:
        return self._turns.machine.counts()

    def mapping(self) -> MappingCounts:
        machine = self._turns.machine
        return mapping_counts(machine.table.snapshot(), machine.malformed, machine.num_repeated)

    @property
    def num_links(self) -> int:
        return self._turns.machine.num_links

    def stats(self) -> RelayStats:
        machine = self._turns.machine
        return RelayStats(
            table=machine.table.snapshot(),
            counts=machine.counts(),
            malformed=machine.malformed,
            unsent=self._turns.sockets.unsent,
        )

    @property
    def num_turns(self) -> int:
        """Of the transfer thread, since its start."""
        return self._loop.num_turns

    def close(self) -> None:
        self._loop.close()
