"""Workers, a network and a clock, all in one thread and under the test's control, for every kind of memory that is relayed.

`World` holds producers and consumers around the real machines. Nothing happens by itself: the test delivers, drops, repeats
or spoils messages, lets moves make progress, lets time pass, and kills or restarts workers. A kind brings its sides (`KVWorld`,
`EmbeddingWorld`): memory is real bytes, blocks that are free hold poison, and who gives a block back poisons it at once. So
bytes that were copied from reused memory, or written into it, are seen.
"""

from __future__ import annotations

import abc
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from kvrelay.errors import ProtocolError
from kvrelay.ids import TransferId, WorkerId, new_worker_id
from kvrelay.transfer.engines.base import Completion, MoveId, Mover, Ranges, TransferError
from kvrelay.transfer.engines.ranges import coalesce
from kvrelay.transfer.region import Region
from kvrelay.transfer.relay.desk import Desk
from kvrelay.transfer.relay.kind import Kind
from kvrelay.transfer.relay.link import LocalSide, TransferSettings
from kvrelay.wire.codec import encode
from kvrelay.wire.relay import Message


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
            coalesce(ranges, self._fabric[self._worker].nbytes, self._fabric[peer].nbytes)
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


class Pool(Protocol):
    """The blocks of one worker and what is in them."""

    @property
    def layout(self) -> Any: ...

    @property
    def memory(self) -> np.ndarray: ...

    def check(self) -> None:
        """No free block was written."""

    @property
    def is_empty(self) -> bool: ...


class Plan(Protocol):
    """One transfer that a test has in mind."""

    @property
    def transfer_id(self) -> TransferId: ...

    @property
    def workers(self) -> Iterable[WorkerId]: ...


P = TypeVar("P", bound=Plan)


class Side(Generic[P], abc.ABC):
    """One worker: the real machine, and an owner that does what it is told."""

    def __init__(self, world: World[Any, Any, Any], role: str, pool: Pool, no_news: Callable[[], Any]) -> None:
        self.world = world
        self.id = new_worker_id(role)
        self.pool: Any = pool
        self.engine = SimEngine(world.mover, self.id, world.fabric)
        world.fabric[self.id] = pool.memory
        local = LocalSide(world.kind, self.id, pool.layout, "host", world.fingerprint, {self.engine.name: self.engine})
        self.desk: Desk[Any, Any] = Desk(local, world.settings, no_news)
        self.machine: Any = self.make_machine()
        self.outcomes: dict[Any, list[str]] = {}  # one for each transfer, in the end

    @abc.abstractmethod
    def make_machine(self) -> Any: ...

    @abc.abstractmethod
    def expect(self, plan: P) -> None: ...

    @abc.abstractmethod
    def abort(self, plan: P) -> None: ...

    @abc.abstractmethod
    def take(self, news: Any) -> None:
        """What the machine says has happened."""

    @property
    def is_idle(self) -> bool:
        return True

    def poll(self) -> None:
        news = self.machine.take_news()
        if news is not None:
            self.take(news)

    def ended(self, name: Any, outcome: str) -> None:
        self.outcomes[name].append(outcome)
        assert len(self.outcomes[name]) == 1, self.outcomes[name]


@dataclass
class Frame:
    source: WorkerId
    target: WorkerId
    data: bytes


PS = TypeVar("PS", bound=Side[Any])
CS = TypeVar("CS", bound=Side[Any])


