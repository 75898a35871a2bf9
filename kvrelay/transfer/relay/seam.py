"""What the relay needs of a kind of memory that it hands over: a `Kind` (`kind.py`), and the transfers of this file.

A transfer dispatches its own messages. The machines (`producer.py`, `consumer.py`) find it by its id and the peer, and know
nothing of what the messages say; they own connections, heartbeats, the table of transfers, and the bounds on moves. After every
call they look whether the transfer is over, and remember its `end` for those who ask late.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

import msgspec

from kvrelay.ids import TransferId, WorkerId
from kvrelay.transfer.engines.base import MoveId
from kvrelay.transfer.relay.kind import State
from kvrelay.transfer.relay.link import ProducerLink
from kvrelay.wire.relay import TransferMessage

MoveKey = tuple[str, MoveId]
"""A transfer engine's name, and its number of a move."""


class End(msgspec.Struct, frozen=True):
    """What is remembered of a transfer that ended."""

    state: str  # of its kind
    peers: tuple[WorkerId, ...]  # none: it ended before this worker was told who they are
    reason: str = ""
    replay: TransferMessage | None = None  # the answer to a peer that asks late

    def concerns(self, peer: WorkerId) -> bool:
        return not self.peers or peer in self.peers


class Transfer(Protocol):
    """One transfer, on either side. Driven by one thread."""

    @property
    def transfer_id(self) -> TransferId: ...

    @property
    def name(self) -> str:
        """What its owner calls it: a RequestId, or the TransferId itself."""

    @property
    def peers(self) -> Collection[WorkerId]: ...

    @property
    def state(self) -> State: ...

    @property
    def is_over(self) -> bool:
        """It has its outcome, and holds nothing that a peer or a move may touch."""

    @property
    def end(self) -> End:
        """Of one that is over."""

    @property
    def num_moves(self) -> int:
        """Under way."""

    def on_message(self, peer: WorkerId, message: TransferMessage, now: float) -> None:
        """Raises TransferError if what the peer says makes no sense."""

    def moved(self, move: MoveKey, error: str) -> None: ...

    def pump(self, max_moves: int, now: float) -> list[MoveKey]:
        """Moves or announces what is new, with at most `max_moves` under way. Returns the moves it began."""

    def tick(self, now: float) -> None: ...

    def fail(self, reason: str, peer: WorkerId, *, drained: bool = False) -> None:
        """Because of `peer`; `drained`: that peer neither reads nor writes any more. Harmless if over."""


class SendingTransfer(Transfer, Protocol):
    """On the side that has the memory."""

    def on_open(self, peer: WorkerId) -> None:
        """The connection has just been opened: says what the consumer has missed."""

    def on_beat(self, peer: WorkerId, theirs: Any, now: float) -> None:
        """A heartbeat lists the transfer in this state."""


class ReceivingTransfer(Transfer, Protocol):
    """On the side that needs it."""

    @property
    def link(self) -> ProducerLink[Any]: ...

    @property
    def expected_at(self) -> float: ...

    @property
    def is_begun(self) -> bool:
        """The producer was asked: its silence is not that of one that cannot be reached."""

    @property
    def is_listed(self) -> bool:
        """Whether heartbeats list it. One that is ending says Abort instead."""

    @property
    def needs_confirming(self) -> bool:
        """Of one that is over: whether the producer may hold something for it, should the last message get lost."""

    @property
    def next_at(self) -> float | None:
        """When `tick` or `pump` is due, besides whenever something happens."""

    def on_ack(self, number: int, sent_at: float, theirs: Any, now: float) -> None:
        """The producer's state, in answer to heartbeat `number`; none: it does not know the transfer."""

    def say_again(self, now: float) -> None:
        """With every heartbeat, until it is answered."""
