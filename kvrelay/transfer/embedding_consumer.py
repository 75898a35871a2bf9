"""All embeddings of a worker that takes them over, from any number of producers. No thread, no socket, no clock.

Driven as `embedding_producer` is. Connections are made on demand: the first transfer from a producer opens one (`address_of`
says where), and one that nobody needs any more is closed.
"""

from __future__ import annotations

from typing import assert_never

from kvrelay.errors import ProtocolError, VersionMismatchError
from kvrelay.ids import TransferId, WorkerId
from kvrelay.log import Log
from kvrelay.states import EmbeddingState
from kvrelay.transfer.embedding_arrival import EmbeddingArrival, ReceivingEnd
from kvrelay.transfer.embedding_book import Book, RelayCounts
from kvrelay.transfer.embedding_receiving import EmbeddingReceiving
from kvrelay.transfer.embedding_room import EmbeddingSettings, Rooms
from kvrelay.transfer.embedding_session import EncoderLink, LocalPool, check_welcome, use_pool
from kvrelay.transfer.engines.base import Completion, MoveId, TransferEngine, TransferError
from kvrelay.wire.embedding import Done, Failed, Heartbeat, HeartbeatAck, Partial, PoolMapped, Received, ToConsumer
from kvrelay.wire.transfer import AbortAck, Message, Refused, TransferMessage, Welcome

log = Log("transfer.embedding.consumer")

AboutTransfer = Partial | Done | Failed | AbortAck
_CONFIRMS = frozenset({EmbeddingState.SUCCESS, EmbeddingState.FAILED, None})


