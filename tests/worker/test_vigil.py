"""When is an incarnation over? When the process stood still for so long that others may have taken it for lost."""

from __future__ import annotations

import threading

import pytest
from patience import PATIENCE_S
from registry_records import make_record

from kvrelay.states import WorkerState
from kvrelay.wire.registry import WorkerLoad, WorkerRecord
from kvrelay.worker.heartbeat import Heartbeat
from kvrelay.worker.status import Status
from kvrelay.worker.vigil import Vigil

LEASE_S = 3.0


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def vigil(clock: Clock) -> Vigil:
    return Vigil(LEASE_S, clock=clock)


def test_a_process_that_looks_often_goes_on(vigil: Vigil, clock: Clock) -> None:
    for _ in range(1000):
        clock.now += 0.3
        assert not vigil.look()


def test_a_stop_that_may_have_cost_the_lease_ends_it_for_good(vigil: Vigil, clock: Clock) -> None:
    clock.now += LEASE_S * 0.66
    assert not vigil.look()
    clock.now += LEASE_S * 0.7
    assert vigil.look()
    clock.now += 0.1
    assert vigil.look()


class Recording:
    """A registration that always answers."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.renewed = threading.Event()

    def register(self, record: WorkerRecord, ttl_s: float) -> bool:
        self.asked.append("register")
        return True

    def renew(self, state: WorkerState, load: WorkerLoad) -> bool:
        self.asked.append("renew")
        self.renewed.set()
        return True

    def leave(self) -> None:
        self.asked.append("leave")

    def close(self) -> None:
        self.asked.append("close")


@pytest.mark.parametrize("stands_still", [False, True])
def test_who_is_over_renews_nothing_and_leaves_without_a_word(vigil: Vigil, clock: Clock, stands_still: bool) -> None:
    registration, status = Recording(), Status(WorkerLoad())
    heartbeat = Heartbeat(
        registration,
        make_record(),
        status,
        registration_s=0.03,
        watchdog_s=10.0,
        vigil=vigil,
        on_refused=lambda error: None,
    )
    heartbeat.start()
    assert registration.renewed.wait(PATIENCE_S)
    if stands_still:
        clock.now += LEASE_S + 1
        heartbeat._thread.join(PATIENCE_S)
        assert not heartbeat._thread.is_alive()
    heartbeat.stop()
    assert registration.asked[-1] == "close"
    assert ("leave" in registration.asked) is not stands_still
