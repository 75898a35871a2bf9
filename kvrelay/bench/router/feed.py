"""What an open dashboard costs the router in processor time: under requests that never cease a viewer of its feed comes and
goes; and with no requests at all. Not in rates, which a machine that is busy otherwise changes far more than a viewer does.

    without, with, with, without    a group of rounds, in which an even drift weighs on both sides alike
    its ratio                       processor time per request with a viewer over without; the middle one of all groups counts

core B: load, viewer  --HTTP-->  core A: router  --serving plane-->  core B: 4 fake workers
"""

from __future__ import annotations

import math
import socket
import statistics
import threading
import time
from dataclasses import dataclass

import uvloop
from rich.console import Console

from kvrelay.bench.harness.child import Child
from kvrelay.bench.harness.report import Target, percentile
from kvrelay.bench.harness.scenario import Part, Results
from kvrelay.bench.harness.server import HOST
from kvrelay.bench.router.http import CLOSED_LOOP_CONNECTIONS, PROMPT, STEP_S, TOKENS, Bench, RouterBench, processes
from kvrelay.bench.router.idle import cpu_of
from kvrelay.bench.router.load import LoadRequest, LoadResult, generate
from kvrelay.errors import BenchError

WORKERS = 4
GROUPS = 20
ORDER = (False, True, True, False)  # whether there is a viewer
ROUND_S = 2.0  # two events of the feed
SETTLE_S = 0.1  # after a viewer has come or gone
WARM_UP_S = 2.0
IDLE_S = 10.0
_SILENCE_S = 30.0  # after which the router is taken for stuck
_END = b"\n\n"
_CHUNK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Round:
    """Of the router: requests per second, processor time per request, time to first token."""

    rps: float
    cpu_ms: float
    ttft_ms: float


@dataclass(frozen=True, slots=True)
class Group:
    """Without a viewer, with one, with one, without."""

    before: Round
    first: Round
    second: Round
    after: Round

    @property
    def cpu_ratio(self) -> float:
        return (self.first.cpu_ms + self.second.cpu_ms) / (self.before.cpu_ms + self.after.cpu_ms)


