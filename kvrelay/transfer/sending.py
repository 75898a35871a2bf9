"""One transfer on the side that has the KV.

    QUEUED -> STARTED -> SENDING -> DONE              write mode, the producer writes
                         SENDING -> OFFERED -> DONE   write mode, the consumer copies: it is told what is computed
              STARTED -> OFFERED -> DONE              read mode
    any -> DRAINING -> FAILED                         where moves are under way, or a reader must let go first

When may the blocks be reused? Where this side writes: when its moves have ended, however they did. Where the consumer reads:
when it has said ReadDone, Release, Abort or AbortAck, or when its lease is over, because then it discards what it copied.
Before it was told that everything is there (WriteDone, or Ready in answer to its Pull) it cannot use what it copied anyway.
"""

from __future__ import annotations

from kvrelay.states import PRODUCER_EDGES, ConsumerState, ProducerState, advance
from kvrelay.transfer.desk import ProducerDesk, ProducerEnd
from kvrelay.transfer.engines.base import MoveId, TransferError
from kvrelay.transfer.layout import Placement, move_ranges
from kvrelay.transfer.leases import HeldLease
from kvrelay.transfer.plan import Coverage, LayerPlan, Progress, Reservation, TransferMeta, WriteTask
from kvrelay.transfer.session import Link, placed_blocks
from kvrelay.wire.serving import FirstToken
from kvrelay.wire.transfer import (
    Abort,
    AbortAck,
    Computed,
    Message,
    NotReady,
    Pull,
    Ready,
    Reserve,
    Starting,
    Unreserved,
    WriteDone,
)

OVER = frozenset({ProducerState.DONE, ProducerState.FAILED})


