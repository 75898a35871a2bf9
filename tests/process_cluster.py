"""A cluster of real processes that a test can hurt: one router, and workers that are started, killed, stopped and drained.

    with ProcessCluster(model, folder) as cluster:
        worker = cluster.add("decode")
        cluster.until_ready(1)

Every process writes its log to a file of its own in `folder`. Leaving the block ends all of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

from patience import PATIENCE_S, until
from prepared import Process, popen

_YIELDING = 5  # a niceness
_READY = re.compile(r"kvrelay ready on http://([^:]+):(\d+).*register at (tcp://\S+?)\)")


class WorkerProcess:
    """One `kvrelay worker`. Its process keeps its id when it comes back as a new worker."""

    def __init__(self, role: str, process: Process, log: pathlib.Path) -> None:
        self.role = role
        self.process = process
        self.log = log
        self.stopped = False

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        if self.alive:
            self.process.send_signal(number)
        self.stopped = number is signal.SIGSTOP or (self.stopped and number is not signal.SIGCONT)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait(PATIENCE_S)

    def yield_to_others(self, *, yields: bool) -> None:
        """On a machine with few cores, workers that serve would starve those that start. Taking it back needs rights."""
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpriority(os.PRIO_PGRP, self.pid, _YIELDING if yields else 0)


class ProcessCluster:
    """Owns the processes."""

    def __init__(
        self,
        model: str,
        folder: pathlib.Path,
        *,
        registration_s: float = 1.0,
        router_flags: Sequence[str] = (),
        worker_flags: Sequence[str] = (),
        api_key: str = "",
        fresh: bool = False,
    ) -> None:
        """`fresh`: each process in an interpreter of its own, as users start them."""
        self._model = model
        self._start: Callable[..., Any] = subprocess.Popen if fresh else popen
        self._folder = folder
        self._lease = ("--registration-s", str(registration_s))
        self._worker_flags = worker_flags
        self._headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {api_key}"} if api_key else {})
        self.workers: list[WorkerProcess] = []
        self._count = 0
        self.router_log = folder / "router.log"
        flags = ("--port", "0", "--registry-listen", "tcp://127.0.0.1:*", *self._lease, *router_flags)
        with self.router_log.open("wb") as log:
            self.router = self._start(_command("router", model, *flags), stdout=subprocess.PIPE, stderr=log, env=_environment())
        assert self.router.stdout is not None
        line = self.router.stdout.readline().decode()
        found = _READY.search(line)
        if found is None:
            self.close()
            raise AssertionError(f"the router did not come up: {line!r}\n{self.router_log.read_text()[-2000:]}")
        self.host, self.port, self.registry = found[1], int(found[2]), found[3]
        self.url = f"http://{self.host}:{self.port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def add(self, role: str) -> WorkerProcess:
        self._count += 1
        path = self._folder / f"{self._count:03d}-{role}.log"
        flags = ("--role", role, "--registry", self.registry, *self._lease, *self._worker_flags)
        with path.open("wb") as log:
            command = _command("worker", self._model, *flags)
            process = self._start(command, stdout=log, stderr=log, env=_environment(), process_group=0)
        worker = WorkerProcess(role, process, path)
        self.workers.append(worker)
        return worker

    @contextlib.contextmanager
    def another_router(self, *flags: str) -> Iterator[str]:
        """With the same workers; its address, once it can use them."""
        command = _command("router", self._model, "--port", "0", "--registry", self.registry, *self._lease, *flags)
        with (self._folder / "another-router.log").open("wb") as log:
            process = self._start(command, stdout=subprocess.PIPE, stderr=log, env=_environment())
        try:
            found = re.search(r"http://[^ ]+", process.stdout.readline().decode())
            assert found is not None, self.logs()
            ids = {entry["id"] for entry in self.shown()}
            until(lambda: ids <= {entry["id"] for entry in self._workers_of(found[0]) if entry["state"] == "ready"}, self.logs)
            yield found[0]
        finally:
            process.terminate()
            process.wait(PATIENCE_S)
            process.stdout.close()

    def reap(self) -> None:
        """Forgets workers that have ended."""
        self.workers = [worker for worker in self.workers if worker.alive]

    def get(self, path: str, timeout_s: float = PATIENCE_S) -> Any:
        return self._ask(urllib.request.Request(self.url + path, headers=self._headers), timeout_s)

    def post(self, path: str, body: dict[str, Any], timeout_s: float = PATIENCE_S) -> Any:
        return self._ask(urllib.request.Request(self.url + path, json.dumps(body).encode(), self._headers), timeout_s)

    def _ask(self, request: urllib.request.Request, timeout_s: float) -> Any:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return json.loads(response.read())

    def shown(self) -> list[dict[str, Any]]:
        """The workers of GET /cluster."""
        return self._workers_of(self.url)

    def _workers_of(self, url: str) -> list[dict[str, Any]]:
        workers: list[dict[str, Any]] = self._ask(urllib.request.Request(f"{url}/cluster", headers=self._headers), PATIENCE_S)[
            "workers"
        ]
        return workers

    def until_ready(self, count: int) -> None:
        self.until(lambda: sum(entry["state"] == "ready" for entry in self.shown()) >= count)

    def until(self, condition: Callable[[], bool]) -> None:
        def so_far() -> bool:
            assert self.router.poll() is None, f"the router has ended\n{self.logs()}"
            return condition()

        until(so_far, lambda: f"waited in vain; the cluster says {self.shown()}\n{self.logs()}")

    def logs(self, lines: int = 12) -> str:
        """The end of every log."""
        parts = []
        for path in sorted(self._folder.glob("*.log")):
            tail = path.read_text(errors="replace").splitlines()[-lines:]
            parts.append("\n".join([f"--- {path.name}", *tail]))
        return "\n".join(parts)

    def close(self) -> None:
        for worker in self.workers:
            worker.signal(signal.SIGKILL)
        self.router.terminate()
        try:
            self.router.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.router.kill()
            self.router.wait(PATIENCE_S)
        if self.router.stdout is not None:
            self.router.stdout.close()
        for worker in self.workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(PATIENCE_S)


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "kvrelay", *arguments]


def _environment() -> dict[str, str]:
    """One thread for each worker's arithmetic: a tiny model gains nothing from more, and a test machine has few cores."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}
