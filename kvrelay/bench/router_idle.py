"""What a cluster costs while nobody asks it anything: `kvrelay serve` with 2 prefill and 2 decode workers, from /proc."""

from __future__ import annotations

import pathlib
import time

import msgspec
from rich.console import Console

from kvrelay.bench.processes import Child
from kvrelay.bench.report import Target
from kvrelay.bench.router_http import HOST, await_page, free_port
from kvrelay.config import ModelOptions
from kvrelay.errors import BenchError

SETTLE_S = 3.0  # after the last worker is ready
WINDOW_S = 15.0
_START_S = 120.0
_WORKERS = 4

TARGETS = {"idle_cpu_percent": Target("<=", 2.0)}


class _Worker(msgspec.Struct):
    pid: int
    state: str


class _Cluster(msgspec.Struct):
    workers: list[_Worker]


def measure(model: ModelOptions, console: Console) -> dict[str, float]:
    port = free_port()
    command = ["kvrelay", "serve", model.model, "--load", model.load, "--prefill", "2", "--decode", "2", "--port", str(port)]
    command += ["--kv-blocks", "256", "--max-model-len", "2048", "--host", HOST]
    with (
        console.status("starting 2 prefill and 2 decode workers") as status,
        Child(command, None, {"KVRELAY_LOG": "warning"}) as router,
    ):
        pids = _await_workers(port, router)
        status.update(f"nothing to do for {SETTLE_S + WINDOW_S:g} s")
        time.sleep(SETTLE_S)
        before, began_at = _cpu([router.pid, *pids]), time.perf_counter()
        time.sleep(WINDOW_S)
        after, wall_s = _cpu([router.pid, *pids]), time.perf_counter() - began_at
    return summarise(before, after, wall_s)


def _await_workers(port: int, router: Child) -> list[int]:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        cluster = msgspec.json.decode(await_page(port, "/cluster", router), type=_Cluster)
        ready = [worker.pid for worker in cluster.workers if worker.state == "ready"]
        if len(ready) == _WORKERS:
            return ready
        time.sleep(0.2)
    raise BenchError(f"the workers were not ready within {_START_S:g} s")


def _cpu(pids: list[int]) -> list[float]:
    """Seconds of processor time of all threads, to the nanosecond: /proc/PID/stat counts in ticks of 10 ms."""
    try:
        return [sum(map(_thread_cpu_s, pathlib.Path(f"/proc/{pid}/task").iterdir())) for pid in pids]
    except OSError as error:
        raise BenchError(f"processor time cannot be read, or a worker ended: {error}") from error


def _thread_cpu_s(task: pathlib.Path) -> float:
    return int((task / "schedstat").read_text(encoding="utf-8").split()[0]) / 1e9


def summarise(before: list[float], after: list[float], wall_s: float) -> dict[str, float]:
    """Seconds of processor time, of the router first."""
    percent = [(end - start) / wall_s * 100 for start, end in zip(before, after, strict=True)]
    return {
        "idle_cpu_percent": sum(percent),
        "idle_cpu_percent_router": percent[0],
        "idle_cpu_percent_worker_max": max(percent[1:]),
    }
