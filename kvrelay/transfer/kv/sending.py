"""One transfer on the side that has the KV.

    QUEUED -> STARTED -> SENDING -> DONE              write mode, the producer writes
                         SENDING -> OFFERED -> DONE   write mode, the consumer copies: it is told what is computed
              STARTED -> OFFERED -> DONE              read mode
              STARTED | OFFERED -> SET_ASIDE          the consumer has no room yet, and others need the blocks: computed again
                                                      from the cache (STARTED, SENDING) when it has
    any -> DRAINING -> FAILED                         where moves are under way, or a reader must let go first (`Ending`)

A reader has access once it was told that everything is there (WriteDone, or Ready in answer to its Pull): before, it cannot use
what it copied.
"""

from __future__ import annotations

from typing import Any, assert_never

from kvrelay.ids import TransferId, WorkerId
from kvrelay.states import PRODUCER_EDGES, ConsumerState, EndedBy, ProducerState, advance
from kvrelay.transfer.engines.base import TransferError
from kvrelay.transfer.kv.kind import ProducerDesk
from kvrelay.transfer.kv.layout import KVLayout, Placement, move_ranges, placed_blocks
from kvrelay.transfer.kv.plan import Coverage, LayerPlan, Progress, Reservation, TransferMeta
from kvrelay.transfer.relay.ending import Ending, Failure
from kvrelay.transfer.relay.leases import HeldLease
from kvrelay.transfer.relay.link import Link
from kvrelay.transfer.relay.seam import End, MoveKey
from kvrelay.wire.kv import Computed, NotReady, Pull, ReadDone, Ready, Release, Reserve, Starting, WriteDone
from kvrelay.wire.relay import Abort, AbortAck, TransferMessage
from kvrelay.wire.serving import FirstToken

_OVER = frozenset({ProducerState.DONE, ProducerState.FAILED})
_WAITING = frozenset({ProducerState.QUEUED, ProducerState.STARTED, ProducerState.SET_ASIDE})  # for the consumer's room
_Said = Reserve | Pull | ReadDone | Release | Abort | AbortAck


