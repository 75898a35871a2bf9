"""What a cluster costs that has no request: `kvrelay serve` with 2 prefill and 2 decode workers, from /proc."""

from __future__ import annotations

import pathlib
import time

from rich.console import Console

from kvrelay.bench.harness.report import Target
from kvrelay.bench.harness.scenario import ModelBench, Part, Results
from kvrelay.bench.harness.server import serve
from kvrelay.errors import BenchError

SETTLE_S = 3.0  # after the last worker is ready
WINDOW_S = 15.0


def measure(options: ModelBench, console: Console) -> Results:
    with (
        console.status("starting 2 prefill and 2 decode workers") as status,
        serve(options.local_model(), {"kv-blocks": 256, "max-model-len": 2048}, prefill=2, decode=2) as server,
    ):
        pids = [server.process.pid, *(worker["pid"] for worker in server.workers)]
        status.update(f"nothing to do for {SETTLE_S + WINDOW_S:g} s")
        time.sleep(SETTLE_S)
        before, began_at = cpu_of(pids), time.perf_counter()
        time.sleep(WINDOW_S)
        after, wall_s = cpu_of(pids), time.perf_counter() - began_at
    return summarise(before, after, wall_s)


def cpu_of(pids: list[int]) -> list[float]:
    """Seconds of processor time of all threads, to the nanosecond: /proc/PID/stat counts in ticks of 10 ms."""
    try:
        return [sum(map(_thread_cpu_s, pathlib.Path(f"/proc/{pid}/task").iterdir())) for pid in pids]
    except OSError as error:
        raise BenchError(f"processor time cannot be read, or a worker ended: {error}") from error


def _thread_cpu_s(task: pathlib.Path) -> float:
    return int((task / "schedstat").read_text(encoding="utf-8").split()[0]) / 1e9


def summarise(before: list[float], after: list[float], wall_s: float) -> Results:
    """Seconds of processor time, of the router first."""
    percent = [(end - start) / wall_s * 100 for start, end in zip(before, after, strict=True)]
    return {
        "idle_cpu_percent": sum(percent),
        "idle_cpu_percent_router": percent[0],
        "idle_cpu_percent_worker_max": max(percent[1:]),
    }


PART = Part("a cluster with nothing to do", measure, {"idle_cpu_percent": Target("<=", 2.0)})
