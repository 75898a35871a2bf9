"""What an open dashboard costs the router in processor time: requests with and without a viewer of its feed, in turns, and no
requests at all. Processor time, since a machine that is busy otherwise changes rates far more than a viewer does.

core B: load, viewer  --HTTP-->  core A: router  --serving plane-->  core B: 4 fake workers
"""

from __future__ import annotations

import socket
import statistics
import threading
import time
from dataclasses import dataclass

from rich.console import Console

from kvrelay.bench.harness.child import Child
from kvrelay.bench.harness.report import Target, percentile
from kvrelay.bench.harness.scenario import Part, Results
from kvrelay.bench.harness.server import HOST
from kvrelay.bench.router.http import CLOSED_LOOP_CONNECTIONS, STEP_S, TOKENS, Bench, RouterBench, processes, require_whole
from kvrelay.bench.router.idle import cpu_of
from kvrelay.errors import BenchError

WORKERS = 4
PAIRS = 12  # of rounds with a viewer and without, the first of them in turns
ROUND_S = 3.0
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


def measure(options: RouterBench, console: Console) -> Results:
    with (
        console.status(f"starting router and {WORKERS} fake workers") as status,
        processes(options, num_workers=WORKERS) as bench,
        Child(bench.other_core) as viewer,
    ):
        viewer.keep(Viewer, bench.port)
        bench.set_tick(STEP_S)
        bench.run_load(tokens=TOKENS, connections=CLOSED_LOOP_CONNECTIONS, duration_s=WARM_UP_S)
        status.update("no requests")
        quiet, watched = _idle(bench, viewer, looks=False), _idle(bench, viewer, looks=True)
        pairs: list[tuple[Round, Round]] = []
        for number in range(PAIRS):
            status.update(f"pair {number + 1} of {PAIRS}, without a viewer and with one")
            order = (False, True) if number % 2 == 0 else (True, False)
            rounds = {looks: _loaded(bench, viewer, ROUND_S, looks=looks) for looks in order}
            pairs.append((rounds[False], rounds[True]))
    return {"feed_idle_cpu_percent": watched - quiet, **summarise(pairs)}


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


def _loaded(bench: Bench, viewer: Child, seconds: float, *, looks: bool) -> Round:
    if looks:
        viewer.ask(Viewer.open)
    before = cpu_of([bench.router.pid])[0]
    result = bench.run_load(tokens=TOKENS, connections=CLOSED_LOOP_CONNECTIONS, duration_s=seconds)
    cpu_s = cpu_of([bench.router.pid])[0] - before
    if looks:
        viewer.ask(Viewer.close)
    require_whole(result, f"{CLOSED_LOOP_CONNECTIONS} connections")
    return Round(
        rps=result.completed / result.wall_s,
        cpu_ms=cpu_s / result.completed * 1e3,
        ttft_ms=percentile(result.ttft_s, 50) * 1e3,
    )


def summarise(pairs: list[tuple[Round, Round]]) -> Results:
    """Of rounds without a viewer and with one. The ratio is the middle one of the pairs': what else the machine does
    meanwhile slows both rounds of a pair, and no more than some of the pairs unequally."""
    without, watched = zip(*pairs, strict=True)
    return {
        "feed_cpu_ratio": statistics.median(after.cpu_ms / before.cpu_ms for before, after in pairs),
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
