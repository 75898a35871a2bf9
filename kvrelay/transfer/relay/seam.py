"""What the relay needs of a kind of memory that it hands over: a `Kind` (`kind.py`), and for each side a transfer that fills in
the abstract methods of this file. What is here is what every transfer does: how it fails, what it says then, and what a
consumer makes of a producer's answers to heartbeats.

A transfer dispatches its own messages. The machines (`producer.py`, `consumer.py`) find it by its id and the peer, and know
nothing of what the messages say; they own connections, heartbeats, the table of transfers, and the bounds on moves. After every
call they look whether the transfer is over, and remember its `end` for those who ask late.
"""

from __future__ import annotations

import abc
from typing import Any, Generic, TypeVar

from kvrelay.ids import TransferId, WorkerId
from kvrelay.states import EndedBy, PeerEnd
from kvrelay.transfer.engines.base import Ranges, TransferEngine
from kvrelay.transfer.relay.desk import Desk
from kvrelay.transfer.relay.ending import Ending, Failure
from kvrelay.transfer.relay.kind import DRAINING, FAILED, End, Layout, MoveKey, State
from kvrelay.transfer.relay.leases import Answers
from kvrelay.transfer.relay.link import ProducerLink
from kvrelay.wire.relay import Abort, AbortAck, TransferMessage

S = TypeVar("S", bound=State)
L = TypeVar("L", bound=Layout)
N = TypeVar("N")


class Transfer(abc.ABC, Generic[S, L, N]):
    """One transfer, on either side. Driven by one thread. `name` is what its owner calls it: a RequestId, or the TransferId."""

    def __init__(self, transfer_id: TransferId, name: str, peers: tuple[WorkerId, ...], state: S, desk: Desk[L, N]) -> None:
        self.transfer_id = transfer_id
        self.name = name
        self.peers = peers
        self.state = state
        self._desk = desk
        self._failure = Failure()
        self._endings = {peer: Ending(transfer_id) for peer in peers}

    @property
    def is_over(self) -> bool:
        """It has its outcome, and holds nothing that a peer or a move may touch."""
        return self.state in (FAILED, self._desk.local.kind.done)

    @property
    def is_ended(self) -> bool:
        """It has its outcome."""
        return self.state == DRAINING or self.is_over

    @property
    def num_moves(self) -> int:
        """Under way."""
        return sum(len(ending.moves) for ending in self._endings.values())

    @property
    def _by_owner(self) -> bool:
        return self._failure.by is EndedBy.OWNER

    # What a kind does

    @property
    @abc.abstractmethod
    def end(self) -> End:
        """Of one that is over."""

    @abc.abstractmethod
    def moved(self, move: MoveKey, error: str) -> None: ...

    @abc.abstractmethod
    def pump(self, max_moves: int, now: float) -> list[MoveKey]:
        """Moves or announces what is new, with at most `max_moves` under way. Returns the moves it began."""

    @abc.abstractmethod
    def on_message(self, peer: WorkerId, message: TransferMessage, now: float) -> None:
        """Raises TransferError if what the peer says makes no sense."""

    def tick(self, now: float) -> None:
        """Time has passed."""

    @abc.abstractmethod
    def _advance(self, following: S) -> None: ...

    @abc.abstractmethod
    def _on_failing(self) -> None:
        """It has failed; its blocks may still be touched. Tells the owner, unless it was the owner that ended it."""

    @abc.abstractmethod
    def _on_failed(self) -> None:
        """Nothing can touch its blocks any more."""

    def _begin(self, peer: WorkerId, engine: TransferEngine, ranges: Ranges, *, writes: bool) -> MoveKey:
        """A move. Raises TransferError."""
        move = (engine.name, engine.write(peer, ranges) if writes else engine.read(peer, ranges))
        self._endings[peer].moves[move] = int(ranges[:, 2].sum())
        self._desk.counts.num_moves += 1
        return move

    # How it fails

    def fail(self, reason: str, peer: WorkerId, *, drained: bool = False) -> None:
        """Because of `peer`; `drained`: that peer neither reads nor writes any more. Harmless if over."""
        if drained:
            self._endings[peer].let_go()
        self._fail(Failure(reason))

    def _fail(self, failure: Failure) -> None:
        """Told once."""
        if not self.is_ended:
            self._failure = failure
            self._advance(type(self.state)(DRAINING))
            for peer, ending in self._endings.items():
                ending.cancel(self._engine(peer))
            self._on_failing()
        self._drain()

    def _drain(self) -> None:
        """Takes the steps that waited for the last move to end, or for the peer to let go."""
        if self.state == DRAINING:
            self._say_last_words()
            if all(ending.is_safe for ending in self._endings.values()):
                self._advance(type(self.state)(FAILED))
                self._on_failed()

    @abc.abstractmethod
    def _engine(self, peer: WorkerId) -> TransferEngine | None: ...

    @abc.abstractmethod
    def _say_last_words(self) -> None: ...


