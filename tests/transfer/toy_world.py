"""A third kind of memory, made of what `transfer/relay/` offers and nothing else: notes of one block each. The consumer says
where there is room (Want), the producer writes the note there or tells where it is (Here), the consumer says that it has
it (Got)."""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from relay_world import Side, World

from kvrelay.ids import TransferId, WorkerId, new_transfer_id
from kvrelay.transfer.engines.base import Mover, Ranges, TransferError
from kvrelay.transfer.relay.consumer import ConsumerMachine
from kvrelay.transfer.relay.desk import Desk
from kvrelay.transfer.relay.kind import End, Kind, MoveKey
from kvrelay.transfer.relay.leases import HeldLease
from kvrelay.transfer.relay.link import ProducerLink, TransferSettings
from kvrelay.transfer.relay.producer import ProducerMachine
from kvrelay.transfer.relay.seam import ReceivingTransfer, SendingTransfer
from kvrelay.wire.relay import (
    Abort,
    AbortAck,
    Heartbeat,
    HeartbeatAck,
    Hello,
    Map,
    Mapped,
    Refused,
    TransferMessage,
    Welcome,
    reader,
)

NOTE_BYTES = 8
POISON = 0xEE


class Notes(msgspec.Struct, frozen=True):
    """The shape of a worker's memory: so many notes."""

    num_blocks: int

    def mismatch(self, other: Notes) -> str:
        return ""


class Want(TransferMessage, frozen=True, kw_only=True):
    block: int


class Here(TransferMessage, frozen=True, kw_only=True):
    block: int


class Got(TransferMessage, frozen=True, kw_only=True):
    pass


class ToyState(enum.StrEnum):
    OPEN = "open"
    DRAINING = "draining"
    DONE = "done"
    FAILED = "failed"


TOY: Kind[Notes] = Kind(
    name="toy",
    version=7,
    decode_for_producer=reader(Hello | Map[Notes] | Want | Got | Heartbeat[ToyState] | Abort | AbortAck),
    decode_for_consumer=reader(Welcome | Refused | Mapped[Notes] | Here | HeartbeatAck[ToyState] | Abort | AbortAck),
    read_layout=lambda layout: layout,
    held_back=(Want,),
    answer_unknown=lambda message: None,
    unwanted=(),
    asks=(Want, Here),
    waits=frozenset(),
    done=ToyState.DONE,
)


def note_ranges(here: int, there: int) -> Ranges:
    return np.array([[here * NOTE_BYTES, there * NOTE_BYTES, NOTE_BYTES]], dtype=np.int64)


ToyDesk = Desk[Notes, list[tuple[TransferId, str]]]
EDGES: dict[ToyState, frozenset[ToyState]] = {
    ToyState.OPEN: frozenset({ToyState.DRAINING, ToyState.DONE}),
    ToyState.DRAINING: frozenset({ToyState.FAILED}),
    ToyState.DONE: frozenset(),
    ToyState.FAILED: frozenset(),
}


