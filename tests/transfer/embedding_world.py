"""Encode and prefill workers, a network and a clock, all in one thread and under the test's control; see relay_world, whose
transfer engine moves the bytes here too.

Every token of every embedding has its own values. Blocks that are free hold poison, and whoever gives a block back poisons it
at once: so bytes that were read from reused memory, or written into it, are seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from relay_world import Frame, SimEngine

from kvrelay.errors import ProtocolError
from kvrelay.ids import TransferId, WorkerId, new_transfer_id, new_worker_id
from kvrelay.states import EmbeddingState
from kvrelay.transfer.embedding_arrival import EmbeddingArrival
from kvrelay.transfer.embedding_consumer import EmbeddingConsumerMachine
from kvrelay.transfer.embedding_layout import EmbeddingLayout
from kvrelay.transfer.embedding_pool import Embedding, EmbeddingPool, Piece, joined
from kvrelay.transfer.embedding_producer import EmbeddingProducerMachine
from kvrelay.transfer.embedding_room import EmbeddingSettings
from kvrelay.transfer.embedding_session import LocalPool
from kvrelay.transfer.engines.base import Mover
from kvrelay.transfer.region import shared_region
from kvrelay.wire.codec import encode
from kvrelay.wire.embedding import decode_for_consumer, decode_for_producer
from kvrelay.wire.transfer import Message

POISON = 0xEE
AUX_ITEMS = 8


def layout(block_size: int, num_blocks: int) -> EmbeddingLayout:
    return EmbeddingLayout(
        num_blocks=num_blocks, block_size=block_size, hidden=1, deepstack=1, dtype="float32", item_bytes=4, aux_items=AUX_ITEMS
    )


class PoisonedPool(EmbeddingPool):
    """Fills what is given back with poison, and knows when somebody writes there."""

    def __init__(self, shape: EmbeddingLayout) -> None:
        super().__init__(shape, shared_region(shape.size_bytes))
        self._rows[:] = POISON

    def give_back(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._rows[block * self.layout.block_size : (block + 1) * self.layout.block_size] = POISON
        super().give_back(blocks)

    def check(self) -> None:
        rows = self._rows.reshape(self.layout.num_blocks, -1)
        assert (rows[self._free] == POISON).all(), "a free block was written"

    @property
    def memory(self) -> np.ndarray:
        return self._rows.base  # type: ignore[return-value]


def embedding(number: int, num_tokens: int, row_bytes: int = 8) -> Embedding:
    tokens = np.arange(num_tokens, dtype=np.int32)
    values = np.repeat((tokens + number * 1_000_000)[:, None], row_bytes // 4, axis=1) + np.arange(
        row_bytes // 4, dtype=np.int32
    )
    rows = np.ascontiguousarray(values.astype(np.int32)).view(np.uint8)
    positions = np.stack((tokens, tokens * 2 + number, tokens * 3), axis=1).astype(np.int32)
    return Embedding(rows=rows, fill_ids=tokens + number * 1000, positions=positions, aux=(number, 3, 4, 5))


def check_equal(piece: Piece, wanted: Embedding) -> None:
    span = slice(piece.start, piece.stop)
    assert isinstance(wanted.rows, np.ndarray)
    assert (piece.rows == wanted.rows[span]).all()
    assert (piece.fill_ids == wanted.fill_ids[span]).all()
    assert (piece.positions == wanted.positions[span]).all()


@dataclass
class Plan:
    number: int
    num_tokens: int
    producer: WorkerId
    consumers: list[WorkerId]
    transfer_id: TransferId = field(default_factory=new_transfer_id)


class EncodeSide:
    """The real machine of an encode worker."""

    def __init__(self, world: EmbeddingWorld, shape: EmbeddingLayout) -> None:
        self.world = world
        self.id = new_worker_id("encode")
        self.pool = PoisonedPool(shape)
        self.engine = SimEngine(world.mover, self.id, world.fabric)
        world.fabric[self.id] = self.pool.memory
        self.machine = EmbeddingProducerMachine(world.local_pool(self), world.settings.transfer)
        self.unoffered: dict[TransferId, Plan] = {}
        self.outcomes: dict[TransferId, list[str]] = {}
        self.states: dict[TransferId, list[EmbeddingState]] = {}

    def expect(self, plan: Plan) -> None:
        self.outcomes[plan.transfer_id] = []
        self.unoffered[plan.transfer_id] = plan
        self.machine.expect(plan.transfer_id, plan.consumers, self.world.now)

    def offer(self, plan: Plan) -> None:
        if plan.transfer_id not in self.unoffered:
            return
        blocks = self.pool.take(plan.num_tokens)
        if blocks is not None:
            del self.unoffered[plan.transfer_id]
            self.pool.store(blocks, embedding(plan.number, plan.num_tokens))
            self.machine.offer(plan.transfer_id, blocks, plan.num_tokens, self.world.now)

    def abort(self, plan: Plan) -> None:
        if not self.outcomes.get(plan.transfer_id, [""]):
            self.unoffered.pop(plan.transfer_id, None)
            self.outcomes[plan.transfer_id].append("aborted")
            self.machine.abort(plan.transfer_id)

    def poll(self) -> None:
        for sent in self.machine.take_news():
            self.outcomes[sent.transfer_id].append(sent.error or "sent")
            assert len(self.outcomes[sent.transfer_id]) == 1, self.outcomes[sent.transfer_id]
            self.unoffered.pop(sent.transfer_id, None)


class PrefillSide:
    """The real machine of a prefill worker. Whatever arrives is looked at at once; what is complete is released when told."""

    def __init__(self, world: EmbeddingWorld, shape: EmbeddingLayout) -> None:
        self.world = world
        self.id = new_worker_id("prefill")
        self.pool = PoisonedPool(shape)
        self.engine = SimEngine(world.mover, self.id, world.fabric)
        world.fabric[self.id] = self.pool.memory
        self.machine = EmbeddingConsumerMachine(world.local_pool(self), world.settings)
        self.plans: dict[TransferId, Plan] = {}
        self.arrivals: dict[TransferId, list[EmbeddingArrival]] = {}
        self.outcomes: dict[TransferId, list[str]] = {}
        self.kept: dict[TransferId, tuple[int, ...]] = {}
        self.states: dict[TransferId, list[EmbeddingState]] = {}

    def expect(self, plan: Plan) -> None:
        self.plans[plan.transfer_id] = plan
        self.arrivals[plan.transfer_id], self.outcomes[plan.transfer_id] = [], []
        self.machine.expect(plan.transfer_id, plan.producer, "sim", len(plan.consumers), self.world.now)

    def abort(self, plan: Plan) -> None:
        if not self.outcomes.get(plan.transfer_id, [""]):
            self.outcomes[plan.transfer_id].append("aborted")
            self.machine.abort(plan.transfer_id)

    def poll(self) -> None:
        for arrival in self.machine.take_news():
            if self.outcomes[arrival.transfer_id] == ["aborted"]:
                self.pool.give_back(arrival.blocks)
                continue
            self._check(arrival)
            self.arrivals[arrival.transfer_id].append(arrival)
            if arrival.error or arrival.is_complete:
                self.outcomes[arrival.transfer_id].append(arrival.error or "arrived")
                assert len(self.outcomes[arrival.transfer_id]) == 1, self.outcomes[arrival.transfer_id]
            if arrival.is_complete:
                self.kept[arrival.transfer_id] = arrival.blocks
                self._check_all(arrival.transfer_id)

    def _check(self, arrival: EmbeddingArrival) -> None:
        plan = self.plans[arrival.transfer_id]
        at = self.num_tokens(plan)
        for piece in arrival.pieces:
            assert piece.start == at
            at = piece.stop
            check_equal(piece, embedding(plan.number, plan.num_tokens))
        if not arrival.error:
            assert arrival.total_tokens == plan.num_tokens
            assert arrival.aux[:4] == (plan.number, 3, 4, 5)
            assert arrival.is_complete == (at == plan.num_tokens)

    def _check_all(self, transfer_id: TransferId) -> None:
        """Also what came earlier is still right: it was moved out of the pool."""
        plan = self.plans[transfer_id]
        pieces = [piece for arrival in self.arrivals[transfer_id] for piece in arrival.pieces]
        whole = joined(pieces)
        assert (whole.start, whole.stop) == (0, plan.num_tokens)
        check_equal(whole, embedding(plan.number, plan.num_tokens))

    def num_tokens(self, plan: Plan) -> int:
        return max((arrival.num_tokens for arrival in self.arrivals[plan.transfer_id]), default=0)

    def release(self, transfer_id: TransferId) -> None:
        self.pool.give_back(self.kept.pop(transfer_id, ()))


Side = EncodeSide | PrefillSide


class EmbeddingWorld:
    """One network and one clock. Workers are addressed by their ids; the dead hear nothing."""

    def __init__(
        self,
        mover: Mover = Mover.PRODUCER,
        *,
        block_sizes: tuple[int, int] = (128, 128),
        pool_tokens: tuple[int, int] = (16384, 16384),
        settings: EmbeddingSettings | None = None,
    ) -> None:
        self.mover = mover
        self.now = 1000.0
        self.settings = settings or EmbeddingSettings(buffer_tokens=1024)
        self.fabric: dict[WorkerId, np.ndarray] = {}
        self.network: list[Frame] = []
        sizes = zip(block_sizes, pool_tokens, strict=True)
        self.layouts = [layout(size, tokens // size) for size, tokens in sizes]
        self.encoders: dict[WorkerId, EncodeSide] = {}
        self.prefills: dict[WorkerId, PrefillSide] = {}
        self.plans: list[Plan] = []
        self.stopped: set[WorkerId] = set()
        self.releases_at_once = True
        self.fingerprint = "tiny"
        self.said: list[Message] = []  # everything that was put onto the network

    def local_pool(self, side: Side) -> LocalPool:
        return LocalPool(side.id, side.pool, "host", self.fingerprint, {side.engine.name: side.engine})

    def add_encoder(self) -> EncodeSide:
        side = EncodeSide(self, self.layouts[0])
        self.encoders[side.id] = side
        return side

    def add_prefill(self) -> PrefillSide:
        side = PrefillSide(self, self.layouts[1])
        self.prefills[side.id] = side
        return side

    def plan(self, encoder: EncodeSide, *prefills: PrefillSide, num_tokens: int) -> Plan:
        plan = Plan(len(self.plans) + 1, num_tokens, encoder.id, [side.id for side in prefills])
        self.plans.append(plan)
        return plan

    def sides(self) -> list[Side]:
        return [*self.encoders.values(), *self.prefills.values()]

    def running(self) -> list[Side]:
        return [side for side in self.sides() if side.id not in self.stopped]

    # Messages

    def pump(self) -> None:
        """Every worker that runs does what it can do at once; messages go onto the network."""
        for side in self.running():
            for completion in side.engine.poll():
                side.machine.on_completion(side.engine, completion)
            self._remember_states(side)
            if isinstance(side, EncodeSide):
                side.machine.pump()
            else:
                side.machine.pump(self.now)
            self._remember_states(side)
            for target, message in side.machine.take_outgoing():
                self.said.append(message)
                self.network.append(Frame(side.id, target, encode(message)))
            side.poll()
            if isinstance(side, PrefillSide) and self.releases_at_once:
                for transfer_id in list(side.kept):
                    side.release(transfer_id)

    def _remember_states(self, side: Side) -> None:
        for transfer_id in side.outcomes:
            state, seen = side.machine.state_of(transfer_id), side.states.setdefault(transfer_id, [])
            if state is not None and (not seen or seen[-1] is not state):
                seen.append(state)

    def decode(self, frame: Frame) -> Message:
        return decode_for_producer(frame.data) if frame.target.startswith("encode") else decode_for_consumer(frame.data)

    def deliver(self, index: int = 0, *, keep: bool = False) -> None:
        """Hands one frame over; `keep` leaves a copy of it on the network."""
        frame = self.network[index] if keep else self.network.pop(index)
        if frame.target in self.stopped:
            if not keep:
                self.network.append(frame)
            return
        encoder, prefill = self.encoders.get(frame.target), self.prefills.get(frame.target)
        try:
            if encoder is not None:
                encoder.machine.on_message(frame.source, decode_for_producer(frame.data), self.now)
            elif prefill is not None:
                prefill.machine.on_message(frame.source, decode_for_consumer(frame.data), self.now)
        except ProtocolError as error:
            side = encoder or prefill
            assert side is not None
            side.machine.on_malformed(frame.source, error)
        self.pump()

    def inject(self, source: WorkerId, target: WorkerId, message: Message) -> None:
        self.network.append(Frame(source, target, encode(message)))

    def drop(self, kind: type[Message]) -> int:
        """Loses every frame of one kind that is under way. Returns how many."""
        lost = [frame for frame in self.network if isinstance(self.decode(frame), kind)]
        self.network = [frame for frame in self.network if frame not in lost]
        return len(lost)

    def deliver_until(self, kind: type[Message]) -> None:
        """Until such a message is under way, and no further."""
        self.pump()
        for _ in range(500):
            if any(isinstance(self.decode(frame), kind) for frame in self.network):
                return
            if self.network:
                self.deliver()
                continue
            for side in self.running():
                side.engine.advance()
            self.pump()
        raise AssertionError(f"nobody says {kind.__name__}")

    def settle(self, rounds: int = 5000) -> None:
        """Delivers everything in order and lets all moves end, until nothing is left to do. No time passes."""
        self.pump()
        for _ in range(rounds):
            moving = [side for side in self.running() if side.engine.busy]
            waiting = [frame for frame in self.network if frame.target not in self.stopped]
            if not moving and not waiting:
                return
            for side in moving:
                side.engine.advance()
            if waiting:
                self.deliver(self.network.index(waiting[0]))
            self.pump()
        raise AssertionError("does not settle")

    def settle_messages(self) -> None:
        """Delivers everything in order, while moves stand still."""
        self.pump()
        while waiting := [frame for frame in self.network if frame.target not in self.stopped]:
            self.deliver(self.network.index(waiting[0]))

    def count(self, kind: type[Message]) -> int:
        return sum(isinstance(message, kind) for message in self.said)

    # Time and death

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for side in self.running():
            side.machine.tick(self.now)
        self.pump()

    def run(self, seconds: float, step: float = 0.5) -> None:
        """Lets time pass with a perfect network."""
        for _ in range(int(seconds / step)):
            self.pass_time(step)
            self.settle()

    def kill(self, side: Side) -> None:
        """The process is gone with its memory. Consumers find out when they are told (`tell_of_death`)."""
        self.encoders.pop(side.id, None)
        self.prefills.pop(side.id, None)
        self.fabric.pop(side.id)
        self.stopped.discard(side.id)
        self.network = [frame for frame in self.network if side.id not in (frame.source, frame.target)]

    def tell_of_death(self, worker: WorkerId) -> None:
        for prefill in self.prefills.values():
            prefill.machine.peer_died(worker, "its process ended")
        self.pump()

    def suspect(self, worker: WorkerId) -> None:
        """A router takes the worker for gone and tells the others that run. It may be wrong."""
        for side in self.running():
            if side.id != worker:
                side.machine.peer_lost(worker, "a router takes it for gone")
        self.pump()

    # What must always hold

    def check(self) -> None:
        for side in self.sides():
            side.pool.check()

    def check_idle(self) -> None:
        """Nothing is held, by anybody, and every transfer has one outcome."""
        self.check()
        for side in self.sides():
            counts = side.pool.counts()
            assert counts.free == counts.total, (side.id, counts)
            assert side.machine.num_live == 0
            assert side.machine.counts.num_moves == 0
            assert all(len(outcome) == 1 for outcome in side.outcomes.values()), side.outcomes
