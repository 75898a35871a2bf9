"""One embedding on the side that has it.

    BOOTSTRAPPING -> WAITING_FOR_INPUT                  every destination has said where there is room (Init)
    WAITING_FOR_INPUT -> SUCCESS                        it fitted everywhere
    WAITING_FOR_INPUT -> TRANSFERRING -> SUCCESS        it did not: the rest followed, resume by resume
    any -> FAILED                                       one destination is enough

The state is that of all destinations together, and changes only when every one of them has got as far. Each destination is
served in rounds at its own pace: it says how much room it has, gets as many tokens as fit, and is told how far it got.

When may the blocks be reused? Where this side writes: when its moves have ended, however they did. Where the consumer reads:
when it has said Received, Abort or AbortAck, or its lease is over, because then it discards what it copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from kvrelay.ids import TransferId, WorkerId
from kvrelay.states import EMBEDDING_EDGES, EmbeddingState, advance
from kvrelay.transfer.embedding_book import RelayCounts
from kvrelay.transfer.embedding_layout import TokenPlacement, check_room, embedding_ranges
from kvrelay.transfer.embedding_pool import EmbeddingPool
from kvrelay.transfer.embedding_session import PoolLink
from kvrelay.transfer.engines.base import MoveId, TransferError
from kvrelay.transfer.leases import HeldLease
from kvrelay.wire.embedding import Done, Failed, Init, Partial, Resume
from kvrelay.wire.transfer import AbortAck, Message


class SendingEnd(msgspec.Struct, frozen=True):
    """What a producer remembers of a transfer that ended."""

    state: EmbeddingState
    consumers: tuple[WorkerId, ...] | None  # none: it ended before this worker was told who they are
    reason: str = ""
    total_tokens: int = 0

    def concerns(self, peer: WorkerId) -> bool:
        return self.consumers is None or peer in self.consumers

    def answer(self, transfer_id: TransferId) -> Done | Failed:
        """To a consumer that has not heard of it."""
        if self.state is EmbeddingState.SUCCESS:
            return Done(transfer_id=transfer_id, total_tokens=self.total_tokens)
        return Failed(transfer_id=transfer_id, reason=self.reason or "it was over before")


@dataclass(slots=True)
class Destination:
    """One consumer of an embedding. (With `blocks` and the counts this is the design note's TransferEmbeddingInfo.)"""

    peer: WorkerId
    lease: HeldLease
    link: PoolLink | None = None  # set with Init
    blocks: tuple[int, ...] = ()  # of the consumer, for the present round
    allocated_tokens: int = 0
    first_token: int = 0  # of the present round
    sent_tokens: int = 0  # all before it were reported sent
    notice: Partial | Done | None = None  # the answer to the present round
    moves: dict[MoveId, int] = field(default_factory=dict)  # bytes under way
    is_reading: bool = False  # it was told to copy, and has not said that it did
    is_complete: bool = False
    has_reported: bool = False  # the first round was answered
    was_partial: bool = False  # by a Partial
    is_ack_due: bool = False  # it has said Abort
    is_told: bool = False  # of the failure


class EmbeddingSending:
    """Driven by the machine that holds it; calls the transfer engines of its links."""

    def __init__(
        self, transfer_id: TransferId, consumers: Sequence[WorkerId], pool: EmbeddingPool, counts: RelayCounts, lease_s: float
    ) -> None:
        self.transfer_id = transfer_id
        self.state = EmbeddingState.BOOTSTRAPPING
        self.destinations = {peer: Destination(peer, HeldLease(lease_s)) for peer in consumers}
        self.total_tokens: int | None = None  # once it was offered
        self.failure = ""
        self.is_unwanted = False  # it was a consumer that ended it
        self.is_over = False  # it has its end, and holds nothing
        self.outgoing: list[tuple[WorkerId, Message]] = []
        self._pool = pool
        self._counts = counts
        self._blocks: tuple[int, ...] = ()

    @property
    def end(self) -> SendingEnd:
        return SendingEnd(self.state, tuple(self.destinations), self.failure, self.total_tokens or 0)

    def offer(self, blocks: tuple[int, ...], total_tokens: int, now: float) -> None:
        """The blocks are this transfer's from now on."""
        if self.state is EmbeddingState.FAILED or self.total_tokens is not None:
            self._counts.duplicates += 1
            self._pool.give_back(blocks)
            return
        self._blocks, self.total_tokens = blocks, total_tokens
        for destination in self.destinations.values():
            destination.lease.extend(now)

    # What a consumer says

    def request(self, peer: WorkerId, link: PoolLink, message: Init | Resume, now: float) -> None:
        """Room for a round. Raises TransferError if what it says does not fit together."""
        destination = self.destinations[peer]
        if self.state is EmbeddingState.FAILED:
            return  # it is told, when nothing moves
        destination.lease.extend(now)
        if self._is_repeated(destination, message):
            return
        layout, _ = link.parts()
        blocks = check_room(layout, message)
        if message.required_dst_info_num != len(self.destinations):
            raise TransferError(f"{message.required_dst_info_num} destinations, not {len(self.destinations)}")
        if isinstance(message, Resume):
            self._counts.resumes += 1
            destination.first_token = message.sent_tokens
        destination.link, destination.blocks, destination.allocated_tokens = link, blocks, message.allocated_tokens
        destination.notice, destination.is_reading = None, False
        if self.state is EmbeddingState.BOOTSTRAPPING and all(each.link is not None for each in self.destinations.values()):
            self._advance(EmbeddingState.WAITING_FOR_INPUT)

    def _is_repeated(self, destination: Destination, message: Init | Resume) -> bool:
        """Whether the round is known, or over: then the present one's answer is said again, if there is one. Raises
        TransferError for a round that cannot be."""
        first_token = message.sent_tokens if isinstance(message, Resume) else 0
        if destination.link is None:
            if isinstance(message, Resume):
                raise TransferError(f"a resume at token {first_token} of what was never begun")
            return False
        resumes = isinstance(message, Resume) and isinstance(destination.notice, Partial)
        if resumes and first_token == destination.sent_tokens:
            return False
        if first_token > destination.first_token:
            raise TransferError(f"a resume at token {first_token}, where {destination.sent_tokens} were sent")
        self._counts.duplicates += 1
        if first_token == destination.first_token and destination.notice is not None and not destination.is_complete:
            self._send(destination, destination.notice)
        return True

    def heartbeat(self, peer: WorkerId, now: float) -> None:
        if self.state is not EmbeddingState.FAILED:
            self.destinations[peer].lease.extend(now)

    def received(self, peer: WorkerId) -> None:
        """The consumer has everything, and reads no more."""
        destination = self.destinations[peer]
        destination.is_reading = False
        if self.state is not EmbeddingState.FAILED and isinstance(destination.notice, Done) and not destination.is_complete:
            destination.is_complete = True
        else:
            self._counts.duplicates += 1
        self._settle()

    def let_go(self, peer: WorkerId) -> None:
        """AbortAck: the consumer has ended it too, and reads no more."""
        self.destinations[peer].is_reading = False
        self.fail("the consumer ended it")

    def consumer_aborted(self, peer: WorkerId, reason: str) -> None:
        """Answered by AbortAck, when nothing is written for it any more."""
        destination = self.destinations[peer]
        destination.is_ack_due, destination.is_told, destination.is_reading = True, False, False
        self.is_unwanted = self.is_unwanted or not self.failure
        self.fail(f"the consumer ended it: {reason}")

    # Ends

    def fail(self, reason: str, *, gone: WorkerId | None = None) -> None:
        """Ends at once if nobody reads or writes the blocks; else when nobody does. `gone` reads no more."""
        if gone is not None:
            self.destinations[gone].is_reading = False
        if self.state is EmbeddingState.SUCCESS:
            return
        if self.state is not EmbeddingState.FAILED:
            self.failure = reason
            self._advance(EmbeddingState.FAILED)
            for destination in self.destinations.values():
                self._cancel_moves(destination)
        self._settle()

    def tick(self, now: float, lease_s: float) -> None:
        for destination in self.destinations.values():
            if destination.lease.over(now) and not destination.is_complete:
                self.fail(f"a consumer has not asked for it for {lease_s:g} s", gone=destination.peer)

    # Rounds

    def pump(self) -> list[tuple[WorkerId, tuple[str, MoveId]]]:
        """Begins every round whose room is known. Returns whom it moves for, and the engine and id of each move it began."""
        if self.state not in (EmbeddingState.WAITING_FOR_INPUT, EmbeddingState.TRANSFERRING) or self.total_tokens is None:
            return []
        begun: list[tuple[WorkerId, tuple[str, MoveId]]] = []
        for destination in self.destinations.values():
            if destination.notice is None and not destination.moves:
                begun += [(destination.peer, move) for move in self._begin(destination)]
        self._settle()
        return begun

    def _begin(self, destination: Destination) -> list[tuple[str, MoveId]]:
        assert destination.link is not None
        layout, engine = destination.link.parts()
        stop = self._stop(destination)
        if destination.link.consumer_copies:
            destination.is_reading = True
            self._report(destination, list(self._blocks))
            return []
        here = TokenPlacement(self._pool.layout, self._blocks)
        there = TokenPlacement(layout, destination.blocks, destination.first_token)
        ranges = embedding_ranges(here, there, (destination.first_token, stop))
        try:
            move = engine.write(destination.peer, ranges)
        except TransferError as error:
            self.fail(f"a write could not be started: {error}")
            return []
        destination.moves[move] = int(ranges[:, 2].sum())
        self._counts.num_moves += 1
        return [(engine.name, move)]

    def moved(self, peer: WorkerId, move: MoveId, error: str) -> None:
        destination = self.destinations[peer]
        size_bytes = destination.moves.pop(move)
        self._counts.num_moves -= 1
        if error:
            self.fail(f"a write of {size_bytes} bytes failed: {error}")
        elif self.state is not EmbeddingState.FAILED:
            self._counts.moved_bytes += size_bytes
            self._counts.moved_tokens += self._stop(destination) - destination.first_token
            self._report(destination, [])
            destination.is_complete = isinstance(destination.notice, Done)
        self._settle()

    def _stop(self, destination: Destination) -> int:
        """The end of the present round: what remains, or as much of it as there is room for."""
        assert self.total_tokens is not None
        return min(self.total_tokens, destination.first_token + destination.allocated_tokens)

    def _report(self, destination: Destination, blocks: list[int]) -> None:
        assert self.total_tokens is not None
        destination.sent_tokens = self._stop(destination)
        if destination.sent_tokens == self.total_tokens:
            destination.notice = Done(transfer_id=self.transfer_id, total_tokens=self.total_tokens, blocks=blocks)
        else:
            destination.was_partial = True
            destination.notice = Partial(
                transfer_id=self.transfer_id,
                sent_tokens=destination.sent_tokens,
                total_tokens=self.total_tokens,
                blocks=blocks,
            )
        destination.has_reported = True
        self._send(destination, destination.notice)

    def _cancel_moves(self, destination: Destination) -> None:
        if destination.link is not None and destination.link.engine is not None:
            for move in destination.moves:
                destination.link.engine.cancel(move)

    def _settle(self) -> None:
        """Takes the step that waited for the last destination."""
        everybody = self.destinations.values()
        if self.state is EmbeddingState.FAILED:
            self._tell_failure()
            if not any(each.moves or each.is_reading for each in everybody):
                self._let_go()
        elif self.state is not EmbeddingState.BOOTSTRAPPING and not self.is_over:
            if all(each.is_complete for each in everybody):
                self._advance(EmbeddingState.SUCCESS)
                self._let_go()
            elif self.state is EmbeddingState.WAITING_FOR_INPUT and self._is_partial():
                self._advance(EmbeddingState.TRANSFERRING)

    def _is_partial(self) -> bool:
        """Whether every destination has reported, and some had not enough room."""
        everybody = self.destinations.values()
        return all(each.has_reported for each in everybody) and any(each.was_partial for each in everybody)

    def _tell_failure(self) -> None:
        """Each destination once, and not before nothing is written into its blocks any more."""
        for each in self.destinations.values():
            if not (each.is_told or each.moves or (each.is_complete and not each.is_ack_due)):
                each.is_told = True
                if each.is_ack_due:
                    self._send(each, AbortAck(transfer_id=self.transfer_id))
                else:
                    self._send(each, Failed(transfer_id=self.transfer_id, reason=self.failure))

    def _let_go(self) -> None:
        if not self.is_over:
            self.is_over = True
            self._pool.give_back(self._blocks)
            self._blocks = ()

    def _send(self, destination: Destination, message: Message) -> None:
        self.outgoing.append((destination.peer, message))

    def _advance(self, following: EmbeddingState) -> None:
        self.state = advance(EMBEDDING_EDGES, self.state, following)
