"""The relay under every fault: messages are lost, delayed, repeated, reordered and spoilt, moves stall and fail, workers stop,
die and come back, requests are aborted and parked - in any order. Always: one outcome per transfer and side, every block back
within the bound once the faults end, no wrong byte in anything that arrived, and no write to a block that was given back.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from relay_world import ConsumerSide, Frame, Plan, ProducerSide, World

from kvrelay.transfer.engines.base import Mover

MAX_PLANS = 6
index = st.integers(0, 1000)
BOUND_LEASES = 3  # everything is back within so many leases after the last fault


class Relay(RuleBasedStateMachine):
    """One or two workers of each role; a dead one is replaced by another incarnation."""

    @initialize(
        mover=st.sampled_from(Mover),
        sizes=st.sampled_from([(4, 4), (2, 4), (4, 2), (4, 6), (6, 4)]),
        num_producers=st.integers(1, 2),
        num_consumers=st.integers(1, 2),
    )
    def begin(self, mover: Mover, sizes: tuple[int, int], num_producers: int, num_consumers: int) -> None:
        self.world = World(mover, sizes=sizes)
        for _ in range(num_producers):
            self.world.add_producer()
        for _ in range(num_consumers):
            self.world.add_consumer()
        self.unheard: list[tuple[Plan, ProducerSide | ConsumerSide]] = []
        self.untold: list[ProducerSide] = []
        self.time_left = 200.0

    # Work

    @precondition(lambda self: len(self.world.plans) < MAX_PLANS)
    @rule(where=index, tokens=st.integers(1, 12), mode=st.sampled_from(["write", "read"]))
    def submit(self, where: int, tokens: int, mode: str) -> None:
        producers, consumers = list(self.world.producers.values()), list(self.world.consumers.values())
        producer, consumer = producers[where % len(producers)], consumers[where // 2 % len(consumers)]
        plan = self.world.plan(producer, consumer, tokens, mode)
        self.unheard += [(plan, producer), (plan, consumer)]

    @precondition(lambda self: self.unheard)
    @rule(which=index)
    def hear(self, which: int) -> None:
        plan, side = self.unheard.pop(which % len(self.unheard))
        if side.id in self.world.fabric:
            side.expect(plan)
            self.world.pump()

    def pick(self, which: int) -> tuple[Plan, ProducerSide | None, ConsumerSide | None]:
        plan = self.world.plans[which % len(self.world.plans)]
        return plan, self.world.producers.get(plan.info.producer), self.world.consumers.get(plan.info.consumer)

    @precondition(lambda self: self.world.plans)
    @rule(which=index, cached=st.integers(0, 3), tokens=st.integers(1, 12))
    def compute(self, which: int, cached: int, tokens: int) -> None:
        plan, producer, _ = self.pick(which)
        if producer is not None and producer.id not in self.world.stopped:
            producer.start(plan, min(cached, plan.num_tokens))
            producer.begin_step(plan, tokens)
            self.world.pump()

    @rule(which=index)
    def compute_layer(self, which: int) -> None:
        producers = list(self.world.producers.values())
        producer = producers[which % len(producers)]
        if producer.id not in self.world.stopped:
            producer.compute_layer()
            self.world.pump()

    @precondition(lambda self: self.world.plans)
    @rule(which=index, skip_blocks=st.integers(0, 2))
    def reserve(self, which: int, skip_blocks: int) -> None:
        plan, _, consumer = self.pick(which)
        if consumer is not None and consumer.id not in self.world.stopped:
            consumer.reserve(plan, skip_blocks)
            self.world.pump()

    @precondition(lambda self: self.world.plans)
    @rule(which=index, what=st.sampled_from(["park", "unreserve", "abort producer", "abort consumer"]))
    def change_mind(self, which: int, what: str) -> None:
        plan, producer, consumer = self.pick(which)
        if what == "park" and producer is not None and producer.live(plan):
            producer.park(plan)
        elif what == "abort producer" and producer is not None:
            producer.abort(plan)
        elif what == "unreserve" and consumer is not None:
            consumer.unreserve(plan)
        elif what == "abort consumer" and consumer is not None:
            consumer.abort(plan)
        self.world.pump()

    # The network and the transports

    @precondition(lambda self: self.world.network)
    @rule(which=st.one_of(st.just(0), index), keep=st.booleans())
    def deliver(self, which: int, keep: bool) -> None:
        self.world.deliver(which % len(self.world.network), keep=keep)

    @precondition(lambda self: self.world.network)
    @rule(count=st.integers(1, 12))
    def deliver_in_order(self, count: int) -> None:
        for _ in range(min(count, len(self.world.network))):
            self.world.deliver(0)

    @precondition(lambda self: self.world.network)
    @rule(which=index)
    def lose(self, which: int) -> None:
        del self.world.network[which % len(self.world.network)]

    @precondition(lambda self: self.world.network)
    @rule(which=index, cut=st.integers(0, 10), noise=st.binary(max_size=10))
    def spoil(self, which: int, cut: int, noise: bytes) -> None:
        frame = self.world.network[which % len(self.world.network)]
        spoilt = b"\xc1" + noise + frame.data[cut:]  # 0xc1 is never valid msgpack
        self.world.network[which % len(self.world.network)] = Frame(frame.source, frame.target, spoilt)

    @rule(which=index, num_ranges=st.integers(1, 30))
    def move(self, which: int, num_ranges: int) -> None:
        sides = [*self.world.producers.values(), *self.world.consumers.values()]
        side = sides[which % len(sides)]
        if side.id not in self.world.stopped:
            side.engine.advance(num_ranges)
            self.world.pump()

    @rule(which=index)
    def break_a_move(self, which: int) -> None:
        sides = [*self.world.producers.values(), *self.world.consumers.values()]
        sides[which % len(sides)].engine.fail_next = True

    # Time, and processes

    @precondition(lambda self: self.time_left > 0)
    @rule(seconds=st.sampled_from([0.01, 0.5, 2.0, 10.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.time_left -= seconds
        self.world.pass_time(seconds)

    @rule(which=index)
    def stop_or_continue(self, which: int) -> None:
        sides = [*self.world.producers.values(), *self.world.consumers.values()]
        self.world.stopped ^= {sides[which % len(sides)].id}
        self.world.pump()

    @rule(which=index)
    def suspect(self, which: int) -> None:
        sides = [*self.world.producers.values(), *self.world.consumers.values()]
        self.world.suspect(sides[which % len(sides)].id)

    @rule(which=index)
    def kill_and_restart(self, which: int) -> None:
        sides: list[ProducerSide | ConsumerSide] = [*self.world.producers.values(), *self.world.consumers.values()]
        side = sides[which % len(sides)]
        self.world.kill(side)
        if isinstance(side, ProducerSide):
            self.untold.append(side)
            self.world.add_producer()
        else:
            self.world.add_consumer()

    @precondition(lambda self: self.untold)
    @rule()
    def find_out(self) -> None:
        self.world.tell_of_death(self.untold.pop().id)

    # What must hold

    @invariant()
    def free_blocks_are_left_alone(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        world = self.world
        world.stopped.clear()
        while self.untold:
            self.find_out()
        while self.unheard:
            self.hear(0)
        dead = [plan.info.producer for plan in world.plans if plan.info.producer not in world.producers]
        for side in [*world.producers.values(), *world.consumers.values()]:
            side.engine.fail_next = False
        for _ in range(int(BOUND_LEASES * world.settings.lease_s)):
            world.settle()
            for worker in dead:
                world.tell_of_death(worker)
            self._work_on()
            world.pass_time(1.0)
            if not any(side.requests for side in [*world.producers.values(), *world.consumers.values()]):
                break
        world.settle()
        world.check_idle()

    def _work_on(self) -> None:
        for plan in self.world.plans:
            producer, consumer = (
                self.world.producers.get(plan.info.producer),
                self.world.consumers.get(plan.info.consumer),
            )
            if producer is not None:
                while producer.step is not None:
                    producer.compute_layer()
                producer.start(plan)
                producer.compute_all(plan, 5)
            if consumer is not None:
                consumer.reserve(plan, plan.number % 2)
            self.world.pump()


TestRelay = Relay.TestCase
TestRelay.settings = settings(
    max_examples=50,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)


class Schedule:
    """A long run of the same rules, with work likely and faults rare, so that faults meet transfers in every state."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.relay = Relay()
        sizes = self.random.choice([(4, 4), (2, 4), (4, 2), (4, 6), (6, 4)])
        self.relay.begin(self.random.choice(list(Mover)), sizes, self.random.randint(1, 2), self.random.randint(1, 2))
        faults = self.random.choice([0.0, 0.3, 1.0, 3.0])
        self.actions: dict[Callable[[], None], float] = {
            self.submit: 3,
            self.hear: 6,
            self.compute: 12,
            self.compute_layer: 40,
            self.reserve: 12,
            self.deliver_in_order: 40,
            self.move: 40,
            self.wait: 6,
            self.change_mind: 6 * faults,
            self.deliver_any: 10 * faults,
            self.repeat: 4 * faults,
            self.lose: 4 * faults,
            self.spoil: 1 * faults,
            self.break_a_move: 0.5 * faults,
            self.wait_long: 0.5 * faults,
            self.stop_or_continue: 2 * faults,
            self.kill_and_restart: 0.3 * faults,
            self.nap: 0.6 * faults,
            self.suspect: 1 * faults,
            self.hang: 4 * faults,
            self.reuse_at_once: 2 * faults,
            self.echo: 3 * faults,
            self.find_out: 2 * faults,
        }

    def any(self) -> int:
        return self.random.randrange(1000)

    def submit(self) -> None:
        if len(self.relay.world.plans) < 4 * MAX_PLANS:
            self.relay.submit(self.any(), self.random.randint(1, 12), self.random.choice(["write", "write", "read"]))

    def hear(self) -> None:
        if self.relay.unheard:
            self.relay.hear(self.any())

    def compute(self) -> None:
        if self.relay.world.plans:
            self.relay.compute(self.any(), self.random.randint(0, 3), self.random.randint(1, 12))

    def compute_layer(self) -> None:
        self.relay.compute_layer(self.any())

    def reserve(self) -> None:
        if self.relay.world.plans:
            self.relay.reserve(self.any(), self.random.randint(0, 2))

    def change_mind(self) -> None:
        kinds = ["park", "park", "unreserve", "unreserve", "abort producer", "abort consumer"]
        if self.relay.world.plans:
            self.relay.change_mind(self.any(), self.random.choice(kinds))

    def deliver_in_order(self) -> None:
        self.relay.deliver_in_order(self.random.randint(1, 4))

    def deliver_any(self) -> None:
        if self.relay.world.network:
            self.relay.deliver(self.any(), False)

    def repeat(self) -> None:
        if self.relay.world.network:
            self.relay.deliver(self.any(), True)

    def lose(self) -> None:
        if self.relay.world.network:
            self.relay.lose(self.any())

    def spoil(self) -> None:
        if self.relay.world.network:
            self.relay.spoil(self.any(), self.random.randint(0, 10), b"")

    def move(self) -> None:
        self.relay.move(self.any(), self.random.choice([1, 2, 30]))

    def break_a_move(self) -> None:
        self.relay.break_a_move(self.any())

    def wait(self) -> None:
        self.relay.wait(self.random.choice([0.01, 0.5, 2.0]))

    def wait_long(self) -> None:
        self.relay.wait(self.random.choice([10.0, 28.0, 40.0]))

    def stop_or_continue(self) -> None:
        self.relay.stop_or_continue(self.any())

    def kill_and_restart(self) -> None:
        self.relay.kill_and_restart(self.any())

    def nap(self) -> None:
        """A consumer is stopped in the middle of its copies for longer than its lease, wakes, and goes on copying."""
        world = self.relay.world
        copying = [side for side in world.consumers.values() if side.engine.busy] or list(world.consumers.values())
        side = self.random.choice(copying)
        while world.network and self.random.random() < 0.9:  # mostly it has heard of everything
            world.deliver(0)
        world.stopped.add(side.id)
        self.relay.wait(self.random.choice([20.0, 31.0]))
        world.stopped.discard(side.id)
        while side.engine.busy and self.random.random() < 0.9:
            side.engine.advance(1)
            world.pump()

    def suspect(self) -> None:
        self.relay.suspect(self.any())

    def hang(self) -> None:
        """A worker is stopped in the middle of its moves and taken for gone; others reuse what they can; it wakes, within its
        transfers' leases or after them, and goes on."""
        world = self.relay.world
        sides: list[ProducerSide | ConsumerSide] = [*world.producers.values(), *world.consumers.values()]
        side = self.random.choice([side for side in sides if side.engine.busy] or sides)
        world.stopped.add(side.id)
        self.relay.wait(self.random.choice([0.5, 4.0, 31.0]))
        world.suspect(side.id)
        for action in self.random.choices([self.submit, self.hear, self.compute, self.compute_layer, self.reserve], k=20):
            action()
        world.stopped.discard(side.id)
        while side.engine.busy and self.random.random() < 0.9:
            side.engine.advance(1)
            world.pump()

    def reuse_at_once(self) -> None:
        """A producer gives up in the middle of something, and the other side has not heard of it yet."""
        world = self.relay.world
        if world.plans:
            self.relay.change_mind(self.any(), self.random.choice(["abort producer", "park"]))
            for side in world.consumers.values():
                side.engine.advance(self.random.choice([1, 30]))
            world.pump()

    def echo(self) -> None:
        """A reservation is taken back, and a copy of it arrives afterwards."""
        world = self.relay.world
        kept = [frame for frame in world.network if frame.target in world.producers][:10]
        if world.plans:
            world.settle()
            self.relay.change_mind(self.any(), "unreserve")
            world.settle()
            world.network += kept
            for _ in kept:
                world.deliver(0)

    def find_out(self) -> None:
        if self.relay.untold:
            self.relay.find_out()

    def run(self, num_steps: int) -> None:
        actions, weights = list(self.actions), list(self.actions.values())
        for action in self.random.choices(actions, weights, k=num_steps):
            action()
            self.relay.free_blocks_are_left_alone()
        self.relay.teardown()


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32))
def test_faults_meet_transfers_in_every_state(seed: int) -> None:
    Schedule(seed).run(400)


@pytest.mark.long
@pytest.mark.parametrize("part", range(10))
def test_faults_meet_transfers_in_every_state_for_long(part: int) -> None:
    for seed in range(part * 400, (part + 1) * 400):
        Schedule(seed).run(400)
