"""All transfers of a worker that hands memory on, to any number of consumers. No thread, no socket, no clock.

Driven by the owner's calls (`add`, `tell`), `on_message` for what consumers say, `on_completion` for what a transfer engine's
`poll` gave, `tick` now and then, `peer_lost` when a consumer seems gone. After any of them: `pump`, which moves or announces
what is new, then `take_outgoing`, `take_news` and `desk.write_log`.
"""

from __future__ import annotations

from typing import Any, TypeVar

from kvrelay.errors import ProtocolError, VersionMismatchError, WrongIdError
from kvrelay.ids import TransferId, WorkerId
from kvrelay.log import Log
from kvrelay.transfer.engines.base import TransferError
from kvrelay.transfer.relay.kind import Layout
from kvrelay.transfer.relay.link import Link, accept_map, check_hello
from kvrelay.transfer.relay.machine import Machine
from kvrelay.transfer.relay.seam import SendingTransfer
from kvrelay.wire.relay import Heartbeat, HeartbeatAck, Hello, Map, Message, Refused, TransferMessage

log = Log("transfer.producer")

T = TypeVar("T", bound=SendingTransfer[Any, Any, Any])
L = TypeVar("L", bound=Layout)
N = TypeVar("N")


class ProducerMachine(Machine[T, L, N]):
    peer_role = "consumer"
    nonsense = "invalid request from the consumer"

    @property
    def num_links(self) -> int:
        return len(self.desk.links)

    def _may_speak_to(self, peer: WorkerId) -> bool:
        link = self.desk.links.get(peer)
        return link is not None and link.open

    # What consumers say

    def on_message(self, peer: WorkerId, message: Message, now: float) -> None:
        link = self.desk.links.get(peer)
        if link is not None:
            link.heard_at = now
        match message:
            case Hello():
                self._on_hello(peer, message, now)
            case Map():
                self._on_map(peer, link, message)
            case _ if link is None or not link.open:
                self.desk.send(peer, Refused(reason="no connection was opened", about="sender"))
            case Heartbeat():
                self._on_heartbeat(peer, message, now)
            case TransferMessage():
                self._dispatch(peer, message, now)

    def on_stranger(self, error: WrongIdError) -> None:
        self.counts.malformed += 1
        log.seldom("message of a stranger", error=error)

    def on_malformed(self, peer: WorkerId, error: ProtocolError) -> None:
        super().on_malformed(peer, error)
        self.desk.send(peer, Refused(reason=str(error)[:500], about="frame"))

    def _on_hello(self, peer: WorkerId, hello: Hello, now: float) -> None:
        links = self.desk.links
        try:
            check_hello(self.desk.local, peer, hello)
            if peer not in links and len(links) >= self._settings.max_links:
                raise VersionMismatchError(f"this worker has {len(links)} consumers, its limit")
        except VersionMismatchError as error:
            self._refuse(peer, str(error))
            return
        links.setdefault(peer, Link(peer, heard_at=now))
        self.desk.send(peer, self.desk.local.welcome())

    def _on_map(self, peer: WorkerId, link: Link[L] | None, message: Map[Any]) -> None:
        if link is None:
            self.desk.send(peer, Refused(reason="no hello came before", about="sender"))
            return
        try:
            answer = accept_map(self.desk.local, link, message)
        except (VersionMismatchError, TransferError) as error:
            self._refuse(peer, str(error))
            return
        self.desk.send(peer, answer)
        for sending in self.table.live_with(peer):
            sending.on_open(peer)

    def _refuse(self, peer: WorkerId, reason: str) -> None:
        """An opening that cannot work ends every transfer between the two; a connection that is open stays as it is."""
        log.seldom("consumer refused", peer=peer, reason=reason)
        self.desk.send(peer, Refused(reason=reason, about="opening"))
        if not self._may_speak_to(peer):
            self.desk.links.pop(peer, None)
            self.fail_all(peer, f"the connection was refused: {reason}", drained=True)

    def _on_heartbeat(self, peer: WorkerId, beat: Heartbeat[Any], now: float) -> None:
        states = [(transfer_id, self._on_beat(peer, transfer_id, theirs, now)) for transfer_id, theirs in beat.transfers]
        self.desk.send(peer, HeartbeatAck(number=beat.number, transfers=states))

    def _on_beat(self, peer: WorkerId, transfer_id: TransferId, theirs: Any, now: float) -> Any:
        """The state here of a transfer that a heartbeat lists; none if it is not known."""
        sending = self.table.find(transfer_id, peer)
        if sending is not None:
            sending.on_beat(peer, theirs, now)
            self._note_end(sending)
            return sending.state
        end = self.table.ended(transfer_id, peer)
        if end is None:
            return None
        if theirs in self._kind.waits and end.replay is not None:
            self.counts.repeats += 1
            self.desk.send(peer, end.replay)
        return end.state

    # Time, and peers that go

    def tick(self, now: float) -> None:
        for sending in self.table.live():
            sending.tick(now)
            self._note_end(sending)
        lease_s = self._settings.lease_s
        for peer in [peer for peer, link in self.desk.links.items() if now >= link.heard_at + lease_s]:
            self._forget_peer(peer, f"the consumer has been silent for {lease_s:g} s")
        self.table.drop_old_messages(now)

    def peer_lost(self, peer: WorkerId, reason: str) -> None:
        """A router considers the consumer gone. It may be stopped, and wake up within its lease: every transfer with it fails
        now, but blocks that it was told to read are held until it lets go or the lease is over."""
        self.fail_all(peer, f"the consumer was lost: {reason}")

    def _forget_peer(self, peer: WorkerId, reason: str) -> None:
        """It has lost its leases by silence. Should it come back, it must say hello again."""
        self.fail_all(peer, reason, drained=True)
        link = self.desk.links.pop(peer)
        if link.engine is not None:
            link.engine.remove_peer(peer)
