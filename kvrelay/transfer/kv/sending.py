"""One transfer on the side that has the KV.

    QUEUED -> STARTED -> SENDING -> DONE              write mode, the producer writes
                         SENDING -> OFFERED -> DONE   write mode, the consumer copies: it is told what is computed
              STARTED -> OFFERED -> DONE              read mode
              STARTED | OFFERED -> SET_ASIDE          the consumer has no room yet, and others need the blocks: computed again
                                                      from the cache (STARTED, SENDING) when it has
    any -> DRAINING -> FAILED                         when moves under way have ended, and a reader has let go (`Ending`)

A reader has access once it was told that everything is there (WriteDone, or Ready in answer to its Pull): before, it cannot use
what it copied.
"""

from __future__ import annotations

from typing import Any, assert_never

from kvrelay.engine.movers import ProducerNews
from kvrelay.ids import WorkerId
from kvrelay.states import PRODUCER_EDGES, ConsumerState, EndedBy, ProducerState, advance
from kvrelay.transfer.blocks import Placement, placed_blocks
from kvrelay.transfer.engines.base import TransferError
from kvrelay.transfer.kv.kind import ProducerDesk
from kvrelay.transfer.kv.layout import KVLayout, move_ranges
from kvrelay.transfer.kv.plan import Coverage, LayerPlan, Progress, Reservation, TransferMeta
from kvrelay.transfer.relay.ending import Failure
from kvrelay.transfer.relay.kind import End, MoveKey
from kvrelay.transfer.relay.leases import HeldLease
from kvrelay.transfer.relay.link import Link
from kvrelay.transfer.relay.seam import SendingTransfer
from kvrelay.wire.kv import Computed, NotReady, Pull, ReadDone, Ready, Release, Reserve, Starting, WriteDone
from kvrelay.wire.relay import Abort, AbortAck, TransferMessage
from kvrelay.wire.serving import FirstToken

_WAITING = frozenset({ProducerState.QUEUED, ProducerState.STARTED, ProducerState.SET_ASIDE})  # for the consumer's room
_Said = Reserve | Pull | ReadDone | Release | Abort | AbortAck


def _bytes_of(meta: TransferMeta, reservation: Reservation | None, layout: KVLayout) -> int:
    """That a transfer moves in all."""
    return 0 if reservation is None else (meta.num_tokens - reservation.skip_tokens) * layout.all_heads_bytes


