"""Prefill and decode workers in a `World`. Every token of every layer and plane of every request has its own value."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
from relay_world import Side, World

from kvrelay.engine.fence import PASSED
from kvrelay.engine.movers import Arrival, ConsumerNews, ProducerNews
from kvrelay.ids import RequestId, TransferId, WorkerId, new_request_id, new_transfer_id
from kvrelay.transfer.engines.base import Mover
from kvrelay.transfer.kv import consumer as consuming
from kvrelay.transfer.kv import producer as producing
from kvrelay.transfer.kv.kind import KV
from kvrelay.transfer.kv.layout import KVLayout
from kvrelay.transfer.kv.plan import transfer_meta
from kvrelay.transfer.kv.receiving import Receiving
from kvrelay.transfer.kv.sending import Sending
from kvrelay.transfer.relay.consumer import ConsumerMachine
from kvrelay.transfer.relay.link import TransferSettings
from kvrelay.transfer.relay.producer import ProducerMachine
from kvrelay.wire.serving import FirstToken, TransferInfo

LAYERS = 3
POISON = 0xDEADBEEF
SIZES = [(4, 4), (2, 4), (4, 2), (4, 6), (6, 4)]


def small_layout(block_size: int, num_blocks: int) -> KVLayout:
    return KVLayout(
        num_layers=LAYERS,
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=1,
        head_dim=1,
        dtype="float32",
        item_bytes=4,
    )


@dataclass
class Plan:
    """One request with its two names, one on each side, and the transfer id they share."""

    number: int
    info: TransferInfo
    num_tokens: int
    on_producer: RequestId
    on_consumer: RequestId

    @property
    def transfer_id(self) -> TransferId:
        return self.info.transfer_id

    @property
    def workers(self) -> list[WorkerId]:
        return [self.info.producer, self.info.consumer]


class Pool:
    """The blocks of one worker and what is in them. Free blocks hold poison."""

    def __init__(self, layout: KVLayout) -> None:
        self.layout = layout
        self.memory = np.full((LAYERS, 2, layout.num_blocks, layout.block_size), POISON, dtype=np.uint32)
        self.free = list(range(layout.num_blocks))
        random.Random(layout.num_blocks).shuffle(self.free)

    def take(self, num_tokens: int) -> list[int] | None:
        count = -(-num_tokens // self.layout.block_size)
        if count > len(self.free):
            return None
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def give_back(self, blocks: list[int]) -> None:
        self.memory[:, :, blocks] = POISON
        assert not set(blocks) & set(self.free), "freed twice"
        self.free.extend(blocks)

    @property
    def is_empty(self) -> bool:
        return len(self.free) == self.layout.num_blocks

    def check(self) -> None:
        assert (self.memory[:, :, self.free] == POISON).all(), "a free block was written"


def kv(number: int, token: int, layer: int, plane: int) -> int:
    return (number << 20) | (token << 8) | (layer << 4) | plane


@dataclass
class Computing:
    """A prompt on a producer's side."""

    plan: Plan
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    finished: bool = False
    wanted: bool = True  # not set aside
    given: tuple[int, ...] = ()  # the blocks, as the relay was told of them


