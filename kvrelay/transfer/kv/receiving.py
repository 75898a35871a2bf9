"""One transfer on the side that needs the KV.

    QUEUED -> STARTING -> RESERVED -> DONE       every byte is here; or, from the first two, it is not wanted any more
    any -> DRAINING -> FAILED                    blocks that were reserved are quarantined until neither the producer nor a read
                                                 of ours can write them (`Ending`)

When may bytes that this side copied be used? Only if, after the last copy, the reader's lease that the producer last
acknowledged is valid.
"""

from __future__ import annotations

import functools
from typing import Any, assert_never

from kvrelay.engine.movers import Arrival, ConsumerNews
from kvrelay.log import Log
from kvrelay.states import CONSUMER_EDGES, ConsumerState, EndedBy, ProducerState, advance
from kvrelay.transfer.blocks import Placement, placed_blocks
from kvrelay.transfer.engines.base import TransferError
from kvrelay.transfer.kv.kind import ConsumerDesk
from kvrelay.transfer.kv.layout import KVLayout, move_ranges
from kvrelay.transfer.kv.plan import Coverage, LayerPlan, Progress, Reservation, TransferMeta
from kvrelay.transfer.relay.ending import Failure
from kvrelay.transfer.relay.kind import End, MoveKey
from kvrelay.transfer.relay.link import ProducerLink
from kvrelay.transfer.relay.seam import ReceivingTransfer
from kvrelay.wire.kv import Computed, NotReady, Pull, ReadDone, Ready, Release, Reserve, Starting, WriteDone
from kvrelay.wire.relay import TransferMessage
from kvrelay.wire.serving import FirstToken

log = Log("relay")

_Said = Starting | Computed | WriteDone | Ready | NotReady


