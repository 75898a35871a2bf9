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
from kvrelay.states import PeerEnd
from kvrelay.transfer.engines.base import Mover, Ranges, TransferError
from kvrelay.transfer.relay.consumer import ConsumerMachine
from kvrelay.transfer.relay.desk import Desk
from kvrelay.transfer.relay.ending import Ending
from kvrelay.transfer.relay.kind import Kind
from kvrelay.transfer.relay.leases import Answers, HeldLease
from kvrelay.transfer.relay.link import ProducerLink, TransferSettings
from kvrelay.transfer.relay.producer import ProducerMachine
from kvrelay.transfer.relay.seam import End, MoveKey
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


class Toy:
    """What both sides have in common."""

    def __init__(self, transfer_id: TransferId, peer: WorkerId, block: int, desk: Desk[Notes, list[Any]]) -> None:
        self.transfer_id = self.name = transfer_id
        self.peers = (peer,)
        self.block = block
        self.desk = desk
        self.state = ToyState.OPEN
        self.ending = Ending(transfer_id)
        self.reason = ""
        self.aborted = False

    @property
    def is_over(self) -> bool:
        return self.state in (ToyState.DONE, ToyState.FAILED)

    @property
    def num_moves(self) -> int:
        return len(self.ending.moves)

    def tell(self, outcome: str) -> None:
        """The owner; with the last word it gets its block back."""
        self.desk.news.append((self.transfer_id, outcome))

    def abort(self) -> None:
        self.aborted = True
        self.fail("aborted", self.peers[0])

    def begin(self, name: str, move: Any) -> list[MoveKey]:
        self.ending.moves[name, move] = NOTE_BYTES
        self.desk.counts.num_moves += 1
        return [(name, move)]

    def fail(self, reason: str, peer: WorkerId, *, drained: bool = False) -> None:
        raise NotImplementedError


class ToySending(Toy):
    def __init__(self, transfer_id: TransferId, peer: WorkerId, block: int, desk: Desk[Notes, list[Any]], now: float) -> None:
        super().__init__(transfer_id, peer, block, desk)
        self.lease = HeldLease(desk.settings.lease_s)
        self.lease.extend(now)
        self.want: int | None = None

    @property
    def end(self) -> End:
        here = Here(transfer_id=self.transfer_id, block=self.block)
        over = Abort(transfer_id=self.transfer_id, reason=self.reason)
        return End(self.state, self.peers, self.reason, here if self.state is ToyState.DONE else over)

    def on_open(self, peer: WorkerId) -> None: ...

    def on_beat(self, peer: WorkerId, theirs: Any, now: float) -> None:
        self.lease.extend(now)
        if theirs is ToyState.FAILED:
            self.on_message(peer, Abort(transfer_id=self.transfer_id, reason="it failed there"), now)
        elif theirs is ToyState.DONE:
            self.on_message(peer, Got(transfer_id=self.transfer_id), now)

    def on_message(self, peer: WorkerId, message: TransferMessage, now: float) -> None:
        link = self.desk.links.get(peer)
        match message:
            case Want() if link is not None and link.open and self.state is ToyState.OPEN:
                layout, _ = link.parts()
                if not 0 <= message.block < layout.num_blocks:
                    raise TransferError(f"no block {message.block}")
                self.want = message.block
                if link.consumer_moves:
                    self.ending.grant()
                    self.desk.send(peer, Here(transfer_id=self.transfer_id, block=self.block))
            case Got() if self.state is ToyState.OPEN and not self.ending.moves:
                self._over(ToyState.DONE)
            case Got() | AbortAck():
                self.ending.let_go()
                self._drain()
            case Abort():
                self.ending.peer_aborted()
                self.fail(f"the consumer ended it: {message.reason}", peer)

    def pump(self, max_moves: int, now: float) -> list[MoveKey]:
        [peer] = self.peers
        link = self.desk.links.get(peer)
        writes = link is not None and link.open and not link.consumer_moves
        if self.state is not ToyState.OPEN or self.want is None or self.ending.moves or link is None or not writes:
            return []
        _, engine = link.parts()
        want, self.want = self.want, None
        return self.begin(engine.name, engine.write(peer, note_ranges(self.block, want)))

    def moved(self, move: MoveKey, error: str) -> None:
        self.desk.move_ended(self.ending.moves.pop(move), moved=not error)
        if self.state is ToyState.DRAINING:
            self._drain()
        elif error:
            self.fail(error, self.peers[0])
        else:
            self.desk.send(self.peers[0], Here(transfer_id=self.transfer_id, block=self.block))
            self._over(ToyState.DONE)

    def tick(self, now: float) -> None:
        if self.lease.over(now):
            self.fail("the lease is over", self.peers[0], drained=True)

    def fail(self, reason: str, peer: WorkerId, *, drained: bool = False) -> None:
        if drained:
            self.ending.let_go()
        if self.state is ToyState.OPEN:
            self.state, self.reason = ToyState.DRAINING, reason
            link = self.desk.links.get(peer)
            self.ending.cancel(link.engine if link is not None else None)
        self._drain()

    def _drain(self) -> None:
        if self.state is ToyState.DRAINING:
            if word := self.ending.producers_last_word(self.reason):
                self.desk.send(self.peers[0], word)
            if self.ending.is_safe:
                self._over(ToyState.FAILED)

    def _over(self, state: ToyState) -> None:
        self.state = state
        self.tell(self.reason or "sent")


