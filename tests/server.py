"""Starts a real `kvrelay serve` for tests and checks at the end that it leaks nothing."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

from patience import PATIENCE_S
from prepared import Process, popen
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

READY = re.compile(r"kvrelay ready on (http://\S+)")


class Server:
    """A running `kvrelay serve` and what it printed."""

    def __init__(self, process: subprocess.Popen[str] | Process) -> None:
        self.process = process
        self.lines: list[str] = []
        self._ready = threading.Event()
        self.url = ""
        self.headers: dict[str, str] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            found = READY.search(line)
            if found:
                self.url = found.group(1)
                self._ready.set()
        self._ready.set()

    def wait_ready(self) -> None:
        self._ready.wait(PATIENCE_S)
        assert self.url, "the server did not come up:\n" + "\n".join(self.lines[-40:])

    def get(self, path: str) -> Any:
        request = urllib.request.Request(self.url + path, headers=self.headers)
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            return json.loads(response.read())

    def metrics(self) -> list[Metric]:
        """As a scraper reads them."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=PATIENCE_S) as response:
            return list(text_string_to_metric_families(response.read().decode()))

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(PATIENCE_S)
        finally:
            if self.process.poll() is None:
                self.process.kill()
        self._reader.join(PATIENCE_S)

    def idle_workers(self) -> list[dict[str, Any]]:
        """The leak check: waits until nothing runs, then fails if any block is held."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            workers: list[dict[str, Any]] = self.get("/cluster")["workers"]
            held = [worker for worker in workers if not is_idle(worker)]
            if not held or time.monotonic() > deadline:
                assert workers
                assert not held, f"not idle after {PATIENCE_S} s: {held}"
                return workers
            time.sleep(0.1)


def is_idle(worker: dict[str, Any]) -> bool:
    busy = [worker[name] for name in ("running", "waiting", "transferring", "swapped")]
    held = [worker["blocks"][kind] for kind in ("in_use", "reserved", "sending", "quarantined")]
    return not any(busy) and not any(held) and worker["transfers"]["in_flight"] == 0


@contextlib.contextmanager
def serve(*arguments: str, environment: dict[str, str] | None = None, fresh: bool = False) -> Iterator[Server]:
    """`kvrelay serve ARGUMENTS` on a free port, ready for requests; stopped and checked for leaks at the end.

    `fresh`: in an interpreter of its own, which is the parent of its workers, as users start it."""
    process = (subprocess.Popen if fresh else popen)(
        [sys.executable, "-m", "kvrelay", "serve", *arguments, "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **(environment or {})},
    )
    server = Server(process)
    try:
        server.wait_ready()
        yield server
        if process.poll() is None:
            server.idle_workers()
    finally:
        server.stop()
