"""All transfers of a worker that takes memory over, from any number of producers. No thread, no socket, no clock.

Driven as `producer.py` is. Connections are made on demand: the first transfer from a producer opens one (`address_of` says
where), and one that no transfer needs any more is closed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, assert_never

from kvrelay.errors import VersionMismatchError
from kvrelay.ids import TransferId, WorkerId
from kvrelay.log import Log
from kvrelay.states import LinkState
from kvrelay.transfer.engines.base import TransferError
from kvrelay.transfer.relay.desk import Desk
from kvrelay.transfer.relay.kind import DRAINING, FAILED, Layout
from kvrelay.transfer.relay.link import ProducerLink, check_welcome, use_mapped
from kvrelay.transfer.relay.machine import Machine
from kvrelay.transfer.relay.seam import ReceivingTransfer
from kvrelay.wire.relay import Heartbeat, HeartbeatAck, Mapped, Message, Refused, TransferMessage, Welcome

log = Log("transfer.consumer")

T = TypeVar("T", bound=ReceivingTransfer[Any, Any, Any])
L = TypeVar("L", bound=Layout)
N = TypeVar("N")


class ConsumerMachine(Machine[T, L, N]):
    peer_role = "producer"
    nonsense = "invalid announcement from the producer"

    def __init__(self, desk: Desk[L, N]) -> None:
        super().__init__(desk)
        self._links: dict[WorkerId, ProducerLink[L]] = {}

    # Connections

    @property
    def num_links(self) -> int:
        return len(self._links)

    def _may_speak_to(self, peer: WorkerId) -> bool:
        return peer in self._links and self._links[peer].ready

    def address_of(self, peer: WorkerId) -> str:
        return self._links[peer].address

    def producers(self) -> list[WorkerId]:
        return list(self._links)

    def link_to(self, peer: WorkerId, address: str, now: float) -> ProducerLink[L]:
        """Raises TransferError if there are too many."""
        link = self._links.get(peer)
        if link is None:
            if len(self._links) >= self._settings.max_links:
                raise TransferError(f"this worker has {len(self._links)} producers, its limit")
            link = ProducerLink(peer, heard_at=now, address=address, opening_since=now)
            link.hello_at = now + self._settings.hello_retry_s
            self._links[peer] = link
            self.desk.send(peer, self.desk.local.hello())
        link.used_at = now
        link.beat_at = min(link.beat_at, now + self._settings.beat_s)
        return link

    def expect(
        self, transfer_id: TransferId, peer: WorkerId, address: str, make: Callable[[ProducerLink[L]], T], now: float
    ) -> str:
        """A transfer that comes from there. Returns why it cannot; empty if it can."""
        end = self.ended_before(transfer_id, peer)
        if end is not None:
            return end.reason or "its transfer id was used before"
        try:
            self.add(make(self.link_to(peer, address, now)), now)
        except TransferError as error:
            return str(error)
        return ""

    def _drop_link(self, link: ProducerLink[L]) -> None:
        del self._links[link.peer]
        if link.engine is not None:
            link.engine.remove_peer(link.peer)

    # What producers say

    def on_message(self, peer: WorkerId, message: Message, now: float) -> None:
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
            case Mapped():
                self._on_mapped(link, message, now)
            case HeartbeatAck():
                self._on_heartbeat_ack(link, message, now)
            case TransferMessage():
                self._dispatch(peer, message, now)

    def _on_welcome(self, link: ProducerLink[L], welcome: Welcome, now: float) -> None:
        try:
            check_welcome(self.desk.local, welcome)
        except VersionMismatchError as error:
            self._refused(link, str(error))
            return
        if welcome.worker_id != link.peer:
            self.peer_died(link.peer, f"it was replaced: {welcome.worker_id} answers at its address")
        elif link.state is LinkState.HELLO:
            link.advance(LinkState.MAPPING)
            link.hello_at = now + self._settings.hello_retry_s
            self.desk.send(link.peer, self.desk.local.map())

    def _on_refused(self, link: ProducerLink[L], refused: Refused, now: float) -> None:
        match refused.about:
            case "sender" if link.state is not LinkState.HELLO:
                log.info("connection is opened again", peer=link.peer, reason=refused.reason)
                self.counts.reconnects += 1
                link.reopen(now, self._settings.hello_retry_s)
                self.desk.send(link.peer, self.desk.local.hello())
            case "opening" if not link.ready:
                self._refused(link, refused.reason)
            case "opening" | "sender" | "frame":
                log.seldom("producer refused a message", peer=link.peer, reason=refused.reason)
            case _:
                assert_never(refused.about)

    def _refused(self, link: ProducerLink[L], reason: str) -> None:
        """The two cannot work together. What the producer was given to write by an earlier opening stays quarantined."""
        log.error("connection refused", peer=link.peer, reason=reason)
        self.fail_all(link.peer, f"the connection was refused: {reason}")
        link.unconfirmed.clear()
        if not self.table.live_with(link.peer):
            self._drop_link(link)

    def _on_mapped(self, link: ProducerLink[L], message: Mapped[Any], now: float) -> None:
        if link.state is not LinkState.MAPPING:
            self.counts.duplicates += 1
            return
        try:
            use_mapped(self.desk.local, link, message)
        except (VersionMismatchError, TransferError) as error:
            self._refused(link, str(error))
            return
        link.advance(LinkState.READY)
        self._beat(link, now)

    def _on_heartbeat_ack(self, link: ProducerLink[L], ack: HeartbeatAck[Any], now: float) -> None:
        sent_at = link.beats.sent_at(ack.number)
        if sent_at is None:
            self.counts.duplicates += 1
            return
        for transfer_id, theirs in ack.transfers:
            receiving = self.table.find(transfer_id, link.peer)
            if receiving is not None:
                receiving.on_ack(ack.number, sent_at, theirs, now)
                self._note_end(receiving)
            elif theirs in (None, FAILED, self._kind.done):
                link.unconfirmed.pop(transfer_id, None)

    # Time, and peers that go

    def tick(self, now: float) -> None:
        for receiving in self.table.live():
            receiving.tick(now)
            self._note_end(receiving)
        for link in list(self._links.values()):
            if not link.ready and now >= link.hello_at:
                link.hello_at = now + self._settings.hello_retry_s
                self.counts.repeats += 1
                local, is_mapping = self.desk.local, link.state is LinkState.MAPPING
                self.desk.send(link.peer, local.map() if is_mapping else local.hello())
            elif link.ready and now >= link.beat_at:
                self._beat(link, now)
            self._check_silence(link, now)
        self.table.drop_old_messages(now)

    def next_tick(self, now: float) -> float:
        """Seconds until `tick` or `pump` has something to do."""
        due = [link.beat_at if link.ready else link.hello_at for link in self._links.values()]
        due.extend(at for receiving in self.table.live() if (at := receiving.next_at) is not None)
        return max(0.0, min(due, default=now + 1.0) - now)

    def _beat(self, link: ProducerLink[L], now: float) -> None:
        live = self.table.live_with(link.peer)
        transfers: list[Any] = list(link.unconfirmed.items())
        transfers.extend((each.transfer_id, each.state) for each in live if each.state != DRAINING)  # those say Abort
        self.desk.send(link.peer, Heartbeat(number=link.beats.send(now), transfers=transfers))
        for receiving in live:
            receiving.say_again(now)
        busy = bool(live or link.unconfirmed)
        if busy:
            link.used_at = now
        link.beat_at = now + (self._settings.beat_s if busy else self._settings.idle_beat_s)

    def _check_silence(self, link: ProducerLink[L], now: float) -> None:
        lease_s, silent_since = self._settings.lease_s, link.silent_since()
        for receiving in self.table.live_with(link.peer):
            patience_s = lease_s if link.ready or receiving.is_begun else min(lease_s, self._settings.opening_s)
            if now >= max(silent_since, receiving.expected_at) + patience_s:
                receiving.fail(f"the producer has not answered for {patience_s:g} s", link.peer)
                self._note_end(receiving)
        silent = now >= silent_since + lease_s
        if not self.table.live_with(link.peer) and (silent or now >= link.used_at + self._settings.idle_link_s):
            self._drop_link(link)

    def peer_lost(self, peer: WorkerId, reason: str) -> None:
        """A router considers the producer gone. It may be stopped, and wake up in the middle of a write: every transfer with it
        fails now, but blocks that it was given stay quarantined until it says that it drained, or is proven dead."""
        self.fail_all(peer, f"the producer was lost: {reason}")

    def peer_died(self, peer: WorkerId, reason: str) -> None:
        """The producer is proven dead: it will never write again."""
        link = self._links.get(peer)
        if link is None:
            return
        log.warning("producer is dead", peer=peer, reason=reason)
        self._drop_link(link)
        self.fail_all(peer, f"the producer is gone: {reason}", drained=True)

    def _ended(self, transfer: T) -> None:
        peer = transfer.link.peer
        if transfer.needs_confirming and peer in self._links:
            unconfirmed = self._links[peer].unconfirmed
            unconfirmed[transfer.transfer_id] = transfer.state
            while len(unconfirmed) > self._settings.max_ended:
                del unconfirmed[next(iter(unconfirmed))]