class ProducerSide(Side[Plan]):
    """A prefill worker: an engine that computes on command."""

    def __init__(self, world: KVWorld, layout: KVLayout) -> None:
        super().__init__(world, "prefill", Pool(layout), ProducerNews)
        self.requests: dict[RequestId, Computing] = {}
        self.aborted: set[RequestId] = set()
        self.step: tuple[Computing, int, int] | None = None
        self.steps = producing.Steps(lambda request: self.machine.table.named(request), layout.num_layers)
        self.rows: producing.Rows = []

    def make_machine(self) -> producing.SendingMachine:
        return ProducerMachine(self.desk)

    def expect(self, plan: Plan) -> None:
        meta = transfer_meta(plan.on_producer, plan.info, plan.info.consumer, plan.num_tokens)
        self.requests[plan.on_producer] = Computing(plan)
        self.outcomes[plan.on_producer] = []
        producing.expect(self.machine, meta, self.world.now)

    def start(self, plan: Plan, num_cached: int = 0) -> bool:
        work = self.requests.get(plan.on_producer)
        if work is None or work.blocks or not work.wanted:
            return False
        blocks = self.pool.take(plan.num_tokens)
        if blocks is None:
            return False
        work.blocks, work.computed, work.finished = blocks, num_cached, False
        for layer in range(LAYERS):
            self._store(work, 0, num_cached, layer)
        work.given = given = tuple(blocks)
        self.machine.tell(plan.on_producer, lambda sending: sending.start(given, num_cached, self.world.now))
        return True

    def begin_step(self, plan: Plan, tokens: int) -> bool:
        work = self.requests.get(plan.on_producer)
        if self.step is not None or work is None or not work.blocks or work.finished:
            return False
        upto = min(plan.num_tokens, work.computed + tokens)
        self.step = (work, upto, 0)
        self.rows = [(plan.on_producer, work.given, upto)]
        self.steps.begin(self.rows)
        return True

    def compute_layer(self) -> None:
        """The next layer of the pass under way; with the last one the pass ends, and perhaps the prompt."""
        if self.step is None:
            return
        work, upto, layer = self.step
        self._store(work, work.computed, upto, layer)
        self.steps.layer_done(self.rows, layer + 1, PASSED)
        self.steps.look()
        self.step = (work, upto, layer + 1)
        if layer + 1 == LAYERS:
            self.step = None
            work.computed = upto
            self._end_step()
            if upto == work.plan.num_tokens and work.blocks:
                work.finished = True
                first = [FirstToken(0, work.plan.number)]
                self.machine.tell(work.plan.on_producer, lambda sending: sending.finish(work.given, first))

    def _end_step(self) -> None:
        self.steps.ended(self.rows)
        self.steps.look()

    def compute_all(self, plan: Plan, chunk: int = 1_000) -> None:
        while self.step is not None or self.begin_step(plan, chunk):
            self.compute_layer()
            self.world.pump()

    def _store(self, work: Computing, start: int, stop: int, layer: int) -> None:
        size = self.pool.layout.block_size
        for token in range(start, stop):
            if not work.blocks:
                return  # given back in the middle of the pass
            for plane in range(2):
                value = kv(work.plan.number, token, layer, plane)
                self.pool.memory[layer, plane, work.blocks[token // size], token % size] = value

    def set_aside(self, plan: Plan) -> None:
        if self.step is None and self.requests[plan.on_producer].blocks:
            self.machine.tell(plan.on_producer, Sending.set_aside)

    def abort(self, plan: Plan) -> None:
        if plan.on_producer in self.outcomes and not self.outcomes[plan.on_producer]:
            self.aborted.add(plan.on_producer)
            self.machine.tell(plan.on_producer, Sending.abort)
            work = self.requests.get(plan.on_producer)
            if work is not None and not work.blocks:
                self._end(plan.on_producer, "aborted")

    def take(self, news: ProducerNews) -> None:
        for request in news.set_aside:
            work = self.requests[request]
            self._give_back(work)
            work.wanted = False
            if request in self.aborted:  # the two crossed: nothing more will be said
                self._end(request, "aborted")
        for request in news.restart:
            self.requests[request].wanted = True
        failed = dict(news.failed)
        assert set(failed) <= set(news.released)
        for request in news.released:
            if request in self.requests:
                self._give_back(self.requests[request])
                ended = "aborted" if request in self.aborted else failed.get(request, "released")
                self._end(request, ended)

    def _give_back(self, work: Computing) -> None:
        if self.step is not None and self.step[0] is work:
            self.step = None
            self._end_step()
        self.pool.give_back(work.blocks)
        work.blocks, work.computed, work.finished = [], 0, False

    def _end(self, request: RequestId, outcome: str) -> None:
        self.ended(request, outcome)
        del self.requests[request]

    @property
    def is_idle(self) -> bool:
        return not self.requests

    def live(self, plan: Plan) -> bool:
        return plan.on_producer in self.requests


@dataclass
class Awaiting:
    """A request on a consumer's side."""

    plan: Plan
    startable: bool = False
    blocks: list[int] | None = None
    skip: int = 0
    arrived: Arrival | None = None
    aborted: bool = False


class ConsumerSide(Side[Plan]):
    """A decode worker: an engine that reserves on command."""

    def __init__(self, world: KVWorld, layout: KVLayout) -> None:
        super().__init__(world, "decode", Pool(layout), ConsumerNews)
        self.requests: dict[RequestId, Awaiting] = {}

    def make_machine(self) -> consuming.ReceivingMachine:
        return ConsumerMachine(self.desk)

    def expect(self, plan: Plan) -> None:
        meta = transfer_meta(plan.on_consumer, plan.info, plan.info.producer, plan.num_tokens)
        self.requests[plan.on_consumer] = Awaiting(plan)
        self.outcomes[plan.on_consumer] = []
        consuming.expect(self.machine, meta, plan.info.signal_address, self.world.now)

    def reserve(self, plan: Plan, skip_blocks: int = 0) -> bool:
        work = self.requests.get(plan.on_consumer)
        if work is None or not work.startable or work.blocks is not None or work.aborted or work.arrived is not None:
            return False
        skip = min(skip_blocks, plan.num_tokens // self.pool.layout.block_size) * self.pool.layout.block_size
        blocks = self.pool.take(plan.num_tokens - skip)
        if blocks is None:
            return False
        work.blocks, work.skip, work.startable = blocks, skip, False
        consuming.reserve(self.machine, plan.on_consumer, tuple(blocks), skip, self.world.now)
        return True

    def abort(self, plan: Plan) -> None:
        work = self.requests.get(plan.on_consumer)
        if work is not None and not work.aborted and work.arrived is None:
            work.aborted = True
            self.ended(plan.on_consumer, "aborted")
            self.machine.tell(plan.on_consumer, Receiving.abort)
            self._forget_if_over(work)

    def take(self, news: ConsumerNews) -> None:
        for request in news.freed:
            work = self.requests[request]
            assert work.blocks is not None, "freed what was not reserved"
            self.pool.give_back(work.blocks)
            work.blocks = None
            self._forget_if_over(work)
        for request in news.started:
            if request in self.requests:  # else an abort crossed it
                self.requests[request].startable = True
        for arrival in news.arrived:
            self._arrived(arrival)

    def _arrived(self, arrival: Arrival) -> None:
        work = self.requests.get(arrival.request_id)
        if work is None or work.aborted:  # the abort was on its way
            if work is not None and not arrival.error and work.blocks is not None:
                self.pool.give_back(work.blocks)
                work.blocks = None
                self._forget_if_over(work)
            return
        assert work.arrived is None, "arrived twice"
        work.arrived = arrival
        self.ended(arrival.request_id, arrival.error or "arrived")
        if not arrival.error:
            assert work.blocks is not None
            self._check_contents(work)
            self.pool.give_back(work.blocks)
            work.blocks = None
        self._forget_if_over(work)

    def _check_contents(self, work: Awaiting) -> None:
        assert work.blocks is not None
        assert work.arrived is not None
        assert work.arrived.first_tokens == [FirstToken(0, work.plan.number)]
        size = self.pool.layout.block_size
        for token in range(work.skip, work.plan.num_tokens):
            index, offset = divmod(token - work.skip, size)
            for layer in range(LAYERS):
                for plane in range(2):
                    value = self.pool.memory[layer, plane, work.blocks[index], offset]
                    assert value == kv(work.plan.number, token, layer, plane), (token, layer, plane, hex(value))

    @property
    def is_idle(self) -> bool:
        return not self.requests

    def _forget_if_over(self, work: Awaiting) -> None:
        if (work.aborted or work.arrived is not None) and work.blocks is None:
            self.requests.pop(work.plan.on_consumer, None)


class KVWorld(World[ProducerSide, ConsumerSide, Plan]):
    kind = KV

    def __init__(
        self,
        mover: Mover = Mover.PRODUCER,
        *,
        sizes: tuple[int, int] = (4, 4),
        blocks: tuple[int, int] = (24, 24),
        settings: TransferSettings | None = None,
    ) -> None:
        super().__init__(mover, settings or TransferSettings())
        self.layouts = (small_layout(sizes[0], blocks[0]), small_layout(sizes[1], blocks[1]))

    @classmethod
    def drawn(cls, draw: random.Random) -> KVWorld:
        return cls(draw.choice(list(Mover)), sizes=draw.choice(SIZES))

    def make_producer(self) -> ProducerSide:
        return ProducerSide(self, self.layouts[0])

    def make_consumer(self) -> ConsumerSide:
        return ConsumerSide(self, self.layouts[1])

    def plan(self, producer: ProducerSide, consumer: ConsumerSide, num_tokens: int = 10, mode: str = "write") -> Plan:
        info = TransferInfo(
            transfer_id=new_transfer_id(),
            mode=mode,  # type: ignore[arg-type]
            producer=producer.id,
            consumer=consumer.id,
            signal_address=f"sim://{producer.id}",
        )
        plan = Plan(len(self.plans) + 1, info, num_tokens, new_request_id(), new_request_id())
        self.plans.append(plan)
        return plan

    @property
    def num_without_room(self) -> int:
        waiting = {work.plan.number for side in self.producers.values() for work in side.requests.values() if not work.blocks}
        waiting |= {
            work.plan.number for side in self.consumers.values() for work in side.requests.values() if work.blocks is None
        }
        return len(waiting)

    # Under faults

    def submit(self, draw: random.Random) -> Plan:
        producer, consumer = draw.choice(list(self.producers.values())), draw.choice(list(self.consumers.values()))
        return self.plan(producer, consumer, draw.randint(1, 12), draw.choice(["write", "write", "read"]))

    def work(self, draw: random.Random) -> None:
        """Mostly layers; a prompt is started or reserved for now and then."""
        what = draw.choices(["layer", "start", "reserve"], [40, 12, 12])[0]
        plan = draw.choice(self.plans)
        producer, consumer = self.side(plan.info.producer), self.side(plan.info.consumer)
        if what == "layer":
            producer = self.side(draw.choice(list(self.producers)))
            if isinstance(producer, ProducerSide):
                producer.compute_layer()
        elif what == "start" and isinstance(producer, ProducerSide):
            producer.start(plan, min(draw.randint(0, 3), plan.num_tokens))
            producer.begin_step(plan, draw.randint(1, 12))
        elif what == "reserve" and isinstance(consumer, ConsumerSide):
            consumer.reserve(plan, draw.randint(0, 2))
        self.pump()

    def change_mind(self, draw: random.Random) -> None:
        plan = draw.choice(self.plans)
        producer, consumer = self.producers.get(plan.info.producer), self.consumers.get(plan.info.consumer)
        what = draw.choice(["set aside", "set aside", "abort producer", "abort consumer"])
        if what == "set aside" and producer is not None and producer.live(plan):
            producer.set_aside(plan)
        elif what == "abort producer" and producer is not None:
            producer.abort(plan)
        elif what == "abort consumer" and consumer is not None:
            consumer.abort(plan)
        self.pump()

    def work_on(self, late: bool) -> None:
        for plan in self.plans:
            producer, consumer = self.producers.get(plan.info.producer), self.consumers.get(plan.info.consumer)
            if producer is not None:
                while producer.step is not None:
                    producer.compute_layer()
                producer.start(plan)
                producer.compute_all(plan, 5)
            if consumer is not None:
                consumer.reserve(plan, plan.number % 2)
            self.pump()
