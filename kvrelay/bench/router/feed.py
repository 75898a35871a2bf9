"""What an open dashboard costs the router: requests with and without a viewer of its feed, in turns, and no requests at all.

core B: load, viewer  --HTTP-->  core A: router  --serving plane-->  core B: 4 fake workers
"""

from __future__ import annotations

import http.client
import socket
import statistics
import threading
import time

from rich.console import Console

from kvrelay.bench.harness.child import Child
from kvrelay.bench.harness.report import Target, percentile
from kvrelay.bench.harness.scenario import Part, Results
from kvrelay.bench.harness.server import HOST
from kvrelay.bench.router.http import CLOSED_LOOP_CONNECTIONS, TOKENS, Bench, RouterBench, processes, require_whole
from kvrelay.bench.router.idle import cpu_of
from kvrelay.bench.router.load import LoadResult
from kvrelay.errors import BenchError

WORKERS = 4
ROUNDS = 3  # of each kind, in turns
IDLE_S = 10.0
_FIRST_S = 30.0  # for the first event to come
_END = b"\n\n"


class Viewer:
    """Reads the feed as a page does, in a thread of its own, while it is open."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._connection: http.client.HTTPConnection
        self._reader: threading.Thread
        self.num_events = 0

    def open(self) -> None:
        """Returns when the first event has come."""
        self._connection = http.client.HTTPConnection(HOST, self._port, timeout=_FIRST_S)
        self._connection.request("GET", "/feed")
        answer = self._connection.getresponse()
        if answer.status != 200:
            raise BenchError(f"GET /feed: status {answer.status}")
        self._count(answer)
        self._reader = threading.Thread(target=self._read, args=(answer,), daemon=True)
        self._reader.start()

    def close(self) -> int:
        """How many events came."""
        self._connection.sock.shutdown(socket.SHUT_RDWR)
        self._reader.join()
        self._connection.close()
        num_events, self.num_events = self.num_events, 0
        return num_events

    def _read(self, answer: http.client.HTTPResponse) -> None:
        try:
            while self._count(answer):
                pass
        except (OSError, http.client.HTTPException):  # it was closed meanwhile
            pass

    def _count(self, answer: http.client.HTTPResponse) -> bool:
        data = answer.read1(1 << 16)
        self.num_events += data.count(_END)
        return bool(data)


def measure(options: RouterBench, console: Console) -> Results:
    with (
        console.status(f"starting router and {WORKERS} fake workers") as status,
        processes(options, num_workers=WORKERS) as bench,
        Child(bench.other_core) as viewer,
    ):
        viewer.keep(Viewer, bench.port)
        bench.run_load(tokens=TOKENS, connections=1, duration_s=1.0)  # warms up
        status.update("no requests")
        quiet, watched = _idle(bench, viewer, looks=False), _idle(bench, viewer, looks=True)
        rounds: dict[bool, list[tuple[LoadResult, float]]] = {False: [], True: []}
        for number in range(ROUNDS):
            for looks in (False, True) if number % 2 == 0 else (True, False):
                status.update(f"round {number + 1} of {ROUNDS}: {'with' if looks else 'without'} a viewer")
                rounds[looks].append(_loaded(bench, viewer, options.seconds, looks=looks))
    return {"feed_idle_cpu_percent": watched - quiet, **summarise(rounds[False], rounds[True])}


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


def _loaded(bench: Bench, viewer: Child, seconds: int, *, looks: bool) -> tuple[LoadResult, float]:
    """And the router's processor time."""
    if looks:
        viewer.ask(Viewer.open)
    before = cpu_of([bench.router.pid])[0]
    result = bench.run_load(tokens=TOKENS, connections=CLOSED_LOOP_CONNECTIONS, duration_s=float(seconds))
    cpu_s = cpu_of([bench.router.pid])[0] - before
    if looks:
        viewer.ask(Viewer.close)
    require_whole(result, f"{CLOSED_LOOP_CONNECTIONS} connections")
    return result, cpu_s


def summarise(without: list[tuple[LoadResult, float]], watched: list[tuple[LoadResult, float]]) -> Results:
    """Medians over the rounds; ratios are of with a viewer to without."""

    def rates(rounds: list[tuple[LoadResult, float]]) -> tuple[float, float, float]:
        return (
            statistics.median(result.completed / result.wall_s for result, _ in rounds),
            statistics.median(cpu_s / result.completed for result, cpu_s in rounds) * 1e3,
            statistics.median(percentile(result.ttft_s, 50) for result, _ in rounds) * 1e3,
        )

    (rps, cpu_ms, ttft_ms), (rps_watched, cpu_ms_watched, ttft_ms_watched) = rates(without), rates(watched)
    return {
        "feed_rps_ratio": rps_watched / rps,
        "feed_rps_without": rps,
        "feed_rps_with": rps_watched,
        "feed_cpu_ms_per_request_without": cpu_ms,
        "feed_cpu_ms_per_request_with": cpu_ms_watched,
        "feed_ttft_ms_p50_without": ttft_ms,
        "feed_ttft_ms_p50_with": ttft_ms_watched,
    }


PART = Part(
    "what an open dashboard costs",
    measure,
    {"feed_idle_cpu_percent": Target("<=", 2.0), "feed_rps_ratio": Target(">=", 0.98)},
)
