"""One embedding on the side that has it.

    BOOTSTRAPPING -> WAITING_FOR_INPUT                  every destination has said where there is room (Init)
    WAITING_FOR_INPUT -> SUCCESS                        it fitted everywhere
    WAITING_FOR_INPUT -> TRANSFERRING -> SUCCESS        it did not: the rest followed, resume by resume
    any -> DRAINING -> FAILED                           one destination is enough

The state is that of all destinations together, and changes only when every one of them has got as far. Each destination is
served in rounds at its own pace (`RoundState`): it says how much room it has, gets as many tokens as fit, and is told how far
it got. The blocks are reused when every destination's `Ending` is safe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, assert_never

from kvrelay.ids import TransferId, WorkerId
from kvrelay.log import Log
from kvrelay.states import EMBEDDING_EDGES, ROUND_EDGES, EmbeddingState, EndedBy, RoundState, advance
from kvrelay.transfer.blocks import Placement
from kvrelay.transfer.embedding.kind import EmbeddingSent, SendingDesk
from kvrelay.transfer.embedding.layout import EmbeddingLayout, check_room, embedding_ranges
from kvrelay.transfer.embedding.pool import EmbeddingPool
from kvrelay.transfer.engines.base import TransferEngine, TransferError
from kvrelay.transfer.relay.ending import Ending, Failure
from kvrelay.transfer.relay.kind import End, MoveKey
from kvrelay.transfer.relay.leases import HeldLease
from kvrelay.transfer.relay.link import Link
from kvrelay.transfer.relay.seam import SendingTransfer
from kvrelay.wire.embedding import Done, Init, Partial, Received, Resume
from kvrelay.wire.relay import Abort, AbortAck, TransferMessage

log = Log("relay")

_Said = Init | Resume | Received | Abort | AbortAck


@dataclass(slots=True)
class Destination:
    """One consumer of an embedding."""

    peer: WorkerId
    lease: HeldLease
    ending: Ending
    state: RoundState = RoundState.OPEN
    link: Link[EmbeddingLayout] | None = None  # set with Init
    blocks: tuple[int, ...] = ()  # of the consumer, for the present round
    allocated_tokens: int = 0
    first_token: int = 0  # of the present round
    sent_tokens: int = 0  # all before it were reported sent
    notice: Partial | Done | None = field(default=None)  # the answer to the present round

    @property
    def is_complete(self) -> bool:
        return self.state is RoundState.COMPLETE

    def advance(self, following: RoundState) -> None:
        self.state = advance(ROUND_EDGES, self.state, following)
        if self.is_complete:
            self.ending.peer_drained()


class EmbeddingSending(SendingTransfer[EmbeddingState, EmbeddingLayout, list[EmbeddingSent]]):
    """Driven by the machine that holds it; calls the transfer engines of its links."""

    def __init__(self, transfer_id: TransferId, consumers: Sequence[WorkerId], pool: EmbeddingPool, desk: SendingDesk) -> None:
        super().__init__(transfer_id, transfer_id, tuple(consumers), EmbeddingState.BOOTSTRAPPING, desk)
        self._destinations = {
            peer: Destination(peer, HeldLease(desk.settings.lease_s), ending) for peer, ending in self._endings.items()
        }
        self._pool = pool
        self._total_tokens: int | None = None  # once it was offered
        self._blocks: tuple[int, ...] = ()

    @property
    def end(self) -> End:
        replay: TransferMessage = Done(transfer_id=self.transfer_id, total_tokens=self._total_tokens or 0)
        if self.state is not EmbeddingState.SUCCESS:
            replay = Abort(transfer_id=self.transfer_id, reason=self._failure.reason)
        return End(self.state, self.peers, self._failure.reason, replay)

    # What the encode worker does

    def offer(self, blocks: tuple[int, ...], total_tokens: int, now: float) -> None:
        """The blocks are this transfer's from now on."""
        if self.is_ended or self._total_tokens is not None:
            self._desk.counts.duplicates += 1
            self._pool.give_back(blocks)
            return
        self._blocks, self._total_tokens = blocks, total_tokens
        for destination in self._destinations.values():
            destination.lease.extend(now)

    def abort(self) -> None:
        """Nothing more is told of it."""
        self._fail(Failure("the encode worker ended it", EndedBy.OWNER))

    # What a consumer says

    def on_message(self, peer: WorkerId, message: TransferMessage, now: float) -> None:
        assert isinstance(message, _Said)
        destination, link = self._destinations[peer], self._desk.links.get(peer)
        match message:
            case Init() | Resume():
                if link is not None and link.open:  # one that was held back may have outlived its connection
                    self._request(destination, link, message, now)
            case Received():
                self._received(destination)
            case Abort():
                self._consumer_aborted(peer, message.reason)
            case AbortAck():
                destination.ending.peer_drained()
                self._fail(Failure("the consumer ended it"))
            case _:
                assert_never(message)

    def on_beat(self, peer: WorkerId, theirs: Any, now: float) -> None:
        assert isinstance(theirs, EmbeddingState)
        destination = self._destinations[peer]
        match theirs:
            case EmbeddingState.SUCCESS:
                self._received(destination)
            case EmbeddingState.FAILED:
                self._consumer_aborted(peer, "it failed there")
            case EmbeddingState.BOOTSTRAPPING | EmbeddingState.WAITING_FOR_INPUT | EmbeddingState.TRANSFERRING:
                if not self.is_ended:
                    destination.lease.extend(now)
            case EmbeddingState.DRAINING:
                pass  # its Abort says more
            case _:
                assert_never(theirs)

    def _request(self, destination: Destination, link: Link[EmbeddingLayout], message: Init | Resume, now: float) -> None:
        """Room for a round. Raises TransferError if what it says does not fit together."""
        if self.is_ended:
            return  # it is told, when nothing moves
        destination.lease.extend(now)
        if self._is_repeated(destination, message):
            return
        layout, _ = link.parts()
        blocks = check_room(layout, message)
        if message.required_dst_info_num != len(self._destinations):
            raise TransferError(f"{message.required_dst_info_num} destinations, not {len(self._destinations)}")
        if isinstance(message, Resume):
            self._desk.counts.resumes += 1
            destination.first_token = message.sent_tokens
        destination.advance(RoundState.ASKED)
        destination.ending.let_go()
        destination.link, destination.blocks, destination.allocated_tokens = link, blocks, message.allocated_tokens
        destinations = self._destinations.values()
        if self.state is EmbeddingState.BOOTSTRAPPING and all(each.state is not RoundState.OPEN for each in destinations):
            self._advance(EmbeddingState.WAITING_FOR_INPUT)

    def _is_repeated(self, destination: Destination, message: Init | Resume) -> bool:
        """Whether the round is known, or over: then the present one's answer is said again, if there is one. Raises
        TransferError for a round that cannot be."""
        first_token = message.sent_tokens if isinstance(message, Resume) else 0
        if destination.state is RoundState.OPEN:
            if isinstance(message, Resume):
                raise TransferError(f"a resume at token {first_token} of what was never begun")
            return False
        resumes = isinstance(message, Resume) and destination.state is RoundState.PARTIAL
        if resumes and first_token == destination.sent_tokens:
            return False
        if first_token > destination.first_token:
            raise TransferError(f"a resume at token {first_token}, where {destination.sent_tokens} were sent")
        self._desk.counts.duplicates += 1
        answered = destination.state in (RoundState.PARTIAL, RoundState.DONE)
        if first_token == destination.first_token and answered and destination.notice is not None:
            self._desk.send(destination.peer, destination.notice)
        return True

    def _received(self, destination: Destination) -> None:
        """The consumer has everything, and reads no more."""
        destination.ending.let_go()
        if not self.is_ended and destination.state is RoundState.DONE:
            destination.advance(RoundState.COMPLETE)
        else:
            self._desk.counts.duplicates += 1
        self._settle()

    # Ends

    def fail(self, reason: str, peer: WorkerId, *, drained: bool = False) -> None:
        if self.is_ended or not self._destinations[peer].is_complete:  # else the others may still want it
            super().fail(reason, peer, drained=drained)

    def tick(self, now: float) -> None:
        for destination in self._destinations.values():
            if destination.lease.over(now) and not destination.is_complete:
                reason = f"a consumer has not asked for it for {self._desk.settings.lease_s:g} s"
                self.fail(reason, destination.peer, drained=True)

    def _on_failing(self) -> None:
        if not self._by_owner:
            self._tell(self._failure.reason, self._failure.by is EndedBy.PEER)

    def _on_failed(self) -> None:
        self._give_back()

    def _settle(self) -> None:
        """Takes the step that waited for the last destination."""
        destinations = self._destinations.values()
        self._drain()
        if self.state in (EmbeddingState.WAITING_FOR_INPUT, EmbeddingState.TRANSFERRING):
            if all(each.is_complete for each in destinations):
                self._advance(EmbeddingState.SUCCESS)
                self._tell("", False)
                self._give_back()
            elif self.state is EmbeddingState.WAITING_FOR_INPUT and self._is_partial():
                self._advance(EmbeddingState.TRANSFERRING)

    def _is_partial(self) -> bool:
        """Whether every destination has reported, and some had not enough room."""
        destinations = self._destinations.values()
        short = any(each.first_token > 0 or each.state is RoundState.PARTIAL for each in destinations)
        return short and all(each.sent_tokens > 0 for each in destinations)

    def _tell(self, error: str, is_unwanted: bool) -> None:
        size_bytes = 0 if error else self._desk.layout.size_of(self._total_tokens or 0)
        self._desk.news.append(EmbeddingSent(self.transfer_id, error, is_unwanted, size_bytes))

    def _give_back(self) -> None:
        self._pool.give_back(self._blocks)
        self._blocks = ()

    # Rounds

    def pump(self, max_moves: int, now: float) -> list[MoveKey]:
        """Begins every round whose room is known: one move each."""
        if self.state not in (EmbeddingState.WAITING_FOR_INPUT, EmbeddingState.TRANSFERRING) or self._total_tokens is None:
            return []
        asking = [each for each in self._destinations.values() if each.state is RoundState.ASKED]
        begun = [move for destination in asking for move in self._begin_round(destination)]
        self._settle()
        return begun

    def _begin_round(self, destination: Destination) -> list[MoveKey]:
        assert destination.link is not None
        layout, engine = destination.link.parts()
        self._bring_to(destination.peer, engine)
        if destination.link.consumer_moves:
            destination.ending.grant()
            self._report(destination, list(self._blocks))
            return []
        here = Placement(self._pool.layout, self._blocks)
        there = Placement(layout, destination.blocks, destination.first_token)
        try:
            ranges = embedding_ranges(here, there, (destination.first_token, self._stop(destination)))
            move = self._begin(destination.peer, engine, ranges, writes=True)
        except TransferError as error:
            self._fail(Failure(f"a write could not be started: {error}"))
            return []
        destination.advance(RoundState.MOVING)
        return [move]

    def _bring_to(self, peer: WorkerId, engine: TransferEngine) -> None:
        assert self._total_tokens is not None
        if self._pool.bring_to(engine.name, self._blocks, self._total_tokens):
            size_bytes = self._pool.layout.size_of(self._total_tokens)
            log.info(
                "embedding copied to the host", transfer=self.transfer_id, consumer=peer, transport=engine.name,
                bytes=size_bytes,
            )  # fmt: skip

    def moved(self, move: MoveKey, error: str) -> None:
        destination = next(each for each in self._destinations.values() if move in each.ending.moves)
        size_bytes = destination.ending.moves.pop(move)
        is_wanted = not error and self.state is not EmbeddingState.DRAINING
        self._desk.move_ended(destination.peer, size_bytes, moved=is_wanted)
        if error:
            self._fail(Failure(f"a write of {size_bytes} bytes failed: {error}"))
        elif is_wanted:
            self._desk.counts.moved_tokens += self._stop(destination) - destination.first_token
            self._report(destination, [])
            if destination.state is RoundState.DONE:
                destination.advance(RoundState.COMPLETE)
        self._settle()

    def _stop(self, destination: Destination) -> int:
        """The end of the present round: what remains, or as much of it as there is room for."""
        assert self._total_tokens is not None
        return min(self._total_tokens, destination.first_token + destination.allocated_tokens)

    def _report(self, destination: Destination, blocks: list[int]) -> None:
        assert self._total_tokens is not None
        total, sent = self._total_tokens, self._stop(destination)
        destination.sent_tokens = sent
        if sent == total:
            destination.advance(RoundState.DONE)
            destination.notice = Done(transfer_id=self.transfer_id, total_tokens=total, blocks=blocks)
        else:
            destination.advance(RoundState.PARTIAL)
            destination.notice = Partial(transfer_id=self.transfer_id, sent_tokens=sent, total_tokens=total, blocks=blocks)
        self._desk.send(destination.peer, destination.notice)

    def _advance(self, following: EmbeddingState) -> None:
        self.state = advance(EMBEDDING_EDGES, self.state, following)
