"""The real ContextPilot index server for tests, in a virtual environment of its own: it shares no package with ours.

The environment is made once, kept in the cache folder, and made anew when its constraints change.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from typing import IO, Any

from patience import PATIENCE_S

from kvrelay.bench.kv.contextpilot import LAUNCHER, SERVER
from kvrelay.config import read_environment

CONSTRAINTS = pathlib.Path(__file__).with_name("contextpilot-constraints.txt")


def environment_folder() -> pathlib.Path:
    digest = hashlib.sha256(CONSTRAINTS.read_bytes()).hexdigest()[:12]
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return read_environment().cache_dir / "tests" / f"contextpilot-{version}-{digest}"


def install(say: IO[str]) -> pathlib.Path:
    """The interpreter of the environment, which is made if it is not there. pip shows its progress on `say`."""
    folder = environment_folder()
    python, complete = folder / "bin" / "python", folder / "complete"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test runs may begin at once
        if not complete.exists():
            print(f"\ninstalling ContextPilot into {folder} (once, about a minute)", file=say, flush=True)
            _call(say, sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder))
            pip = (sys.executable, "-m", "pip", "--python", str(python), "install", "--disable-pip-version-check")
            _call(say, *pip, "--no-deps", "--no-compile", "-r", str(CONSTRAINTS))  # nothing is left to resolve
            complete.touch()
    return python


def _call(say: IO[str], *command: str) -> None:
    done = subprocess.run(command, stdout=say, stderr=subprocess.STDOUT, check=False)
    assert done.returncode == 0, f"{' '.join(command)} failed; its output is above"


class ContextPilotServer:
    """One index server on loopback. `infer_url` is where it sends what it proxies."""

    def __init__(self, python: pathlib.Path, *, infer_url: str = "http://127.0.0.1:9", port: int = 0) -> None:
        self._python = python
        self.infer_url = infer_url
        self.port = port or _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as we do
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        assert self._process is None
        flags = ["--host", "127.0.0.1", "--port", str(self.port), "--infer-api-url", self.infer_url]
        command = [str(self._python), "-c", LAUNCHER, SERVER, *flags]
        self._process = subprocess.Popen(command, stdout=self._output, stderr=subprocess.STDOUT, process_group=0)
        deadline = time.monotonic() + PATIENCE_S
        while not self._answers():
            assert self._process.poll() is None, f"ContextPilot ended: {self.output()}"
            assert time.monotonic() < deadline, f"ContextPilot did not come up: {self.output()}"
            time.sleep(0.05)

    def stop(self) -> None:
        """Harmless if it does not run."""
        process, self._process = self._process, None
        if process is not None:
            os.killpg(process.pid, signal.SIGKILL)  # also of a stopped one, and of its pool
            process.wait()

    def close(self) -> None:
        self.stop()
        self._output.close()

    def pause(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def listed(self) -> set[str]:
        """The ids that the index knows."""
        return set(self.call("GET", "/requests")["request_ids"])

    def reorder(self, contexts: list[list[int]] | list[list[str]]) -> list[str]:
        """Puts contexts into the index; their ids, in the order of the contexts."""
        request_ids: list[str] = self.call("POST", "/reorder", {"contexts": contexts})["request_ids"]
        return request_ids

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            return json.loads(response.read())

    def output(self) -> str:
        self._output.seek(0)
        return self._output.read().decode(errors="replace")[-4000:]

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self.url, timeout=2):  # /health says 503 until there is an index
                return True
        except OSError:
            return False


@contextlib.contextmanager
def contextpilot(python: pathlib.Path, *, infer_url: str = "http://127.0.0.1:9") -> Iterator[ContextPilotServer]:
    server = ContextPilotServer(python, infer_url=infer_url)
    try:
        server.start()
        yield server
    finally:
        server.close()


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port
