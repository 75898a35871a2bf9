"""All embeddings of a worker that hands them on, to any number of consumers. No thread, no socket, no clock.

Who drives it: the worker's calls (`expect`, `offer`, `abort`), `on_message` for what consumers say, `on_completion` for what a
transfer engine's `poll` gave, `tick` now and then, `peer_lost` when a consumer seems gone. After any of them: `pump`, which
moves or announces what there is room for, then `take_outgoing` and `take_news`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

import msgspec

from kvrelay.errors import ProtocolError, VersionMismatchError
from kvrelay.ids import TransferId, WorkerId
from kvrelay.log import Log
from kvrelay.states import EmbeddingState
from kvrelay.transfer.embedding_book import Book, RelayCounts
from kvrelay.transfer.embedding_sending import EmbeddingSending, SendingEnd
from kvrelay.transfer.embedding_session import LocalPool, PoolLink, accept_pool, check_hello
from kvrelay.transfer.engines.base import Completion, MoveId, TransferEngine, TransferError
from kvrelay.transfer.session import TransferSettings
from kvrelay.wire.embedding import Failed, Heartbeat, HeartbeatAck, Init, MapPool, Received, Resume, ToProducer
from kvrelay.wire.transfer import Abort, AbortAck, Hello, Message, Refused, TransferMessage

log = Log("transfer.embedding.producer")

AboutTransfer = Init | Resume | Received | Abort | AbortAck


class EmbeddingSent(msgspec.Struct, frozen=True):
    """How an expected transfer ended. `error` is empty when every consumer has everything."""

    transfer_id: TransferId
    error: str = ""
    is_unwanted: bool = False  # it was a consumer that ended it


class EmbeddingProducerMachine:
    """See the module. Every method may be called in any order; what is over is ignored."""

    def __init__(self, local: LocalPool, settings: TransferSettings) -> None:
        self._local = local
        self._settings = settings
        self._links: dict[WorkerId, PoolLink] = {}
        self._moves: dict[tuple[str, MoveId], tuple[EmbeddingSending, WorkerId]] = {}
        self._book: Book[EmbeddingSending, SendingEnd] = Book(settings)
        self._untold: set[TransferId] = set()
        self._news: list[EmbeddingSent] = []

    # The worker's calls

    def expect(self, transfer_id: TransferId, consumers: Sequence[WorkerId], now: float) -> None:
        """An embedding will be offered; these will ask for it."""
        if self._book.knows(transfer_id):
            end = self._book.ended(transfer_id)
            self._news.append(
                EmbeddingSent(transfer_id, (end and end.reason) or "its transfer id was used before", end is not None)
            )
            return
        sending = EmbeddingSending(transfer_id, consumers, self._local.pool, self.counts, self._settings.lease_s)
        self._book.add(transfer_id, sending)
        self._untold.add(transfer_id)
        for peer in consumers:
            message = self._book.unpark(transfer_id, peer)
            if isinstance(message, Init):
                self._to_transfer(sending, peer, message, now)

    def offer(self, transfer_id: TransferId, blocks: tuple[int, ...], total_tokens: int, now: float) -> None:
        """The embedding is in these blocks of the pool, which are the relay's from now on."""
        sending = self._book.find(transfer_id)
        if sending is None:
            self._local.pool.give_back(blocks)
        else:
            sending.offer(blocks, total_tokens, now)

    def abort(self, transfer_id: TransferId) -> None:
        """Nothing more is told of it."""
        self._untold.discard(transfer_id)
        self._news = [news for news in self._news if news.transfer_id != transfer_id]
        sending = self._book.find(transfer_id)
        if sending is not None:
            sending.fail("the encode worker ended it")
            self._note(sending)

    # What consumers say

    def on_message(self, peer: WorkerId, message: ToProducer, now: float) -> None:
        link = self._links.get(peer)
        if link is not None:
            link.heard_at = now
        match message:
            case Hello():
                self._on_hello(peer, message, now)
            case MapPool():
                self._on_map_pool(peer, link, message)
            case Heartbeat() | Init() | Resume() | Received() | Abort() | AbortAck():
                if link is None or not link.open:
                    self._send(peer, Refused(reason="no connection was opened", about="sender"))
                elif isinstance(message, Heartbeat):
                    self._on_heartbeat(peer, message, now)
                else:
                    self._on_transfer_message(peer, message, now)
            case _:
                assert_never(message)

    def on_malformed(self, peer: WorkerId, error: ProtocolError) -> None:
        self.counts.malformed += 1
        log.seldom("malformed message", peer=peer, error=error)
        self._send(peer, Refused(reason=str(error)[:500], about="frame"))

    def _on_hello(self, peer: WorkerId, hello: Hello, now: float) -> None:
        try:
            check_hello(self._local, peer, hello)
            if peer not in self._links and len(self._links) >= self._settings.max_links:
                raise VersionMismatchError(f"this worker has {len(self._links)} consumers, its limit")
        except VersionMismatchError as error:
            self._refuse(peer, str(error))
            return
        self._links.setdefault(peer, PoolLink(peer, heard_at=now))
        self._send(peer, self._local.welcome())

    def _on_map_pool(self, peer: WorkerId, link: PoolLink | None, message: MapPool) -> None:
        if link is None:
            self._send(peer, Refused(reason="no hello came before", about="sender"))
            return
        try:
            answer = accept_pool(self._local, link, message)
        except (VersionMismatchError, TransferError) as error:
            self._refuse(peer, str(error))
            return
        self._send(peer, answer)

    def _refuse(self, peer: WorkerId, reason: str) -> None:
        """An opening that cannot work ends every transfer to it; a connection that is open stays as it is."""
        log.seldom("consumer refused", peer=peer, reason=reason)
        self._send(peer, Refused(reason=reason, about="opening"))
        link = self._links.get(peer)
        if link is None or not link.open:
            self._links.pop(peer, None)
            self._fail_all(peer, f"the connection was refused: {reason}", is_gone=True)

    def _on_heartbeat(self, peer: WorkerId, beat: Heartbeat, now: float) -> None:
        states: list[tuple[TransferId, EmbeddingState | None]] = []
        for transfer_id, theirs in beat.transfers:
            sending, end = self._book.find(transfer_id), self._book.ended(transfer_id)
            if sending is not None and peer in sending.destinations:
                self._beat(sending, peer, theirs, now)
                states.append((transfer_id, sending.state))
            elif end is not None and end.concerns(peer):
                states.append((transfer_id, end.state))
            else:
                states.append((transfer_id, None))
        self._send(peer, HeartbeatAck(number=beat.number, transfers=states))

    def _beat(self, sending: EmbeddingSending, peer: WorkerId, theirs: EmbeddingState, now: float) -> None:
        match theirs:
            case EmbeddingState.SUCCESS:
                sending.received(peer)
            case EmbeddingState.FAILED:
                sending.consumer_aborted(peer, "it failed there")
            case EmbeddingState.BOOTSTRAPPING | EmbeddingState.WAITING_FOR_INPUT | EmbeddingState.TRANSFERRING:
                sending.heartbeat(peer, now)
            case _:
                assert_never(theirs)
        self._note(sending)

    def _on_transfer_message(self, peer: WorkerId, message: AboutTransfer, now: float) -> None:
        sending, end = self._book.find(message.transfer_id), self._book.ended(message.transfer_id)
        if sending is not None and peer in sending.destinations:
            self._to_transfer(sending, peer, message, now)
        elif end is not None and end.concerns(peer):
            self._late(peer, message, end)
        elif sending is not None or end is not None:
            self.counts.foreign += 1
            if isinstance(message, Abort):  # true: nothing is written for a worker that has no part in it
                self._send(peer, AbortAck(transfer_id=message.transfer_id))
        else:
            self._unknown(peer, message, now)

    def _to_transfer(self, sending: EmbeddingSending, peer: WorkerId, message: AboutTransfer, now: float) -> None:
        link = self._links.get(peer)
        try:
            match message:
                case Init() | Resume():
                    if link is not None and link.open:  # a parked one may have outlived its connection
                        sending.request(peer, link, message, now)
                case Received():
                    sending.received(peer)
                case Abort():
                    sending.consumer_aborted(peer, message.reason)
                case AbortAck():
                    sending.let_go(peer)
                case _:
                    assert_never(message)
        except TransferError as error:
            sending.fail(f"the consumer asked for what cannot be: {error}")
        self._note(sending)

    def _late(self, peer: WorkerId, message: AboutTransfer, end: SendingEnd) -> None:
        """The transfer is over here. Whoever waits for an answer gets it again."""
        self.counts.duplicates += 1
        match message:
            case Abort():
                self._send(peer, AbortAck(transfer_id=message.transfer_id))
            case Init() | Resume():
                self._send(peer, end.answer(message.transfer_id))
            case Received() | AbortAck():
                pass  # nobody waits
            case _:
                assert_never(message)

    def _unknown(self, peer: WorkerId, message: AboutTransfer, now: float) -> None:
        """This worker has not heard of the transfer: its request may be on the way, or long forgotten."""
        match message:
            case Init():
                self._book.park(peer, message, now)
            case Resume():
                self.counts.unknown += 1
                self._send(peer, Failed(transfer_id=message.transfer_id, reason="the producer does not know it"))
            case Abort():
                self.counts.unknown += 1
                self._book.unpark(message.transfer_id, peer)
                reason = f"the consumer ended it: {message.reason}"
                self._book.end(message.transfer_id, SendingEnd(EmbeddingState.FAILED, None, reason))
                self._send(peer, AbortAck(transfer_id=message.transfer_id))
            case Received() | AbortAck():
                self.counts.unknown += 1
            case _:
                assert_never(message)

    # Moves, time, and peers that go

    def on_completion(self, engine: TransferEngine, completion: Completion) -> None:
        sending, peer = self._moves.pop((engine.name, completion.id), (None, None))
        if sending is not None and peer is not None:
            sending.moved(peer, completion.id, completion.error)
            self._note(sending)

    def pump(self) -> None:
        for sending in self._book.live():
            for destination, key in sending.pump():
                self._moves[key] = (sending, destination)
            self._note(sending)

    def tick(self, now: float) -> None:
        lease_s = self._settings.lease_s
        for sending in self._book.live():
            sending.tick(now, lease_s)
            self._note(sending)
        for peer in [peer for peer, link in self._links.items() if now >= link.heard_at + lease_s]:
            self._forget_peer(peer, f"the consumer has been silent for {lease_s:g} s")
        self._book.expire_parked(now)

    def peer_lost(self, peer: WorkerId, reason: str) -> None:
        """Somebody takes the consumer for gone. It may be stopped, and wake up within its lease: every transfer with it fails
        now, but blocks that it was told to read are held until it lets go or the lease is over."""
        self._fail_all(peer, f"the consumer was lost: {reason}", is_gone=False)

    def _forget_peer(self, peer: WorkerId, reason: str) -> None:
        """It has lost its leases by silence. Should it come back, it must say hello again."""
        link = self._links.pop(peer)
        self._fail_all(peer, reason, is_gone=True)
        if link.engine is not None:
            link.engine.remove_peer(peer)

    def _fail_all(self, peer: WorkerId, reason: str, *, is_gone: bool) -> None:
        for sending in self._book.live():
            if peer in sending.destinations and not sending.destinations[peer].is_complete:
                sending.fail(reason, gone=peer if is_gone else None)
                self._note(sending)

    def close(self, reason: str) -> None:
        """Ends every transfer. Those with moves under way end when the engines have been closed and polled."""
        for sending in self._book.live():
            for peer in sending.destinations:
                sending.fail(reason, gone=peer)
            self._note(sending)

    # What comes out

    def _note(self, sending: EmbeddingSending) -> None:
        """After whatever may have changed the transfer."""
        for peer, message in sending.outgoing:
            self._send(peer, message)
        sending.outgoing.clear()
        has_outcome = sending.state in (EmbeddingState.SUCCESS, EmbeddingState.FAILED)
        if has_outcome and sending.transfer_id in self._untold:
            self._untold.discard(sending.transfer_id)
            self._news.append(EmbeddingSent(sending.transfer_id, sending.failure, sending.is_unwanted))
        if sending.is_over and self._book.find(sending.transfer_id) is sending:
            self._book.end(sending.transfer_id, sending.end)
            self.counts.done += sending.state is EmbeddingState.SUCCESS
            self.counts.failed += sending.state is EmbeddingState.FAILED
            log.debug("embedding over", transfer=sending.transfer_id, state=sending.state)

    def _send(self, peer: WorkerId, message: Message) -> None:
        self._book.send(peer, message)

    def take_outgoing(self) -> list[tuple[WorkerId, Message]]:
        """Words about transfers wait for the connection to be open: a consumer asks again."""
        return [
            (peer, message)
            for peer, message in self._book.take_outgoing()
            if not isinstance(message, TransferMessage) or (peer in self._links and self._links[peer].open)
        ]

    def take_news(self) -> list[EmbeddingSent]:
        news, self._news = self._news, []
        return news

    @property
    def counts(self) -> RelayCounts:
        return self._book.counts

    @property
    def num_live(self) -> int:
        return self._book.num_live

    def state_of(self, transfer_id: TransferId) -> EmbeddingState | None:
        sending, end = self._book.find(transfer_id), self._book.ended(transfer_id)
        return sending.state if sending is not None else end.state if end is not None else None
