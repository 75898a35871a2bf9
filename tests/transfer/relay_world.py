"""Two kinds of workers, a network and a clock, all in one thread and under the test's control.

`World` holds producers and consumers around the real machines. Nothing happens by itself: the test delivers, drops, repeats
or spoils messages, lets moves make progress, lets time pass, and kills or restarts workers. KV is real bytes: every token of
every layer and plane of every request has its own value, blocks that are free hold poison, and whoever gives a block back
poisons it at once. So bytes that were copied from reused memory, or written into it, are seen.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from kvrelay.engine.movers import Arrival
from kvrelay.errors import ProtocolError
from kvrelay.ids import RequestId, TransferId, WorkerId, new_request_id, new_transfer_id, new_worker_id
from kvrelay.transfer.engines.base import Completion, MoveId, Mover, Ranges, TransferError, check_ranges
from kvrelay.transfer.kv_consumer import ConsumerMachine
from kvrelay.transfer.kv_producer import ProducerMachine
from kvrelay.transfer.layout import KVLayout
from kvrelay.transfer.region import Region
from kvrelay.transfer.session import LocalSide, TransferSettings
from kvrelay.wire.codec import encode
from kvrelay.wire.serving import FirstToken, TransferInfo
from kvrelay.wire.transfer import Message, decode_for_consumer, decode_for_producer

LAYERS = 3
POISON = 0xDEADBEEF


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
class Move:
    peer: WorkerId
    ranges: Ranges
    writes: bool
    done: int = 0
    cancelled: bool = False


class SimEngine:
    """A transfer engine whose moves make progress only when `advance` is called, one range at a time. A cancelled move may
    still move bytes until `poll` has told its end, as the contract allows."""

    name = "memory"

    def __init__(self, mover: Mover, worker: WorkerId, fabric: dict[WorkerId, np.ndarray]) -> None:
        self._mover = mover
        self._worker = worker
        self._fabric = fabric
        self._peers: set[WorkerId] = set()
        self._moves: dict[MoveId, Move] = {}
        self._finished: list[Completion] = []
        self._next = 0
        self.fail_next = False

    @property
    def mover(self) -> Mover:
        return self._mover

    def register(self, region: Region) -> None:
        pass

    def local_info(self) -> bytes:
        return self._worker.encode()

    def add_peer(self, peer: WorkerId, info: bytes) -> None:
        if info != peer.encode():
            raise TransferError("not the peer's info")
        self._peers.add(peer)

    def remove_peer(self, peer: WorkerId) -> None:
        self._peers.discard(peer)
        for move in [key for key, move in self._moves.items() if move.peer == peer]:
            del self._moves[move]
            self._finished.append(Completion(move, "the peer was removed"))

    def write(self, peer: WorkerId, ranges: Ranges) -> MoveId:
        if self._mover is Mover.CONSUMER:
            raise TransferError("only the consumer moves")
        return self._begin(peer, ranges, writes=True)

    def read(self, peer: WorkerId, ranges: Ranges) -> MoveId:
        return self._begin(peer, ranges, writes=False)

    def _begin(self, peer: WorkerId, ranges: Ranges, *, writes: bool) -> MoveId:
        if peer not in self._peers:
            raise TransferError(f"unknown peer {peer}")
        if peer in self._fabric:
            check_ranges(ranges, self._fabric[self._worker].nbytes, self._fabric[peer].nbytes)
        self._next += 1
        self._moves[MoveId(self._next)] = Move(peer, ranges, writes)
        return MoveId(self._next)

    @property
    def busy(self) -> bool:
        return bool(self._moves or self._finished)

    def advance(self, max_ranges: int = 1_000_000) -> None:
        """Moves up to so many ranges of the oldest move."""
        for key, move in list(self._moves.items()):
            if self.fail_next:
                self.fail_next = False
                self._end(key, "injected")
                return
            if move.peer not in self._fabric:
                self._end(key, "the peer is gone")
                continue
            self._copy(move, max_ranges)
            if move.done == len(move.ranges) or move.cancelled:
                self._end(key, "cancelled" if move.cancelled else "")
            return

    def _copy(self, move: Move, max_ranges: int) -> None:
        mine, theirs = (self._fabric[worker].reshape(-1).view(np.uint8) for worker in (self._worker, move.peer))
        for local, remote, size in move.ranges[move.done : move.done + max_ranges]:
            if move.writes:
                theirs[remote : remote + size] = mine[local : local + size]
            else:
                mine[local : local + size] = theirs[remote : remote + size]
            move.done += 1

    def _end(self, key: MoveId, error: str) -> None:
        del self._moves[key]
        self._finished.append(Completion(key, error))

    def poll(self) -> list[Completion]:
        finished, self._finished = self._finished, []
        return finished

    def cancel(self, move: MoveId) -> None:
        if move in self._moves:
            self._moves[move].cancelled = True

    def close(self) -> None:
        for key in list(self._moves):
            self._end(key, "closed")


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
    wanted: bool = True  # not parked


class ProducerSide:
    """A prefill worker: the real machine, and an engine that computes on command."""

    def __init__(self, world: World, layout: KVLayout) -> None:
        self.world = world
        self.id = new_worker_id("prefill")
        self.pool = Pool(layout)
        self.engine = SimEngine(world.mover, self.id, world.fabric)
        world.fabric[self.id] = self.pool.memory
        self.machine = ProducerMachine(world.local_side(self.id, layout, self.engine), world.settings)
        self.requests: dict[RequestId, Computing] = {}
        self.outcomes: dict[RequestId, list[str]] = {}
        self.aborted: set[RequestId] = set()
        self.step: tuple[Computing, int, int] | None = None

    def expect(self, plan: Plan) -> None:
        self.requests[plan.on_producer] = Computing(plan)
        self.outcomes[plan.on_producer] = []
        self.machine.expect(plan.on_producer, plan.info, plan.num_tokens, self.world.now)

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
        self.machine.start(plan.on_producer, blocks, num_cached, self.world.now)
        return True

    def begin_step(self, plan: Plan, tokens: int) -> bool:
        work = self.requests.get(plan.on_producer)
        if self.step is not None or work is None or not work.blocks or work.finished:
            return False
        upto = min(plan.num_tokens, work.computed + tokens)
        self.step = (work, upto, 0)
        self.machine.begin_step([(plan.on_producer, upto)])
        return True

    def compute_layer(self) -> None:
        """The next layer of the pass under way; with the last one the pass ends, and perhaps the prompt."""
        if self.step is None:
            return
        work, upto, layer = self.step
        self._store(work, work.computed, upto, layer)
        self.machine.layers_done(layer + 1)
        self.step = (work, upto, layer + 1)
        if layer + 1 == LAYERS:
            self.step = None
            work.computed = upto
            self.machine.end_step()
            if upto == work.plan.num_tokens and work.blocks:
                work.finished = True
                self.machine.finish(work.plan.on_producer, [FirstToken(0, work.plan.number)])

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

    def park(self, plan: Plan) -> None:
        if self.step is None and self.requests[plan.on_producer].blocks:
            self.machine.park(plan.on_producer)

    def abort(self, plan: Plan) -> None:
        if plan.on_producer in self.outcomes and not self.outcomes[plan.on_producer]:
            self.aborted.add(plan.on_producer)
            self.machine.abort(plan.on_producer)
            work = self.requests.get(plan.on_producer)
            if work is not None and not work.blocks:
                self._end(plan.on_producer, "aborted")

    def poll(self) -> None:
        news = self.machine.take_news()
        for request in news.parked:
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
            self.machine.end_step()
        self.pool.give_back(work.blocks)
        work.blocks, work.computed, work.finished = [], 0, False

    def _end(self, request: RequestId, outcome: str) -> None:
        self.outcomes[request].append(outcome)
        assert len(self.outcomes[request]) == 1, self.outcomes[request]
        del self.requests[request]

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


class ConsumerSide:
    """A decode worker: the real machine, and an engine that reserves on command."""

    def __init__(self, world: World, layout: KVLayout) -> None:
        self.world = world
        self.id = new_worker_id("decode")
        self.pool = Pool(layout)
        self.engine = SimEngine(world.mover, self.id, world.fabric)
        world.fabric[self.id] = self.pool.memory
        self.machine = ConsumerMachine(world.local_side(self.id, layout, self.engine), world.settings)
        self.requests: dict[RequestId, Awaiting] = {}
        self.outcomes: dict[RequestId, list[str]] = {}

    def expect(self, plan: Plan) -> None:
        self.requests[plan.on_consumer] = Awaiting(plan)
        self.outcomes[plan.on_consumer] = []
        self.machine.expect(plan.on_consumer, plan.info, plan.num_tokens, self.world.now)

    def reserve(self, plan: Plan, skip_blocks: int = 0) -> bool:
        work = self.requests.get(plan.on_consumer)
        if work is None or not work.startable or work.blocks is not None or work.aborted or work.arrived is not None:
            return False
        skip = min(skip_blocks, plan.num_tokens // self.pool.layout.block_size) * self.pool.layout.block_size
        blocks = self.pool.take(plan.num_tokens - skip)
        if blocks is None:
            return False
        work.blocks, work.skip, work.startable = blocks, skip, False
        self.machine.reserve(plan.on_consumer, blocks, skip, self.world.now)
        return True

    def unreserve(self, plan: Plan) -> None:
        work = self.requests.get(plan.on_consumer)
        if work is not None and work.blocks is not None and not work.aborted and work.arrived is None:
            self.machine.unreserve(plan.on_consumer)

    def abort(self, plan: Plan) -> None:
        work = self.requests.get(plan.on_consumer)
        if work is not None and not work.aborted and work.arrived is None:
            work.aborted = True
            self._outcome(plan.on_consumer, "aborted")
            self.machine.abort(plan.on_consumer)
            self._forget_if_over(work)

    def poll(self) -> None:
        news = self.machine.take_news()
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
        self._outcome(arrival.request_id, arrival.error or "arrived")
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

    def _outcome(self, request: RequestId, outcome: str) -> None:
        self.outcomes[request].append(outcome)
        assert len(self.outcomes[request]) == 1, self.outcomes[request]

    def _forget_if_over(self, work: Awaiting) -> None:
        if (work.aborted or work.arrived is not None) and work.blocks is None:
            self.requests.pop(work.plan.on_consumer, None)


@dataclass
class Frame:
    source: WorkerId
    target: WorkerId
    data: bytes


class World:
    """One network and one clock. Workers are addressed by their ids; the dead ones stay known, and hear nothing."""

    def __init__(
        self,
        mover: Mover = Mover.PRODUCER,
        *,
        sizes: tuple[int, int] = (4, 4),
        blocks: tuple[int, int] = (24, 24),
        settings: TransferSettings | None = None,
    ) -> None:
        self.mover = mover
        self.now = 1000.0
        self.settings = settings or TransferSettings()
        self.fabric: dict[WorkerId, np.ndarray] = {}
        self.network: list[Frame] = []
        self.layouts = (small_layout(sizes[0], blocks[0]), small_layout(sizes[1], blocks[1]))
        self.fingerprint = "tiny/float32"
        self.producers: dict[WorkerId, ProducerSide] = {}
        self.consumers: dict[WorkerId, ConsumerSide] = {}
        self.plans: list[Plan] = []
        self.malformed = 0
        self.stopped: set[WorkerId] = set()  # stopped processes: they see and do nothing

    def local_side(self, worker: WorkerId, layout: KVLayout, engine: SimEngine) -> LocalSide:
        return LocalSide(worker, layout, "host", self.fingerprint, {engine.name: engine})

    def add_producer(self) -> ProducerSide:
        side = ProducerSide(self, self.layouts[0])
        self.producers[side.id] = side
        return side

    def add_consumer(self) -> ConsumerSide:
        side = ConsumerSide(self, self.layouts[1])
        self.consumers[side.id] = side
        return side

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

    # Messages

    def pump(self) -> None:
        """Every worker that runs does what it can do at once; messages go onto the network."""
        for worker, producer in self.producers.items():
            if worker not in self.stopped:
                for completion in producer.engine.poll():
                    producer.machine.on_completion(producer.engine, completion)
                producer.machine.pump()
                self._post(worker, producer.machine.take_outgoing())
                producer.poll()
        for worker, consumer in self.consumers.items():
            if worker not in self.stopped:
                for completion in consumer.engine.poll():
                    consumer.machine.on_completion(consumer.engine, completion)
                consumer.machine.pump(self.now)
                self._post(worker, consumer.machine.take_outgoing())
                consumer.poll()

    def _post(self, source: WorkerId, messages: list[tuple[WorkerId, Message]]) -> None:
        self.network.extend(Frame(source, target, encode(message)) for target, message in messages)

    def deliver(self, index: int = 0, *, keep: bool = False) -> None:
        """Hands one frame over; `keep` leaves a copy of it on the network."""
        frame = self.network[index] if keep else self.network.pop(index)
        if frame.target in self.stopped:
            if not keep:
                self.network.append(frame)
            return
        try:
            if frame.target in self.producers:
                message = decode_for_producer(frame.data)
                self.producers[frame.target].machine.on_message(frame.source, message, self.now)
            elif frame.target in self.consumers:
                answer = decode_for_consumer(frame.data)
                self.consumers[frame.target].machine.on_message(frame.source, answer, self.now)
        except ProtocolError as error:
            self.malformed += 1
            side = self.producers.get(frame.target) or self.consumers[frame.target]
            side.machine.on_malformed(frame.source, error)
        self.pump()

    def drop(self, kind: type[Message] | None = None) -> int:
        """Loses every frame that is under way, or those of one kind. Returns how many."""
        lost = [frame for frame in self.network if kind is None or self.kind(frame) == kind.__name__]
        self.network = [frame for frame in self.network if frame not in lost]
        return len(lost)

    def kind(self, frame: Frame) -> str:
        decode = decode_for_producer if frame.target.startswith("prefill") else decode_for_consumer
        try:
            return type(decode(frame.data)).__name__
        except ProtocolError:
            return "malformed"

    def kinds(self) -> list[str]:
        return [self.kind(frame) for frame in self.network]

    def settle(self, rounds: int = 5000) -> None:
        """Delivers everything in order and lets all moves end, until nothing is left to do. No time passes."""
        self.pump()
        for _ in range(rounds):
            workers = [*self.producers.values(), *self.consumers.values()]
            moving = [side for side in workers if side.engine.busy and side.id not in self.stopped]
            waiting = [frame for frame in self.network if frame.target not in self.stopped]
            if not moving and not waiting:
                return
            for side in moving:
                side.engine.advance()
            if waiting:
                self.deliver(self.network.index(waiting[0]))
            self.pump()
        raise AssertionError(f"does not settle: {self.kinds()[:20]}")

    def settle_messages(self, only: WorkerId | None = None) -> None:
        """Delivers everything in order (to one worker), while moves stand still."""
        self.pump()
        while waiting := [f for f in self.network if f.target not in self.stopped and only in (None, f.target)]:
            self.deliver(self.network.index(waiting[0]))

    # Time and death

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for worker, side in [*self.producers.items(), *self.consumers.items()]:
            if worker not in self.stopped:
                side.machine.tick(self.now)
        self.pump()

    def run(self, seconds: float, step: float = 0.5) -> None:
        """Lets time pass with a perfect network."""
        for _ in range(int(seconds / step)):
            self.pass_time(step)
            self.settle()

    def kill(self, side: ProducerSide | ConsumerSide) -> None:
        """The process is gone with its memory. Those that are connected to it find out when they are told (`tell_of_death`)."""
        self.producers.pop(side.id, None)
        self.consumers.pop(side.id, None)
        self.fabric.pop(side.id)
        self.stopped.discard(side.id)
        self.network = [frame for frame in self.network if side.id not in (frame.source, frame.target)]

    def tell_of_death(self, worker: WorkerId) -> None:
        for consumer in self.consumers.values():
            consumer.machine.peer_died(worker, "its process ended")
        self.pump()

    def suspect(self, worker: WorkerId) -> None:
        """A router takes the worker for gone and tells the others that run. It may be wrong."""
        for other, side in [*self.producers.items(), *self.consumers.items()]:
            if other != worker and other not in self.stopped:
                side.machine.peer_lost(worker, "a router takes it for gone")
        self.pump()

    # What must always hold

    def check(self) -> None:
        for side in [*self.producers.values(), *self.consumers.values()]:
            side.pool.check()

    def check_idle(self) -> None:
        """Nothing is held, by anybody, and nothing remembers a name."""
        self.check()
        for side in [*self.producers.values(), *self.consumers.values()]:
            assert not side.requests, side.requests
            assert len(side.pool.free) == side.pool.layout.num_blocks
            assert side.machine.table.snapshot().size == 0
            assert side.machine.num_moves == 0
            assert all(len(outcome) == 1 for outcome in side.outcomes.values())
