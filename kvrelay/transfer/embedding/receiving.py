"""One embedding on the side that needs it.

    BOOTSTRAPPING -> WAITING_FOR_INPUT              there is room for the default, and the producer was told (Init)
    WAITING_FOR_INPUT -> SUCCESS                    it fitted
    WAITING_FOR_INPUT -> TRANSFERRING -> SUCCESS    it did not: what came is moved out, and the rest is asked for (Resume)
    any -> DRAINING -> FAILED                       blocks are quarantined until nothing can write them (`Ending`)

Each round goes its own way (`RoundState`): asked for, announced, copied where this side copies, in. The producer may write the
blocks of a round from when it is asked until it has answered.

The true length comes with the first notice, and again in the aux data. Tokens of a round that did not bring the last one are
copied out of the pool, and only then are its blocks given back, or used for the next round. Where there is room for the rest
besides, the rest is asked for first, and what came is copied while it is on its way. Tokens of the last round stay where they
are until the embedding is released.

When may bytes that this side copied be used? Only if, after the copy, the reader's lease that the producer last acknowledged is
valid.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvrelay.ids import TransferId
from kvrelay.log import Log
from kvrelay.states import EMBEDDING_EDGES, ROUND_EDGES, EmbeddingState, EndedBy, RoundState, advance
from kvrelay.transfer.blocks import Placement, placed_blocks
from kvrelay.transfer.embedding.arrival import EmbeddingArrival, Round
from kvrelay.transfer.embedding.kind import ReceivingDesk
from kvrelay.transfer.embedding.layout import EmbeddingLayout, embedding_ranges
from kvrelay.transfer.embedding.memory import PoolMemory
from kvrelay.transfer.embedding.pieces import Piece
from kvrelay.transfer.embedding.room import NoRoomError, Room, Rooms
from kvrelay.transfer.engines.base import TransferError
from kvrelay.transfer.relay.ending import Failure
from kvrelay.transfer.relay.kind import End, MoveKey
from kvrelay.transfer.relay.link import ProducerLink
from kvrelay.transfer.relay.seam import ReceivingTransfer
from kvrelay.wire.embedding import Done, Init, Partial, Received, Resume
from kvrelay.wire.relay import TransferMessage

_MAX_TOKENS = 1 << 18  # of an embedding: memory for all of them is made when the first have come

log = Log("relay")


class EmbeddingReceiving(ReceivingTransfer[EmbeddingState, EmbeddingLayout, list[EmbeddingArrival]]):
    """Driven by the machine that holds it; calls the transfer engine of its link."""

    def __init__(
        self,
        transfer_id: TransferId,
        link: ProducerLink[EmbeddingLayout],
        rooms: Rooms,
        desk: ReceivingDesk,
        required_dst_info_num: int,
        now: float,
        request_id: str = "",
        trace_id: str = "",
    ) -> None:
        super().__init__(transfer_id, transfer_id, link, EmbeddingState.BOOTSTRAPPING, desk, now)
        self._rooms = rooms
        self._pool = rooms.pool
        self._required_dst_info_num = required_dst_info_num
        self._request_id = request_id
        self._trace_id = trace_id
        self._round = RoundState.OPEN
        self._room: Room | None = None
        self._first_token = 0  # of the present round
        self._asked_at = now  # the present round was asked for
        self._notice: Partial | Done | None = None  # its answer
        self._total_tokens = 0  # told by the first notice
        self._num_resumes = 0
        self._num_first_tokens = 0  # of the first round, if there are several
        self._aux: tuple[int, ...] = ()
        self._home: Piece | None = None  # for what leaves the pool before the rest comes
        self._arrived: Round | None = None  # to be copied out, once the message that asks for the next has been sent
        self._leaving: Round | None = None  # to be copied out
        rooms.queue(transfer_id)

    @property
    def is_begun(self) -> bool:
        return self.state is not EmbeddingState.BOOTSTRAPPING

    @property
    def end(self) -> End:
        received = Received(transfer_id=self.transfer_id) if self.state is EmbeddingState.SUCCESS else None
        return End(self.state, self.peers, self._failure.reason, received)

    @property
    def next_at(self) -> float | None:
        """At once, where there is something to copy out and nothing to wait for."""
        if (self._leaving or self._arrived) and not self.link.consumer_moves:
            return self.expected_at
        waits_for_room = self.state is EmbeddingState.BOOTSTRAPPING and self._room is None
        return self._rooms.deadline(self.expected_at) if waits_for_room else None

    # What the worker does

    def abort(self) -> None:
        """Nothing more is told of it."""
        self._fail(Failure("the consumer does not want it any more", EndedBy.OWNER))

    # Rounds

    def _take_room(self, now: float) -> None:
        """For the first round; it may have to wait."""
        try:
            self._room = self._rooms.first(self.transfer_id, self.expected_at, now)
        except NoRoomError as error:
            self._fail(Failure(str(error)))

    def _ask(self) -> None:
        assert self._room is not None
        if self.link.ready and not self.link.consumer_moves:
            self._ending.grant()
        block_size, tokens, blocks = self._pool.layout.block_size, self._room.tokens, list(self._room.blocks)
        message: Init | Resume = Init(
            transfer_id=self.transfer_id, block_size=block_size, allocated_tokens=tokens, blocks=blocks,
            required_dst_info_num=self._required_dst_info_num,
        )  # fmt: skip
        if self._first_token:
            message = Resume(**msgspec.structs.asdict(message), sent_tokens=self._first_token)
        self._send(message)

    def _ask_first(self, now: float) -> None:
        """For the present round."""
        self._advance_round(RoundState.ASKED)
        self._asked_at, self._notice = now, None
        self._ask()

    def _on_notice(self, message: Partial | Done, now: float) -> None:
        """The producer's answer to a round. Raises TransferError if it does not fit what was asked for."""
        if self._round is not RoundState.ASKED or self.is_ended or _stop(message) <= self._first_token:
            self._desk.counts.duplicates += 1
            return
        self._check(message)
        layout, _ = self.link.parts()
        if self.link.consumer_moves:
            placed_blocks(message.blocks, layout, _stop(message))
        self._notice, self._total_tokens = message, message.total_tokens
        self._advance_round(RoundState.ANNOUNCED)
        self._answers.known(self._asked_at)
        self._ending.let_go()
        if not self.link.consumer_moves:
            self._round_is_in(now)

    def _check(self, message: Partial | Done) -> None:
        assert self._room is not None
        stop, room_stop = _stop(message), self._first_token + self._room.tokens
        if message.total_tokens > _MAX_TOKENS:
            raise TransferError(f"{message.total_tokens} tokens in all, where {_MAX_TOKENS} is the most")
        if self._total_tokens and message.total_tokens != self._total_tokens:
            raise TransferError(f"{message.total_tokens} tokens in all, where there were {self._total_tokens}")
        if stop > room_stop:
            raise TransferError(f"{stop} tokens, where there was room up to {room_stop}")
        if isinstance(message, Partial) and (stop < room_stop or stop >= message.total_tokens):
            raise TransferError(f"a part up to token {stop} of {message.total_tokens}, where there was room up to {room_stop}")

    def pump(self, max_moves: int, now: float) -> list[MoveKey]:
        """Takes room and asks; where this side copies, reads what was announced, and uses it if it still may. While bytes of
        the next round are on their way, those of the round before are moved out."""
        if self.state is EmbeddingState.BOOTSTRAPPING and self._room is None:
            self._take_room(now)
        if self.state is EmbeddingState.BOOTSTRAPPING and self._room is not None and self.link.ready:
            self._advance(EmbeddingState.WAITING_FOR_INPUT)
            self._ask_first(now)
        begun = self._read_or_use(now)
        if self._round is RoundState.MOVING or not self.link.consumer_moves:
            self._move_out(self._leaving)
        if self._arrived is not None:
            self._leaving, self._arrived = self._arrived, None
        return begun

    def _read_or_use(self, now: float) -> list[MoveKey]:
        if self.is_ended:
            return []
        if self._round is RoundState.ANNOUNCED:
            return self._read()
        if self._round is RoundState.MOVING and not self._ending.moves:
            if self._answers.lease.valid(now):
                self._round_is_in(now)
            else:
                self._fail(Failure("the producer's lease ran out before everything was copied"))
        return []

    def _read(self) -> list[MoveKey]:
        assert self._notice is not None
        assert self._room is not None
        layout, engine = self.link.parts()
        here = Placement(self._pool.layout, self._room.blocks, self._first_token)
        there = Placement(layout, self._notice.blocks)
        try:
            ranges = embedding_ranges(here, there, (self._first_token, _stop(self._notice)))
            move = self._begin(self.link.peer, engine, ranges, writes=False)
        except TransferError as error:
            self._fail(Failure(f"a read could not be started: {error}"))
            return []
        self._advance_round(RoundState.MOVING)
        return [move]

    def moved(self, move: MoveKey, error: str) -> None:
        size_bytes = self._ending.moves.pop(move)
        self._desk.move_ended(self.link.peer, size_bytes, moved=not error)
        if error:
            self._fail(Failure(f"a read of {size_bytes} bytes failed: {error}"))
        else:
            assert self._notice is not None
            self._desk.counts.moved_tokens += _stop(self._notice) - self._first_token
        self._drain()

    @property
    def _memory(self) -> PoolMemory:
        """Where the link's transport puts what comes."""
        _, engine = self.link.parts()
        return self._pool.memory_of(engine.name)

    def _round_is_in(self, now: float) -> None:
        """Every byte of the round is in the pool, and nothing will be written there until the producer is asked to."""
        assert self._room is not None
        assert self._notice is not None
        self._move_out(self._leaving or self._arrived)  # of the round before
        total, stop = self._total_tokens, _stop(self._notice)
        if self._first_token == 0:
            told, *rest = self._memory.aux(self._room.blocks[0])
            self._aux = tuple(rest)
            if told != total:
                self._fail(Failure(f"the aux data say {told} tokens, the producer {total}"))
                return
        arrived = Round(self._room.blocks, self._first_token, stop - self._first_token)
        if stop == total:
            self._succeed(arrived, now)
            return
        if self.state is EmbeddingState.WAITING_FOR_INPUT:
            self._advance(EmbeddingState.TRANSFERRING)
        self._resume(arrived, total - stop, now)

    def _resume(self, arrived: Round, remaining_tokens: int, now: float) -> None:
        try:
            self._home = self._home or self._memory.home(self._total_tokens)
            besides = self._rooms.besides(remaining_tokens)
            if besides is not None:
                self._room, self._arrived = besides, arrived
            else:
                self._arrive(arrived)
                self._room = self._rooms.more(arrived.blocks, remaining_tokens)
        except (NoRoomError, TransferError) as error:
            self._fail(Failure(str(error)))
            return
        self._desk.counts.resumes += 1
        self._num_resumes += 1
        self._num_first_tokens = self._num_first_tokens or arrived.num_tokens
        self._first_token = arrived.first_token + arrived.num_tokens
        self._ask_first(now)

    def _move_out(self, arrived: Round | None) -> None:
        if arrived is not None:
            self._leaving = self._arrived = None
            self._arrive(arrived)
            self._pool.give_back(arrived.blocks)

    def _arrive(self, arrived: Round) -> None:
        """With copies of what is in the pool, where all of the embedding will be."""
        assert self._home is not None
        pieces = self._memory.move_out(self._home, arrived.blocks, arrived.first_token, arrived.num_tokens)
        self._desk.news.append(
            EmbeddingArrival(transfer_id=self.transfer_id, pieces=pieces, total_tokens=self._total_tokens, aux=self._aux)
        )

    def _succeed(self, arrived: Round, now: float) -> None:
        """The owner of the embedding releases its room."""
        self._advance_round(RoundState.COMPLETE)
        self._advance(EmbeddingState.SUCCESS)
        self._rooms.note_length(self._total_tokens)
        self._log_success(now)
        self._send(Received(transfer_id=self.transfer_id))
        self._desk.news.append(
            EmbeddingArrival(
                transfer_id=self.transfer_id,
                pieces=tuple(self._memory.pieces(arrived.blocks, arrived.first_token, arrived.num_tokens)),
                total_tokens=self._total_tokens,
                aux=self._aux,
                is_complete=True,
                blocks=arrived.blocks,
            )
        )

    def _log_success(self, now: float) -> None:
        fields = dict[str, object]()
        if self._num_resumes:
            fields = {"first_round": self._num_first_tokens, "resumes": self._num_resumes}
        _, engine = self.link.parts()
        tell = log.warning if self._num_resumes else log.info
        tell(
            "an embedding came in several rounds" if self._num_resumes else "embedding taken over",
            request=self._request_id, transfer=self.transfer_id, producer=self.link.peer, tokens=self._total_tokens,
            bytes=self._pool.layout.size_of(self._total_tokens), transport=engine.name, **fields,
            ms=round((now - self.expected_at) * 1000, 1), trace=self._trace_id,
        )  # fmt: skip

    # What the producer says

    def _hear(self, message: TransferMessage, now: float) -> None:
        assert isinstance(message, Partial | Done)
        self._on_notice(message, now)

    def _repair(self, theirs: Any, now: float) -> None:
        """A notice that got lost comes again when the round is asked for again."""

    def _ask_again(self, now: float) -> None:
        if self._round is RoundState.ASKED:
            self._desk.counts.repeats += 1
            self._ask()

    # Ends

    def _on_failing(self) -> None:
        self._rooms.leave_queue(self.transfer_id)
        for unmoved in filter(None, (self._arrived, self._leaving)):
            self._pool.give_back(unmoved.blocks)
        self._arrived = self._leaving = None
        if not self._by_owner:
            self._desk.news.append(EmbeddingArrival(transfer_id=self.transfer_id, error=self._failure.reason))
        if self._room is not None and not self._ending.is_safe:
            self._pool.quarantine(self._room.blocks)

    def _on_failed(self) -> None:
        if self._room is not None:
            self._pool.give_back(self._room.blocks)

    def _advance(self, following: EmbeddingState) -> None:
        self.state = advance(EMBEDDING_EDGES, self.state, following)
        self._answers.restart()

    def _advance_round(self, following: RoundState) -> None:
        self._round = advance(ROUND_EDGES, self._round, following)


def _stop(message: Partial | Done) -> int:
    """How far the tokens go after this round."""
    return message.sent_tokens if isinstance(message, Partial) else message.total_tokens
