"""Which worker changes its role and when, in virtual time; and who carries it out."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest

from kvrelay.discovery.base import Alone, router_record
from kvrelay.errors import ConflictError
from kvrelay.ids import RouterId, WorkerId, new_router_id
from kvrelay.metrics import Metrics
from kvrelay.router.backend import DrainOrder
from kvrelay.router.rebalance import Move, Rebalancer, Rules, WorkerSight
from kvrelay.router.role_changes import RebalanceMode, RoleChanges
from kvrelay.states import Role
from kvrelay.wire.registry import BlockCounts, WorkerLoad

RULES = Rules()


def worker(name: str, role: Role, *, is_ready: bool = True, **load: int) -> WorkerSight:
    return WorkerSight(id=WorkerId(name), role=role, is_ready=is_ready, max_batch=8, load=WorkerLoad(**load))


def prefill(name: str, waiting: int = 0, running: int = 1) -> WorkerSight:
    return worker(name, Role.PREFILL, running=running, waiting=waiting)


def decode(name: str, running: int = 0, **more: int) -> WorkerSight:
    return worker(name, Role.DECODE, running=running, **more)


class Watch:
    """Observes once a second, and keeps what was decided when."""

    def __init__(self, rules: Rules = RULES) -> None:
        self.rebalancer = Rebalancer(rules)
        self.now = 0.0
        self.moves: list[tuple[float, Move]] = []

    def see(self, workers: Sequence[WorkerSight], seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.moves += [(self.now, move) for move in self.rebalancer.observe(workers, self.now)]
            self.now += 1.0


SHORT_OF_PREFILL = [prefill("p0", 9), prefill("p1", 8), decode("d0", 3), decode("d1", 1), decode("d2", 2)]
SHORT_OF_DECODE = [prefill("p0", running=0), prefill("p1", running=0), decode("d0", 8), decode("d1", 8)]


def test_the_idlest_worker_of_the_role_with_room_moves_once_the_other_has_been_short_for_long() -> None:
    watch = Watch()
    watch.see(SHORT_OF_PREFILL, RULES.patience_s)
    assert watch.moves == []
    watch.see(SHORT_OF_PREFILL, 2.0)
    ((at, move),) = watch.moves
    assert at == RULES.patience_s
    assert (move.worker, move.role, move.next_role) == ("d1", Role.DECODE, Role.PREFILL)
    assert "prefill" in move.reason


def test_full_batches_full_memory_and_swapping_ask_for_decode_workers() -> None:
    full = BlockCounts(total=100, in_use=80, reserved=20)
    memory = [
        WorkerSight(id=WorkerId(name), role=Role.DECODE, is_ready=True, max_batch=8, load=WorkerLoad(running=1, blocks=full))
        for name in ("d0", "d1")
    ]
    idle = SHORT_OF_DECODE[:2]
    for busy in (SHORT_OF_DECODE[2:], memory, [decode("d0", 2, swapped=1), decode("d1", 2, swapped=1)]):
        watch = Watch()
        watch.see([*idle, *busy], 30.0)
        ((_, move),) = watch.moves
        assert (move.worker, move.next_role) == ("p0", Role.DECODE)


def test_prompts_that_wait_at_decode_workers_wait_for_prefill_workers() -> None:
    watch = Watch()
    watch.see(
        [prefill("p0", running=0), prefill("p1", running=0), decode("d0", 1, waiting=50), decode("d1", 1, waiting=50)], 300.0
    )
    assert watch.moves == []


@pytest.mark.parametrize(
    "workers",
    [
        [prefill("p0", 50), decode("d0", 0)],  # the last of its role
        [prefill("p0", 50), decode("d0", 6), decode("d1", 6)],  # one fewer would be too few
        [prefill("p0", 1), decode("d0", 4), decode("d1", 4)],  # neither short
        [prefill("p0", 50), prefill("p1", 50)],  # no role begins
        [prefill("p0", 50), worker("e0", Role.ENCODE), worker("e1", Role.ENCODE)],
        [prefill("p0", 50), decode("d0"), decode("d1"), worker("d2", Role.DECODE, is_ready=False)],  # one is on its way
        [],
    ],
)
def test_nothing_moves_where_it_would_not_help_or_cost_a_role_its_last_worker(workers: list[WorkerSight]) -> None:
    watch = Watch()
    watch.see(workers, 600.0)
    assert watch.moves == []


def test_whole_workers_give_and_take() -> None:
    watch = Watch()
    watch.see([prefill("p0", 50), decode("d0", 8), worker("w0", Role.WHOLE), worker("w1", Role.WHOLE, running=2)], 30.0)
    ((_, move),) = watch.moves
    assert (move.worker, move.role, move.next_role) == ("w0", Role.WHOLE, Role.PREFILL)
    watch = Watch()
    whole = [worker(name, Role.WHOLE, running=8, waiting=9) for name in ("w0", "w1")]
    watch.see([prefill("p0", running=0), prefill("p1", running=0), decode("d0", 4), *whole], 30.0)
    ((_, move),) = watch.moves
    assert (move.role, move.next_role) == (Role.PREFILL, Role.WHOLE)


def test_a_burst_moves_nothing_and_neither_does_traffic_that_swings() -> None:
    watch = Watch()
    calm = [prefill("p0", running=0), prefill("p1", running=0), decode("d0", 3), decode("d1", 1), decode("d2", 2)]
    for _ in range(20):
        watch.see(SHORT_OF_PREFILL, 10.0)
        watch.see(calm, 30.0)
    assert watch.moves == []


def test_after_a_move_there_is_a_pause() -> None:
    watch = Watch()
    watch.see(SHORT_OF_PREFILL, 300.0)
    times = [at for at, _ in watch.moves]
    assert len(times) >= 3
    assert all(later - sooner >= RULES.pause_s for sooner, later in itertools.pairwise(times))


def test_a_day_of_changing_traffic_needs_few_moves_and_ends_where_it_is_needed() -> None:
    """Three hours of prompts, three of long answers, again and again; a worker that moves takes 20 s."""
    roles = dict.fromkeys(["a", "b", "c"], Role.PREFILL) | dict.fromkeys(["d", "e", "f"], Role.DECODE)
    rebalancer = Rebalancer()
    back_at: dict[str, int] = {}
    moves: list[Move] = []
    for second in range(24 * 3600):
        of = {role: sum(its is role for its in roles.values()) for role in (Role.PREFILL, Role.DECODE)}
        many_prompts = second // (3 * 3600) % 2 == 0
        waiting = int((18 if many_prompts else 0) / of[Role.PREFILL])
        running = int(min(8, (6 if many_prompts else 30) / of[Role.DECODE]))
        sights = [
            worker(
                name,
                role,
                is_ready=back_at.get(name, 0) <= second,
                running=running if role is Role.DECODE else int(many_prompts),
                waiting=waiting if role is Role.PREFILL else 0,
            )
            for name, role in roles.items()
        ]
        for move in rebalancer.observe(sights, float(second)):
            roles[move.worker], back_at[move.worker] = move.next_role, second + 20
            moves.append(move)
        assert min(of.values()) >= 1
        if second % (3 * 3600) == 3 * 3600 - 1:
            assert of[Role.PREFILL if many_prompts else Role.DECODE] >= 4
    assert 8 <= len(moves) <= 24  # a few for each of the eight turns of the day


def test_encode_workers_have_a_pressure_and_never_move() -> None:
    rebalancer, busy = Rebalancer(), WorkerLoad(waiting=8)
    encode = [WorkerSight(id=WorkerId(f"e{number}"), role=Role.ENCODE, is_ready=True, load=busy) for number in range(2)]
    idle = [WorkerSight(id=WorkerId(f"p{number}"), role=Role.PREFILL, is_ready=True) for number in range(3)]
    assert [move for now in range(60) for move in rebalancer.observe([*encode, *idle], float(now))] == []
    assert rebalancer.pressures == {Role.ENCODE: 2.0, Role.PREFILL: 0.0}


class Carrier:
    def __init__(self, leader: Callable[[RouterId], bool], *, mode: RebalanceMode = "on", error: bool = False) -> None:
        self.now, self._error = 0.0, error
        self.metrics, router_id = Metrics(), new_router_id()
        self.ordered: list[tuple[str, Role]] = []
        self.changes = RoleChanges(
            Rebalancer(),
            router_id=router_id,
            company=Alone(router_record(router_id, may_lead=leader(router_id))),
            sights=lambda: SHORT_OF_PREFILL,
            drain=self._drain,
            metrics=self.metrics,
            mode=mode,
            clock=lambda: self.now,
        )

    def _drain(self, worker_id: str, role: Role) -> DrainOrder:
        if self._error:
            raise ConflictError("it is draining already")
        self.ordered.append((worker_id, role))
        return DrainOrder(worker=WorkerId(worker_id), role=Role.DECODE, next_role=role, warning="")

    def run(self) -> list[tuple[str, Role]]:
        for _ in range(30):
            self.changes.tick()
            self.now += 1.0
        return self.ordered

    @property
    def counted(self) -> float:
        labels = {"role": "decode", "next_role": "prefill"}
        return self.metrics.registry.get_sample_value("kvrelay_role_changes_total", labels) or 0.0


def test_the_leader_carries_moves_out_and_nobody_else() -> None:
    leading = Carrier(lambda _: True)
    assert leading.run() == [("d1", Role.PREFILL)]
    assert leading.counted == 1.0
    assert leading.metrics.registry.get_sample_value("kvrelay_role_pressure", {"role": "prefill"}) == 2.0
    assert Carrier(lambda _: False).run() == []
    assert Carrier(lambda _: True, mode="dry_run").run() == []
    assert Carrier(lambda _: True, mode="off").run() == []
    late = Carrier(lambda _: True, error=True)
    assert late.run() == []
    assert late.counted == 0.0
