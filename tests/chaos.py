"""Chaos: a cluster of two prefill and two decode workers loses, gets and changes workers at random under 32 streams.

    python tests/chaos.py --minutes 30 --seed 7 --report build/soak.json       what `make soak` runs

Every few tenths of a second one thing happens, drawn from a seed: a worker is killed, stopped and woken later, drained by a
signal or by the operator, or one more is started. Whoever goes is replaced, and nobody is spared: where the last worker of a
role goes, streams wait for its successor. A request that comes when no decode worker is up or starting may be refused; the
timeline of GET /cluster judges every 503. At the end nothing may be held anywhere. `Report.problems` is empty if all of this
holds; it is the definition of the test.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import dataclasses
import json
import pathlib
import random
import signal
import sys
import tempfile
import time
import urllib.error
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from chaos_load import Kind, Load, Outcome, keep_asking, make_requests
from patience import PATIENCE_S
from process_cluster import ProcessCluster, WorkerProcess
from server import is_idle
from tiny_models import tiny_model

NUM_STREAMS = 32
NUM_REQUESTS = 32
COMPLETE_SHARE = 0.995
LEASE_S = 2.5  # on a busy machine with few cores, a shorter one takes workers for hung that only wait for their turn
POPULATION = {"prefill": 2, "decode": 2}
MOST = {"prefill": 3, "decode": 3}
_LOOK_EVERY_S = 0.1
_BLUR_S = 0.5  # how far the timeline may be behind
_WORKER_FLAGS = ("--kv-blocks", "256", "--max-batch", "32", "--threads", "1", "--progress", "plain", "--transfer-lease-s", "4")


@dataclass
class Timeline:
    """How many workers could generate, over time."""

    times: list[float] = field(default_factory=list)
    capable: list[int] = field(default_factory=list)

    def add(self, workers: list[dict[str, Any]]) -> None:
        self.times.append(time.monotonic())
        self.capable.append(sum(entry["state"] == "ready" and entry["role"] != "prefill" for entry in workers))

    def nobody_between(self, began_at: float, ended_at: float) -> bool:
        first = max(0, bisect.bisect_left(self.times, began_at - _BLUR_S) - 1)
        last = bisect.bisect_right(self.times, ended_at + _BLUR_S)
        return 0 in self.capable[first:last]


@dataclass
class Report:
    seed: int
    duration_s: float
    counts: dict[str, int]
    events: dict[str, int]
    share: float
    longest_gap_s: float
    slowest_s: float
    excused: int
    problems: list[str]
    bad: list[str]

    def as_text(self) -> str:
        lines = [
            f"seed {self.seed}, {self.duration_s:.0f} s: {self.share:.2%} of the requests as in their solo runs",
            f"requests: {self.counts}; 503 while nobody was there: {self.excused}",
            f"events: {self.events}",
            f"longest gap in a stream {self.longest_gap_s:.1f} s, slowest request {self.slowest_s:.1f} s",
            *(f"PROBLEM: {problem}" for problem in self.problems),
            *(f"  {each}" for each in self.bad),
        ]
        return "\n".join(lines)


class Chaos:
    """One run. Everything on one event loop; what blocks goes to threads."""

    def __init__(self, cluster: ProcessCluster, seed: int, say: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._rng = random.Random(seed)
        self._seed = seed
        self._say = say
        self._began_at = time.monotonic()
        self.timeline = Timeline()
        self.load = Load()
        self.events: dict[str, int] = {}
        self._shown: list[dict[str, Any]] = []
        self._due: list[tuple[float, Callable[[], None]]] = []
        self._leaving: set[int] = set()

    async def run(self, duration_s: float, every_s: tuple[float, float], requests: list[Any]) -> None:
        over = asyncio.Event()
        watch = asyncio.create_task(self._watch(over))
        clients = [self._client(requests, number, over) for number in range(NUM_STREAMS)]
        ends_at = time.monotonic() + duration_s
        told_at = time.monotonic()
        try:
            while (now := time.monotonic()) < ends_at:
                await asyncio.sleep(self._rng.uniform(*every_s))
                self._run_due()
                await self._hurt_somebody()
                self._refill()
                if now - told_at > 30.0:
                    told_at = now
                    self._say(f"{duration_s - (ends_at - now):6.0f} s  {self.load.count()}  {self.events}")
            while self._due:
                self._run_due(everything=True)
        finally:
            over.set()
            await asyncio.gather(*clients)
            await watch

    def _client(self, requests: list[Any], number: int, over: asyncio.Event) -> asyncio.Task[None]:
        rng = random.Random(self._seed * 1000 + number)
        return asyncio.create_task(
            keep_asking(self._cluster.host, self._cluster.port, requests, self.load, rng, over), name=f"client {number}"
        )

    async def _watch(self, over: asyncio.Event) -> None:
        while not over.is_set() or self.load.num_open:
            try:
                self._shown = await asyncio.to_thread(self._cluster.shown)
                self.timeline.add(self._shown)
                self._let_others_start()
            except (OSError, urllib.error.URLError) as error:
                self._note("cluster page unreachable", str(error))
            await asyncio.sleep(_LOOK_EVERY_S)

    def _let_others_start(self) -> None:
        ready = {entry["pid"] for entry in self._shown if entry["state"] == "ready"}
        for worker in self._cluster.workers:
            worker.yield_to_others(yields=worker.pid in ready)

    # What happens

    def _note(self, event: str, whom: str = "") -> None:
        self.events[event] = self.events.get(event, 0) + 1
        (self._cluster.router_log.parent / "chaos.log").open("a").write(
            f"{time.strftime('%H:%M:%S')} {time.monotonic() - self._began_at:7.2f} {event} {whom}\n"
        )

    async def _hurt_somebody(self) -> None:
        victims = self._victims()
        if not victims:
            return
        victim = self._rng.choice(victims)
        match self._rng.choice(("kill", "kill", "stop", "stop", "terminate", "drain", "add")):
            case "kill":
                self._note("kill", self._name(victim))
                victim.kill()
            case "stop":
                self._stop(victim)
            case "terminate":
                self._note("terminate", self._name(victim))
                self._leaving.add(victim.pid)
                victim.signal(signal.SIGTERM)
            case "drain":
                await self._drain(victim)
            case "add":
                if self._count(victim.role) < MOST[victim.role]:
                    self._note("add", victim.role)
                    self._cluster.add(victim.role)

    def _victims(self) -> list[WorkerProcess]:
        """Those that serve."""
        ready = {entry["pid"] for entry in self._shown if entry["state"] == "ready"}
        sound = [worker for worker in self._cluster.workers if worker.alive and not worker.stopped]
        return [worker for worker in sound if worker.pid in ready and worker.pid not in self._leaving]

    def _stop(self, victim: WorkerProcess) -> None:
        """For a part of the lease, or for longer: then it comes back as another worker."""
        for_s = LEASE_S * self._rng.choice((self._rng.uniform(0.05, 0.3), self._rng.uniform(1.2, 2.5)))
        self._note("stop" if for_s < LEASE_S else "hang", f"{self._name(victim)} for {for_s:.1f} s")
        victim.signal(signal.SIGSTOP)

        def wake() -> None:
            if victim.alive:
                self._note("wake", self._name(victim))
                victim.signal(signal.SIGCONT)

        self._due.append((time.monotonic() + for_s, wake))

    async def _drain(self, victim: WorkerProcess) -> None:
        entry = next((entry for entry in self._shown if entry["pid"] == victim.pid), None)
        assert entry is not None
        self._note("drain", self._name(victim))
        try:
            await asyncio.to_thread(self._cluster.post, "/admin/drain", {"worker": entry["id"]})
            self._leaving.add(victim.pid)
        except urllib.error.HTTPError as error:  # it has gone meanwhile
            self._note(f"drain answered {error.code}", error.read().decode()[:200])

    def _run_due(self, *, everything: bool = False) -> None:
        now = time.monotonic()
        due = [act for at, act in self._due if everything or at <= now]
        self._due = [(at, act) for at, act in self._due if not everything and at > now]
        for act in due:
            act()

    def _refill(self) -> None:
        self._cluster.reap()
        for role, wanted in POPULATION.items():
            if self._count(role) < wanted:
                self._note("start", role)
                self._cluster.add(role)

    def _count(self, role: str) -> int:
        return sum(worker.role == role and worker.alive and worker.pid not in self._leaving for worker in self._cluster.workers)

    def _name(self, worker: WorkerProcess) -> str:
        entry = next((entry for entry in self._shown if entry["pid"] == worker.pid), None)
        return f"{worker.role} {worker.pid} {entry['id'] if entry else ''} {worker.log.name}"

    # What came of it

    def report(self, duration_s: float, leaks: list[str]) -> Report:
        outcomes = self.load.outcomes
        bad = [each for each in outcomes if each.kind not in (Kind.COMPLETED, Kind.LEFT)]
        excused = [each for each in bad if self._is_excused(each)]
        completed = sum(each.kind is Kind.COMPLETED for each in outcomes)
        judged = completed + len(bad) - len(excused)
        share = completed / judged if judged else 0.0
        problems = list(leaks)
        if share < COMPLETE_SHARE:
            problems.append(f"only {completed} of {judged} requests were answered as in their solo runs")
        unexcused = [each for each in bad if each.kind is Kind.NO_WORKER and not self._is_excused(each)]
        if unexcused:
            problems.append(f"{len(unexcused)} answers of 503 although a worker could generate")
        if any(each.kind is Kind.HUNG for each in outcomes):
            problems.append("requests hung")
        return Report(
            seed=self._seed,
            duration_s=duration_s,
            counts=self.load.count(),
            events=self.events,
            share=share,
            longest_gap_s=max((each.longest_gap_s for each in outcomes), default=0.0),
            slowest_s=max((each.ended_at - each.began_at for each in outcomes), default=0.0),
            excused=len(excused),
            problems=problems,
            bad=[self._describe(each) for each in bad[:40]],
        )

    def _is_excused(self, outcome: Outcome) -> bool:
        return outcome.kind is Kind.NO_WORKER and self.timeline.nobody_between(outcome.began_at, outcome.ended_at)

    def _describe(self, outcome: Outcome) -> str:
        times = f"{outcome.began_at - self._began_at:.2f} to {outcome.ended_at - self._began_at:.2f} s"
        return f"{times}: {outcome.kind.value}: {outcome.detail}"


def leaks(cluster: ProcessCluster) -> list[str]:
    """Waits until every worker that is left is ready and holds nothing; says who does not get there."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        cluster.reap()
        shown = cluster.shown()
        held = [entry for entry in shown if entry["state"] != "ready" or not is_idle(entry)]
        missing = {worker.pid for worker in cluster.workers} - {entry["pid"] for entry in shown}
        if not held and not missing:
            return []
        if time.monotonic() > deadline:
            return [f"not idle after {PATIENCE_S:.0f} s: {entry}" for entry in held] + [
                f"alive, but not in the cluster: {worker.role} {worker.pid} {worker.log.name}"
                for worker in cluster.workers
                if worker.pid in missing
            ]
        time.sleep(0.1)