class Sending:
    """Driven by the machine that holds it; calls the transfer engine of its link."""

    def __init__(self, meta: TransferMeta, desk: ProducerDesk) -> None:
        self.meta = meta
        self.state = ProducerState.QUEUED
        self.peers = (meta.peer,)
        self.end = End(self.state, self.peers)  # replaced when it is over
        self._desk = desk
        self._lease = HeldLease(desk.settings.lease_s)
        self._ending = Ending(meta.transfer_id)
        self._failure = Failure()
        self._link: Link[KVLayout] | None = None  # set with the first reservation or pull
        self._blocks: tuple[int, ...] = ()
        self._progress = Progress()
        self._first_tokens: list[FirstToken] | None = None  # set when the prompt is computed
        self._reservation: Reservation | None = None
        self._coverage: Coverage | None = None
        self._announced: Progress | None = None

    @property
    def transfer_id(self) -> TransferId:
        return self.meta.transfer_id

    @property
    def name(self) -> str:
        return self.meta.request_id

    @property
    def is_over(self) -> bool:
        return self.state in _OVER

    @property
    def num_moves(self) -> int:
        return len(self._ending.moves)

    @property
    def _consumer_copies(self) -> bool:
        assert self._link is not None
        return self.meta.mode == "read" or self._link.consumer_moves

    # What the engine does

    def start(self, blocks: tuple[int, ...], num_computed: int, now: float) -> None:
        if self.state in _OVER or self.state is ProducerState.DRAINING:
            return
        self._blocks, self._progress, self._first_tokens = blocks, Progress(num_computed), None
        if self.state is ProducerState.QUEUED:
            self._advance(ProducerState.STARTED)
            self._lease.extend(now)
            if self._reservation is not None:
                self._advance(ProducerState.SENDING)
            else:
                self.on_open(self.meta.peer)

    def computing(self, next_tokens: int, layers: int) -> None:
        """A forward pass has stored the KV up to `next_tokens` of the first `layers` layers."""
        if self._blocks:
            self._progress = Progress(self._progress.num_tokens, next_tokens, layers)

    def computed(self, num_tokens: int) -> None:
        if self._blocks:
            self._progress = Progress(max(num_tokens, self._progress.num_tokens))

    def finish(self, first_tokens: list[FirstToken]) -> None:
        if not self._blocks or self.state in _OVER:
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
                self._consumer_aborted(message.reason)
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
                self._consumer_aborted("it failed there")
            case ConsumerState.QUEUED | ConsumerState.STARTING | ConsumerState.RESERVED | ConsumerState.DRAINING:
                if self.state is not ProducerState.DRAINING:
                    self._lease.extend(now)
                    if theirs is ConsumerState.RESERVED and self._reservation is not None:
                        self._say_progress_again()
            case _:
                assert_never(theirs)

    def _say_progress_again(self) -> None:
        if self.state is ProducerState.SENDING:
            self._announced = None
        elif self.state is ProducerState.OFFERED:
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
            self._desk.news.restart.append(self.meta.request_id)

    def _read_done(self) -> None:
        """The consumer has everything, or has let go."""
        if self.state is ProducerState.OFFERED:
            self._over(ProducerState.DONE)
        elif self.state is ProducerState.DRAINING:
            self._ending.let_go()
            self._drain()
        else:
            self._desk.counts.duplicates += 1

    def _release(self) -> None:
        """The consumer wants nothing, and holds no blocks for it."""
        if self._ending.moves or self.state is ProducerState.DRAINING:
            self._consumer_aborted("released while bytes were moving")
        else:
            self._over(ProducerState.DONE)

    def _consumer_aborted(self, reason: str) -> None:
        """Answered by AbortAck, when nothing moves any more."""
        self._ending.peer_aborted()
        self._fail(Failure(f"the consumer ended it: {reason}", EndedBy.PEER))

    # Ends

    def fail(self, reason: str, peer: WorkerId, *, drained: bool = False) -> None:
        if drained:
            self._ending.let_go()
        self._fail(Failure(reason))

    def tick(self, now: float) -> None:
        if self._lease.over(now):
            self.fail(f"the consumer has not asked for it for {self._desk.settings.lease_s:g} s", self.meta.peer, drained=True)

    def _fail(self, failure: Failure) -> None:
        if self.state in _OVER:
            return
        if self.state is not ProducerState.DRAINING:
            self._failure = failure
            self._ending.cancel(self._link.engine if self._link is not None else None)
            if not self._ending.is_safe:
                self._advance(ProducerState.DRAINING)
        self._drain()

    def _drain(self) -> None:
        """Takes the steps that waited for the last move to end, or for the reader to let go."""
        word = self._ending.producers_last_word(self._failure.reason)
        if word is not None:
            self._send(word)
        if self._ending.is_safe:
            self._over(ProducerState.FAILED)

    def _over(self, state: ProducerState, replay: WriteDone | None = None) -> None:
        held, failed = bool(self._blocks), state is ProducerState.FAILED
        self._advance(state)
        reason = self._failure.reason
        late = replay or Abort(transfer_id=self.transfer_id, reason=reason or "it was over before")
        self.end = End(state, self.peers, reason, late)
        self._blocks = ()
        news, request_id, by_engine = self._desk.news, self.meta.request_id, self._failure.by is EndedBy.OWNER
        if held or not by_engine:
            news.released.append(request_id)
        if failed and not by_engine:
            news.failed.append((request_id, reason))

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
        self._desk.move_ended(size_bytes, moved=not error, late=self._first_tokens is not None)
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
        ranges = move_ranges(here, there, plan.tokens, plan.layers)
        move = (engine.name, engine.write(self.meta.peer, ranges))
        self._ending.moves[move] = int(ranges[:, 2].sum())
        self._desk.counts.num_moves += 1
        return move

    def _finish_if_written(self) -> None:
        if self.state is not ProducerState.SENDING or self._ending.moves or self._first_tokens is None:
            return
        if self._coverage is not None and self._coverage.complete(self.meta.num_tokens):
            done = self._write_done()
            self._send(done)
            self._over(ProducerState.DONE, replay=done)

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
        return Ready(
            transfer_id=self.transfer_id,
            num_tokens=self.meta.num_tokens,
            blocks=list(self._blocks),
            first_tokens=self._first_tokens or [],
        )

    def _send(self, message: TransferMessage) -> None:
        self._desk.send(self.meta.peer, message)

    def _advance(self, following: ProducerState) -> None:
        self.state = advance(PRODUCER_EDGES, self.state, following)