class Viewer:
    """Reads the feed as a page does, in a thread of its own, while it is open."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._socket: socket.socket
        self._reader: threading.Thread
        self.num_events = 0

    def open(self) -> None:
        """Returns when the first event has come."""
        self._socket = socket.create_connection((HOST, self._port), timeout=_SILENCE_S)
        self._socket.sendall(b"GET /feed HTTP/1.1\r\nHost: %b\r\n\r\n" % HOST.encode())
        answer = self._socket.recv(_CHUNK_BYTES)
        if not answer.startswith(b"HTTP/1.1 200 "):
            raise BenchError(f"GET /feed: {answer[:80]!r}")
        self.num_events = answer.count(_END)
        while not self.num_events:
            if not self._count():
                raise BenchError("the feed ended before its first event")
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def close(self) -> int:
        """How many events came."""
        self._socket.shutdown(socket.SHUT_RDWR)  # the reader reads the end
        self._reader.join()
        self._socket.close()
        return self.num_events

    def _read(self) -> None:
        while self._count():
            pass

    def _count(self) -> bool:
        data = self._socket.recv(_CHUNK_BYTES)
        self.num_events += data.count(_END)
        return bool(data)


class SteadyLoad:
    """Sends requests without end, in a thread of its own."""

    def __init__(self, request: LoadRequest) -> None:
        self._result = LoadResult()
        self._num_seen = 0
        threading.Thread(target=lambda: uvloop.run(generate(request, self._result)), daemon=True).start()

    @property
    def num_lost(self) -> int:
        return self._result.lost

    def since_last(self) -> list[float]:
        """Times to first token of the requests that ended since it was last asked. Raises BenchError if one was lost."""
        if self._result.lost:
            raise BenchError(f"answers lost or wrong: {self._result.problems}")
        times = self._result.ttft_s[self._num_seen :]
        self._num_seen += len(times)
        self._result.gaps_s.clear()
        return times


def measure(options: RouterBench, console: Console) -> Results:
    with (
        console.status(f"starting router and {WORKERS} fake workers") as status,
        processes(options, num_workers=WORKERS) as bench,
        Child(bench.other_core) as viewer,
        Child(bench.other_core) as load,
    ):
        viewer.keep(Viewer, bench.port)
        bench.set_tick(STEP_S)
        bench.run_load(tokens=TOKENS, connections=CLOSED_LOOP_CONNECTIONS, duration_s=WARM_UP_S)
        status.update("no requests")
        quiet, watched = _idle(bench, viewer, looks=False), _idle(bench, viewer, looks=True)
        load.keep(SteadyLoad, LoadRequest(HOST, bench.port, bench.model, PROMPT, TOKENS, CLOSED_LOOP_CONNECTIONS, math.inf))
        time.sleep(WARM_UP_S)
        groups: list[Group] = []
        for number in range(GROUPS):
            status.update(f"{number + 1} of {GROUPS}: without a viewer, with one, with one, without")
            rounds = [_round(bench, load, viewer, looks=looks) for looks in ORDER]
            groups.append(Group(rounds[0], rounds[1], rounds[2], rounds[3]))
    return {"feed_idle_cpu_percent": watched - quiet, **summarise(groups)}


def _idle(bench: Bench, viewer: Child, *, looks: bool) -> float:
    """Per cent of a core that the router takes with nothing to do."""
    if looks:
        viewer.ask(Viewer.open)
    before, began_at = cpu_of([bench.router.pid])[0], time.perf_counter()
    time.sleep(IDLE_S)
    share = (cpu_of([bench.router.pid])[0] - before) / (time.perf_counter() - began_at)
    if looks and viewer.ask(Viewer.close) < IDLE_S / 2:
        raise BenchError("the feed said less than it should")
    return share * 100


def _round(bench: Bench, load: Child, viewer: Child, *, looks: bool) -> Round:
    if looks:
        viewer.ask(Viewer.open)
    time.sleep(SETTLE_S)
    load.ask(SteadyLoad.since_last)
    before, began_at = cpu_of([bench.router.pid])[0], time.perf_counter()
    time.sleep(ROUND_S)
    ttft_s = load.ask(SteadyLoad.since_last)
    cpu_s, wall_s = cpu_of([bench.router.pid])[0] - before, time.perf_counter() - began_at
    if looks:
        viewer.ask(Viewer.close)
    if not ttft_s:
        raise BenchError(f"no request ended within {ROUND_S:g} s")
    return Round(rps=len(ttft_s) / wall_s, cpu_ms=cpu_s / len(ttft_s) * 1e3, ttft_ms=percentile(ttft_s, 50) * 1e3)


def summarise(groups: list[Group]) -> Results:
    """The ratio is the middle one of the groups', between the bounds that hold the true middle in 95 of 100 runs."""
    ratios = sorted(group.cpu_ratio for group in groups)
    reach = 0.98 * math.sqrt(len(ratios))
    low = max(0, math.floor(len(ratios) / 2 - reach))
    without = [one for group in groups for one in (group.before, group.after)]
    watched = [one for group in groups for one in (group.first, group.second)]
    return {
        "feed_samples": float(len(ratios)),
        "feed_cpu_ratio": statistics.median(ratios),
        "feed_cpu_ratio_low": ratios[low],
        "feed_cpu_ratio_high": ratios[-1 - low],
        "feed_cpu_ms_per_request_without": statistics.median(one.cpu_ms for one in without),
        "feed_cpu_ms_per_request_with": statistics.median(one.cpu_ms for one in watched),
        "feed_rps_without": statistics.median(one.rps for one in without),
        "feed_rps_with": statistics.median(one.rps for one in watched),
        "feed_ttft_ms_p50_without": statistics.median(one.ttft_ms for one in without),
        "feed_ttft_ms_p50_with": statistics.median(one.ttft_ms for one in watched),
    }


PART = Part(
    "what an open dashboard costs",
    measure,
    {"feed_idle_cpu_percent": Target("<=", 2.0), "feed_cpu_ratio": Target("<=", 1.02)},
)
