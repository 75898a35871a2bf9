"""What a simulation checks of itself: every request ends once, every block comes back. Here one is lost on purpose."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvrelay.engine.engine import Engine
from kvrelay.simulate.cluster import Layout, SimulatedCluster
from kvrelay.simulate.costs import Costs, line
from kvrelay.simulate.run import Failure, Outcome, simulate
from kvrelay.simulate.traffic import Wanted, draw
from kvrelay.simulate.worker import SimulatedWorker
from kvrelay.states import Role
from kvrelay.wire.serving import Submit, ToWorker

COSTS = Costs(prefill=line(2.0, 0.02), decode=line(4.0, 0.1))
TRAFFIC = Wanted(rate=6.0, duration_s=3.0, input_tokens=200, output_tokens=40, seed=1)


def run(drive: Callable[[SimulatedCluster], None], failures: tuple[Failure, ...] = ()) -> Outcome:
    layout = Layout(prefill=2, decode=2, num_blocks=512, max_model_len=4096, restart_s=1.0)
    return simulate(layout, COSTS, draw(TRAFFIC), failures=failures, drive=drive)


def oldest(cluster: SimulatedCluster, role: Role) -> SimulatedWorker:
    return next(worker for worker in cluster.workers.values() if worker.record.role is role)


def leak(cluster: SimulatedCluster, role: Role) -> None:
    engine = oldest(cluster, role).engine
    assert isinstance(engine, Engine)
    assert engine.core.kv.pool.allocate(1)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_request_that_a_worker_forgets_is_missed(role: Role, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of many; the others end."""
    receive, lost = SimulatedWorker.receive, list[ToWorker]()

    def forget(worker: SimulatedWorker, router: bytes, message: ToWorker) -> None:
        if isinstance(message, Submit) and worker.record.role is role and not lost:
            lost.append(message)
        else:
            receive(worker, router, message)

    monkeypatch.setattr(SimulatedWorker, "receive", forget)
    with pytest.raises(AssertionError, match="requests are lost: 1 have"):
        run(lambda cluster: None)
    assert len(lost) == 1


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_block_that_nothing_holds_and_that_did_not_come_back_is_missed(role: Role) -> None:
    with pytest.raises(AssertionError, match="differ from the pool's"):
        run(lambda cluster: cluster.loop.at(1.5, leak, cluster, role))


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_killed_worker_takes_along_the_blocks_of_its_requests_and_no_others(role: Role) -> None:
    failures = (Failure(at_s=2.0, role=role),)
    outcome = run(lambda cluster: None, failures)
    assert {answer.outcome for answer in outcome.answers} == {"finished"}
    with pytest.raises(AssertionError, match="differ from the pool's"):
        run(lambda cluster: cluster.loop.at(1.5, leak, cluster, role), failures)


def test_a_worker_that_leaves_to_change_its_role_has_all_its_blocks() -> None:
    def drive(cluster: SimulatedCluster, leaks: bool) -> None:
        cluster.loop.at(1.5, move, cluster, leaks)

    def move(cluster: SimulatedCluster, leaks: bool) -> None:
        if leaks:
            leak(cluster, Role.DECODE)
        cluster.routers[0].drain(oldest(cluster, Role.DECODE).record.id, Role.PREFILL)

    assert run(lambda cluster: drive(cluster, leaks=False)).num_role_changes == 1
    with pytest.raises(AssertionError, match="differ from the pool's"):
        run(lambda cluster: drive(cluster, leaks=True))
