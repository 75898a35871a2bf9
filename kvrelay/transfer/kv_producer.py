"""All transfers of a worker that hands KV on, to any number of consumers. No thread, no socket, no clock.

Who drives it: the engine's calls (`expect` ... `abort`), `on_message` for what consumers say, `on_completion` for what a
transfer engine's `poll` gave, `tick` now and then, `peer_lost` when a consumer seems gone. After any of them: `pump`, which
moves or announces what is new, then `take_outgoing` and `take_news`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from kvrelay.engine.movers import ProducerNews
from kvrelay.errors import ProtocolError, VersionMismatchError
from kvrelay.ids import RequestId, WorkerId, as_request_id, as_transfer_id, as_worker_id
from kvrelay.log import Log
from kvrelay.states import ConsumerState, ProducerState
from kvrelay.transfer.desk import ProducerDesk, ProducerEnd
from kvrelay.transfer.engines.base import Completion, MoveId, TransferEngine, TransferError
from kvrelay.transfer.plan import TransferMeta
from kvrelay.transfer.sending import OVER, Sending
from kvrelay.transfer.session import Link, LocalSide, TransferSettings, accept_region, check_hello
from kvrelay.transfer.table import TransferTable
from kvrelay.wire.registry import TransferCounts
from kvrelay.wire.serving import FirstToken, TransferInfo
from kvrelay.wire.transfer import (
    Abort,
    AbortAck,
    Heartbeat,
    HeartbeatAck,
    Hello,
    MapRegion,
    Message,
    NotReady,
    Pull,
    ReadDone,
    Refused,
    RegionMapped,
    Release,
    Reserve,
    ToProducer,
    TransferMessage,
    Unreserve,
    Unreserved,
)

log = Log("transfer.producer")

AboutTransfer = Reserve | Unreserve | Pull | ReadDone | Release | Abort | AbortAck


class ProducerMachine:
    """See the module. Every method may be called in any order; what is over is ignored."""

    def __init__(self, local: LocalSide, settings: TransferSettings) -> None:
        self._local = local
        self._settings = settings
        self._desk = ProducerDesk(local.layout)
        self._links: dict[WorkerId, Link] = {}
        self._moves: dict[tuple[str, MoveId], Sending] = {}
        self._step: list[tuple[Sending, int]] = []
        self.malformed = 0
        self.table: TransferTable[Sending, ProducerEnd] = TransferTable(
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
            peer=as_worker_id(transfer.consumer),
            mode=transfer.mode,
            num_tokens=num_tokens,
        )
        if self.table.knows(meta.transfer_id):
            self._ended_before(meta)
            return
        sending = Sending(meta, self._desk, self._settings.lease_s)
        self.table.add(sending)
        for message in self.table.unpark(meta.transfer_id, meta.peer):
            assert isinstance(message, AboutTransfer)
            self._to_transfer(sending, message, now)

    def _ended_before(self, meta: TransferMeta) -> None:
        """The consumer gave up before this worker had heard of the transfer."""
        end = self.table.ended(meta.transfer_id, meta.peer)
        self._desk.news.released.append(meta.request_id)
        if end is None or end.state is ProducerState.FAILED:
            reason = end.reason if end is not None else "its transfer id was used before"
            self._desk.news.failed.append((meta.request_id, reason))

    def start(self, request_id: RequestId, blocks: Sequence[int], num_computed: int, now: float) -> None:
        if (sending := self.table.of_request(request_id)) is not None:
            sending.start(tuple(blocks), num_computed, now)

    def begin_step(self, rows: Sequence[tuple[RequestId, int]]) -> None:
        found = ((self.table.of_request(request_id), tokens) for request_id, tokens in rows)
        self._step = [(sending, tokens) for sending, tokens in found if sending is not None]

    def layers_done(self, layers: int) -> None:
        """The pass under way has stored its first `layers` layers."""
        for sending, tokens in self._step:
            sending.computing(tokens, layers)

    def end_step(self) -> None:
        for sending, tokens in self._step:
            sending.computed(tokens)
        self._step = []

    def finish(self, request_id: RequestId, first_tokens: list[FirstToken]) -> None:
        if (sending := self.table.of_request(request_id)) is not None:
            sending.finish(first_tokens)

    def park(self, request_id: RequestId) -> None:
        if (sending := self.table.of_request(request_id)) is not None:
            sending.park()

    def abort(self, request_id: RequestId) -> None:
        sending = self.table.of_request(request_id)
        if sending is not None and sending.state not in OVER:
            sending.abort()
            self._note_end(sending)

    # What consumers say

    def on_message(self, peer: WorkerId, message: ToProducer, now: float) -> None:
        link = self._links.get(peer)
        if link is not None:
            link.heard_at = now
        match message:
            case Hello():
                self._on_hello(peer, message, now)
            case MapRegion():
                self._on_map_region(peer, link, message)
            case Heartbeat() | Reserve() | Unreserve() | Pull() | ReadDone() | Release() | Abort() | AbortAck():
                if link is None or not link.open:
                    self._send(peer, Refused(reason="no connection was opened", about="sender"))
                elif isinstance(message, Heartbeat):
                    self._on_heartbeat(peer, message, now)
                else:
                    self._on_transfer_message(peer, message, now)
            case _:
                assert_never(message)

    def on_malformed(self, peer: WorkerId, error: ProtocolError) -> None:
        self.malformed += 1
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
        self._links.setdefault(peer, Link(peer, heard_at=now))
        self._send(peer, self._local.welcome())

    def _on_map_region(self, peer: WorkerId, link: Link | None, message: MapRegion) -> None:
        if link is None:
            self._send(peer, Refused(reason="no hello came before", about="sender"))
            return
        try:
            answer: RegionMapped = accept_region(self._local, link, message)
        except (VersionMismatchError, TransferError) as error:
            self._refuse(peer, str(error))
            return
        self._send(peer, answer)
        for sending in self.table.live_with(peer):
            sending.say_where_it_is()

    def _refuse(self, peer: WorkerId, reason: str) -> None:
        """An opening that cannot work ends every transfer between the two; a connection that is open stays as it is."""
        log.seldom("consumer refused", peer=peer, reason=reason)
        self._send(peer, Refused(reason=reason, about="opening"))
        link = self._links.get(peer)
        if link is None or not link.open:
            self._links.pop(peer, None)
            self._fail_all(peer, f"the connection was refused: {reason}")

    def _on_heartbeat(self, peer: WorkerId, beat: Heartbeat, now: float) -> None:
        states = [(transfer_id, ProducerState.UNKNOWN) for transfer_id, _ in beat.transfers]
        for index, (transfer_id, theirs) in enumerate(beat.transfers):
            sending = self.table.find(transfer_id, peer)
            if sending is not None:
                self._beat(sending, theirs, now)
                states[index] = (transfer_id, sending.state)
            elif (end := self.table.ended(transfer_id, peer)) is not None:
                states[index] = (transfer_id, end.state)
                if theirs is ConsumerState.RESERVED and end.replay is not None:
                    self._send(peer, end.replay)
        self._send(peer, HeartbeatAck(number=beat.number, transfers=states))

    def _beat(self, sending: Sending, theirs: ConsumerState, now: float) -> None:
        match theirs:
            case ConsumerState.DONE if sending.state in (ProducerState.QUEUED, ProducerState.STARTED):
                sending.release()
            case ConsumerState.DONE:
                sending.read_done()
            case ConsumerState.FAILED:
                sending.consumer_aborted("it failed there")
            case ConsumerState.QUEUED | ConsumerState.STARTING | ConsumerState.RESERVED | ConsumerState.DRAINING:
                sending.heartbeat(theirs, now)
            case _:
                assert_never(theirs)
        self._note_end(sending)

    def _on_transfer_message(self, peer: WorkerId, message: AboutTransfer, now: float) -> None:
        sending = self.table.find(message.transfer_id, peer)
        if sending is not None:
            self._to_transfer(sending, message, now)
        elif (end := self.table.ended(message.transfer_id, peer)) is not None:
            self._late(peer, message, end)
        elif self.table.knows(message.transfer_id):
            self.table.stats.foreign += 1
        else:
            self._unknown(peer, message, now)

    def _to_transfer(self, sending: Sending, message: AboutTransfer, now: float) -> None:
        link = self._links.get(sending.meta.peer)
        try:
            match message:
                case Reserve():
                    if link is not None and link.open:  # a parked one may have outlived its connection
                        sending.reserve(link, message, now)
                case Pull():
                    if link is not None and link.open:
                        sending.pull(link, message, now)
                case Unreserve():
                    sending.unreserve(message.reservation)
                case ReadDone() | AbortAck():
                    sending.read_done()
                case Release():
                    sending.release()
                case Abort():
                    sending.consumer_aborted(message.reason)
                case _:
                    assert_never(message)
        except TransferError as error:
            sending.fail(f"the consumer asked for what cannot be: {error}")
        self._note_end(sending)

    def _late(self, peer: WorkerId, message: AboutTransfer, end: ProducerEnd) -> None:
        """The transfer is over here. Whoever waits for an answer gets it again."""
        self.table.stats.duplicates += 1
        match message:
            case Abort():
                self._send(peer, AbortAck(transfer_id=message.transfer_id))
            case Reserve() | Pull() | Unreserve():
                if end.replay is not None and end.replay.reservation == message.reservation:
                    self._send(peer, end.replay)
                else:
                    reason = end.reason or "it was over before"
                    self._send(peer, Abort(transfer_id=message.transfer_id, reason=reason))
            case ReadDone() | Release() | AbortAck():
                pass  # nobody waits
            case _:
                assert_never(message)

    def _unknown(self, peer: WorkerId, message: AboutTransfer, now: float) -> None:
        """This worker has not heard of the transfer: its request may be on the way, or long forgotten."""
        match message:
            case Reserve():
                self.table.park(peer, message, now)
            case Pull():
                self._send(peer, NotReady(transfer_id=message.transfer_id, reservation=message.reservation))
            case Unreserve():
                self.table.unpark(message.transfer_id, peer)
                self._send(peer, Unreserved(transfer_id=message.transfer_id, reservation=message.reservation))
            case Abort():
                self._forget_before_known(peer, message, ProducerEnd(ProducerState.FAILED, message.reason))
                self._send(peer, AbortAck(transfer_id=message.transfer_id))
            case Release():
                self._forget_before_known(peer, message, ProducerEnd(ProducerState.DONE))
            case ReadDone() | AbortAck():
                self.table.stats.unknown += 1
            case _:
                assert_never(message)

    def _forget_before_known(self, peer: WorkerId, message: Abort | Release, end: ProducerEnd) -> None:
        self.table.stats.unknown += 1
        self.table.unpark(message.transfer_id, peer)
        self.table.remember(message.transfer_id, peer, end)

    # Moves, time, and peers that go

    def on_completion(self, engine: TransferEngine, completion: Completion) -> None:
        sending = self._moves.pop((engine.name, completion.id), None)
        if sending is not None:
            sending.moved(completion.id, completion.error)
            self._note_end(sending)

    def pump(self) -> None:
        """Fair: every transfer may have `max_moves_per_transfer` under way, as long as `max_moves` lasts."""
        for sending in self.table.live():
            room = self._settings.max_moves - self._desk.num_moves
            if sending.state is not ProducerState.SENDING:
                continue
            begun = sending.pump(min(self._settings.max_moves_per_transfer, room + sending.num_moves))
            if begun:
                _, engine = self._links[sending.meta.peer].parts()
                self._moves.update({(engine.name, move): sending for move in begun})
            self._note_end(sending)

    def tick(self, now: float) -> None:
        lease_s = self._settings.lease_s
        for sending in self.table.live():
            sending.tick(now, lease_s)
            self._note_end(sending)
        for peer in [peer for peer, link in self._links.items() if now >= link.heard_at + lease_s]:
            self._forget_peer(peer, f"the consumer has been silent for {lease_s:g} s")
        self.table.expire_parked(now)

    def peer_lost(self, peer: WorkerId, reason: str) -> None:
        """Somebody takes the consumer for gone. It may be stopped, and wake up within its lease: every transfer with it fails
        now, but blocks that it was told to read are held until it lets go or the lease is over."""
        for sending in self.table.live_with(peer):
            sending.fail(f"the consumer was lost: {reason}")
            self._note_end(sending)

    def _forget_peer(self, peer: WorkerId, reason: str) -> None:
        """It has lost its leases by silence. Should it come back, it must say hello again."""
        link = self._links.pop(peer)
        self._fail_all(peer, reason)
        if link.engine is not None:
            link.engine.remove_peer(peer)

    def _fail_all(self, peer: WorkerId, reason: str) -> None:
        for sending in self.table.live_with(peer):
            sending.fail(reason, reader_gone=True)
            self._note_end(sending)

    def close(self, reason: str) -> None:
        """Ends every transfer. Those with moves under way end when the engines have been closed and polled."""
        for sending in self.table.live():
            sending.fail(reason, reader_gone=True)
            self._note_end(sending)

    # What comes out

    def _note_end(self, sending: Sending) -> None:
        if sending.state in OVER and self.table.is_live(sending):
            self.table.end(sending, sending.end)
            log.debug("transfer over", transfer=sending.meta.transfer_id, request=sending.meta.request_id, state=sending.state)
            if sending.silent:
                self.table.remove(sending.meta.request_id)

    def _send(self, peer: WorkerId, message: Message) -> None:
        self._desk.send(peer, message)

    def take_outgoing(self) -> list[tuple[WorkerId, Message]]:
        """Words about transfers wait for the connection to be open: then the consumer is told where each of them is."""
        return [
            (peer, message)
            for peer, message in self._desk.take_outgoing()
            if not isinstance(message, TransferMessage) or (peer in self._links and self._links[peer].open)
        ]

    def take_news(self) -> ProducerNews:
        """Hands the outcomes to the scheduler; the names of what ended are forgotten with it."""
        news, self._desk.news = self._desk.news, ProducerNews()
        for request_id in news.released:
            self.table.remove(request_id)
        return news

    @property
    def num_moves(self) -> int:
        return self._desk.num_moves

    def wants_layers(self) -> bool:
        """Whether a layer of the pass under way could be moved as soon as it is computed."""
        return any(sending.state is ProducerState.SENDING for sending, _ in self._step)

    @property
    def num_repeated(self) -> int:
        """Messages about open transfers that said what was known, or came too late to matter."""
        return self._desk.duplicates

    def counts(self) -> TransferCounts:
        return self._desk.counts(self.table.num_live)