class ToySending(SendingTransfer[ToyState, Notes, list[tuple[TransferId, str]]]):
    def __init__(self, transfer_id: TransferId, peer: WorkerId, block: int, desk: ToyDesk, now: float) -> None:
        super().__init__(transfer_id, transfer_id, (peer,), ToyState.OPEN, desk)
        self.block = block
        self.peer = peer
        self.ending = self._endings[peer]
        self.lease = HeldLease(desk.settings.lease_s)
        self.lease.extend(now)
        self.want: int | None = None

    @property
    def end(self) -> End:
        here = Here(transfer_id=self.transfer_id, block=self.block)
        over = Abort(transfer_id=self.transfer_id, reason=self._failure.reason)
        return End(self.state, self.peers, self._failure.reason, here if self.state is ToyState.DONE else over)

    def abort(self) -> None:
        self.fail("aborted", self.peer)

    def on_beat(self, peer: WorkerId, theirs: Any, now: float) -> None:
        self.lease.extend(now)
        if theirs is ToyState.FAILED:
            self._consumer_aborted(peer, "it failed there")
        elif theirs is ToyState.DONE:
            self.on_message(peer, Got(transfer_id=self.transfer_id), now)

    def on_message(self, peer: WorkerId, message: TransferMessage, now: float) -> None:
        link = self._desk.links.get(peer)
        match message:
            case Want() if link is not None and link.open and self.state is ToyState.OPEN:
                layout, _ = link.parts()
                if not 0 <= message.block < layout.num_blocks:
                    raise TransferError(f"no block {message.block}")
                self.want = message.block
                if link.consumer_moves:
                    self.lease.extend(now)  # the consumer counts from when it asked
                    self.ending.grant()
                    self._desk.send(peer, Here(transfer_id=self.transfer_id, block=self.block))
            case Got() if self.state is ToyState.OPEN and not self.ending.moves:
                self._sent()
            case Got() | AbortAck():
                self.ending.let_go()
                self._drain()
            case Abort():
                self._consumer_aborted(peer, message.reason)

    def pump(self, max_moves: int, now: float) -> list[MoveKey]:
        link = self._desk.links.get(self.peer)
        writes = link is not None and link.open and not link.consumer_moves
        if self.state is not ToyState.OPEN or self.want is None or self.ending.moves or link is None or not writes:
            return []
        _, engine = link.parts()
        move = (engine.name, engine.write(self.peer, note_ranges(self.block, self.want)))
        self.want = None
        self.ending.moves[move] = NOTE_BYTES
        self._desk.counts.num_moves += 1
        return [move]

    def moved(self, move: MoveKey, error: str) -> None:
        self._desk.move_ended(self.peer, self.ending.moves.pop(move), moved=not error)
        if error:
            self.fail(error, self.peer)
        elif self.state is ToyState.OPEN:
            self._desk.send(self.peer, Here(transfer_id=self.transfer_id, block=self.block))
            self._sent()
        self._drain()

    def tick(self, now: float) -> None:
        if self.lease.over(now):
            self.fail("the lease is over", self.peer, drained=True)

    def _sent(self) -> None:
        self._advance(ToyState.DONE)
        self._desk.news.append((self.transfer_id, "sent"))

    def _on_failing(self) -> None: ...

    def _on_failed(self) -> None:
        self._desk.news.append((self.transfer_id, self._failure.reason))

    def _advance(self, following: ToyState) -> None:
        assert following in EDGES[self.state]
        self.state = following


class ToyReceiving(ReceivingTransfer[ToyState, Notes, list[tuple[TransferId, str]]]):
    def __init__(self, transfer_id: TransferId, link: ProducerLink[Notes], block: int, desk: ToyDesk, now: float) -> None:
        super().__init__(transfer_id, transfer_id, link, ToyState.OPEN, desk, now)
        self.block = block
        self.asked_at = now  # at the earliest: an answer may be to the first of several questions
        self.source: int | None = None  # where to copy from
        self.is_copied = False

    @property
    def is_begun(self) -> bool:
        return self.link.ready

    @property
    def end(self) -> End:
        got = Got(transfer_id=self.transfer_id) if self.state is ToyState.DONE else None
        return End(self.state, self.peers, self._failure.reason, got)

    def abort(self) -> None:
        self.fail("aborted", self.link.peer)

    def _ask_again(self, now: float) -> None:
        if self.source is None:
            if not self.link.consumer_moves:
                self._ending.grant()
            self._send(Want(transfer_id=self.transfer_id, block=self.block))

    def _repair(self, theirs: Any, now: float) -> None: ...

    def _hear(self, message: TransferMessage, now: float) -> None:
        assert isinstance(message, Here)
        if self.state is not ToyState.OPEN:
            return
        if self.link.consumer_moves:
            self._answers.known(self.asked_at)
            self.source = message.block if self.source is None else self.source
        else:
            self._got()

    def pump(self, max_moves: int, now: float) -> list[MoveKey]:
        if self.state is not ToyState.OPEN or self.source is None or self._ending.moves:
            return []
        if self.is_copied:
            if self._answers.lease.valid(now):
                self._got()
            else:
                self.fail("the lease is over", self.link.peer)
            return []
        _, engine = self.link.parts()
        try:
            move = (engine.name, engine.read(self.link.peer, note_ranges(self.block, self.source)))
        except TransferError as error:
            self.fail(str(error), self.link.peer)
            return []
        self._ending.moves[move] = NOTE_BYTES
        self._desk.counts.num_moves += 1
        return [move]

    def moved(self, move: MoveKey, error: str) -> None:
        self._desk.move_ended(self.link.peer, self._ending.moves.pop(move), moved=not error)
        self.is_copied = not error
        if error:
            self.fail(error, self.link.peer)
        self._drain()

    def _got(self) -> None:
        self._ending.let_go()
        self._advance(ToyState.DONE)
        self._send(Got(transfer_id=self.transfer_id))
        self._desk.news.append((self.transfer_id, "arrived"))

    def _on_failing(self) -> None: ...

    def _on_failed(self) -> None:
        self._desk.news.append((self.transfer_id, self._failure.reason))

    def _advance(self, following: ToyState) -> None:
        assert following in EDGES[self.state]
        self.state = following
        self._answers.restart()


