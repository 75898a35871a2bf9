"""What both sides of the relay do with their transfers: find the one that a message is about, answer what comes early or late,
hand out moves, and note ends. No thread, no socket, no clock."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

from kvrelay.errors import ProtocolError
from kvrelay.ids import TransferId, WorkerId
from kvrelay.log import Log
from kvrelay.transfer.engines.base import Completion, TransferEngine, TransferError
from kvrelay.transfer.relay.desk import Desk
from kvrelay.transfer.relay.kind import FAILED, End, Layout, MoveKey
from kvrelay.transfer.relay.seam import Transfer
from kvrelay.transfer.relay.table import TransferTable
from kvrelay.wire.relay import Abort, AbortAck, Message, TransferMessage

log = Log("transfer")

T = TypeVar("T", bound=Transfer[Any, Any, Any])
L = TypeVar("L", bound=Layout)
N = TypeVar("N")


class Machine(abc.ABC, Generic[T, L, N]):
    """Every method may be called in any order; what is over is ignored. After any of them: `pump`, then `take_outgoing` and
    `take_news` in either order, then `desk.write_log`."""

    peer_role: ClassVar[str]
    nonsense: ClassVar[str]  # why a transfer fails whose peer talks nonsense

    def __init__(self, desk: Desk[L, N]) -> None:
        self.desk = desk
        self._kind = desk.local.kind
        self._settings = desk.settings
        self._moves: dict[MoveKey, T] = {}
        self.counts = desk.counts
        self.table: TransferTable[T] = TransferTable(desk.settings, desk.counts)

    # What the owner does

    def ended_before(self, transfer_id: TransferId, peer: WorkerId) -> End | None:
        """Of a transfer that is known already: how it ended, or that its id was used for another one."""
        if not self.table.knows(transfer_id):
            return None
        used = End(FAILED, (peer,), "its transfer id was used before")
        return self.table.ended(transfer_id, peer) or used

    def add(self, transfer: T, now: float) -> None:
        """It must not be known."""
        self.table.add(transfer)
        for peer in transfer.peers:
            message = self.table.take_held_back(transfer.transfer_id, peer)
            if message is not None:
                self._to_transfer(transfer, peer, message, now)

    def tell(self, name: str, action: Callable[[T], None]) -> bool:
        """The owner's word about a transfer that it calls so. Whether there is one."""
        transfer = self.table.named(name)
        if transfer is not None:
            action(transfer)
            self._note_end(transfer)
        return transfer is not None

    # What peers say

    def on_malformed(self, peer: WorkerId, error: ProtocolError) -> None:
        self.counts.malformed += 1
        log.seldom("malformed message", peer=peer, error=error)

    def _dispatch(self, peer: WorkerId, message: TransferMessage, now: float) -> None:
        """About one transfer: it lives, or is over, or belongs to others, or is not known."""
        transfer = self.table.find(message.transfer_id, peer)
        if transfer is not None:
            self._to_transfer(transfer, peer, message, now)
        elif (end := self.table.ended(message.transfer_id, peer)) is not None:
            self.counts.duplicates += 1
            self._answer(peer, message, end.replay if isinstance(message, self._kind.asks) else None)
        elif self.table.knows(message.transfer_id):
            self.counts.foreign += 1
            self._answer(peer, message)
        else:
            self._unknown(peer, message, now)

    def _to_transfer(self, transfer: T, peer: WorkerId, message: TransferMessage, now: float) -> None:
        try:
            transfer.on_message(peer, message, now)
        except TransferError as error:
            transfer.fail(f"{self.nonsense}: {error}", peer)
        self._note_end(transfer)

    def _unknown(self, peer: WorkerId, message: TransferMessage, now: float) -> None:
        """This worker has not heard of the transfer: its request may be on the way, or long forgotten."""
        if isinstance(message, self._kind.held_back):
            self.table.hold_back(peer, message, now)
            return
        self.counts.unknown += 1
        if isinstance(message, Abort):
            self._end_early(peer, message, FAILED, f"the {self.peer_role} ended it: {message.reason}")
        elif isinstance(message, self._kind.unwanted):
            self._end_early(peer, message, self._kind.done, "")
        self._answer(peer, message, self._kind.answer_unknown(message))

    def _end_early(self, peer: WorkerId, message: TransferMessage, state: str, reason: str) -> None:
        self.table.take_held_back(message.transfer_id, peer)
        replay = Abort(transfer_id=message.transfer_id, reason=reason or "it was over before")
        self.table.remember(message.transfer_id, End(state, (), reason, replay))

    def _answer(self, peer: WorkerId, message: TransferMessage, answer: TransferMessage | None = None) -> None:
        """AbortAck is true of any transfer that does not live here: nothing of it is read or written."""
        if isinstance(message, Abort):
            answer = AbortAck(transfer_id=message.transfer_id)
        if answer is not None:
            self.desk.send(peer, answer)

    # Moves

    def on_completion(self, engine: TransferEngine, completion: Completion) -> None:
        move = (engine.name, completion.id)
        transfer = self._moves.pop(move, None)
        if transfer is not None:
            transfer.moved(move, completion.error)
            self._note_end(transfer)

    def pump(self, now: float) -> None:
        """Fair: every transfer may have `max_moves_per_transfer` under way, as long as `max_moves` lasts. `now` is a time after
        the last completions were polled: readers' leases are judged by it."""
        most, most_of_one = self._settings.max_moves, self._settings.max_moves_per_transfer
        for transfer in self.table.live():
            room = most - self.counts.num_moves + transfer.num_moves
            for move in transfer.pump(min(most_of_one, room), now):
                self._moves[move] = transfer
            self._note_end(transfer)

    # Ends

    def fail_all(self, peer: WorkerId, reason: str, *, drained: bool = False) -> None:
        for transfer in self.table.live_with(peer):
            transfer.fail(reason, peer, drained=drained)
            self._note_end(transfer)

    def close(self, reason: str, *, drained: bool) -> None:
        """Ends every transfer. Those with moves under way end when the engines have been closed and polled."""
        for transfer in self.table.live():
            for peer in transfer.peers:
                transfer.fail(reason, peer, drained=drained)
            self._note_end(transfer)

    def _note_end(self, transfer: T) -> None:
        if transfer.is_over and self.table.is_live(transfer):
            self.table.end(transfer)
            failed = transfer.state == FAILED
            self.counts.done += not failed
            self.counts.failed += failed
            log.debug("transfer over", transfer=transfer.transfer_id, name=transfer.name, state=transfer.state)
            self._ended(transfer)

    def _ended(self, transfer: T) -> None:
        """What else one side does then."""

    # What comes out

    def take_outgoing(self) -> list[tuple[WorkerId, Message]]:
        """Words about transfers wait for the connection to be open: then the other side is told where each of them is."""
        return [
            (peer, message)
            for peer, message in self.desk.take_outgoing()
            if not isinstance(message, TransferMessage) or self._may_speak_to(peer)
        ]

    @abc.abstractmethod
    def _may_speak_to(self, peer: WorkerId) -> bool: ...

    def take_news(self) -> N | None:
        return self.desk.take_news()

    @property
    @abc.abstractmethod
    def num_links(self) -> int: ...
