"""One embedding on the side that needs it.

    BOOTSTRAPPING -> WAITING_FOR_INPUT              there is room for the default, and the producer was told (Init)
    WAITING_FOR_INPUT -> SUCCESS                    it fitted
    WAITING_FOR_INPUT -> TRANSFERRING -> SUCCESS    it did not: what came is moved out, and the rest is asked for (Resume)
    any -> FAILED

The true length comes with the first notice, and again in the aux data. Tokens of a round that did not bring the last one are
copied out of the pool, and only then are its blocks given back, or used for the next round. Where there is room for the rest
besides, the rest is asked for first, and what came is copied while it is on its way. Tokens of the last round stay where they
are, until whoever expected the embedding has used them.

When may the blocks be reused after a failure? Where the producer writes: when the round under way was answered, or the producer
has said that it drained (AbortAck, Failed), or is proven dead - never because time has passed. Where this side copies: when its
own reads have ended.

When may bytes that this side copied be used? Only if, after the copy, the producer's last acknowledged lease is valid.
"""

from __future__ import annotations

from typing import assert_never

from kvrelay.ids import TransferId
from kvrelay.states import EMBEDDING_EDGES, EmbeddingState, advance
from kvrelay.transfer.embedding_arrival import EmbeddingArrival, ReceivingEnd, Round
from kvrelay.transfer.embedding_book import RelayCounts
from kvrelay.transfer.embedding_layout import TokenPlacement, check_source, embedding_ranges
from kvrelay.transfer.embedding_pool import EmbeddingPool, Piece
from kvrelay.transfer.embedding_room import EmbeddingSettings, NoRoomError, Room, Rooms
from kvrelay.transfer.embedding_session import EncoderLink
from kvrelay.transfer.engines.base import MoveId, TransferError
from kvrelay.transfer.leases import ReaderLease
from kvrelay.wire.embedding import Done, Init, Partial, Received, Resume
from kvrelay.wire.transfer import Abort, AbortAck, TransferMessage


