"""One simulation: a cluster, its costs, its traffic, its failures; and what came of it."""

from __future__ import annotations

import gc
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from kvrelay.progress import Progress, Silent
from kvrelay.simulate.clients import Answer, Clients
from kvrelay.simulate.cluster import Layout, SimulatedCluster
from kvrelay.simulate.costs import Costs
from kvrelay.simulate.loop import VirtualLoop
from kvrelay.simulate.traffic import Session
from kvrelay.states import Role

_LOST_S = 600.0  # of virtual time without a word to a client, while no worker computes
_SETTLE_S = 120.0  # of virtual time, after the last answer: transfers end, workers fall idle
_AT_ONCE_S = 1e-9
_COLLECTOR_THRESHOLDS = (1_000_000, 20, 1_000_000)  # caches are millions of objects, and what ends leaves few circles
_DRIVER = Callable[[SimulatedCluster], None]


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A worker of this role is killed at this time: the one that has lived longest."""

    at_s: float
    role: Role
    comes_back: bool = True


class Targets(msgspec.Struct, frozen=True, kw_only=True):
    """An answer is good if its first token comes in time, and on average all that follow."""

    ttft_ms: float = 1000.0
    itl_ms: float = 50.0

    def met(self, answer: Answer) -> bool:
        if answer.outcome != "finished":
            return False
        return answer.ttft_s * 1000 <= self.ttft_ms and answer.mean_itl_s * 1000 <= self.itl_ms


@dataclass(kw_only=True)
class Outcome:
    """What is known at the end."""

    answers: list[Answer]
    gaps_us: Counter[int]
    seconds: float  # of virtual time, until the last answer
    cpu_s: float  # of this process
    submit_us: Counter[int]  # of this process, for a request: the router's choice, and what it notes and sends
    busy: dict[Role, float] = field(default_factory=dict)  # share of the time of its workers
    num_prompt_tokens: int = 0  # computed
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    num_messages: int = 0  # of outputs, to a router
    num_told_blocks: int = 0  # in cache events
    num_registry_messages: int = 0  # to each router
    listening_s: float = 0.0  # of this process, for a router's events
    index_bytes: float = 0.0  # of a router
    num_encoded: int = 0  # images that went through a vision tower
    num_role_changes: int = 0


def simulate(
    layout: Layout,
    costs: Costs,
    sessions: Iterable[Session],
    *,
    failures: Iterable[Failure] = (),
    duration_s: float = 0.0,
    drive: _DRIVER | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """`drive` is given the cluster before it begins: its real routers, its workers, its loop. `duration_s` is for the progress
    only. Raises AssertionError if a request did not end exactly once, or a block did not come back."""
    began = time.process_time()
    loop = VirtualLoop()
    clients = Clients(loop, costs.router_ms / 1000.0)
    cluster = SimulatedCluster(layout, costs, loop, clients.hear)
    clients.routers = cluster.routers
    if drive is not None:
        drive(cluster)
    for failure in failures:
        loop.at(failure.at_s, _kill, cluster, failure)
    loop.at(0.0, cluster.start)
    loop.run(lambda: False, until=_AT_ONCE_S)  # its workers are up before the first request comes
    loop.at(0.0, clients.begin, iter(sessions))
    usual = gc.get_threshold()
    gc.set_threshold(*_COLLECTOR_THRESHOLDS)
    try:
        _run(cluster, clients, duration_s, progress or Silent())
        seconds = loop.now
        loop.run(lambda: cluster.is_idle, until=seconds + _SETTLE_S)
        _check(cluster, clients)
    finally:
        gc.set_threshold(*usual)
    return _outcome(cluster, clients, seconds, time.process_time() - began)


def _run(cluster: SimulatedCluster, clients: Clients, duration_s: float, progress: Progress) -> None:
    progress.start("simulating", max(1, round(duration_s)), unit="s")
    for second in itertools.count(1):
        cluster.loop.run(clients.are_done, until=float(second))
        if clients.are_done():
            break
        silent_s = second - clients.heard_at
        is_stuck = clients.num_open and silent_s > _LOST_S + cluster.layout.restart_s and cluster.computes_nothing
        assert not is_stuck, f"requests are lost: {clients.num_open} have not ended, and no worker computes"
        if second <= duration_s:
            progress.advance(1)
    progress.done()


def _kill(cluster: SimulatedCluster, failure: Failure) -> None:
    worker = next((worker for worker in cluster.workers.values() if worker.record.role is failure.role), None)
    if worker is not None:
        cluster.kill(worker, comes_back=failure.comes_back)


def _check(cluster: SimulatedCluster, clients: Clients) -> None:
    for answer in clients.answers:
        assert answer.outcome, "a request did not end"
    cluster.check_idle()


def _outcome(cluster: SimulatedCluster, clients: Clients, seconds: float, cpu_s: float) -> Outcome:
    outcome = Outcome(
        answers=clients.answers,
        gaps_us=clients.gaps_us,
        seconds=seconds,
        cpu_s=cpu_s,
        submit_us=clients.submit_us,
        num_role_changes=cluster.num_role_changes,
        num_messages=round(clients.num_messages / len(cluster.routers)),
        num_registry_messages=cluster.registry.num_told,
        index_bytes=cluster.index_bytes,
    )
    lived, busy = dict.fromkeys(Role, 0.0), dict.fromkeys(Role, 0.0)
    for worker in [*cluster.workers.values(), *cluster.gone]:
        role, load = worker.record.role, worker.engine.load()
        lived[role] += (worker.died_at or seconds) - worker.began_at
        busy[role] += worker.busy_s
        outcome.num_prompt_tokens += load.prompt_tokens
        outcome.num_cached_tokens += load.cached_tokens
        outcome.num_preemptions += load.preemptions
        outcome.num_steps += worker.num_steps
        outcome.num_told_blocks += worker.audience.num_told_blocks
        outcome.listening_s += worker.audience.listening_ns / 1e9 / len(cluster.routers)
        outcome.num_encoded += load.images.encoded if load.images is not None else 0
    outcome.busy = {role: min(1.0, busy[role] / lived[role]) for role in lived if lived[role] > 0}
    return outcome