class Sending(SendingTransfer[ProducerState, KVLayout, ProducerNews]):
    """Driven by the machine that holds it; calls the transfer engine of its link."""

    def __init__(self, meta: TransferMeta, desk: ProducerDesk) -> None:
        super().__init__(meta.transfer_id, meta.request_id, (meta.peer,), ProducerState.QUEUED, desk)
        self.meta = meta
        self._lease = HeldLease(desk.settings.lease_s)
        self._ending = self._endings[meta.peer]
        self._link: Link[KVLayout] | None = None  # set with the first reservation or pull
        self._blocks: tuple[int, ...] = ()
        self._progress = Progress()
        self._first_tokens: list[FirstToken] | None = None  # set when the prompt is computed
        self._reservation: Reservation | None = None
        self._coverage: Coverage | None = None
        self._announced: Progress | None = None
        self._written: WriteDone | None = None  # once everything was, where this side writes

    @property
    def end(self) -> End:
        reason = self._failure.reason
        late = self._written or Abort(transfer_id=self.transfer_id, reason=reason or "it was over before")
        return End(self.state, self.peers, reason, late)

    @property
    def _consumer_copies(self) -> bool:
        assert self._link is not None
        return self.meta.mode == "read" or self._link.consumer_moves

    # What the engine does

    def start(self, blocks: tuple[int, ...], num_computed: int, now: float) -> None:
        if self.is_ended:
            return
        self._blocks, self._progress, self._first_tokens = blocks, Progress(num_computed), None
        if self.state is ProducerState.QUEUED:
            self._advance(ProducerState.STARTED)
            self._lease.extend(now)
            if self._reservation is not None:
                self._advance(ProducerState.SENDING)
            else:
                self.on_open(self.meta.peer)

    # `blocks` are, in these three, those that `start` was given: what is said of earlier ones, set aside since, is of no use.

    def computing(self, blocks: tuple[int, ...], next_tokens: int, layers: int) -> None:
        """A forward pass has stored the KV up to `next_tokens` of the first `layers` layers."""
        if self._blocks and blocks is self._blocks:
            self._progress = Progress(self._progress.num_tokens, next_tokens, layers)

    def computed(self, blocks: tuple[int, ...], num_tokens: int) -> None:
        if self._blocks and blocks is self._blocks:
            self._progress = Progress(max(num_tokens, self._progress.num_tokens))

    def finish(self, blocks: tuple[int, ...], first_tokens: list[FirstToken]) -> None:
        if not self._blocks or blocks is not self._blocks or self.is_over:
            return
        self._progress = Progress(self.meta.num_tokens)
        self._first_tokens = first_tokens
        if self.meta.mode == "read" and self.state is ProducerState.STARTED:
            self._advance(ProducerState.OFFERED)
            self.on_open(self.meta.peer)

    def set_aside(self) -> None:
        """Not if the consumer has reserved or pulled: then the transfer goes on."""
        waits = self.state in (ProducerState.STARTED, ProducerState.OFFERED) and self._reservation is None
        if waits and self._blocks:
            self._advance(ProducerState.SET_ASIDE)
            self._blocks, self._progress, self._first_tokens = (), Progress(), None
            self._desk.counts.set_aside += 1
            self._desk.news.set_aside.append(self.meta.request_id)

    def abort(self) -> None:
        """A reader that was told it may read is given its lease to let go."""
        self._fail(Failure("the prefill was aborted", EndedBy.OWNER))

    # What the consumer says

    def on_message(self, peer: WorkerId, message: TransferMessage, now: float) -> None:
        assert isinstance(message, _Said)
        link = self._desk.links.get(peer)
        match message:
            case Reserve():
                if link is not None and link.open:  # one that was held back may have outlived its connection
                    self._reserve(link, message, now)
            case Pull():
                if link is not None and link.open:
                    self._pull(link, message, now)
            case ReadDone() | AbortAck():
                self._read_done()
            case Release():
                self._release()
            case Abort():
                self._consumer_aborted(peer, message.reason)
            case _:
                assert_never(message)

    def on_open(self, peer: WorkerId) -> None:
        """Tells a consumer that has just come that there is something to reserve blocks for."""
        is_computed = self.state in (ProducerState.SET_ASIDE, ProducerState.OFFERED) and self._reservation is None
        if self.meta.mode == "write" and self.state in (ProducerState.STARTED, ProducerState.SET_ASIDE):
            self._send(Starting(transfer_id=self.transfer_id, num_tokens=self.meta.num_tokens))
        elif self.meta.mode == "read" and is_computed:
            self._send(Ready(transfer_id=self.transfer_id, num_tokens=self.meta.num_tokens))

    def on_beat(self, peer: WorkerId, theirs: Any, now: float) -> None:
        """Extends the lease, and says again what the consumer has not heard."""
        assert isinstance(theirs, ConsumerState)
        match theirs:
            case ConsumerState.DONE if self.state in _WAITING:
                self._release()
            case ConsumerState.DONE:
                self._read_done()
            case ConsumerState.FAILED:
                self._consumer_aborted(peer, "it failed there")
            case ConsumerState.QUEUED | ConsumerState.STARTING | ConsumerState.RESERVED | ConsumerState.DRAINING:
                if self.state is not ProducerState.DRAINING:
                    self._lease.extend(now)
                    if theirs is ConsumerState.RESERVED and self._reservation is not None:
                        self._say_progress_again()
            case _:
                assert_never(theirs)

    def _say_progress_again(self) -> None:
        if self.state is ProducerState.SENDING:
            self._desk.counts.repeats += self._announced is not None
            self._announced = None
        elif self.state is ProducerState.OFFERED:
            self._desk.counts.repeats += 1
            self._send(self._ready() if self.meta.mode == "read" else self._write_done())

    def _reserve(self, link: Link[KVLayout], message: Reserve, now: float) -> None:
        """Raises TransferError if the blocks make no sense."""
        if self.meta.mode != "write":
            raise TransferError("Reserve in read mode")
        if self._reservation is not None or self.state not in _WAITING:
            self._desk.counts.duplicates += 1
            if self.state is ProducerState.OFFERED:
                self._send(self._write_done())
            return
        layout, _ = link.parts()
        needed = self.meta.num_tokens - message.skip_tokens
        if message.skip_tokens < 0 or needed < 0:
            raise TransferError(f"skips {message.skip_tokens} of {self.meta.num_tokens} tokens")
        blocks = placed_blocks(message.blocks, layout, needed)
        self._lease.extend(now)
        self._link = link
        self._reservation = Reservation(message.skip_tokens, blocks)
        self._coverage = Coverage(self.transfer_id, self._desk.layout.num_layers, message.skip_tokens)
        if self.state is not ProducerState.QUEUED:
            self._restart_if_set_aside()
            self._advance(ProducerState.SENDING)

    def _pull(self, link: Link[KVLayout], message: Pull, now: float) -> None:
        if self.meta.mode != "read":
            raise TransferError("Pull in write mode")
        if self.state is ProducerState.OFFERED:
            self._lease.extend(now)
            self._link = link
            self._reservation = Reservation(message.skip_tokens)
            self._ending.grant()
            self._send(self._ready())
        elif self.state in _WAITING:
            self._restart_if_set_aside()
            self._send(NotReady(transfer_id=self.transfer_id))
        else:
            self._desk.counts.duplicates += 1

    def _restart_if_set_aside(self) -> None:
        if self.state is ProducerState.SET_ASIDE:
            self._advance(ProducerState.STARTED)
            self._desk.counts.recomputed += 1
            self._desk.news.restart.append(self.meta.request_id)

    def _read_done(self) -> None:
        """The consumer has everything, or has let go."""
        if self.state is ProducerState.OFFERED:
            self._succeed()
        elif self.state is ProducerState.DRAINING:
            self._ending.let_go()
            self._drain()
        else:
            self._desk.counts.duplicates += 1

    def _release(self) -> None:
        """The consumer wants nothing, and holds no blocks for it."""
        if self._ending.moves or self.state is ProducerState.DRAINING:
            self._consumer_aborted(self.meta.peer, "released while bytes were moving")
        else:
            self._succeed()

    # Ends

    def tick(self, now: float) -> None:
        if self._lease.over(now):
            self.fail(f"the consumer has not asked for it for {self._desk.settings.lease_s:g} s", self.meta.peer, drained=True)

    def _on_failing(self) -> None:
        """The engine is told when its blocks are free."""

    def _on_failed(self) -> None:
        if not self._by_owner:
            self._desk.news.failed.append((self.meta.request_id, self._failure.reason))
        self._release_blocks()

    def _succeed(self) -> None:
        self._desk.news.sent_bytes[self.meta.request_id] = _bytes_of(self.meta, self._reservation, self._desk.layout)
        self._advance(ProducerState.DONE)
        self._release_blocks()

    def _release_blocks(self) -> None:
        """The engine is told, unless it ended the transfer and holds nothing."""
        if self._blocks or not self._by_owner:
            self._desk.news.released.append(self.meta.request_id)
        self._blocks = ()

    # Moves

    def pump(self, max_moves: int, now: float) -> list[MoveKey]:
        if self.state is not ProducerState.SENDING or not self._blocks:
            return []
        if self._consumer_copies:
            self._announce()
            return []
        begun = self._write_new(max_moves)
        self._finish_if_written()
        return begun

    def moved(self, move: MoveKey, error: str) -> None:
        size_bytes = self._ending.moves.pop(move)
        self._desk.move_ended(self.meta.peer, size_bytes, moved=not error, late=self._first_tokens is not None)
        if self.state is ProducerState.DRAINING:
            self._drain()
        elif error:
            self._fail(Failure(f"a write of {size_bytes} bytes failed: {error}"))
        else:
            self._finish_if_written()

    def _write_new(self, max_moves: int) -> list[MoveKey]:
        assert self._coverage is not None
        begun: list[MoveKey] = []
        try:
            for plan in self._coverage.take(self._progress, max(0, max_moves - len(self._ending.moves))):
                begun.append(self._write(plan))
        except TransferError as error:
            self._fail(Failure(f"a write could not be started: {error}"))
        return begun

    def _write(self, plan: LayerPlan) -> MoveKey:
        assert self._link is not None
        assert self._reservation is not None
        layout, engine = self._link.parts()
        here = Placement(self._desk.layout, self._blocks)
        there = Placement(layout, self._reservation.blocks, self._reservation.skip_tokens)
        ranges = move_ranges(here, there, plan.tokens, plan.layers, writes=True)
        return self._begin(self.meta.peer, engine, ranges, writes=True)

    def _finish_if_written(self) -> None:
        if self.state is not ProducerState.SENDING or self._ending.moves or self._first_tokens is None:
            return
        if self._coverage is not None and self._coverage.complete(self.meta.num_tokens):
            self._written = self._write_done()
            self._send(self._written)
            self._succeed()

    def _announce(self) -> None:
        """What is new since the last notice; the last of all is WriteDone."""
        assert self._reservation is not None
        if self._first_tokens is not None:
            self._advance(ProducerState.OFFERED)
            self._ending.grant()
            self._send(self._write_done())
        elif self._progress is not self._announced and self._progress.furthest > self._reservation.skip_tokens:
            self._announced = self._progress
            self._send(
                Computed(
                    transfer_id=self.transfer_id,
                    blocks=list(self._blocks),
                    num_tokens=self._progress.num_tokens,
                    next_tokens=self._progress.next_tokens,
                    layers=self._progress.layers,
                )
            )

    # Small things

    def _write_done(self) -> WriteDone:
        assert self._first_tokens is not None
        blocks = list(self._blocks) if self._consumer_copies else []
        return WriteDone(transfer_id=self.transfer_id, first_tokens=self._first_tokens, blocks=blocks)

    def _ready(self) -> Ready:
        """In answer to a Pull."""
        blocks, first_tokens, num_tokens = list(self._blocks), self._first_tokens or [], self.meta.num_tokens
        return Ready(transfer_id=self.transfer_id, num_tokens=num_tokens, blocks=blocks, first_tokens=first_tokens)

    def _send(self, message: TransferMessage) -> None:
        self._desk.send(self.meta.peer, message)

    def _advance(self, following: ProducerState) -> None:
        self.state = advance(PRODUCER_EDGES, self.state, following)