class EmbeddingConsumerMachine:
    """See the module. Every method may be called in any order; what is over is ignored."""

    def __init__(self, local: LocalPool, settings: EmbeddingSettings) -> None:
        self._local = local
        self._all_settings = settings
        self._settings = settings.transfer
        self._rooms = Rooms(local.pool, settings)
        self._links: dict[WorkerId, EncoderLink] = {}
        self._moves: dict[tuple[str, MoveId], EmbeddingReceiving] = {}
        self._book: Book[EmbeddingReceiving, ReceivingEnd] = Book(settings.transfer)
        self._news: list[EmbeddingArrival] = []

    # The worker's calls

    def expect(self, transfer_id: TransferId, producer: WorkerId, address: str, required_dst_info_num: int, now: float) -> None:
        """An embedding comes from there. `required_dst_info_num` consumers get it, this one included."""
        if self._book.knows(transfer_id):
            end = self._book.ended(transfer_id)
            reason = (end and end.reason) or "its transfer id was used before"
            self._news.append(EmbeddingArrival(transfer_id=transfer_id, error=reason))
            return
        link = self._link_to(producer, address, now)
        if link is None:
            reason = f"this worker has {len(self._links)} producers, its limit"
            self._news.append(EmbeddingArrival(transfer_id=transfer_id, error=reason))
            return
        receiving = EmbeddingReceiving(
            transfer_id, link, self._rooms, self._local.pool, self.counts, self._all_settings, required_dst_info_num, now
        )
        self._book.add(transfer_id, receiving)

    def abort(self, transfer_id: TransferId) -> None:
        """Nothing more is told of it."""
        receiving = self._book.find(transfer_id)
        if receiving is not None:
            receiving.abort()
            self._note(receiving)

    # Connections

    def address_of(self, peer: WorkerId) -> str:
        return self._links[peer].address

    def producers(self) -> list[WorkerId]:
        return list(self._links)

    def _link_to(self, peer: WorkerId, address: str, now: float) -> EncoderLink | None:
        link = self._links.get(peer)
        if link is None:
            if len(self._links) >= self._settings.max_links:
                return None
            link = EncoderLink(peer, heard_at=now, address=address, opening_since=now)
            link.hello_at = now + self._settings.hello_retry_s
            self._links[peer] = link
            self._book.send(peer, self._local.hello())
        link.used_at = now
        link.beat_at = min(link.beat_at, now + self._settings.beat_s)
        return link

    def _drop_link(self, link: EncoderLink) -> None:
        del self._links[link.peer]
        if link.engine is not None:
            link.engine.remove_peer(link.peer)

    def _live_with(self, peer: WorkerId) -> list[EmbeddingReceiving]:
        return [receiving for receiving in self._book.live() if receiving.link.peer == peer]

    # What producers say

    def on_message(self, peer: WorkerId, message: ToConsumer, now: float) -> None:
        link = self._links.get(peer)
        if link is None:
            self.counts.unknown += 1
            return
        link.heard_at = now
        match message:
            case Welcome():
                self._on_welcome(link, message, now)
            case Refused():
                self._on_refused(link, message, now)
            case PoolMapped():
                self._on_pool_mapped(link, message, now)
            case HeartbeatAck():
                self._on_heartbeat_ack(link, message, now)
            case Partial() | Done() | Failed() | AbortAck():
                self._on_transfer_message(peer, message, now)
            case _:
                assert_never(message)

    def on_malformed(self, peer: WorkerId, error: ProtocolError) -> None:
        self.counts.malformed += 1
        log.seldom("malformed message", peer=peer, error=error)

    def _on_welcome(self, link: EncoderLink, welcome: Welcome, now: float) -> None:
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
            self._book.send(link.peer, self._local.map_pool())

    def _on_refused(self, link: EncoderLink, refused: Refused, now: float) -> None:
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

    def _refused(self, link: EncoderLink, reason: str) -> None:
        """The two cannot work together. Whatever the producer was given to write by an earlier opening stays quarantined."""
        log.error("connection refused", peer=link.peer, reason=reason)
        self._fail_all(link.peer, f"the connection was refused: {reason}")
        link.unconfirmed.clear()
        if not self._live_with(link.peer):
            self._drop_link(link)

    def _on_pool_mapped(self, link: EncoderLink, message: PoolMapped, now: float) -> None:
        if link.ready or not link.welcomed:
            self.counts.duplicates += 1
            return
        try:
            use_pool(self._local, link, message)
        except (VersionMismatchError, TransferError) as error:
            self._refused(link, str(error))
            return
        link.ready = True
        self._beat(link, now)

    def _on_heartbeat_ack(self, link: EncoderLink, ack: HeartbeatAck, now: float) -> None:
        sent_at = link.beats.sent_at(ack.number)
        if sent_at is None:
            self.counts.duplicates += 1
            return
        for transfer_id, theirs in ack.transfers:
            receiving = self._book.find(transfer_id)
            if receiving is not None and receiving.link.peer == link.peer:
                receiving.acked(ack.number, sent_at, theirs, now)
                self._note(receiving)
            elif theirs in _CONFIRMS:
                link.unconfirmed.pop(transfer_id, None)

    def _on_transfer_message(self, peer: WorkerId, message: AboutTransfer, now: float) -> None:
        receiving, end = self._book.find(message.transfer_id), self._book.ended(message.transfer_id)
        if receiving is not None and receiving.link.peer == peer:
            self._to_transfer(receiving, message, now)
        elif end is not None and end.peer == peer:
            self._late(peer, message, end)
        elif receiving is not None or end is not None:
            self.counts.foreign += 1
        else:
            self.counts.unknown += 1

    def _to_transfer(self, receiving: EmbeddingReceiving, message: AboutTransfer, now: float) -> None:
        try:
            match message:
                case Partial() | Done():
                    receiving.notice(message, now)
                case Failed():
                    receiving.producer_failed(message.reason)
                case AbortAck():
                    receiving.abort_ack()
                case _:
                    assert_never(message)
        except TransferError as error:
            receiving.fail(f"the producer announced what cannot be: {error}")
        self._note(receiving)

    def _late(self, peer: WorkerId, message: AboutTransfer, end: ReceivingEnd) -> None:
        """The transfer is over here. A producer that still waits for a word of it gets it again."""
        self.counts.duplicates += 1
        if isinstance(message, Failed):
            self._book.send(peer, AbortAck(transfer_id=message.transfer_id))
        elif isinstance(message, Done) and end.state is EmbeddingState.SUCCESS:
            self._book.send(peer, Received(transfer_id=message.transfer_id))

    # Moves, time, and peers that go

    def on_completion(self, engine: TransferEngine, completion: Completion) -> None:
        receiving = self._moves.pop((engine.name, completion.id), None)
        if receiving is not None:
            receiving.moved(completion.id, completion.error)
            self._note(receiving)

    def pump(self, now: float) -> None:
        """`now` is a time after the last completions were polled: leases are judged by it."""
        self._hand_out_room(now)
        for receiving in self._book.live():
            receiving.begin(now)
            for move in receiving.pump(now):
                _, engine = receiving.link.parts()
                self._moves[engine.name, move] = receiving
            self._note(receiving)

    def _hand_out_room(self, now: float) -> None:
        """In the order in which they were expected: whoever waits is not overtaken."""
        for receiving in self._book.live():
            if receiving.waits_for_room and not receiving.take_room(now) and receiving.waits_for_room:
                return

    def tick(self, now: float) -> None:
        for link in list(self._links.values()):
            if not link.ready and now >= link.hello_at:
                link.hello_at = now + self._settings.hello_retry_s
                self._book.send(link.peer, self._local.map_pool() if link.welcomed else self._local.hello())
            elif link.ready and now >= link.beat_at:
                self._beat(link, now)
            self._check_silence(link, now)

    def _beat(self, link: EncoderLink, now: float) -> None:
        live = self._live_with(link.peer)
        transfers = list(link.unconfirmed.items())
        transfers.extend((each.transfer_id, each.state) for each in live)
        self._book.send(link.peer, Heartbeat(number=link.beats.send(now), transfers=transfers))
        for receiving in live:
            receiving.say_again(now)
            self._note(receiving)
        if live or link.unconfirmed:
            link.used_at = now
        link.beat_at = now + (self._settings.beat_s if live or link.unconfirmed else self._settings.idle_beat_s)

    def _check_silence(self, link: EncoderLink, now: float) -> None:
        lease_s = self._settings.lease_s
        silent_since = link.silent_since()
        for receiving in self._live_with(link.peer):
            patience_s = lease_s if link.ready else min(lease_s, self._settings.opening_s)
            if now >= max(silent_since, receiving.expected_at) + patience_s:
                receiving.fail(f"the producer has not answered for {patience_s:g} s")
                self._note(receiving)
        silent = now >= silent_since + lease_s
        if not self._live_with(link.peer) and (silent or now >= link.used_at + self._settings.idle_link_s):
            self._drop_link(link)

    def peer_lost(self, peer: WorkerId, reason: str) -> None:
        """Somebody takes the producer for gone. It may be stopped, and wake up in the middle of a write: every transfer with it
        fails now, but blocks that it was given stay quarantined until it says that it drained, or is proven dead."""
        self._fail_all(peer, f"the producer was lost: {reason}")

    def peer_died(self, peer: WorkerId, reason: str) -> None:
        """The producer is proven dead: it will never write again."""
        link = self._links.get(peer)
        if link is None:
            return
        log.warning("producer is dead", peer=peer, reason=reason)
        self._drop_link(link)
        self._fail_all(peer, f"the producer is gone: {reason}", peer_drained=True)

    def _fail_all(self, peer: WorkerId, reason: str, *, peer_drained: bool = False) -> None:
        for receiving in self._live_with(peer):
            receiving.fail(reason, peer_drained=peer_drained)
            self._note(receiving)

    def close(self, reason: str, *, is_unreachable: bool = False) -> None:
        """Ends every transfer. Blocks that a producer may write come back only when the engines have been closed."""
        for receiving in self._book.live():
            receiving.fail(reason, peer_drained=is_unreachable)
            self._note(receiving)

    # What comes out

    def _note(self, receiving: EmbeddingReceiving) -> None:
        """After whatever may have changed the transfer."""
        peer = receiving.link.peer
        for message in receiving.outgoing:
            self._book.send(peer, message)
        self._news += receiving.arrivals
        receiving.outgoing.clear()
        receiving.arrivals.clear()
        if not receiving.is_over or self._book.find(receiving.transfer_id) is not receiving:
            return
        self._book.end(receiving.transfer_id, receiving.end)
        self.counts.done += receiving.state is EmbeddingState.SUCCESS
        self.counts.failed += receiving.state is EmbeddingState.FAILED
        log.debug("embedding over", transfer=receiving.transfer_id, state=receiving.state)
        if receiving.needs_confirming() and peer in self._links:
            unconfirmed = self._links[peer].unconfirmed
            unconfirmed[receiving.transfer_id] = receiving.state
            while len(unconfirmed) > self._settings.max_ended:
                del unconfirmed[next(iter(unconfirmed))]

    def take_outgoing(self) -> list[tuple[WorkerId, Message]]:
        """Words about transfers wait for the connection to be open: the heartbeat that follows says what they would have."""
        return [
            (peer, message)
            for peer, message in self._book.take_outgoing()
            if not isinstance(message, TransferMessage) or (peer in self._links and self._links[peer].ready)
        ]

    def take_news(self) -> list[EmbeddingArrival]:
        news, self._news = self._news, []
        return news

    def next_tick(self, now: float) -> float:
        """Seconds until `tick` or `pump` has something to do."""
        if any(receiving.is_moving_out for receiving in self._book.live()):
            return 0.0
        due = [link.beat_at if link.ready else link.hello_at for link in self._links.values()]
        waiting = [each.expected_at + self._all_settings.wait_s for each in self._book.live() if each.waits_for_room]
        return max(0.0, min([*due, *waiting], default=now + 1.0) - now)

    @property
    def counts(self) -> RelayCounts:
        return self._book.counts

    @property
    def num_live(self) -> int:
        return self._book.num_live

    def state_of(self, transfer_id: TransferId) -> EmbeddingState | None:
        receiving, end = self._book.find(transfer_id), self._book.ended(transfer_id)
        return receiving.state if receiving is not None else end.state if end is not None else None