def run_chaos(
    folder: pathlib.Path,
    *,
    seed: int,
    duration_s: float,
    every_s: tuple[float, float] = (0.3, 1.8),
    mode: str = "write",
    say: Callable[[str], None] = lambda line: None,
    fresh: bool = False,
) -> Report:
    """A whole run, on a cluster of its own."""
    model = tiny_model("llama")
    flags = ("--local-prefill-tokens", "16", "--mode", mode)
    flags += ("--failover-wait-s", "120")  # on a busy machine a successor takes longer to start than the default allows
    with ProcessCluster(
        str(model), folder, registration_s=LEASE_S, router_flags=flags, worker_flags=_WORKER_FLAGS, fresh=fresh
    ) as cluster:
        for role, count in POPULATION.items():
            for _ in range(count):
                cluster.add(role)
        requests = make_requests(model, seed, NUM_REQUESTS)
        cluster.until_ready(sum(POPULATION.values()))
        chaos = Chaos(cluster, seed, say)
        asyncio.run(chaos.run(duration_s, every_s, requests))
        report = chaos.report(duration_s, leaks(cluster))
        if cluster.router.poll() is not None:
            report.problems.append("the router has ended")
        return report


def main() -> int:
    parser = argparse.ArgumentParser(description="hurts a cluster under load, and reports what its clients saw")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--mode", choices=("write", "read"), default="write", help="of the hand-over")
    parser.add_argument("--report", type=pathlib.Path, help="file for the report as JSON; as text, with .txt, beside it")
    parser.add_argument("--logs", type=pathlib.Path, help="folder for the logs of all processes")
    arguments = parser.parse_args()
    folder = arguments.logs or pathlib.Path(tempfile.mkdtemp(prefix="kvrelay-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"seed {arguments.seed}; logs in {folder}", flush=True)
    report = run_chaos(
        folder,
        seed=arguments.seed,
        duration_s=arguments.minutes * 60,
        mode=arguments.mode,
        say=lambda line: print(line, flush=True),
        fresh=True,
    )
    print(report.as_text())
    if arguments.report is not None:
        arguments.report.parent.mkdir(parents=True, exist_ok=True)
        arguments.report.write_text(json.dumps(dataclasses.asdict(report), indent=1) + "\n")
        arguments.report.with_suffix(".txt").write_text(report.as_text() + "\n")
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
