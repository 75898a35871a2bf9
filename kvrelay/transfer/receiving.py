"""One transfer on the side that needs the KV.

    QUEUED -> STARTING -> RESERVED -> DONE       every byte is here; or, from the first two, it is not wanted any more
                          RESERVED -> STARTING   unreserved: the blocks are back, and may be reserved anew
    any -> DRAINING -> FAILED                    where blocks were reserved: quarantined until nobody can write them

When may the blocks be reused after a failure? Where the producer writes: when it has said that it drained (AbortAck, Abort,
or FAILED in a HeartbeatAck), or is proven dead - never because time has passed. Where this side copies: when its own reads
have ended.

When may bytes that this side copied be used? Only if, after the last copy, the producer's last acknowledged lease is valid.
"""

from __future__ import annotations

from typing import assert_never

from kvrelay.engine.movers import Arrival
from kvrelay.states import CONSUMER_EDGES, ConsumerState, ProducerState, advance
from kvrelay.transfer.desk import ConsumerDesk, ConsumerEnd
from kvrelay.transfer.engines.base import MoveId, TransferError
from kvrelay.transfer.layout import Placement, move_ranges
from kvrelay.transfer.leases import ReaderLease
from kvrelay.transfer.plan import Coverage, LayerPlan, Progress, Reservation, TransferMeta, WriteTask
from kvrelay.transfer.session import ProducerLink, TransferSettings, placed_blocks
from kvrelay.wire.serving import FirstToken
from kvrelay.wire.transfer import (
    Abort,
    AbortAck,
    Computed,
    Message,
    Pull,
    ReadDone,
    Ready,
    Release,
    Reserve,
    Unreserve,
    WriteDone,
)

OVER = frozenset({ConsumerState.DONE, ConsumerState.FAILED})


