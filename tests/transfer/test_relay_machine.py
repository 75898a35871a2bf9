"""The relay under every fault, for every kind of memory: messages are lost, delayed, repeated, reordered and spoilt, moves
stall and fail, workers stop, die and come back, transfers are aborted and set aside - in any order. Always: one outcome per
transfer and side, every block back within the bound once the faults end, no wrong byte in anything that arrived, and no
write to a block that was given back.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from embedding_world import EmbeddingWorld
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kv_world import KVWorld
from relay_world import Frame, Side, World
from toy_world import ToyWorld

MAX_PLANS = 6
BOUND_LEASES = 3  # everything is back within so many leases after the last fault, and one more for each transfer without room
WORLDS: dict[str, Callable[[random.Random], World[Any, Any, Any]]] = {
    "kv": KVWorld.drawn,
    "embedding": EmbeddingWorld.drawn,
    "toy": ToyWorld.drawn,
}
EXAMPLES = {"kv": 40, "embedding": 20, "toy": 10}
KINDS = pytest.mark.parametrize("kind", list(WORLDS))
index = st.integers(0, 1000)
seeds = st.integers(0, 2**32).map(random.Random)


class Faults:
    """One or two workers of each role; a dead one is replaced by another incarnation."""

    def __init__(self, kind: str, draw: random.Random) -> None:
        self.world = WORLDS[kind](draw)
        for _ in range(draw.randint(1, 2)):
            self.world.add_producer()
        for _ in range(draw.randint(1, 2)):
            self.world.add_consumer()
        self.unheard: list[tuple[Any, Side[Any]]] = []
        self.untold: list[Side[Any]] = []
        self.time_left = 200.0

    # Work

    def submit(self, draw: random.Random, max_plans: int) -> None:
        if len(self.world.plans) < max_plans:
            plan = self.world.submit(draw)
            self.unheard += [(plan, side) for side in self.world.sides() if side.id in plan.workers]

    def hear(self, which: int) -> None:
        if self.unheard:
            plan, side = self.unheard.pop(which % len(self.unheard))
            if side.id in self.world.fabric:
                side.expect(plan)
                self.world.pump()

    def work(self, draw: random.Random) -> None:
        if self.world.plans:
            self.world.work(draw)

    def change_mind(self, draw: random.Random) -> None:
        if self.world.plans:
            self.world.change_mind(draw)

    # The network and the transports

    def deliver(self, which: int, keep: bool) -> None:
        if self.world.network:
            self.world.deliver(which % len(self.world.network), keep=keep)

    def deliver_in_order(self, count: int) -> None:
        for _ in range(min(count, len(self.world.network))):
            self.world.deliver(0)

    def lose(self, which: int) -> None:
        if self.world.network:
            del self.world.network[which % len(self.world.network)]

    def spoil(self, which: int, cut: int, noise: bytes = b"") -> None:
        if self.world.network:
            frame = self.world.network[which % len(self.world.network)]
            spoilt = b"\xc1" + noise + frame.data[cut:]  # 0xc1 is never valid msgpack
            self.world.network[which % len(self.world.network)] = Frame(frame.source, frame.target, spoilt)

    def side(self, which: int) -> Side[Any]:
        sides = self.world.sides()
        return sides[which % len(sides)]

    def move(self, which: int, num_ranges: int) -> None:
        side = self.side(which)
        if side.id not in self.world.stopped:
            side.engine.advance(num_ranges)
            self.world.pump()

    def break_a_move(self, which: int) -> None:
        self.side(which).engine.fail_next = True

    # Time, and processes

    def wait(self, seconds: float) -> None:
        if self.time_left > 0:
            self.time_left -= seconds
            self.world.pass_time(seconds)

    def stop_or_continue(self, which: int) -> None:
        self.world.stopped ^= {self.side(which).id}
        self.world.pump()

    def suspect(self, which: int) -> None:
        self.world.suspect(self.side(which).id)

    def kill_and_restart(self, which: int) -> None:
        side = self.side(which)
        is_producer = side.id in self.world.producers
        self.world.kill(side)
        self.untold.append(side)
        if is_producer:
            self.world.add_producer()
        else:
            self.world.add_consumer()

    def find_out(self) -> None:
        if self.untold:
            self.world.tell_of_death(self.untold.pop().id)

    def end(self) -> None:
        """The last fault is over."""
        world, dead = self.world, [side.id for side in self.untold]
        world.stopped.clear()
        while self.untold:
            self.find_out()
        while self.unheard:
            self.hear(0)
        for side in world.sides():
            side.engine.fail_next = False
        dead += [worker for plan in world.plans for worker in plan.workers if worker not in world.fabric]
        # What holds the room that a transfer waits for may be ended by its lease only.
        bound_s = int((BOUND_LEASES + world.num_without_room) * world.settings.lease_s)
        for second in range(bound_s):
            world.settle()
            for worker in dead:
                world.tell_of_death(worker)
            world.work_on(late=second > bound_s / 2)
            world.pass_time(1.0)
            if world.is_idle:
                break
        world.settle()
        world.check_idle()


class Relay(RuleBasedStateMachine):
    """Hypothesis chooses what happens, and finds the shortest way to what goes wrong."""

    faults: Faults | None = None

    @initialize(kind=st.sampled_from(["kv", "kv", "embedding", "embedding", "toy"]), draw=seeds)
    def begin(self, kind: str, draw: random.Random) -> None:
        self.faults = Faults(kind, draw)

    @property
    def it(self) -> Faults:
        assert self.faults is not None
        return self.faults

    @rule(draw=seeds)
    def submit(self, draw: random.Random) -> None:
        self.it.submit(draw, MAX_PLANS)

    @rule(which=index)
    def hear(self, which: int) -> None:
        self.it.hear(which)

    @precondition(lambda self: self.it.world.plans)
    @rule(draw=seeds)
    def work(self, draw: random.Random) -> None:
        self.it.work(draw)

    @precondition(lambda self: self.it.world.plans)
    @rule(draw=seeds)
    def change_mind(self, draw: random.Random) -> None:
        self.it.change_mind(draw)

    @precondition(lambda self: self.it.world.network)
    @rule(which=st.one_of(st.just(0), index), keep=st.booleans())
    def deliver(self, which: int, keep: bool) -> None:
        self.it.deliver(which, keep)

    @precondition(lambda self: self.it.world.network)
    @rule(count=st.integers(1, 12))
    def deliver_in_order(self, count: int) -> None:
        self.it.deliver_in_order(count)

    @precondition(lambda self: self.it.world.network)
    @rule(which=index)
    def lose(self, which: int) -> None:
        self.it.lose(which)

    @precondition(lambda self: self.it.world.network)
    @rule(which=index, cut=st.integers(0, 10), noise=st.binary(max_size=10))
    def spoil(self, which: int, cut: int, noise: bytes) -> None:
        self.it.spoil(which, cut, noise)

    @rule(which=index, num_ranges=st.integers(1, 30))
    def move(self, which: int, num_ranges: int) -> None:
        self.it.move(which, num_ranges)

    @rule(which=index)
    def break_a_move(self, which: int) -> None:
        self.it.break_a_move(which)

    @precondition(lambda self: self.it.time_left > 0)
    @rule(seconds=st.sampled_from([0.01, 0.5, 2.0, 10.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.it.wait(seconds)

    @rule(which=index)
    def stop_or_continue(self, which: int) -> None:
        self.it.stop_or_continue(which)

    @rule(which=index)
    def suspect(self, which: int) -> None:
        self.it.suspect(which)

    @rule(which=index)
    def kill_and_restart(self, which: int) -> None:
        self.it.kill_and_restart(which)

    @precondition(lambda self: self.it.untold)
    @rule()
    def find_out(self) -> None:
        self.it.find_out()

    @invariant()
    def free_blocks_are_left_alone(self) -> None:
        if self.faults is not None:
            self.faults.world.check()

    def teardown(self) -> None:
        if self.faults is not None:
            self.faults.end()


CHOSEN = settings(
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)


class TestRelay(Relay.TestCase):  # type: ignore[misc, name-defined]
    settings = settings(CHOSEN, max_examples=40)


@pytest.mark.long
class TestRelayForLong(Relay.TestCase):  # type: ignore[misc, name-defined]
    settings = settings(CHOSEN, max_examples=600)


class Schedule:
    """A long run of the same, with work likely and faults rare, so that faults meet transfers in every state."""

    def __init__(self, kind: str, seed: int) -> None:
        self.random = draw = random.Random(seed)
        self.it = it = Faults(kind, draw)
        faults = draw.choice([0.0, 0.3, 1.0, 3.0])
        self.actions: dict[Callable[[], None], float] = {
            lambda: it.submit(draw, 4 * MAX_PLANS): 3,
            lambda: it.hear(self.any()): 6,
            lambda: it.work(draw): 50,
            lambda: it.deliver_in_order(draw.randint(1, 4)): 40,
            lambda: it.move(self.any(), draw.choice([1, 2, 30])): 40,
            lambda: it.wait(draw.choice([0.01, 0.5, 2.0])): 6,
            lambda: it.change_mind(draw): 4 * faults,
            lambda: it.deliver(self.any(), draw.random() < 0.3): 14 * faults,
            lambda: it.lose(self.any()): 4 * faults,
            lambda: it.spoil(self.any(), draw.randint(0, 10)): 1 * faults,
            lambda: it.break_a_move(self.any()): 0.5 * faults,
            lambda: it.wait(draw.choice([10.0, 28.0, 40.0])): 0.5 * faults,
            lambda: it.stop_or_continue(self.any()): 2 * faults,
            lambda: it.kill_and_restart(self.any()): 0.3 * faults,
            lambda: it.suspect(self.any()): 1 * faults,
            self.nap: 0.6 * faults,
            self.freeze: 4 * faults,
            self.reuse_at_once: 2 * faults,
            self.echo: 2 * faults,
            it.find_out: 2 * faults,
        }

    def any(self) -> int:
        return self.random.randrange(1000)

    def busy(self, sides: list[Side[Any]]) -> Side[Any]:
        return self.random.choice([side for side in sides if side.engine.busy] or sides)

    def nap(self) -> None:
        """A consumer is stopped in the middle of its copies for longer than its lease, wakes, and goes on copying."""
        world = self.it.world
        side = self.busy(list(world.consumers.values()))
        while world.network and self.random.random() < 0.9:  # mostly it has heard of everything
            world.deliver(0)
        world.stopped.add(side.id)
        self.it.wait(self.random.choice([1.0, 20.0, 31.0]))
        self.wake(side)

    def wake(self, side: Side[Any]) -> None:
        self.it.world.stopped.discard(side.id)
        while side.engine.busy and self.random.random() < 0.9:
            side.engine.advance(1)
            self.it.world.pump()

    def freeze(self) -> None:
        """A worker is stopped in the middle of its moves and considered gone; others reuse what they can; it wakes, within its
        transfers' leases or after them, and goes on."""
        world = self.it.world
        side = self.busy(world.sides())
        world.stopped.add(side.id)
        self.it.wait(self.random.choice([0.5, 4.0, 31.0]))
        world.suspect(side.id)
        for _ in range(20):
            self.random.choice(
                [
                    lambda: self.it.submit(self.random, 4 * MAX_PLANS),
                    lambda: self.it.hear(self.any()),
                    lambda: self.it.work(self.random),
                ]
            )()
        self.wake(side)

    def reuse_at_once(self) -> None:
        """One side gives up in the middle of something, and the other has not heard of it yet."""
        self.it.change_mind(self.random)
        for side in self.it.world.consumers.values():
            if side.id not in self.it.world.stopped:
                side.engine.advance(self.random.choice([1, 30]))
        self.it.world.pump()

    def echo(self) -> None:
        """Copies of messages arrive when what they were about is over."""
        world = self.it.world
        kept = world.network[:10]
        world.settle()
        self.it.change_mind(self.random)
        world.settle()
        world.network += [frame for frame in kept if frame.target in world.fabric and frame.source in world.fabric]
        self.it.deliver_in_order(len(kept))

    def run(self, num_steps: int) -> World[Any, Any, Any]:
        actions, weights = list(self.actions), list(self.actions.values())
        for action in self.random.choices(actions, weights, k=num_steps):
            action()
            self.it.world.check()
        self.it.end()
        return self.it.world


@KINDS
def test_faults_meet_transfers_in_every_state(kind: str) -> None:
    @settings(max_examples=EXAMPLES[kind], deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(seed=st.integers(0, 2**32))
    def check(seed: int) -> None:
        Schedule(kind, seed).run(400)

    check()


@pytest.mark.long
@KINDS
@pytest.mark.parametrize("part", range(10))
def test_faults_meet_transfers_in_every_state_for_long(kind: str, part: int) -> None:
    for seed in range(part * 300, (part + 1) * 300):
        Schedule(kind, seed).run(400)


@KINDS
def test_the_schedules_reach_what_they_are_for(kind: str) -> None:
    """Transfers arrive and fail; so the other tests are about something."""
    worlds = [Schedule(kind, seed).run(300) for seed in range(8)]
    consumers = [side for world in worlds for side in world.consumers.values()]
    outcomes = Counter(outcome == "arrived" for side in consumers for [outcome] in side.outcomes.values())
    assert outcomes[True] > 10
    assert outcomes[False] > 3
    if kind == "embedding":
        assert sum(side.machine.counts.resumes for side in consumers) > 10