class World(Generic[PS, CS, P], abc.ABC):
    """One network and one clock. Workers are addressed by their ids; the dead ones hear nothing."""

    kind: Kind[Any]

    def __init__(self, mover: Mover, settings: TransferSettings) -> None:
        self.mover = mover
        self.settings = settings
        self.now = 1000.0
        self.fabric: dict[WorkerId, np.ndarray] = {}
        self.network: list[Frame] = []
        self.fingerprint = "tiny/float32"
        self.producers: dict[WorkerId, PS] = {}
        self.consumers: dict[WorkerId, CS] = {}
        self.plans: list[P] = []
        self.malformed = 0
        self.said: list[Message] = []  # everything that was put onto the network
        self.stopped: set[WorkerId] = set()  # stopped processes: they see and do nothing

    # What a kind brings

    @abc.abstractmethod
    def make_producer(self) -> PS: ...

    @abc.abstractmethod
    def make_consumer(self) -> CS: ...

    @abc.abstractmethod
    def submit(self, draw: random.Random) -> P:
        """Some transfer between workers that live."""

    @abc.abstractmethod
    def work(self, draw: random.Random) -> None:
        """Some worker that runs does some part of its work."""

    @abc.abstractmethod
    def change_mind(self, draw: random.Random) -> None:
        """Some worker that runs ends a transfer, or does something else that was not foreseen."""

    @abc.abstractmethod
    def work_on(self, late: bool) -> None:
        """Everything that can be done is; `late`: what could not be done until now is given up."""

    @property
    def num_without_room(self) -> int:
        """Transfers that wait for blocks which others hold."""
        return 0

    # Workers

    def add_producer(self) -> PS:
        side = self.make_producer()
        self.producers[side.id] = side
        return side

    def add_consumer(self) -> CS:
        side = self.make_consumer()
        self.consumers[side.id] = side
        return side

    def sides(self) -> list[PS | CS]:
        return [*self.producers.values(), *self.consumers.values()]

    def running(self) -> list[PS | CS]:
        return [side for side in self.sides() if side.id not in self.stopped]

    def side(self, worker: WorkerId) -> PS | CS | None:
        """One that runs."""
        return next((side for side in self.running() if side.id == worker), None)

    # Messages

    def pump(self) -> None:
        """Every worker that runs does what it can do at once; messages go onto the network."""
        for side in self.running():
            for completion in side.engine.poll():
                side.machine.on_completion(side.engine, completion)
            self.watch(side)
            side.machine.pump(self.now)
            self.watch(side)
            for target, message in side.machine.take_outgoing():
                self.said.append(message)
                self.inject(side.id, target, message)
            side.poll()

    def watch(self, side: PS | CS) -> None:
        """Called before and after everything that a worker does."""

    def inject(self, source: WorkerId, target: WorkerId, message: Message) -> None:
        self.network.append(Frame(source, target, encode(message)))

    def decode(self, frame: Frame) -> Message:
        """Raises ProtocolError."""
        to_producer = frame.target in self.producers or frame.source in self.consumers
        return self.kind.decode_for_producer(frame.data) if to_producer else self.kind.decode_for_consumer(frame.data)

    def deliver(self, index: int = 0, *, keep: bool = False) -> None:
        """Hands one frame over; `keep` leaves a copy of it on the network."""
        frame = self.network[index] if keep else self.network.pop(index)
        if frame.target in self.stopped:
            if not keep:
                self.network.append(frame)
            return
        side = self.side(frame.target)
        if side is not None:
            try:
                side.machine.on_message(frame.source, self.decode(frame), self.now)
            except ProtocolError as error:
                self.malformed += 1
                side.machine.on_malformed(frame.source, error)
        self.pump()

    def drop(self, kind: type[Message] | None = None) -> int:
        """Loses every frame that is under way, or those of one kind. Returns how many."""
        lost = [frame for frame in self.network if kind is None or self.said_in(frame) == kind.__name__]
        self.network = [frame for frame in self.network if frame not in lost]
        return len(lost)

    def said_in(self, frame: Frame) -> str:
        try:
            return type(self.decode(frame)).__name__
        except ProtocolError:
            return "malformed"

    def kinds(self) -> list[str]:
        return [self.said_in(frame) for frame in self.network]

    def frames(self, kind: type[Message]) -> list[Frame]:
        return [frame for frame in self.network if self.said_in(frame) == kind.__name__]

    def count(self, kind: type[Message]) -> int:
        return sum(isinstance(message, kind) for message in self.said)

    def deliver_until(self, kind: type[Message]) -> None:
        """Until such a message is under way, and no further."""
        self.pump()
        for _ in range(500):
            if self.frames(kind):
                return
            if self.network:
                self.deliver()
                continue
            for side in self.running():
                side.engine.advance()
            self.pump()
        raise AssertionError(f"no worker says {kind.__name__}")

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
        raise AssertionError(f"does not settle: {self.kinds()[:20]}")

    def settle_messages(self, only: WorkerId | None = None) -> None:
        """Delivers everything in order (to one worker), while moves stand still."""
        self.pump()
        while waiting := [f for f in self.network if f.target not in self.stopped and only in (None, f.target)]:
            self.deliver(self.network.index(waiting[0]))

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

    def kill(self, side: Side[Any]) -> None:
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
        """A router considers the worker gone and tells the others that run. It may be wrong."""
        for side in self.running():
            if side.id != worker:
                side.machine.peer_lost(worker, "a router considers it gone")
        self.pump()

    # What must always hold

    def check(self) -> None:
        for side in self.sides():
            side.pool.check()

    @property
    def is_idle(self) -> bool:
        """Nothing is held by any worker."""
        return all(side.is_idle and side.pool.is_empty and not side.machine.table.num_live for side in self.sides())

    def check_idle(self) -> None:
        """Nothing is held, nothing moves, and every transfer has one outcome."""
        self.check()
        for side in self.sides():
            assert side.is_idle, side.id
            assert side.pool.is_empty, side.id
            assert side.machine.table.num_live == 0
            assert side.machine.counts.num_moves == 0
            assert all(len(outcome) == 1 for outcome in side.outcomes.values()), side.outcomes