class EmbeddingReceiving:
    """Driven by the machine that holds it; calls the transfer engine of its link."""

    def __init__(
        self,
        transfer_id: TransferId,
        link: EncoderLink,
        rooms: Rooms,
        pool: EmbeddingPool,
        counts: RelayCounts,
        settings: EmbeddingSettings,
        required_dst_info_num: int,
        now: float,
    ) -> None:
        self.transfer_id = transfer_id
        self.link = link
        self.state = EmbeddingState.BOOTSTRAPPING
        self.failure = ""
        self.is_over = False  # it has its end, and holds nothing that a peer may touch
        self.expected_at = now
        self.outgoing: list[TransferMessage] = []
        self.arrivals: list[EmbeddingArrival] = []
        self._rooms = rooms
        self._pool = pool
        self._counts = counts
        self._unknown_s = settings.transfer.unknown_s
        self._required_dst_info_num = required_dst_info_num
        self._lease = ReaderLease(settings.transfer.lease_s)
        self._acked_beat = 0  # acks of earlier heartbeats tell nothing new
        self._unknown_since: float | None = None
        self._known_there = False
        self._room: Room | None = None
        self._first_token = 0  # of the present round
        self._asked_at: float | None = None  # the present round was asked for
        self._notice: Partial | Done | None = None  # its answer
        self._total_tokens: int | None = None
        self._aux: tuple[int, ...] = ()
        self._unmoved: Round | None = None  # arrived, and still to be copied out
        self._is_resume_said = True  # messages go out after `pump`, so not in the one after a resume
        self._reads: dict[MoveId, int] = {}
        self._is_read = False  # the round's copy was made, or is being made
        self._ended_here = False
        self._peer_drained = False
        self._ack_due = False

    @property
    def end(self) -> ReceivingEnd:
        return ReceivingEnd(self.state, self.link.peer, self.failure)

    @property
    def waits_for_room(self) -> bool:
        return self.state is EmbeddingState.BOOTSTRAPPING and self._room is None

    @property
    def _may_be_written(self) -> bool:
        """Whether the producer may be writing the blocks, for all that is known here."""
        is_open = self._asked_at is not None and self._notice is None
        return is_open and not self.link.consumer_copies and not self._peer_drained

    # Rounds

    def take_room(self, now: float) -> bool:
        """For the first round. False: wait."""
        try:
            self._room = self._rooms.first(self.expected_at, now)
        except NoRoomError as error:
            self.fail(str(error))
        return self._room is not None

    def begin(self, now: float) -> None:
        """Once there is room and a connection."""
        if self.state is EmbeddingState.BOOTSTRAPPING and self._room is not None and self.link.ready:
            self._advance(EmbeddingState.WAITING_FOR_INPUT)
            self._ask(now)

    def _ask(self, now: float) -> None:
        if self._asked_at is None:
            self._asked_at = now
        assert self._room is not None
        block_size, tokens, blocks = self._pool.layout.block_size, self._room.tokens, list(self._room.blocks)
        if self._first_token == 0:
            self._send(
                Init(
                    transfer_id=self.transfer_id,
                    block_size=block_size,
                    allocated_tokens=tokens,
                    blocks=blocks,
                    required_dst_info_num=self._required_dst_info_num,
                )
            )
        else:
            self._send(
                Resume(
                    transfer_id=self.transfer_id,
                    sent_tokens=self._first_token,
                    block_size=block_size,
                    allocated_tokens=tokens,
                    blocks=blocks,
                    required_dst_info_num=self._required_dst_info_num,
                )
            )

    def notice(self, message: Partial | Done, now: float) -> None:
        """The producer's answer to a round. Raises TransferError if it does not fit what was asked for."""
        if not self._is_awaited(message):
            self._counts.duplicates += 1
            return
        assert self._asked_at is not None
        self._check(message)
        layout, _ = self.link.parts()
        if self.link.consumer_copies:
            check_source(layout, message.blocks, _stop(message))
        self._notice, self._total_tokens = message, message.total_tokens
        self._lease.confirm(self._asked_at)
        if not self.link.consumer_copies:
            self._round_is_in(now)

    def _is_awaited(self, message: Partial | Done) -> bool:
        is_open = self._asked_at is not None and self._notice is None and self.state is not EmbeddingState.FAILED
        return is_open and _stop(message) > self._first_token

    def _check(self, message: Partial | Done) -> None:
        assert self._room is not None
        stop, room_stop = _stop(message), self._first_token + self._room.tokens
        if self._total_tokens is not None and message.total_tokens != self._total_tokens:
            raise TransferError(f"{message.total_tokens} tokens in all, where there were {self._total_tokens}")
        if stop > room_stop:
            raise TransferError(f"{stop} tokens, where there was room up to {room_stop}")
        if isinstance(message, Partial) and (stop < room_stop or stop >= message.total_tokens):
            raise TransferError(f"a part up to token {stop} of {message.total_tokens}, where there was room up to {room_stop}")

    def pump(self, now: float) -> list[MoveId]:
        """Where this side copies: reads what was announced, and uses it if it still may. Returns the moves it began. While
        bytes of the next round are on their way, those of the round before are moved out."""
        begun = self._read_or_use(now)
        if self._is_read if self.link.consumer_copies else self._is_resume_said:
            self._move_out()
        self._is_resume_said = True
        return begun

    def _read_or_use(self, now: float) -> list[MoveId]:
        is_announced = self._notice is not None and self.link.consumer_copies
        if self.state not in (EmbeddingState.WAITING_FOR_INPUT, EmbeddingState.TRANSFERRING) or not is_announced:
            return []
        if not self._is_read:
            return self._read()
        if not self._reads:
            if self._lease.valid(now):
                self._round_is_in(now)
            else:
                self.fail("the producer's lease ran out before everything was copied")
        return []

    def _read(self) -> list[MoveId]:
        assert self._notice is not None
        assert self._room is not None
        layout, engine = self.link.parts()
        here = TokenPlacement(self._pool.layout, self._room.blocks, self._first_token)
        there = TokenPlacement(layout, self._notice.blocks)
        ranges = embedding_ranges(here, there, (self._first_token, _stop(self._notice)))
        try:
            move = engine.read(self.link.peer, ranges)
        except TransferError as error:
            self.fail(f"a read could not be started: {error}")
            return []
        self._is_read = True
        self._reads[move] = int(ranges[:, 2].sum())
        self._counts.num_moves += 1
        return [move]

    def moved(self, move: MoveId, error: str) -> None:
        size_bytes = self._reads.pop(move)
        self._counts.num_moves -= 1
        if error:
            self.fail(f"a read of {size_bytes} bytes failed: {error}")
        else:
            assert self._notice is not None
            self._counts.moved_bytes += size_bytes
            self._counts.moved_tokens += _stop(self._notice) - self._first_token
        self._settle()

    def _round_is_in(self, now: float) -> None:
        """Every byte of the round is in the pool, and nobody will write there until it is asked to."""
        assert self._room is not None
        assert self._notice is not None
        self._move_out()  # of the round before
        total, stop = self._notice.total_tokens, _stop(self._notice)
        if self._first_token == 0:
            told, *rest = self._pool.aux(self._room.blocks[0])
            self._aux = tuple(rest)
            if told != total:
                self.fail(f"the aux data say {told} tokens, the producer {total}")
                return
        arrived = Round(self._room.blocks, self._first_token, stop - self._first_token)
        if stop == total:
            self._succeed(arrived)
            return
        if self.state is EmbeddingState.WAITING_FOR_INPUT:
            self._advance(EmbeddingState.TRANSFERRING)
        self._resume(arrived, total - stop, now)

    def _resume(self, arrived: Round, remaining_tokens: int, now: float) -> None:
        besides = self._rooms.besides(remaining_tokens)
        if besides is not None:
            self._room, self._unmoved, self._is_resume_said = besides, arrived, False
        else:
            self._arrive(arrived)
            try:
                self._room = self._rooms.more(arrived.blocks, remaining_tokens)
            except NoRoomError as error:
                self.fail(str(error))
                return
        self._counts.resumes += 1
        sent_tokens = arrived.first_token + arrived.num_tokens
        self._first_token, self._asked_at, self._notice, self._is_read = sent_tokens, None, None, False
        self._ask(now)

    @property
    def is_moving_out(self) -> bool:
        """`pump` has a copy to make, and need not wait for anything."""
        return self._unmoved is not None and not self.link.consumer_copies

    def _move_out(self) -> None:
        if self._unmoved is not None:
            arrived, self._unmoved = self._unmoved, None
            self._arrive(arrived)
            self._pool.give_back(arrived.blocks)

    def _arrive(self, arrived: Round) -> None:
        """With copies of what is in the pool."""
        pieces = tuple(piece.copy() for piece in self._pieces(arrived))
        total = self._total_tokens or 0
        self.arrivals.append(EmbeddingArrival(transfer_id=self.transfer_id, pieces=pieces, total_tokens=total, aux=self._aux))

    def _pieces(self, arrived: Round) -> list[Piece]:
        return self._pool.pieces(arrived.blocks, arrived.first_token, arrived.num_tokens)

    def _succeed(self, arrived: Round) -> None:
        self._advance(EmbeddingState.SUCCESS)
        self._rooms.note_length(self._total_tokens or 0)
        self._send(Received(transfer_id=self.transfer_id))
        self.arrivals.append(
            EmbeddingArrival(
                transfer_id=self.transfer_id,
                pieces=tuple(self._pieces(arrived)),
                total_tokens=self._total_tokens or 0,
                aux=self._aux,
                is_complete=True,
                blocks=arrived.blocks,
            )
        )
        self._room = None  # its holder releases it
        self.is_over = True

    # What else the producer says

    def producer_failed(self, reason: str) -> None:
        """It has drained. It may wait for our reads to end, too."""
        self._ack_due = True
        self.fail(f"the producer ended it: {reason}", peer_drained=True)

    def abort_ack(self) -> None:
        if self.state is EmbeddingState.FAILED:
            self._peer_drained = True
            self._settle()
        else:
            self._counts.duplicates += 1

    def acked(self, number: int, sent_at: float, theirs: EmbeddingState | None, now: float) -> None:
        """The producer's state, in answer to heartbeat `number`."""
        if number <= self._acked_beat or self.state is EmbeddingState.FAILED:
            return
        self._acked_beat = number
        match theirs:
            case None:
                self._not_known_there(now)
            case EmbeddingState.BOOTSTRAPPING | EmbeddingState.WAITING_FOR_INPUT | EmbeddingState.TRANSFERRING:
                self._known_there, self._unknown_since = True, None
                self._lease.confirm(sent_at)
            case EmbeddingState.SUCCESS:
                pass  # Done was lost, and comes again when the round is asked for again
            case EmbeddingState.FAILED:
                self.fail("it failed there")
            case _:
                assert_never(theirs)

    def _not_known_there(self, now: float) -> None:
        if self._known_there:
            self.fail("the producer does not know it any more")
        elif self._unknown_since is None:
            self._unknown_since = now
        elif now >= self._unknown_since + self._unknown_s:
            self.fail(f"the producer has not heard of it for {self._unknown_s:g} s")

    def say_again(self, now: float) -> None:
        """With every heartbeat, until it is answered."""
        if self.state is EmbeddingState.FAILED and not self._peer_drained:
            self._send(Abort(transfer_id=self.transfer_id, reason=self.failure))
        elif self._asked_at is not None and self._notice is None and self.state is not EmbeddingState.FAILED:
            self._ask(now)

    # Ends

    def abort(self) -> None:
        """By whoever expected it: nothing more is told of it."""
        self._ended_here = True
        self.arrivals.clear()
        self.fail("the consumer does not want it any more")

    def fail(self, reason: str, *, peer_drained: bool = False) -> None:
        """Told once. The blocks are given back when nobody can touch them."""
        if self.state is EmbeddingState.SUCCESS or self.is_over:
            return
        self._peer_drained = self._peer_drained or peer_drained
        if self.state is not EmbeddingState.FAILED:
            self.failure = reason
            self._advance(EmbeddingState.FAILED)
            if self._unmoved is not None:
                self._pool.give_back(self._unmoved.blocks)
                self._unmoved = None
            if not self._ended_here:
                self.arrivals.append(EmbeddingArrival(transfer_id=self.transfer_id, error=reason))
            for move in self._reads:
                _, engine = self.link.parts()
                engine.cancel(move)
            if self._room is not None and (self._reads or self._may_be_written):
                self._pool.quarantine(self._room.blocks)
            if not self._ack_due:
                self._send(Abort(transfer_id=self.transfer_id, reason=reason))
        self._settle()

    def _settle(self) -> None:
        """Takes the step that waited for the last read to end, or for the producer to let go."""
        if self.state is not EmbeddingState.FAILED or self.is_over or self._reads or self._may_be_written:
            return
        self.is_over = True
        if self._room is not None:
            self._pool.give_back(self._room.blocks)
            self._room = None
        if self._ack_due:
            self._send(AbortAck(transfer_id=self.transfer_id))

    def needs_confirming(self) -> bool:
        """Whether the producer may still hold something for this transfer, should the last message get lost."""
        return self.state is EmbeddingState.SUCCESS or self._ack_due or not self._peer_drained

    def _send(self, message: TransferMessage) -> None:
        """Not before the connection is open: what would be said is said again with the heartbeat that opens it."""
        if self.link.ready:
            self.outgoing.append(message)

    def _advance(self, following: EmbeddingState) -> None:
        self.state = advance(EMBEDDING_EDGES, self.state, following)


def _stop(message: Partial | Done) -> int:
    """How far the tokens go after this round."""
    return message.sent_tokens if isinstance(message, Partial) else message.total_tokens