class SendingTransfer(Transfer[S, L, N]):
    """On the side that has the memory."""

    def on_open(self, peer: WorkerId) -> None:
        """The connection has just been opened: says what the consumer has missed."""

    @abc.abstractmethod
    def on_beat(self, peer: WorkerId, theirs: Any, now: float) -> None:
        """A heartbeat lists the transfer in this state."""

    def _engine(self, peer: WorkerId) -> TransferEngine | None:
        link = self._desk.links.get(peer)
        return link.engine if link is not None else None

    def _say_last_words(self) -> None:
        for peer, ending in self._endings.items():
            word = ending.producers_last_word(self._failure.reason)
            if word is not None:
                self._desk.send(peer, word)

    def _consumer_aborted(self, peer: WorkerId, reason: str) -> None:
        """Answered by AbortAck, when nothing is written for it any more."""
        self._endings[peer].peer_aborted()
        self._fail(Failure(f"the consumer ended it: {reason}", EndedBy.PEER))


class ReceivingTransfer(Transfer[S, L, N]):
    """On the side that needs it."""

    def __init__(
        self, transfer_id: TransferId, name: str, link: ProducerLink[L], state: S, desk: Desk[L, N], now: float
    ) -> None:
        super().__init__(transfer_id, name, (link.peer,), state, desk)
        self.link = link
        self.expected_at = now
        self._ending = self._endings[link.peer]
        self._answers = Answers(link.beats, desk.settings.lease_s, desk.settings.unknown_s)

    @property
    @abc.abstractmethod
    def is_begun(self) -> bool:
        """The producer was asked: its silence is not that of one that cannot be reached."""

    @property
    def needs_confirming(self) -> bool:
        """Of one that is over: whether the producer may hold something for it, should the last message get lost."""
        return self.state != FAILED or self._ending.peer_end is not PeerEnd.AWARE

    @property
    def next_at(self) -> float | None:
        """When `tick` or `pump` is due, besides whenever something happens."""
        return None

    @abc.abstractmethod
    def _hear(self, message: TransferMessage, now: float) -> None:
        """What the producer says, but for Abort and AbortAck. Raises TransferError as `on_message`."""

    @abc.abstractmethod
    def _repair(self, theirs: Any, now: float) -> None:
        """The producer's state, which may tell that a message got lost."""

    @abc.abstractmethod
    def _ask_again(self, now: float) -> None:
        """With every heartbeat."""

    def on_message(self, peer: WorkerId, message: TransferMessage, now: float) -> None:
        self._answers.known()
        match message:
            case Abort():
                self._producer_aborted(message.reason)
            case AbortAck() if self.state == DRAINING:
                self._ending.peer_drained()
                self._drain()
            case AbortAck():
                self._desk.counts.duplicates += 1
            case _:
                self._hear(message, now)

    def on_ack(self, number: int, sent_at: float, theirs: Any, now: float) -> None:
        """The producer's state, in answer to heartbeat `number`; none: it does not know the transfer."""
        if not self._answers.is_news(number) or self.is_ended:
            return
        if theirs is None:
            if reason := self._answers.unknown(now):
                self._fail(Failure(reason))
        elif theirs == FAILED:
            self._producer_aborted("it failed there")
        elif theirs == DRAINING:
            self._fail(Failure("the producer ended it"))
        else:
            if theirs != self._desk.local.kind.done:
                self._answers.known(sent_at)
            self._repair(theirs, now)

    def _producer_aborted(self, reason: str) -> None:
        """It has drained. It may wait for our reads to end, too."""
        self._ending.peer_aborted()
        self._fail(Failure(f"the producer ended it: {reason}", EndedBy.PEER))

    def say_again(self, now: float) -> None:
        """With every heartbeat, until it is answered."""
        if self.state == DRAINING:
            self._ending.say_abort(self._failure.reason, self._repeat)
        else:
            self._ask_again(now)

    def fail(self, reason: str, peer: WorkerId, *, drained: bool = False) -> None:
        if drained:
            self._ending.peer_drained()
        super().fail(reason, peer)

    def _fail(self, failure: Failure) -> None:
        if not self.is_ended:
            self._ending.say_abort(failure.reason, self._send)
        super()._fail(failure)

    def _say_last_words(self) -> None:
        if not self._ending.moves:
            self._ending.say_drained(self._send)

    def _engine(self, peer: WorkerId) -> TransferEngine | None:
        return self.link.engine

    def _repeat(self, message: TransferMessage) -> None:
        self._desk.counts.repeats += 1
        self._send(message)

    def _send(self, message: TransferMessage) -> None:
        """Not before the connection is open: what would be said is said again with the heartbeat that opens it."""
        if self.link.ready:
            self._desk.send(self.link.peer, message)