class Receiving(ReceivingTransfer[ConsumerState, KVLayout, ConsumerNews]):
    """Driven by the machine that holds it; calls the transfer engine of its link."""

    def __init__(self, meta: TransferMeta, link: ProducerLink[KVLayout], desk: ConsumerDesk, now: float) -> None:
        super().__init__(meta.transfer_id, meta.request_id, link, ConsumerState.QUEUED, desk, now)
        self.meta = meta
        self._settings = desk.settings
        self._reservation: Reservation | None = None
        self._reserved_at = 0.0
        self._pull_at: float | None = None  # read mode: the producer was not ready, and is asked again then
        self._pull_backoff_s = desk.settings.pull_backoff_s
        self._remote_blocks: tuple[int, ...] = ()
        self._announced = Progress()
        self._first_tokens: list[FirstToken] | None = None
        self._coverage: Coverage | None = None

    @property
    def is_begun(self) -> bool:
        return self.state is ConsumerState.RESERVED

    @property
    def next_at(self) -> float | None:
        return self._pull_at

    @property
    def end(self) -> End:
        read = ReadDone(transfer_id=self.transfer_id)
        has_read = self.state is ConsumerState.DONE and self._copies
        return End(self.state, self.peers, self._failure.reason, read if has_read else None)

    @property
    def needs_confirming(self) -> bool:
        done = self.state is ConsumerState.DONE
        return self._copies or self._by_owner if done else super().needs_confirming

    @property
    def _copies(self) -> bool:
        return self.meta.mode == "read" or self.link.consumer_moves

    # What the engine does

    def reserve(self, blocks: tuple[int, ...], skip_tokens: int, now: float) -> None:
        if self.state is not ConsumerState.STARTING:
            self._desk.news.freed.append(self.meta.request_id)
            return
        self._advance(ConsumerState.RESERVED)
        self._reservation = Reservation(skip_tokens, blocks)
        self._coverage = Coverage(self.transfer_id, self._desk.layout.num_layers, skip_tokens)
        self._reserved_at = now
        self._answers.lease.forget()
        self._ask(now)

    def abort(self) -> None:
        failure = Failure("the decode was aborted", EndedBy.OWNER)
        if self.state is ConsumerState.DRAINING:
            return
        if self._reservation is None:
            self._failure = failure
            self._send(Release(transfer_id=self.transfer_id))
            self._advance(ConsumerState.DONE)
        else:
            self._fail(failure)

    # What the producer says

    def _hear(self, message: TransferMessage, now: float) -> None:
        assert isinstance(message, _Said)
        match message:
            case Starting():
                self._starting()
            case Ready() if not message.blocks:
                self._starting()
                if self._pull_at is not None:
                    self._pull_at = now  # it was not ready before
            case Computed() | WriteDone() | Ready() | NotReady() if self.state is not ConsumerState.RESERVED:
                self._desk.counts.duplicates += 1
            case Computed():
                self._computed(message)
            case WriteDone():
                self._write_done(message, now)
            case Ready():
                self._ready(message)
            case NotReady():
                if self._first_tokens is None:
                    self._pull_at = now + self._pull_backoff_s
                    self._pull_backoff_s = min(self._pull_backoff_s * 2, self._settings.pull_backoff_max_s)
            case _:
                assert_never(message)

    def _starting(self) -> None:
        if self.state is ConsumerState.QUEUED:
            self._advance(ConsumerState.STARTING)
            self._desk.news.started.append(self.meta.request_id)
        else:
            self._desk.counts.duplicates += 1

    def _computed(self, message: Computed) -> None:
        """Raises TransferError if the announcement makes no sense."""
        progress = Progress(message.num_tokens, message.next_tokens, message.layers)
        if progress.furthest > self.meta.num_tokens:
            raise TransferError(f"{progress.furthest} computed tokens of a prompt of {self.meta.num_tokens}")
        self._may_copy(message.blocks, progress)

    def _write_done(self, message: WriteDone, now: float) -> None:
        """Raises TransferError as `_computed`."""
        if self._copies:
            self._may_copy(message.blocks, Progress(self.meta.num_tokens))
            self._first_tokens = message.first_tokens
        else:
            self._succeed(message.first_tokens, now)

    def _ready(self, message: Ready) -> None:
        """In answer to a Pull. Raises TransferError as `_computed`."""
        if message.num_tokens != self.meta.num_tokens:
            raise TransferError(f"a prompt of {message.num_tokens} tokens, not of {self.meta.num_tokens}")
        self._may_copy(message.blocks, Progress(self.meta.num_tokens))
        self._first_tokens = message.first_tokens
        self._pull_at = None

    def _repair(self, theirs: Any, now: float) -> None:
        """What got lost: the producer's word that it starts, or ours that asks for the KV."""
        write, offered = self.meta.mode == "write", theirs is ProducerState.OFFERED
        if theirs is ProducerState.DONE:
            if self.state is not ConsumerState.RESERVED:  # else WriteDone is on its way again
                self._fail(Failure("the producer believes that it was released"))
        elif self.state is ConsumerState.QUEUED:
            if offered or theirs is ProducerState.SET_ASIDE or (write and theirs is not ProducerState.QUEUED):
                self._starting()
        elif self.state is ConsumerState.RESERVED:
            waits = theirs in (ProducerState.STARTED, ProducerState.SET_ASIDE)
            if waits if write else offered and self._first_tokens is None:
                self._desk.counts.repeats += 1
                self._ask(now)

    # Time

    def tick(self, now: float) -> None:
        deadline_s = self._settings.pull_deadline_s
        if self._pull_at is not None and now >= self._reserved_at + deadline_s:
            self._fail(Failure(f"the producer was not ready within {deadline_s:g} s"))
        elif self._pull_at is not None and now >= self._pull_at:
            self._ask(now)

    def _ask_again(self, now: float) -> None:
        """The producer's answer to the heartbeat tells whether it must be asked again."""

    def _ask(self, now: float) -> None:
        assert self._reservation is not None
        skip_tokens = self._reservation.skip_tokens
        if self.meta.mode == "write":
            if self.link.ready and not self._copies:
                self._ending.grant()
            blocks = list(self._reservation.blocks)
            self._send(Reserve(transfer_id=self.transfer_id, blocks=blocks, skip_tokens=skip_tokens))
        else:
            self._send(Pull(transfer_id=self.transfer_id, skip_tokens=skip_tokens))
            self._pull_at = now + self._settings.pull_backoff_max_s  # should no answer come at all

    # Reads

    def pump(self, max_moves: int, now: float) -> list[MoveKey]:
        if self.state is not ConsumerState.RESERVED or not self._copies:
            return []
        begun = self._read_new(max_moves)
        if not self._ending.moves and self._first_tokens is not None and self._everything_read():
            self._use_if_leased(now)
        return begun

    def moved(self, move: MoveKey, error: str) -> None:
        size_bytes = self._ending.moves.pop(move)
        self._desk.move_ended(self.link.peer, size_bytes, moved=not error, late=self._first_tokens is not None)
        if error:
            self._fail(Failure(f"a read of {size_bytes} bytes failed: {error}"))
        self._drain()

    def _may_copy(self, blocks: list[int], progress: Progress) -> None:
        layout, _ = self.link.parts()
        self._remote_blocks = placed_blocks(blocks, layout, progress.furthest)
        if (progress.num_tokens, progress.layers) > (self._announced.num_tokens, self._announced.layers):
            self._announced = progress
        self._answers.known(self._reserved_at)

    def _read_new(self, max_moves: int) -> list[MoveKey]:
        assert self._coverage is not None
        begun: list[MoveKey] = []
        try:
            for plan in self._coverage.take(self._announced, max(0, max_moves - len(self._ending.moves))):
                begun.append(self._read(plan))
        except TransferError as error:
            self._fail(Failure(f"a read could not be started: {error}"))
        return begun

    def _read(self, plan: LayerPlan) -> MoveKey:
        assert self._reservation is not None
        layout, engine = self.link.parts()
        here = Placement(self._desk.layout, self._reservation.blocks, self._reservation.skip_tokens)
        ranges = move_ranges(here, Placement(layout, self._remote_blocks), plan.tokens, plan.layers, writes=False)
        return self._begin(self.meta.peer, engine, ranges, writes=False)

    def _everything_read(self) -> bool:
        return self._coverage is not None and self._coverage.complete(self.meta.num_tokens)

    def _use_if_leased(self, now: float) -> None:
        if not self._answers.lease.valid(now):
            self._fail(Failure("the producer's lease ran out before everything was copied"))
            return
        assert self._first_tokens is not None
        self._send(ReadDone(transfer_id=self.transfer_id))
        self._succeed(self._first_tokens, now)

    # Ends

    def _on_failing(self) -> None:
        self._pull_at = None
        if not self._by_owner:
            by_producer = self._failure.by is EndedBy.PEER
            self._desk.news.arrived.append(Arrival(self.meta.request_id, [], self._failure.reason, by_producer))

    def _on_failed(self) -> None:
        if self._reservation is not None:
            self._desk.news.freed.append(self.meta.request_id)

    def _succeed(self, first_tokens: list[FirstToken], now: float) -> None:
        """The blocks are the engine's, with what is in them."""
        assert self._reservation is not None
        self._ending.let_go()
        num_tokens = self.meta.num_tokens - self._reservation.skip_tokens
        said = functools.partial(
            log.info, "KV taken over", request=self.meta.request_id, transfer=self.transfer_id, producer=self.meta.peer,
            tokens=num_tokens, bytes=num_tokens * self._desk.layout.all_heads_bytes,
            ms=round((now - self._reserved_at) * 1000, 1), trace=self.meta.trace_id,
        )  # fmt: skip
        self._desk.log_later(said)
        self._desk.news.arrived.append(Arrival(self.meta.request_id, first_tokens))
        self._advance(ConsumerState.DONE)

    def _advance(self, following: ConsumerState) -> None:
        self.state = advance(CONSUMER_EDGES, self.state, following)
        self._answers.restart()