class Sending:
    """Driven by the machine that holds it; calls the transfer engine of its link."""

    def __init__(self, meta: TransferMeta, desk: ProducerDesk, lease_s: float) -> None:
        self.meta = meta
        self.state = advance(PRODUCER_EDGES, ProducerState.UNKNOWN, ProducerState.QUEUED)
        self.end = ProducerEnd(ProducerState.UNKNOWN)  # replaced when it is over
        self._desk = desk
        self._lease = HeldLease(lease_s)
        self._link: Link | None = None  # set with the first reservation or pull
        self._blocks: tuple[int, ...] = ()
        self._progress = Progress()
        self._first_tokens: list[FirstToken] | None = None  # set when the prompt is computed
        self._parked = False
        self._reservation: Reservation | None = None
        self._dropped = 0  # this reservation, and every earlier one, was taken back
        self._unreserving = False
        self._coverage: Coverage | None = None
        self._announced: Progress | None = None
        self._moves: dict[MoveId, WriteTask] = {}
        self._failure = ""  # why it is DRAINING
        self._ended_by_engine = False
        self._ack_due = False
        self.silent = False  # ended without news: the engine aborted it and holds nothing

    # What the engine does

    def start(self, blocks: tuple[int, ...], num_computed: int, now: float) -> None:
        if self.state in OVER or self.state is ProducerState.DRAINING:
            return
        self._blocks, self._progress, self._parked = blocks, Progress(num_computed), False
        self._first_tokens = None
        if self.state is ProducerState.QUEUED:
            self._advance(ProducerState.STARTED)
            self._lease.extend(now)
            if self._reservation is not None:
                self._advance(ProducerState.SENDING)
            else:
                self.say_where_it_is()

    def computing(self, next_tokens: int, layers: int) -> None:
        """A forward pass has stored the KV up to `next_tokens` of the first `layers` layers."""
        if self._blocks:
            self._progress = Progress(self._progress.num_tokens, next_tokens, layers)

    def computed(self, num_tokens: int) -> None:
        if self._blocks:
            self._progress = Progress(max(num_tokens, self._progress.num_tokens))

    def finish(self, first_tokens: list[FirstToken]) -> None:
        if not self._blocks or self.state in OVER:
            return
        self._progress = Progress(self.meta.num_tokens)
        self._first_tokens = first_tokens
        if self.meta.mode == "read" and self.state is ProducerState.STARTED:
            self._advance(ProducerState.OFFERED)
            self.say_where_it_is()

    def park(self) -> None:
        waits = self.state is ProducerState.STARTED or (self.state is ProducerState.OFFERED and self.meta.mode == "read")
        if not waits or self._reservation is not None or self._parked or not self._blocks:
            return
        if self.state is ProducerState.OFFERED:
            self._advance(ProducerState.STARTED)
        self._blocks, self._progress, self._first_tokens = (), Progress(), None
        self._parked = True
        self._desk.news.parked.append(self.meta.request_id)

    # What the consumer says

    def say_where_it_is(self) -> None:
        """Tells a consumer that has just come, or has missed it, that there is something to reserve blocks for."""
        if self.meta.mode == "write" and self.state is ProducerState.STARTED:
            self._send(Starting(transfer_id=self.meta.transfer_id, num_tokens=self.meta.num_tokens))
        elif self.meta.mode == "read" and (self._parked or (self.state is ProducerState.OFFERED and not self._reservation)):
            self._send(self._ready())

    def reserve(self, link: Link, message: Reserve, now: float) -> None:
        """Raises TransferError if the blocks make no sense."""
        if self.meta.mode != "write":
            raise TransferError("Reserve in read mode")
        if self._late(message.reservation):
            return
        layout, _ = link.parts()
        needed = self.meta.num_tokens - message.skip_tokens
        if message.skip_tokens < 0 or needed < 0:
            raise TransferError(f"skips {message.skip_tokens} of {self.meta.num_tokens} tokens")
        blocks = placed_blocks(message.blocks, layout, needed)
        self._lease.extend(now)
        self._link = link
        self._reservation = Reservation(message.reservation, message.skip_tokens, blocks)
        self._coverage = Coverage(self.meta.transfer_id, self._desk.layout.num_layers, message.skip_tokens)
        if self.state is ProducerState.STARTED:
            self._advance(ProducerState.SENDING)
        self._wake_if_parked()

    def pull(self, link: Link, message: Pull, now: float) -> None:
        if self.meta.mode != "read":
            raise TransferError("Pull in write mode")
        if self.state is ProducerState.OFFERED and self._answers(message.reservation):
            self._lease.extend(now)
            self._link = link
            self._reservation = Reservation(message.reservation, message.skip_tokens)
            self._send(self._ready())
        elif self.state in (ProducerState.QUEUED, ProducerState.STARTED):
            self._wake_if_parked()
            self._send(NotReady(transfer_id=self.meta.transfer_id, reservation=message.reservation))
        else:
            self._desk.duplicates += 1

    def unreserve(self, number: int) -> None:
        self._dropped = max(self._dropped, number)
        if self.state is ProducerState.DRAINING:
            return  # Abort will follow, and says more
        if self._reservation is None or self._reservation.number > number:
            self._send(Unreserved(transfer_id=self.meta.transfer_id, reservation=number))
            return
        self._unreserving = True
        self._cancel_moves()
        self._settle()

    def heartbeat(self, theirs: ConsumerState, now: float) -> None:
        """Extends the lease, and says again what the consumer has not heard."""
        if self.state is ProducerState.DRAINING:
            return
        self._lease.extend(now)
        if theirs is ConsumerState.QUEUED and self._parked:
            self.say_where_it_is()  # it would wait for a prompt that waits for its pull
        if theirs is not ConsumerState.RESERVED or self._reservation is None:
            return
        if self.state is ProducerState.SENDING:
            self._announced = None
        elif self.state is ProducerState.OFFERED:
            self._send(self._ready() if self.meta.mode == "read" else self._write_done())

    def read_done(self) -> None:
        """The consumer has everything."""
        if self.state is ProducerState.OFFERED:
            self._over(ProducerState.DONE)
        elif self.state is ProducerState.DRAINING and not self._moves:
            self._over(ProducerState.FAILED)
        else:
            self._desk.duplicates += 1

    def release(self) -> None:
        """The consumer wants nothing, and holds no blocks for it."""
        if self._moves or self.state is ProducerState.DRAINING:
            self.consumer_aborted("released while bytes were moving")
        else:
            self._over(ProducerState.DONE)

    def consumer_aborted(self, reason: str) -> None:
        """Answered by AbortAck, when nothing moves any more."""
        self._ack_due = True
        self.fail(f"the consumer ended it: {reason}", reader_gone=True)

    # Ends

    def abort(self) -> None:
        """By the engine. A reader that was told it may read is given its lease to let go."""
        self._ended_by_engine = True
        self.fail("the prefill was aborted")

    def fail(self, reason: str, *, reader_gone: bool = False) -> None:
        """Ends at once if nobody reads or writes the blocks; else when nobody does."""
        if self.state in OVER:
            return
        waits_for_reader = self.state is ProducerState.OFFERED and self._reservation is not None and not reader_gone
        if self.state is ProducerState.DRAINING:
            if reader_gone and not self._moves:
                self._over(ProducerState.FAILED)
            return
        self._failure = reason
        if self._moves:
            self._advance(ProducerState.DRAINING)
            self._cancel_moves()
        elif waits_for_reader:
            self._advance(ProducerState.DRAINING)
            self._send(Abort(transfer_id=self.meta.transfer_id, reason=reason))
        else:
            self._over(ProducerState.FAILED)

    def tick(self, now: float, lease_s: float) -> None:
        if self._lease.over(now):
            self.fail(f"the consumer has not asked for it for {lease_s:g} s", reader_gone=True)

    # Moves

    def pump(self, max_moves: int) -> list[MoveId]:
        """Moves or announces what is new. Returns the moves it began."""
        if self.state is not ProducerState.SENDING or not self._blocks or self._unreserving:
            return []
        assert self._link is not None
        if self._link.consumer_copies(self.meta.mode):
            self._announce()
            return []
        begun = self._write_new(max_moves)
        self._settle()
        return begun

    def moved(self, move: MoveId, error: str) -> None:
        task = self._moves.pop(move)
        self._desk.num_moves -= 1
        if not error:
            self._desk.count_moved(task.size_bytes, late=self._first_tokens is not None)
        elif self.state is ProducerState.SENDING and not self._unreserving:
            self.fail(f"a write of {task.size_bytes} bytes failed: {error}")
            return
        self._settle()

    def _write_new(self, max_moves: int) -> list[MoveId]:
        assert self._coverage is not None
        begun: list[MoveId] = []
        try:
            for plan in self._coverage.take(self._progress, max(0, max_moves - len(self._moves))):
                begun.extend(self._write(plan))
        except TransferError as error:
            self.fail(f"a write could not be started: {error}")
        return begun

    def _write(self, plan: LayerPlan) -> list[MoveId]:
        assert self._link is not None
        assert self._reservation is not None
        layout, engine = self._link.parts()
        here = Placement(self._desk.layout, self._blocks)
        there = Placement(layout, self._reservation.blocks, self._reservation.skip_tokens)
        ranges = move_ranges(here, there, plan.tokens, plan.layers)
        move = engine.write(self.meta.peer, ranges)
        self._moves[move] = WriteTask(plan, self.meta.peer, int(ranges[:, 2].sum()))
        self._desk.num_moves += 1
        return [move]

    def _announce(self) -> None:
        """What is new since the last notice; the last of all is WriteDone."""
        assert self._reservation is not None
        if self._first_tokens is not None:
            self._advance(ProducerState.OFFERED)
            self._send(self._write_done())
        elif self._progress is not self._announced and self._progress.furthest > self._reservation.skip_tokens:
            self._announced = self._progress
            self._send(
                Computed(
                    transfer_id=self.meta.transfer_id,
                    reservation=self._reservation.number,
                    blocks=list(self._blocks),
                    num_tokens=self._progress.num_tokens,
                    next_tokens=self._progress.next_tokens,
                    layers=self._progress.layers,
                )
            )

    def _cancel_moves(self) -> None:
        if self._link is not None and self._link.engine is not None:
            for move in self._moves:
                self._link.engine.cancel(move)

    def _settle(self) -> None:
        """Takes the step that waited for the last move to end."""
        if self._moves:
            return
        if self.state is ProducerState.DRAINING:
            self._over(ProducerState.FAILED)
        elif self._unreserving:
            self._take_back()
        elif self.state is ProducerState.SENDING and self._first_tokens is not None and self._everything_written():
            done = self._write_done()
            self._send(done)
            self._over(ProducerState.DONE, replay=done)

    def _everything_written(self) -> bool:
        assert self._link is not None
        if self._coverage is None or self._link.consumer_copies(self.meta.mode):
            return False
        return self._coverage.complete(self.meta.num_tokens)

    def _take_back(self) -> None:
        self._reservation = self._coverage = self._announced = None
        self._unreserving = False
        if self.meta.mode == "write" and self.state is not ProducerState.QUEUED:
            self._advance(ProducerState.STARTED)
        self._send(Unreserved(transfer_id=self.meta.transfer_id, reservation=self._dropped))

    # Small things

    @property
    def num_moves(self) -> int:
        return len(self._moves)

    def _late(self, number: int) -> bool:
        """Whether a Reserve is one that was taken back, or is known. One that was answered is answered again."""
        if number > self._dropped and self._reservation is None:
            return self.state not in (ProducerState.QUEUED, ProducerState.STARTED)
        self._desk.duplicates += 1
        known = self._reservation is not None and self._reservation.number == number
        if known and self.state is ProducerState.OFFERED and not self._unreserving:
            self._send(self._write_done())
        return True

    def _answers(self, number: int) -> bool:
        """Whether a Pull is the present one, or a new one."""
        return number > self._dropped and (self._reservation is None or self._reservation.number == number)

    def _wake_if_parked(self) -> None:
        if self._parked:
            self._parked = False
            self._desk.news.restart.append(self.meta.request_id)

    def _write_done(self) -> WriteDone:
        assert self._first_tokens is not None
        assert self._reservation is not None
        assert self._link is not None
        blocks = list(self._blocks) if self._link.consumer_copies(self.meta.mode) else []
        return WriteDone(
            transfer_id=self.meta.transfer_id,
            reservation=self._reservation.number,
            first_tokens=self._first_tokens,
            blocks=blocks,
        )

    def _ready(self) -> Ready:
        return Ready(
            transfer_id=self.meta.transfer_id,
            reservation=self._reservation.number if self._reservation is not None else 0,
            blocks=list(self._blocks),
            num_tokens=self.meta.num_tokens,
            first_tokens=self._first_tokens or [],
        )

    def _send(self, message: Message) -> None:
        self._desk.send(self.meta.peer, message)

    def _advance(self, following: ProducerState) -> None:
        self.state = advance(PRODUCER_EDGES, self.state, following)

    def _over(self, state: ProducerState, replay: WriteDone | None = None) -> None:
        held = bool(self._blocks)
        self._advance(state)
        self.end = ProducerEnd(state, self._failure, replay)
        self._blocks = ()
        news, request_id = self._desk.news, self.meta.request_id
        self._desk.done += state is ProducerState.DONE
        self._desk.failed += state is ProducerState.FAILED
        self.silent = self._ended_by_engine and not held
        if not self.silent:
            news.released.append(request_id)
        if state is ProducerState.FAILED:
            if not self._ended_by_engine:
                news.failed.append((request_id, self._failure))
            self._send_end()

    def _send_end(self) -> None:
        if self._ack_due:
            self._send(AbortAck(transfer_id=self.meta.transfer_id))
        else:
            self._send(Abort(transfer_id=self.meta.transfer_id, reason=self._failure))
