"""Encode and prefill workers in a `World`. Every token of every embedding has its own values."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from relay_world import Side, World

from kvrelay.ids import TransferId, WorkerId, new_transfer_id
from kvrelay.states import EmbeddingState
from kvrelay.transfer.embedding import mover as moving
from kvrelay.transfer.embedding.arrival import EmbeddingArrival
from kvrelay.transfer.embedding.kind import EMBEDDINGS, EmbeddingSent
from kvrelay.transfer.embedding.layout import EmbeddingLayout
from kvrelay.transfer.embedding.memory import host_memory
from kvrelay.transfer.embedding.pieces import Embedding, Piece
from kvrelay.transfer.embedding.pool import EmbeddingPool
from kvrelay.transfer.embedding.receiving import EmbeddingReceiving
from kvrelay.transfer.embedding.room import EmbeddingSettings, Rooms
from kvrelay.transfer.embedding.sending import EmbeddingSending
from kvrelay.transfer.engines.base import Mover
from kvrelay.transfer.relay.consumer import ConsumerMachine
from kvrelay.transfer.relay.producer import ProducerMachine

POISON = 0xEE
AUX_ITEMS = 8
BLOCK_SIZES = [(4, 4), (2, 4), (4, 3), (6, 4)]


def joined(pieces: Sequence[Piece]) -> Piece:
    """One piece of several that follow each other. Copies, unless there is but one."""
    if len(pieces) == 1:
        return pieces[0]
    return Piece(
        pieces[0].start,
        torch.cat([piece.rows for piece in pieces]),
        np.concatenate([piece.fill_ids for piece in pieces]),
        np.concatenate([piece.positions for piece in pieces]),
    )


def layout(block_size: int, num_blocks: int) -> EmbeddingLayout:
    return EmbeddingLayout(
        num_blocks=num_blocks, block_size=block_size, hidden=1, deepstack=1, dtype="float32", item_bytes=4, aux_items=AUX_ITEMS
    )


class PoisonedPool(EmbeddingPool):
    """Fills what is given back with poison, and knows when anything is written there."""

    def __init__(self, shape: EmbeddingLayout) -> None:
        super().__init__(host_memory(shape))
        self._rows = self.host.rows.numpy()
        self._rows[:] = POISON

    def give_back(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._rows[block * self.layout.block_size : (block + 1) * self.layout.block_size] = POISON
        super().give_back(blocks)

    def check(self) -> None:
        rows = self._rows.reshape(self.layout.num_blocks, -1)
        assert (rows[self._free] == POISON).all(), "a free block was written"

    @property
    def is_empty(self) -> bool:
        return self.counts().free == self.counts().total

    @property
    def memory(self) -> np.ndarray:
        assert self.host.region.buffer is not None
        return np.frombuffer(self.host.region.buffer, dtype=np.uint8)


def embedding(number: int, num_tokens: int, row_bytes: int = 8) -> Embedding:
    tokens = np.arange(num_tokens, dtype=np.int32)
    values = np.repeat((tokens + number * 1_000_000)[:, None], row_bytes // 4, axis=1) + np.arange(
        row_bytes // 4, dtype=np.int32
    )
    rows = torch.from_numpy(np.ascontiguousarray(values.astype(np.int32)).view(np.uint8))
    positions = np.stack((tokens, tokens * 2 + number, tokens * 3), axis=1).astype(np.int32)
    return Embedding(rows=rows, fill_ids=tokens + number * 1000, positions=positions, aux=(number, 3, 4, 5))


def check_equal(piece: Piece, wanted: Embedding) -> None:
    span = slice(piece.start, piece.stop)
    assert torch.equal(piece.rows.cpu(), wanted.rows[span])
    assert (piece.fill_ids == wanted.fill_ids[span]).all()
    assert (piece.positions == wanted.positions[span]).all()


@dataclass
class Plan:
    number: int
    num_tokens: int
    producer: WorkerId
    consumers: list[WorkerId]
    transfer_id: TransferId = field(default_factory=new_transfer_id)

    @property
    def workers(self) -> list[WorkerId]:
        return [self.producer, *self.consumers]


class EncodeSide(Side[Plan]):
    """An encode worker."""

    def __init__(self, world: EmbeddingWorld, shape: EmbeddingLayout) -> None:
        super().__init__(world, "encode", PoisonedPool(shape), list[EmbeddingSent])
        self.unoffered: dict[TransferId, Plan] = {}
        self.states: dict[TransferId, list[EmbeddingState]] = {}

    def make_machine(self) -> moving.SendingMachine:
        return ProducerMachine(self.desk)

    def expect(self, plan: Plan) -> None:
        self.outcomes[plan.transfer_id] = []
        self.unoffered[plan.transfer_id] = plan
        moving.expect_sending(self.machine, self.pool, plan.transfer_id, plan.consumers, self.world.now)

    def offer(self, plan: Plan) -> None:
        if plan.transfer_id not in self.unoffered:
            return
        blocks = self.pool.take(plan.num_tokens)
        if blocks is not None:
            del self.unoffered[plan.transfer_id]
            self.pool.store(blocks, embedding(plan.number, plan.num_tokens))
            moving.offer(self.machine, self.pool, plan.transfer_id, blocks, plan.num_tokens, self.world.now)

    def abort(self, plan: Plan) -> None:
        if not self.outcomes.get(plan.transfer_id, [""]):
            self.unoffered.pop(plan.transfer_id, None)
            self.ended(plan.transfer_id, "aborted")
            self.machine.tell(plan.transfer_id, EmbeddingSending.abort)

    def take(self, news: list[EmbeddingSent]) -> None:
        for sent in news:
            if self.outcomes[sent.transfer_id] != ["aborted"]:  # else the two crossed
                self.ended(sent.transfer_id, sent.error or "sent")
            self.unoffered.pop(sent.transfer_id, None)

    @property
    def is_idle(self) -> bool:
        return not self.unoffered


class PrefillSide(Side[Plan]):
    """A prefill worker. What arrives is looked at at once; what is complete is released when told."""

    def __init__(self, world: EmbeddingWorld, shape: EmbeddingLayout) -> None:
        super().__init__(world, "prefill", PoisonedPool(shape), list[EmbeddingArrival])
        self.rooms = Rooms(self.pool, world.embedding_settings)
        self.plans: dict[TransferId, Plan] = {}
        self.arrivals: dict[TransferId, list[EmbeddingArrival]] = {}
        self.kept: dict[TransferId, tuple[int, ...]] = {}
        self.states: dict[TransferId, list[EmbeddingState]] = {}

    def make_machine(self) -> moving.ReceivingMachine:
        return ConsumerMachine(self.desk)

    def expect(self, plan: Plan) -> None:
        self.plans[plan.transfer_id] = plan
        self.arrivals[plan.transfer_id], self.outcomes[plan.transfer_id] = [], []
        number = len(plan.consumers)
        moving.expect_receiving(
            self.machine, self.rooms, plan.transfer_id, plan.producer, "sim", number, self.world.now, "a request", "a trace"
        )

    def abort(self, plan: Plan) -> None:
        if not self.outcomes.get(plan.transfer_id, [""]):
            self.ended(plan.transfer_id, "aborted")
            self.machine.tell(plan.transfer_id, EmbeddingReceiving.abort)

    def take(self, news: list[EmbeddingArrival]) -> None:
        for arrival in news:
            if self.outcomes[arrival.transfer_id] == ["aborted"]:
                self.pool.give_back(arrival.blocks)
                continue
            self._check(arrival)
            self.arrivals[arrival.transfer_id].append(arrival)
            if arrival.error or arrival.is_complete:
                self.ended(arrival.transfer_id, arrival.error or "arrived")
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


class EmbeddingWorld(World[EncodeSide, PrefillSide, Plan]):
    kind = EMBEDDINGS

    def __init__(
        self,
        mover: Mover = Mover.PRODUCER,
        *,
        block_sizes: tuple[int, int] = (128, 128),
        pool_tokens: tuple[int, int] = (16384, 16384),
        settings: EmbeddingSettings | None = None,
    ) -> None:
        self.embedding_settings = settings or EmbeddingSettings(buffer_tokens=1024)
        super().__init__(mover, self.embedding_settings.transfer)
        sizes = zip(block_sizes, pool_tokens, strict=True)
        self.layouts = [layout(size, tokens // size) for size, tokens in sizes]
        self.releases_at_once = True

    @classmethod
    def drawn(cls, draw: random.Random) -> EmbeddingWorld:
        """Pools are small, so that every embedding of some length is resumed and several wait for room."""
        settings = EmbeddingSettings(
            buffer_tokens=draw.randint(1, 16),
            full=draw.choice(["wait", "shrink", "fail"]),
            buffer=draw.choice(["adaptive", "fixed"]),
        )
        world = cls(draw.choice(list(Mover)), block_sizes=draw.choice(BLOCK_SIZES), pool_tokens=(60, 24), settings=settings)
        world.releases_at_once = False
        return world

    def make_producer(self) -> EncodeSide:
        return EncodeSide(self, self.layouts[0])

    def make_consumer(self) -> PrefillSide:
        return PrefillSide(self, self.layouts[1])

    def plan(self, encoder: EncodeSide, *prefills: PrefillSide, num_tokens: int) -> Plan:
        plan = Plan(len(self.plans) + 1, num_tokens, encoder.id, [side.id for side in prefills])
        self.plans.append(plan)
        return plan

    def pump(self) -> None:
        super().pump()
        if self.releases_at_once:
            self._release()

    def _release(self) -> None:
        for side in self.consumers.values():
            if side.id not in self.stopped:
                for transfer_id in list(side.kept):
                    side.release(transfer_id)

    def watch(self, side: EncodeSide | PrefillSide) -> None:
        for transfer_id in side.outcomes:
            state, seen = side.machine.table.state_of(transfer_id), side.states.setdefault(transfer_id, [])
            if state not in (None, EmbeddingState.DRAINING) and (not seen or seen[-1] is not state):
                seen.append(state)

    # Under faults

    def submit(self, draw: random.Random) -> Plan:
        consumers = list(self.consumers.values())
        chosen = consumers if draw.random() < 0.3 else [draw.choice(consumers)]
        return self.plan(draw.choice(list(self.producers.values())), *chosen, num_tokens=draw.randint(1, 40))

    def work(self, draw: random.Random) -> None:
        plan = draw.choice(self.plans)
        encoder = self.side(plan.producer)
        if draw.random() < 0.4:
            self._release()
        elif isinstance(encoder, EncodeSide):
            encoder.offer(plan)
        self.pump()

    def change_mind(self, draw: random.Random) -> None:
        plan = draw.choice(self.plans)
        for worker in [plan.producer] if draw.random() < 0.5 else plan.consumers:
            side = self.side(worker)
            if side is not None:
                side.abort(plan)
        self.pump()

    def work_on(self, late: bool) -> None:
        """Late: embeddings for which there was no room waited behind those of consumers that are dead."""
        self.releases_at_once = True
        for encoder in self.producers.values():
            for plan in list(encoder.unoffered.values()):
                encoder.offer(plan)
                if late:
                    encoder.abort(plan)
        self.pump()