@dataclass
class Plan:
    number: int
    producer: WorkerId
    consumer: WorkerId
    transfer_id: TransferId = field(default_factory=new_transfer_id)

    @property
    def workers(self) -> list[WorkerId]:
        return [self.producer, self.consumer]


class NotePool:
    def __init__(self, num_blocks: int = 40) -> None:
        self.layout = Notes(num_blocks)
        self.memory = np.full((num_blocks, NOTE_BYTES), POISON, dtype=np.uint8)
        self.free = list(range(num_blocks))

    @property
    def is_empty(self) -> bool:
        return len(self.free) == self.layout.num_blocks

    def give_back(self, block: int) -> None:
        self.memory[block] = POISON
        assert block not in self.free, "freed twice"
        self.free.append(block)

    def check(self) -> None:
        assert (self.memory[self.free] == POISON).all(), "a free block was written"


class ToySide(Side[Plan]):
    def __init__(self, world: ToyWorld, role: str) -> None:
        self.is_producer = role == "encode"
        super().__init__(world, role, NotePool(), list[Any])
        self.blocks: dict[TransferId, tuple[Plan, int]] = {}

    def make_machine(self) -> Any:
        return ProducerMachine(self.desk) if self.is_producer else ConsumerMachine(self.desk)

    def expect(self, plan: Plan) -> None:
        self.outcomes[plan.transfer_id] = []
        peer = plan.consumer if self.is_producer else plan.producer
        end = self.machine.ended_before(plan.transfer_id, peer)
        if end is not None:
            self.ended(plan.transfer_id, end.reason)
            return
        block = self.pool.free.pop(0)
        self.blocks[plan.transfer_id] = (plan, block)
        now = self.world.now
        if self.is_producer:
            self.pool.memory[block] = plan.number
            self.machine.add(ToySending(plan.transfer_id, peer, block, self.desk, now), now)
        else:
            link = self.machine.link_to(peer, "sim", now)
            receiving = ToyReceiving(plan.transfer_id, link, block, self.desk, now)
            self.machine.add(receiving, now)
            if link.ready:
                receiving.say_again(now)

    def abort(self, plan: Plan) -> None:
        self.machine.tell(plan.transfer_id, lambda transfer: transfer.abort())

    def take(self, news: list[tuple[TransferId, str]]) -> None:
        for transfer_id, outcome in news:
            plan, block = self.blocks.pop(transfer_id)
            if outcome == "arrived":
                assert (self.pool.memory[block] == plan.number).all()
            self.pool.give_back(block)
            self.ended(transfer_id, outcome)

    @property
    def is_idle(self) -> bool:
        return not self.blocks


class ToyWorld(World[ToySide, ToySide, Plan]):
    kind = TOY

    def __init__(self, mover: Mover = Mover.PRODUCER) -> None:
        super().__init__(mover, TransferSettings())

    @classmethod
    def drawn(cls, draw: random.Random) -> ToyWorld:
        return cls(draw.choice(list(Mover)))

    def make_producer(self) -> ToySide:
        return ToySide(self, "encode")

    def make_consumer(self) -> ToySide:
        return ToySide(self, "prefill")

    def plan(self, producer: ToySide, consumer: ToySide) -> Plan:
        plan = Plan(len(self.plans) + 1, producer.id, consumer.id)
        self.plans.append(plan)
        return plan

    def submit(self, draw: random.Random) -> Plan:
        return self.plan(draw.choice(list(self.producers.values())), draw.choice(list(self.consumers.values())))

    def work(self, draw: random.Random) -> None:
        self.pump()

    def change_mind(self, draw: random.Random) -> None:
        plan = draw.choice(self.plans)
        side = self.side(draw.choice(plan.workers))
        if side is not None:
            side.abort(plan)
        self.pump()

    def work_on(self, late: bool) -> None:
        self.pump()
