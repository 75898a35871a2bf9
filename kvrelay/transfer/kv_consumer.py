"""All transfers of a worker that takes KV over, from any number of producers. No thread, no socket, no clock.

Driven as `kv_producer` is. Connections are made on demand: the first transfer from a producer opens one (`address_of` says
where), and one that nobody needs any more is closed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from kvrelay.engine.movers import Arrival, ConsumerNews
from kvrelay.errors import ProtocolError, VersionMismatchError
from kvrelay.ids import RequestId, WorkerId, as_request_id, as_transfer_id, as_worker_id
from kvrelay.log import Log
from kvrelay.states import ConsumerState, ProducerState
from kvrelay.transfer.desk import ConsumerDesk, ConsumerEnd
from kvrelay.transfer.engines.base import Completion, MoveId, TransferEngine, TransferError
from kvrelay.transfer.plan import TransferMeta
from kvrelay.transfer.receiving import OVER, Receiving
from kvrelay.transfer.session import LocalSide, ProducerLink, TransferSettings, check_welcome, use_region
from kvrelay.transfer.table import TransferTable
from kvrelay.wire.registry import TransferCounts
from kvrelay.wire.serving import TransferInfo
from kvrelay.wire.transfer import (
    Abort,
    AbortAck,
    Computed,
    Heartbeat,
    HeartbeatAck,
    Message,
    NotReady,
    ReadDone,
    Ready,
    Refused,
    RegionMapped,
    Starting,
    ToConsumer,
    TransferMessage,
    Unreserved,
    Welcome,
    WriteDone,
)

log = Log("transfer.consumer")

AboutTransfer = Starting | Unreserved | Computed | WriteDone | Ready | NotReady | Abort | AbortAck
_CONFIRMS = frozenset({ProducerState.DONE, ProducerState.FAILED, ProducerState.UNKNOWN})


class ConsumerMachine:
    """See the module. Every method may be called in any order; what is over is ignored."""

    def __init__(self, local: LocalSide, settings: TransferSettings) -> None:
        self._local = local
        self._settings = settings
        self._desk = ConsumerDesk(local.layout)
        self._links: dict[WorkerId, ProducerLink] = {}
        self._moves: dict[tuple[str, MoveId], Receiving] = {}
        self.malformed = 0
        self.table: TransferTable[Receiving, ConsumerEnd] = TransferTable(
            max_parked=settings.max_parked, parked_s=settings.parked_s, max_ended=settings.max_ended
        )

    @property
    def num_links(self) -> int:
        return len(self._links)

    # The engine's calls

    def expect(self, request_id: RequestId, transfer: TransferInfo, num_tokens: int, now: float) -> None:
        """Raises WrongIdError."""
        meta = TransferMeta(
            transfer_id=as_transfer_id(transfer.transfer_id),
            request_id=as_request_id(request_id),
            peer=as_worker_id(transfer.producer),
            mode=transfer.mode,
            num_tokens=num_tokens,
        )
        if self.table.knows(meta.transfer_id):
            end = self.table.ended(meta.transfer_id, meta.peer)
            reason = end.reason if end is not None and end.reason else "its transfer id was used before"
            self._desk.news.arrived.append(Arrival(request_id, [], error=reason))
            return
        link = self._link_to(meta.peer, transfer.signal_address, now)
        if link is None:
            reason = f"this worker has {len(self._links)} producers, its limit"
            self._desk.news.arrived.append(Arrival(request_id, [], error=reason))
            return
        receiving = Receiving(meta, link, self._desk, self._settings, now)
        self.table.add(receiving)
        for message in self.table.unpark(meta.transfer_id, meta.peer):
            assert isinstance(message, AboutTransfer)
            self._to_transfer(receiving, message, now)

    def reserve(self, request_id: RequestId, blocks: Sequence[int], skip_tokens: int, now: float) -> None:
        receiving = self.table.of_request(request_id)
        if receiving is None:  # it ended before, and the engine has been told
            self._desk.news.freed.append(request_id)
        else:
            receiving.reserve(tuple(blocks), skip_tokens, now)

    def unreserve(self, request_id: RequestId) -> None:
        if (receiving := self.table.of_request(request_id)) is not None:
            receiving.unreserve()

    def abort(self, request_id: RequestId) -> None:
        receiving = self.table.of_request(request_id)
        if receiving is not None and receiving.state not in OVER:
            receiving.abort()
            self._note_end(receiving)

    # Connections

    def address_of(self, peer: WorkerId) -> str:
        return self._links[peer].address

    def producers(self) -> list[WorkerId]:
        return list(self._links)

    def _link_to(self, peer: WorkerId, address: str, now: float) -> ProducerLink | None:
        link = self._links.get(peer)
        if link is None:
            if len(self._links) >= self._settings.max_links:
                return None
            link = ProducerLink(peer, heard_at=now, address=address, opening_since=now)
            link.hello_at = now + self._settings.hello_retry_s
            self._links[peer] = link
            self._desk.send(peer, self._local.hello())
        link.used_at = now
        link.beat_at = min(link.beat_at, now + self._settings.beat_s)
        return link

    def _drop_link(self, link: ProducerLink) -> None:
        del self._links[link.peer]
        if link.engine is not None:
            link.engine.remove_peer(link.peer)

    # What producers say

    def on_message(self, peer: WorkerId, message: ToConsumer, now: float) -> None:
        link = self._links.get(peer)
        if link is None:
            self.table.stats.unknown += 1
            return
        link.heard_at = now
        match message:
            case Welcome():
                self._on_welcome(link, message, now)
            case Refused():
                self._on_refused(link, message, now)
            case RegionMapped():
                self._on_region_mapped(link, message, now)
            case HeartbeatAck():
                self._on_heartbeat_ack(link, message, now)
            case Starting() | Unreserved() | Computed() | WriteDone() | Ready() | NotReady() | Abort() | AbortAck():
                self._on_transfer_message(peer, message, now)
            case _:
                assert_never(message)

    def on_malformed(self, peer: WorkerId, error: ProtocolError) -> None:
        self.malformed += 1
        log.seldom("malformed message", peer=peer, error=error)

    def _on_welcome(self, link: ProducerLink, welcome: Welcome, now: float) -> None:
        try:
            check_welcome(welcome)
        except VersionMismatchError as error:
            self._refused(link, str(error))
            return
        if welcome.worker_id != link.peer:
            self.peer_died(link.peer, f"it was replaced: {welcome.worker_id} answers at its address")
        elif not link.welcomed:
            link.welcomed = True
            link.hello_at = now + self._settings.hello_retry_s
            self._desk.send(link.peer, self._local.map_region())

    def _on_refused(self, link: ProducerLink, refused: Refused, now: float) -> None:
        match refused.about:
            case "sender" if link.ready or link.welcomed:
                log.info("connection is opened again", peer=link.peer, reason=refused.reason)
                link.reopen(now, self._settings.hello_retry_s)
            case "opening" if not link.ready:
                self._refused(link, refused.reason)
            case "opening" | "sender" | "frame":
                log.seldom("producer refused a message", peer=link.peer, reason=refused.reason)
            case _:
                assert_never(refused.about)

    def _refused(self, link: ProducerLink, reason: str) -> None:
        """The two cannot work together. Whatever the producer was given to write by an earlier opening stays quarantined."""
        log.error("connection refused", peer=link.peer, reason=reason)
        for receiving in self.table.live_with(link.peer):
            receiving.fail(f"the connection was refused: {reason}")
            self._note_end(receiving)
        link.unconfirmed.clear()
        if not self.table.live_with(link.peer):
            self._drop_link(link)

    def _on_region_mapped(self, link: ProducerLink, message: RegionMapped, now: float) -> None:
        if link.ready or not link.welcomed:
            self._desk.duplicates += 1
            return
        try:
            use_region(self._local, link, message)
        except (VersionMismatchError, TransferError) as error:
            self._refused(link, str(error))
            return
        link.ready = True
        self._beat(link, now)

    def _on_heartbeat_ack(self, link: ProducerLink, ack: HeartbeatAck, now: float) -> None:
        sent_at = link.beats.sent_at(ack.number)
        if sent_at is None:
            self._desk.duplicates += 1
            return
        for transfer_id, theirs in ack.transfers:
            receiving = self.table.find(transfer_id, link.peer)
            if receiving is not None:
                receiving.acked(ack.number, sent_at, theirs, now)
                self._note_end(receiving)
            elif theirs in _CONFIRMS:
                link.unconfirmed.pop(transfer_id, None)

    def _on_transfer_message(self, peer: WorkerId, message: AboutTransfer, now: float) -> None:
        receiving = self.table.find(message.transfer_id, peer)
        if receiving is not None:
            self._to_transfer(receiving, message, now)
        elif (end := self.table.ended(message.transfer_id, peer)) is not None:
            self._late(peer, message, end)
        elif self.table.knows(message.transfer_id):
            self.table.stats.foreign += 1
        else:
            self._unknown(peer, message, now)

    def _to_transfer(self, receiving: Receiving, message: AboutTransfer, now: float) -> None:
        try:
            match message:
                case Starting():
                    receiving.starting()
                case Computed():
                    receiving.computed(message)
                case WriteDone():
                    receiving.write_done(message)
                case Ready():
                    receiving.ready(message, now)
                case NotReady():
                    receiving.not_ready(message.reservation, now)
                case Unreserved():
                    receiving.unreserved(message.reservation)
                case Abort():
                    receiving.producer_aborted(message.reason)
                case AbortAck():
                    receiving.abort_ack()
                case _:
                    assert_never(message)
        except TransferError as error:
            receiving.fail(f"the producer announced what cannot be: {error}")
        self._note_end(receiving)

    def _late(self, peer: WorkerId, message: AboutTransfer, end: ConsumerEnd) -> None:
        """The transfer is over here. A producer that still waits for a word of it gets it again."""
        self.table.stats.duplicates += 1
        if isinstance(message, Abort):
            self._desk.send(peer, AbortAck(transfer_id=message.transfer_id))
        elif isinstance(message, WriteDone) and message.blocks and end.state is ConsumerState.DONE:
            self._desk.send(peer, ReadDone(transfer_id=message.transfer_id))

    def _unknown(self, peer: WorkerId, message: AboutTransfer, now: float) -> None:
        """Its request may be on the way to this worker."""
        if isinstance(message, Starting | Ready):
            self.table.park(peer, message, now)
            return
        self.table.stats.unknown += 1
        if isinstance(message, Abort):
            self.table.unpark(message.transfer_id, peer)
            reason = f"the producer ended it: {message.reason}"
            self.table.remember(message.transfer_id, peer, ConsumerEnd(ConsumerState.FAILED, reason))
            self._desk.send(peer, AbortAck(transfer_id=message.transfer_id))

    # Moves, time, and peers that go

    def on_completion(self, engine: TransferEngine, completion: Completion) -> None:
        receiving = self._moves.pop((engine.name, completion.id), None)
        if receiving is not None:
            receiving.moved(completion.id, completion.error)
            self._note_end(receiving)

    def pump(self, now: float) -> None:
        """`now` is a time after the last completions were polled: leases are judged by it."""
        for receiving in self.table.live():
            room = self._settings.max_moves - self._desk.num_moves
            if receiving.state is not ConsumerState.RESERVED:
                continue
            begun = receiving.pump(min(self._settings.max_moves_per_transfer, room + receiving.num_moves), now)
            if begun:
                _, engine = receiving.link.parts()
                self._moves.update({(engine.name, move): receiving for move in begun})
            self._note_end(receiving)

    def tick(self, now: float) -> None:
        for receiving in self.table.live():
            receiving.tick(now)
            self._note_end(receiving)
        for link in list(self._links.values()):
            if not link.ready and now >= link.hello_at:
                link.hello_at = now + self._settings.hello_retry_s
                self._desk.send(link.peer, self._local.map_region() if link.welcomed else self._local.hello())
            elif link.ready and now >= link.beat_at:
                self._beat(link, now)
            self._check_silence(link, now)
        self.table.expire_parked(now)

    def _beat(self, link: ProducerLink, now: float) -> None:
        live = self.table.live_with(link.peer)
        transfers = list(link.unconfirmed.items())
        transfers.extend((each.meta.transfer_id, each.state) for each in live if each.state is not ConsumerState.DRAINING)
        self._desk.send(link.peer, Heartbeat(number=link.beats.send(now), transfers=transfers))
        for receiving in live:
            receiving.say_again()
        if live or link.unconfirmed:
            link.used_at = now
        link.beat_at = now + (self._settings.beat_s if live or link.unconfirmed else self._settings.idle_beat_s)

    def _check_silence(self, link: ProducerLink, now: float) -> None:
        lease_s = self._settings.lease_s
        live = self.table.live_with(link.peer)
        silent_since = link.silent_since()
        for receiving in live:
            patience_s = lease_s if link.ready or receiving.state is ConsumerState.RESERVED else self._settings.opening_s
            patience_s = min(lease_s, patience_s)
            if now >= max(silent_since, receiving.expected_at) + patience_s:
                receiving.fail(f"the producer has not answered for {patience_s:g} s")
                self._note_end(receiving)
        silent = now >= silent_since + lease_s
        if not self.table.live_with(link.peer) and (silent or now >= link.used_at + self._settings.idle_link_s):
            self._drop_link(link)

    def peer_lost(self, peer: WorkerId, reason: str) -> None:
        """Somebody takes the producer for gone. It may be stopped, and wake up in the middle of a write: every transfer with it
        fails now, but blocks that it was given stay quarantined until it says that it drained, or is proven dead."""
        for receiving in self.table.live_with(peer):
            receiving.fail(f"the producer was lost: {reason}")
            self._note_end(receiving)

    def peer_died(self, peer: WorkerId, reason: str) -> None:
        """The producer is proven dead: it will never write again."""
        link = self._links.get(peer)
        if link is None:
            return
        log.warning("producer is dead", peer=peer, reason=reason)
        self._drop_link(link)
        for receiving in self.table.live_with(peer):
            receiving.fail(f"the producer is gone: {reason}", peer_drained=True)
            self._note_end(receiving)

    def close(self, reason: str) -> None:
        """Ends every transfer. Blocks that a producer may write come back only when the engines have been closed."""
        for receiving in self.table.live():
            receiving.fail(reason)
            self._note_end(receiving)

    # What comes out

    def _note_end(self, receiving: Receiving) -> None:
        if receiving.state not in OVER or not self.table.is_live(receiving):
            return
        meta = receiving.meta
        self.table.end(receiving, receiving.end)
        log.debug("transfer over", transfer=meta.transfer_id, request=meta.request_id, state=receiving.state)
        if receiving.needs_confirming() and meta.peer in self._links:
            unconfirmed = self._links[meta.peer].unconfirmed
            unconfirmed[meta.transfer_id] = receiving.state
            while len(unconfirmed) > self._settings.max_ended:
                del unconfirmed[next(iter(unconfirmed))]
        if receiving.silent:
            self.table.remove(meta.request_id)

    def take_outgoing(self) -> list[tuple[WorkerId, Message]]:
        """Words about transfers wait for the connection to be open: the heartbeat that follows says what they would have."""
        return [
            (peer, message)
            for peer, message in self._desk.take_outgoing()
            if not isinstance(message, TransferMessage) or (peer in self._links and self._links[peer].ready)
        ]

    def take_news(self) -> ConsumerNews:
        """Hands the outcomes to the scheduler; the names of what ended are forgotten with it."""
        news, self._desk.news = self._desk.news, ConsumerNews()
        for request_id in [*(arrival.request_id for arrival in news.arrived), *news.freed]:
            self.table.remove(request_id)
        return news

    @property
    def num_moves(self) -> int:
        return self._desk.num_moves

    def next_tick(self, now: float) -> float:
        """Seconds until `tick` has something to do."""
        due = [link.beat_at if link.ready else link.hello_at for link in self._links.values()]
        due.extend(receiving.next_at for receiving in self.table.live() if receiving.next_at is not None)
        return max(0.0, min(due, default=now + 1.0) - now)

    @property
    def num_repeated(self) -> int:
        """Messages about open transfers that said what was known, or came too late to matter."""
        return self._desk.duplicates

    def counts(self) -> TransferCounts:
        return self._desk.counts(self.table.num_live)