class ToyReceiving(Toy):
    def __init__(
        self, transfer_id: TransferId, link: ProducerLink[Notes], block: int, desk: Desk[Notes, list[Any]], now: float
    ) -> None:
        super().__init__(transfer_id, link.peer, block, desk)
        self.link = link
        self.expected_at = now
        self.asked_at = now
        self.next_at = None
        self.answers = Answers(link.beats, desk.settings.lease_s, desk.settings.unknown_s)
        self.source: int | None = None  # where to copy from

    @property
    def is_begun(self) -> bool:
        return self.link.ready

    @property
    def is_listed(self) -> bool:
        return self.state is not ToyState.DRAINING

    @property
    def needs_confirming(self) -> bool:
        return self.state is ToyState.DONE or self.ending.peer_end is not PeerEnd.AWARE

    @property
    def end(self) -> End:
        got = Got(transfer_id=self.transfer_id) if self.state is ToyState.DONE else None
        return End(self.state, self.peers, self.reason, got)

    def say_again(self, now: float) -> None:
        if self.state is ToyState.DRAINING:
            self.ending.say_abort(self.reason, self._send)
        elif self.source is None and not self.ending.moves:
            if not self.link.consumer_moves:
                self.ending.grant()
            self.asked_at = now
            self._send(Want(transfer_id=self.transfer_id, block=self.block))

    def on_ack(self, number: int, sent_at: float, theirs: Any, now: float) -> None:
        if not self.answers.is_news(number) or self.state is not ToyState.OPEN:
            return
        match theirs:
            case None:
                if reason := self.answers.unknown(now):
                    self.fail(reason, self.link.peer)
            case ToyState.OPEN:
                self.answers.known(sent_at)
            case ToyState.DRAINING:
                self.fail("the producer ended it", self.link.peer)
            case ToyState.FAILED:
                self.on_message(self.link.peer, Abort(transfer_id=self.transfer_id, reason="it failed there"), now)

    def on_message(self, peer: WorkerId, message: TransferMessage, now: float) -> None:
        self.answers.known()
        match message:
            case Here() if self.state is ToyState.OPEN and self.link.consumer_moves:
                self.answers.known(self.asked_at)
                self.source = message.block
            case Here() if self.state is ToyState.OPEN:
                self._got()
            case Abort():
                self.ending.peer_aborted()
                self.fail(f"the producer ended it: {message.reason}", peer)
            case AbortAck() if self.state is ToyState.DRAINING:
                self.ending.peer_drained()
                self._settle()

    def pump(self, max_moves: int, now: float) -> list[MoveKey]:
        if self.state is not ToyState.OPEN or self.source is None or self.ending.moves:
            return []
        if self.source < 0:  # it was copied
            if self.answers.lease.valid(now):
                self._got()
            else:
                self.fail("the lease is over", self.link.peer)
            return []
        _, engine = self.link.parts()
        source, self.source = self.source, -1
        try:
            return self.begin(engine.name, engine.read(self.link.peer, note_ranges(self.block, source)))
        except TransferError as error:
            self.fail(str(error), self.link.peer)
            return []

    def moved(self, move: MoveKey, error: str) -> None:
        self.desk.move_ended(self.ending.moves.pop(move), moved=not error)
        if error:
            self.fail(error, self.link.peer)
        self._settle()

    def tick(self, now: float) -> None: ...

    def fail(self, reason: str, peer: WorkerId, *, drained: bool = False) -> None:
        if drained:
            self.ending.peer_drained()
        if self.state is ToyState.OPEN:
            self.state, self.reason = ToyState.DRAINING, reason
            self.ending.cancel(self.link.engine)
            self.ending.say_abort(reason, self._send)
        self._settle()

    def _settle(self) -> None:
        if self.state is ToyState.DRAINING and self.ending.is_safe:
            self.state = ToyState.FAILED
            self.ending.say_drained(self._send)
            self.tell(self.reason)

    def _got(self) -> None:
        self.ending.let_go()
        self.state = ToyState.DONE
        self._send(Got(transfer_id=self.transfer_id))
        self.tell("arrived")

    def _send(self, message: TransferMessage) -> None:
        if self.link.ready:
            self.desk.send(self.link.peer, message)


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
        self.machine.tell(plan.transfer_id, Toy.abort)

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
