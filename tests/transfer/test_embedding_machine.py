"""The embedding relay under every fault: messages are lost, delayed, repeated, reordered and spoilt, moves stall and fail,
workers stop, die and come back, transfers are aborted - in any order. Always: every embedding arrives byte for byte or ends
with one clear error on each side, every block is back within the bound once the faults end, and no free block is written.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from embedding_world import EmbeddingWorld, EncodeSide, Plan, PrefillSide, Side
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from relay_world import Frame

from kvrelay.transfer.embedding_room import EmbeddingSettings
from kvrelay.transfer.engines.base import Mover

MAX_PLANS = 6
BOUND_LEASES = 3  # everything is back within so many leases after the last fault
BLOCK_SIZES = [(4, 4), (2, 4), (4, 3), (6, 4)]
POLICIES = ["wait", "shrink", "fail"]
index = st.integers(0, 1000)


class Embeddings(RuleBasedStateMachine):
    """One or two workers of each role; a dead one is replaced by another incarnation. Pools are small, so that every embedding
    of some length is resumed and several wait for room."""

    @initialize(
        mover=st.sampled_from(Mover),
        block_sizes=st.sampled_from(BLOCK_SIZES),
        policy=st.sampled_from(POLICIES),
        default=st.integers(1, 16),
        num_prefills=st.integers(1, 2),
    )
    def begin(self, mover: Mover, block_sizes: tuple[int, int], policy: str, default: int, num_prefills: int) -> None:
        chosen = EmbeddingSettings(buffer_tokens=default, full=policy, buffer="adaptive" if default % 2 else "fixed")  # type: ignore[arg-type]
        self.world = EmbeddingWorld(mover, block_sizes=block_sizes, pool_tokens=(60, 24), settings=chosen)
        self.world.releases_at_once = False
        self.world.add_encoder()
        for _ in range(num_prefills):
            self.world.add_prefill()
        self.unheard: list[tuple[Plan, Side]] = []
        self.untold: list[Side] = []
        self.time_left = 150.0

    # Work

    @precondition(lambda self: len(self.world.plans) < MAX_PLANS)
    @rule(tokens=st.integers(1, 40), everybody=st.booleans())
    def submit(self, tokens: int, everybody: bool) -> None:
        encoder, prefills = next(iter(self.world.encoders.values())), list(self.world.prefills.values())
        chosen = prefills if everybody else prefills[tokens % len(prefills) :][:1]
        plan = self.world.plan(encoder, *chosen, num_tokens=tokens)
        self.unheard += [(plan, side) for side in (encoder, *chosen)]

    @precondition(lambda self: self.unheard)
    @rule(which=index)
    def hear(self, which: int) -> None:
        plan, side = self.unheard.pop(which % len(self.unheard))
        if side.id in self.world.fabric:
            side.expect(plan)
            self.world.pump()

    @precondition(lambda self: self.world.plans)
    @rule(which=index)
    def offer(self, which: int) -> None:
        plan = self.world.plans[which % len(self.world.plans)]
        encoder = self.world.encoders.get(plan.producer)
        if encoder is not None and encoder.id not in self.world.stopped:
            encoder.offer(plan)
            self.world.pump()

    @rule()
    def release(self) -> None:
        for side in self.world.prefills.values():
            if side.id not in self.world.stopped:
                for transfer_id in list(side.kept):
                    side.release(transfer_id)
        self.world.pump()

    @precondition(lambda self: self.world.plans)
    @rule(which=index, by_encoder=st.booleans())
    def abort(self, which: int, by_encoder: bool) -> None:
        plan = self.world.plans[which % len(self.world.plans)]
        workers = [plan.producer] if by_encoder else plan.consumers
        for side in self.world.running():
            if side.id in workers:
                side.abort(plan)
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
    @rule(which=index, cut=st.integers(0, 10))
    def spoil(self, which: int, cut: int) -> None:
        frame = self.world.network[which % len(self.world.network)]
        spoilt = b"\xc1" + frame.data[cut:]  # 0xc1 is never valid msgpack
        self.world.network[which % len(self.world.network)] = Frame(frame.source, frame.target, spoilt)

    @rule(which=index, num_ranges=st.integers(1, 30))
    def move(self, which: int, num_ranges: int) -> None:
        side = self.world.sides()[which % len(self.world.sides())]
        if side.id not in self.world.stopped:
            side.engine.advance(num_ranges)
            self.world.pump()

    @rule(which=index)
    def break_a_move(self, which: int) -> None:
        self.world.sides()[which % len(self.world.sides())].engine.fail_next = True

    # Time, and workers that stop and die

    @precondition(lambda self: self.time_left > 0)
    @rule(seconds=st.sampled_from([0.01, 0.5, 2.0, 10.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.time_left -= seconds
        self.world.pass_time(seconds)

    @rule(which=index)
    def stop_or_continue(self, which: int) -> None:
        side = self.world.sides()[which % len(self.world.sides())]
        self.world.stopped ^= {side.id}

    @rule(which=index)
    def suspect(self, which: int) -> None:
        self.world.suspect(self.world.sides()[which % len(self.world.sides())].id)

    @precondition(lambda self: len(self.untold) < 2)
    @rule(which=index)
    def kill_and_restart(self, which: int) -> None:
        side = self.world.sides()[which % len(self.world.sides())]
        self.world.kill(side)
        self.untold.append(side)
        if isinstance(side, EncodeSide):
            self.world.add_encoder()
        else:
            self.world.add_prefill()

    @precondition(lambda self: self.untold)
    @rule()
    def find_out(self) -> None:
        self.world.tell_of_death(self.untold.pop().id)

    # Always

    @invariant()
    def free_blocks_are_left_alone(self) -> None:
        if "world" in vars(self):
            self.world.check()

    def teardown(self) -> None:
        if "world" not in vars(self):
            return
        world = self.world
        world.stopped.clear()
        world.releases_at_once = True
        for plan, side in self.unheard:
            if side.id in world.fabric:
                side.expect(plan)
        while self.untold:
            self.find_out()
        for encoder in world.encoders.values():
            encoder.engine.fail_next = False
        bound_s = BOUND_LEASES * world.settings.transfer.lease_s
        for second in range(0, int(bound_s), 2):
            for encoder in world.encoders.values():
                for plan in list(encoder.unoffered.values()):
                    encoder.offer(plan)
                    if second > bound_s / 2:  # those before it waited for consumers that are dead
                        encoder.abort(plan)
            world.pass_time(2.0)
            world.settle()
        world.check_idle()


TestEmbeddings = Embeddings.TestCase
TestEmbeddings.settings = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)


class Schedule:
    """A long run of the same rules, with work likely and faults rare, so that faults meet transfers in every state."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.relay = Embeddings()
        draw = self.random
        self.relay.begin(
            draw.choice(list(Mover)), draw.choice(BLOCK_SIZES), draw.choice(POLICIES), draw.randint(1, 16), draw.randint(1, 2)
        )
        faults = self.random.choice([0.0, 0.3, 1.0, 3.0])
        relay = self.relay
        self.actions: dict[Callable[[], None], float] = {
            self.submit: 4,
            self.hear: 10,
            lambda: relay.offer(self.any()) if relay.world.plans else None: 10,
            relay.release: 6,
            lambda: relay.deliver_in_order(draw.randint(1, 4)) if relay.world.network else None: 40,
            lambda: relay.move(self.any(), draw.choice([1, 2, 30])): 40,
            lambda: relay.wait(draw.choice([0.01, 0.5, 2.0])): 6,
            lambda: relay.abort(self.any(), draw.random() < 0.5) if relay.world.plans else None: 2 * faults,
            lambda: relay.deliver(self.any(), draw.random() < 0.4) if relay.world.network else None: 14 * faults,
            lambda: relay.lose(self.any()) if relay.world.network else None: 4 * faults,
            lambda: relay.spoil(self.any(), draw.randint(0, 10)) if relay.world.network else None: faults,
            lambda: relay.break_a_move(self.any()): 0.5 * faults,
            lambda: relay.wait(draw.choice([10.0, 28.0, 40.0])): 0.5 * faults,
            lambda: relay.stop_or_continue(self.any()): 2 * faults,
            lambda: relay.suspect(self.any()): faults,
            lambda: relay.kill_and_restart(self.any()) if len(relay.untold) < 2 else None: 0.3 * faults,
            lambda: relay.find_out() if relay.untold else None: 2 * faults,
            self.nap: 0.6 * faults,
        }

    def any(self) -> int:
        return self.random.randrange(1000)

    def submit(self) -> None:
        if len(self.relay.world.plans) < 3 * MAX_PLANS:
            self.relay.submit(self.random.randint(1, 40), self.random.random() < 0.3)

    def hear(self) -> None:
        if self.relay.unheard:
            self.relay.hear(self.any())

    def nap(self) -> None:
        """A worker is stopped in the middle of its moves, perhaps for longer than its lease, wakes, and goes on moving."""
        world = self.relay.world
        side = self.random.choice([side for side in world.sides() if side.engine.busy] or world.sides())
        world.stopped.add(side.id)
        for _ in range(self.random.choice([1, 20, 31])):
            world.pass_time(1.0)
            while self.random.random() < 0.7 and [frame for frame in world.network if frame.target != side.id]:
                world.deliver(self.random.randrange(len(world.network)))
        world.stopped.discard(side.id)
        while side.engine.busy and self.random.random() < 0.9:
            side.engine.advance(1)
            world.pump()

    def run(self, num_steps: int) -> EmbeddingWorld:
        actions, weights = list(self.actions), list(self.actions.values())
        for action in self.random.choices(actions, weights, k=num_steps):
            action()
            self.relay.free_blocks_are_left_alone()
        self.relay.teardown()
        return self.relay.world


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32))
def test_faults_meet_embeddings_in_every_state(seed: int) -> None:
    Schedule(seed).run(300)


@pytest.mark.long
@pytest.mark.parametrize("part", range(10))
def test_faults_meet_embeddings_in_every_state_for_long(part: int) -> None:
    for seed in range(part * 200, (part + 1) * 200):
        Schedule(seed).run(400)


def test_the_schedules_reach_what_they_are_for() -> None:
    """Embeddings arrive, are resumed and fail; so the other tests are about something."""
    worlds = [Schedule(seed).run(300) for seed in range(6)]
    prefills: list[PrefillSide] = [side for world in worlds for side in world.prefills.values()]
    outcomes = [outcome for side in prefills for [outcome] in side.outcomes.values()]
    assert outcomes.count("arrived") > 10
    assert len(outcomes) - outcomes.count("arrived") > 3
    assert sum(side.machine.counts.resumes for side in prefills) > 10
