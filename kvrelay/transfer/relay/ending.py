"""Who may still touch the blocks of a transfer, and what is said when it ends. The rules of quarantine stand here, once, for
every kind of memory that is handed over.

    whose blocks     may be touched by                  until
    the producer's   its own writes                     they have ended, however they did
                     a consumer told to read them       it has let go, or its reader's lease is over: then it discards its copy
    the consumer's   its own reads                      they have ended, however they did
                     a producer told to write them      it says that it has written or drained, or is proven dead - never
                                                        because time has passed

So a transfer that fails is DRAINING as long as `is_safe` does not hold, and its blocks are used by nothing else meanwhile.

Last words: a producer says Abort (or AbortAck, to a consumer that said Abort) when its own writes have ended, once. A consumer
says Abort at once and repeats it until the producer answers; it says AbortAck when its own reads have ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from kvrelay.ids import TransferId
from kvrelay.states import PEER_ACCESS_EDGES, PEER_END_EDGES, EndedBy, PeerAccess, PeerEnd, advance
from kvrelay.transfer.engines.base import TransferEngine
from kvrelay.transfer.relay.kind import MoveKey
from kvrelay.wire.relay import Abort, AbortAck


class Failure(msgspec.Struct, frozen=True):
    """Why a transfer did not succeed, and through whom."""

    reason: str = ""
    by: EndedBy = EndedBy.FAULT


@dataclass(slots=True)
class Ending:
    """Of one side of a transfer, towards one peer."""

    transfer_id: TransferId
    moves: dict[MoveKey, int] = field(default_factory=dict)  # ours that are under way, with their bytes
    access: PeerAccess = PeerAccess.NONE
    peer_end: PeerEnd = PeerEnd.UNAWARE

    @property
    def is_safe(self) -> bool:
        """The blocks may be reused."""
        return not self.moves and self.access is PeerAccess.NONE

    def grant(self) -> None:
        """The peer is told of the blocks."""
        if self.access is PeerAccess.NONE:
            self.access = advance(PEER_ACCESS_EDGES, self.access, PeerAccess.GRANTED)

    def let_go(self) -> None:
        """The peer touches the blocks no more, as it said or as was proven."""
        if self.access is PeerAccess.GRANTED:
            self.access = advance(PEER_ACCESS_EDGES, self.access, PeerAccess.NONE)

    def peer_aborted(self) -> None:
        """The peer said Abort. It has let go, and waits for our AbortAck."""
        self.let_go()
        if self.peer_end is not PeerEnd.WAITING:
            self.peer_end = advance(PEER_END_EDGES, self.peer_end, PeerEnd.WAITING)

    def peer_drained(self) -> None:
        """The peer has let go, and need not be told of the end: it knows, or has everything, or is dead."""
        self.let_go()
        if self.peer_end is PeerEnd.UNAWARE:
            self.peer_end = advance(PEER_END_EDGES, self.peer_end, PeerEnd.AWARE)

    def cancel(self, engine: TransferEngine | None) -> None:
        """The moves still have to end."""
        if engine is not None:
            for _, move in self.moves:
                engine.cancel(move)

    def producers_last_word(self, reason: str) -> Abort | AbortAck | None:
        """None while it must wait, or when it was said."""
        if self.moves or self.peer_end is PeerEnd.AWARE:
            return None
        waits = self.peer_end is PeerEnd.WAITING
        self.peer_end = advance(PEER_END_EDGES, self.peer_end, PeerEnd.AWARE)
        return AbortAck(transfer_id=self.transfer_id) if waits else Abort(transfer_id=self.transfer_id, reason=reason)

    def say_abort(self, reason: str, send: Callable[[Abort | AbortAck], None]) -> None:
        """By a consumer, as often as it likes."""
        if self.peer_end is PeerEnd.UNAWARE:
            send(Abort(transfer_id=self.transfer_id, reason=reason))

    def say_drained(self, send: Callable[[Abort | AbortAck], None]) -> None:
        """By a consumer whose reads have ended."""
        if self.peer_end is PeerEnd.WAITING:
            send(AbortAck(transfer_id=self.transfer_id))