class Receiving:
    """Driven by the machine that holds it; calls the transfer engine of its link."""

    def __init__(
        self, meta: TransferMeta, link: ProducerLink, desk: ConsumerDesk, settings: TransferSettings, now: float
    ) -> None:
        self.meta = meta
        self.link = link
        self.state = ConsumerState.QUEUED
        self.end = ConsumerEnd(ConsumerState.QUEUED)  # replaced when it is over
        self.silent = False  # ended without news: the engine aborted it and holds nothing
        self.expected_at = now
        self._desk = desk
        self._settings = settings
        self._lease = ReaderLease(settings.lease_s)
        self._first_beat = link.beats.next_number  # acks of earlier heartbeats are about an earlier state
        self._unknown_since: float | None = None
        self._reservation: Reservation | None = None
        self._last_number = 0
        self._reserved_at = 0.0
        self._was_asked = False  # the producer may know the blocks of the present reservation
        self._unreserving = False
        self._peer_let_go = False  # Unreserved came, local reads still run
        self._pull_at: float | None = None
        self._pull_backoff_s = settings.pull_backoff_s
        self._remote_blocks: tuple[int, ...] = ()
        self._announced = Progress()
        self._first_tokens: list[FirstToken] | None = None
        self._coverage: Coverage | None = None
        self._reads: dict[MoveId, WriteTask] = {}
        self._failure = ""
        self._ended_by_engine = False
        self._peer_drained = False
        self._ack_due = False

    @property
    def copies(self) -> bool:
        return self.link.consumer_copies(self.meta.mode)

    @property
    def num_moves(self) -> int:
        return len(self._reads)

    # What the engine does

    def reserve(self, blocks: tuple[int, ...], skip_tokens: int, now: float) -> None:
        if self.state is not ConsumerState.STARTING:
            self._desk.news.freed.append(self.meta.request_id)
            return
        self._advance(ConsumerState.RESERVED)
        self._last_number += 1
        self._reservation = Reservation(self._last_number, skip_tokens, blocks)
        self._coverage = Coverage(self.meta.transfer_id, self._desk.layout.num_layers, skip_tokens)
        self._reserved_at, self._was_asked = now, False
        self._lease.forget()
        self._remote_blocks, self._announced, self._first_tokens = (), Progress(), None
        self._pull_backoff_s = self._settings.pull_backoff_s
        self._ask(now)

    def unreserve(self) -> None:
        if self.state is not ConsumerState.RESERVED or self._unreserving:
            return
        self._unreserving, self._peer_let_go, self._pull_at = True, False, None
        self._cancel_reads()
        self.say_again()

    def abort(self) -> None:
        """By the engine: it does not want the request any more."""
        self._ended_by_engine = True
        if self.state is ConsumerState.DRAINING:
            return
        if self._reservation is None:
            self._send(Release(transfer_id=self.meta.transfer_id))
            self._over(ConsumerState.DONE)
        else:
            self.fail("the decode was aborted")

    # What the producer says

    def starting(self) -> None:
        if self.state is ConsumerState.QUEUED:
            self._advance(ConsumerState.STARTING)
            self._desk.news.started.append(self.meta.request_id)
        else:
            self._desk.duplicates += 1

    def computed(self, message: Computed) -> None:
        """Raises TransferError if the announcement makes no sense."""
        progress = Progress(message.num_tokens, message.next_tokens, message.layers)
        if not self._present(message.reservation):
            return
        if progress.furthest > self.meta.num_tokens:
            raise TransferError(f"{progress.furthest} computed tokens of a prompt of {self.meta.num_tokens}")
        self._may_copy(message.blocks, progress)

    def write_done(self, message: WriteDone) -> None:
        """Raises TransferError as `computed`."""
        if not self.copies and self._matches(message.reservation):
            self._succeed(message.first_tokens)  # also when it was to be unreserved: the bytes were quicker
        elif self._present(message.reservation):
            self._may_copy(message.blocks, Progress(self.meta.num_tokens))
            self._first_tokens = message.first_tokens

    def ready(self, message: Ready, now: float) -> None:
        """Raises TransferError as `computed`."""
        if message.reservation == 0:
            self.starting()
            if self._pull_at is not None:
                self._pull_at = now  # it was not ready before
        elif self._present(message.reservation):
            if message.num_tokens != self.meta.num_tokens:
                raise TransferError(f"a prompt of {message.num_tokens} tokens, not of {self.meta.num_tokens}")
            self._may_copy(message.blocks, Progress(self.meta.num_tokens))
            self._first_tokens = message.first_tokens
            self._pull_at = None

    def not_ready(self, number: int, now: float) -> None:
        if self._present(number) and self._first_tokens is None:
            self._pull_at = now + self._pull_backoff_s
            self._pull_backoff_s = min(self._pull_backoff_s * 2, self._settings.pull_backoff_max_s)

    def unreserved(self, number: int) -> None:
        if self._unreserving and self._matches(number):
            self._peer_let_go = True
            self._settle()
        else:
            self._desk.duplicates += 1

    def producer_aborted(self, reason: str) -> None:
        """It has drained. It may wait for our reads to end, too."""
        self._ack_due = True
        self.fail(f"the producer ended it: {reason}", peer_drained=True, by_producer=True)

    def abort_ack(self) -> None:
        if self.state is ConsumerState.DRAINING:
            self._peer_drained = True
            self._settle()
        else:
            self._desk.duplicates += 1

    def acked(self, number: int, sent_at: float, theirs: ProducerState, now: float) -> None:
        """The producer's state, in answer to heartbeat `number`. Repairs whatever message got lost."""
        if number < self._first_beat or self.state is ConsumerState.DRAINING:
            return
        if theirs is not ProducerState.UNKNOWN:
            self._unknown_since = None
        match theirs:
            case ProducerState.UNKNOWN:
                self._not_known_there(now)
            case ProducerState.QUEUED:
                pass
            case ProducerState.STARTED | ProducerState.SENDING | ProducerState.OFFERED:
                self._lease.confirm(sent_at)
                self._lost_message(theirs, now)
            case ProducerState.DRAINING:
                self.fail("the producer ended it")
            case ProducerState.DONE:
                if self.state is not ConsumerState.RESERVED:  # else WriteDone is on its way again
                    self.fail("the producer believes that it was released")
            case ProducerState.FAILED:
                self.producer_aborted("it failed there")
            case _:
                assert_never(theirs)

    def _not_known_there(self, now: float) -> None:
        if self.state is not ConsumerState.QUEUED:
            self.fail("the producer does not know it any more")
        elif self._unknown_since is None:
            self._unknown_since = now
        elif now >= self._unknown_since + self._settings.unknown_s:
            self.fail(f"the producer has not heard of it for {self._settings.unknown_s:g} s")

    def _lost_message(self, theirs: ProducerState, now: float) -> None:
        write, offered = self.meta.mode == "write", theirs is ProducerState.OFFERED
        if self.state is ConsumerState.QUEUED and (write or offered):
            self.starting()
        elif self.state is ConsumerState.RESERVED and not self._unreserving:
            unheard = theirs is ProducerState.STARTED if write else offered and self._first_tokens is None
            if unheard:
                self._ask(now)

    # Time

    def tick(self, now: float) -> None:
        settings = self._settings
        if self._pull_at is not None and now >= self._reserved_at + settings.pull_deadline_s:
            self.fail(f"the producer was not ready within {settings.pull_deadline_s:g} s")
        elif self._pull_at is not None and now >= self._pull_at:
            self._ask(now)

    def say_again(self) -> None:
        """With every heartbeat, until it is answered."""
        if self.state is ConsumerState.DRAINING and not self._peer_drained:
            self._send(Abort(transfer_id=self.meta.transfer_id, reason=self._failure))
        elif self._unreserving and not self._peer_let_go:
            self._send(Unreserve(transfer_id=self.meta.transfer_id, reservation=self._last_number))

    def _ask(self, now: float) -> None:
        assert self._reservation is not None
        number, skip_tokens = self._reservation.number, self._reservation.skip_tokens
        self._was_asked = self._was_asked or self.link.ready
        if self.meta.mode == "write":
            blocks = list(self._reservation.blocks)
            self._send(Reserve(transfer_id=self.meta.transfer_id, reservation=number, blocks=blocks, skip_tokens=skip_tokens))
        else:
            self._send(Pull(transfer_id=self.meta.transfer_id, reservation=number, skip_tokens=skip_tokens))
            self._pull_at = now + self._settings.pull_backoff_max_s  # should no answer come at all

    @property
    def next_at(self) -> float | None:
        """When `tick` is due."""
        return self._pull_at

    # Reads

    def pump(self, max_moves: int, now: float) -> list[MoveId]:
        """Reads what was announced. Returns the moves it began."""
        if self.state is not ConsumerState.RESERVED or self._unreserving or not self.copies:
            return []
        begun = self._read_new(max_moves)
        if not self._reads and self._first_tokens is not None and self._everything_read():
            self._use_if_leased(now)
        return begun

    def moved(self, move: MoveId, error: str) -> None:
        task = self._reads.pop(move)
        self._desk.num_moves -= 1
        if not error:
            self._desk.count_moved(task.size_bytes, late=self._first_tokens is not None)
        elif self.state is ConsumerState.RESERVED and not self._unreserving:
            self.fail(f"a read of {task.size_bytes} bytes failed: {error}")
            return
        self._settle()

    def _may_copy(self, blocks: list[int], progress: Progress) -> None:
        layout, _ = self.link.parts()
        self._remote_blocks = placed_blocks(blocks, layout, progress.furthest)
        if (progress.num_tokens, progress.layers) > (self._announced.num_tokens, self._announced.layers):
            self._announced = progress
        self._lease.confirm(self._reserved_at)

    def _read_new(self, max_moves: int) -> list[MoveId]:
        assert self._coverage is not None
        begun: list[MoveId] = []
        try:
            for plan in self._coverage.take(self._announced, max(0, max_moves - len(self._reads))):
                begun.append(self._read(plan))
        except TransferError as error:
            self.fail(f"a read could not be started: {error}")
        return begun

    def _read(self, plan: LayerPlan) -> MoveId:
        assert self._reservation is not None
        layout, engine = self.link.parts()
        here = Placement(self._desk.layout, self._reservation.blocks, self._reservation.skip_tokens)
        ranges = move_ranges(here, Placement(layout, self._remote_blocks), plan.tokens, plan.layers)
        move = engine.read(self.meta.peer, ranges)
        self._reads[move] = WriteTask(plan, self.meta.peer, int(ranges[:, 2].sum()))
        self._desk.num_moves += 1
        return move

    def _everything_read(self) -> bool:
        return self._coverage is not None and self._coverage.complete(self.meta.num_tokens)

    def _use_if_leased(self, now: float) -> None:
        if not self._lease.valid(now):
            self.fail("the producer's lease ran out before everything was copied")
            return
        assert self._first_tokens is not None
        self._send(ReadDone(transfer_id=self.meta.transfer_id))
        self._succeed(self._first_tokens)

    def _cancel_reads(self) -> None:
        if self.link.engine is not None:
            for move in self._reads:
                self.link.engine.cancel(move)

    # Ends

    def fail(self, reason: str, *, peer_drained: bool = False, by_producer: bool = False) -> None:
        """Told once. The blocks are freed when nobody can write them."""
        if self.state in OVER:
            return
        self._peer_drained = self._peer_drained or peer_drained
        if self.state is not ConsumerState.DRAINING:
            self._failure = reason
            self._pull_at = None
            if not self._ended_by_engine:
                self._desk.news.arrived.append(Arrival(self.meta.request_id, [], reason, by_producer))
            if self._reservation is None:
                self._over(ConsumerState.FAILED)
                return
            self._advance(ConsumerState.DRAINING)
            self._cancel_reads()
            self.say_again()
        self._settle()

    def _settle(self) -> None:
        """Takes the step that waited for the last read to end, or for the producer to let go."""
        if self._reads:
            return
        if self.state is ConsumerState.DRAINING and (self._peer_drained or self.copies or not self._was_asked):
            self._over(ConsumerState.FAILED)
        elif self._unreserving and self._peer_let_go and self.state is ConsumerState.RESERVED:
            self._reservation = self._coverage = None
            self._unreserving = False
            self._advance(ConsumerState.STARTING)
            self._desk.news.freed.append(self.meta.request_id)
            self._desk.news.started.append(self.meta.request_id)

    def _succeed(self, first_tokens: list[FirstToken]) -> None:
        self._desk.news.arrived.append(Arrival(self.meta.request_id, first_tokens))
        self._reservation = None  # the blocks are the engine's, with what is in them
        self._over(ConsumerState.DONE)

    def _over(self, state: ConsumerState) -> None:
        self._advance(state)
        self.end = ConsumerEnd(state, self._failure)
        self._desk.done += state is ConsumerState.DONE
        self._desk.failed += state is ConsumerState.FAILED
        held = self._reservation is not None
        self.silent = self._ended_by_engine and not held
        if state is ConsumerState.FAILED:
            if held:
                self._desk.news.freed.append(self.meta.request_id)
            if self._ack_due:
                self._send(AbortAck(transfer_id=self.meta.transfer_id))
            elif not held:
                self._send(Abort(transfer_id=self.meta.transfer_id, reason=self._failure))

    def needs_confirming(self) -> bool:
        """Whether the producer may still hold something for this transfer, should the last message get lost."""
        if self.state is ConsumerState.FAILED:
            return self._ack_due or not self._peer_drained
        return self.copies or self._ended_by_engine

    # Small things

    def _matches(self, number: int) -> bool:
        return self.state is ConsumerState.RESERVED and self._reservation is not None and self._reservation.number == number

    def _present(self, number: int) -> bool:
        """Whether a message answers the present reservation, and that is still wanted."""
        if self._matches(number) and not self._unreserving:
            return True
        self._desk.duplicates += 1
        return False

    def _send(self, message: Message) -> None:
        """Not before the connection is open: the heartbeat that opens it says what these words would have."""
        if self.link.ready:
            self._desk.send(self.meta.peer, message)

    def _advance(self, following: ConsumerState) -> None:
        self.state = advance(CONSUMER_EDGES, self.state, following)
        self._first_beat = self.link.beats.next_number
