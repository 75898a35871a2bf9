"""ContextPilot's own index server, in a process of a Python that has it (it shares no package with ours).

with open_contextpilot(python) as (pid, url):
    index_contexts(url, contexts)   puts them into the index; ids of requests, one for each
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence

import httpx

from kvrelay.bench.harness.server import HOST, free_port
from kvrelay.errors import BenchError

SERVER = "contextpilot.server.http_server"
# The server builds its index with a pool of forked processes and ends them by SIGTERM. One that it catches while it is still
# being forked has uvicorn's handler of that signal, and forgets it: then /reorder waits for ever, on a busy machine often. So
# the signal has to wait until the child can die of it.
LAUNCHER = """
import os, runpy, signal, sys

def mask(how):
    signal.pthread_sigmask(how, [signal.SIGTERM])

def after_in_child():
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    mask(signal.SIG_UNBLOCK)

os.register_at_fork(
    before=lambda: mask(signal.SIG_BLOCK), after_in_parent=lambda: mask(signal.SIG_UNBLOCK), after_in_child=after_in_child
)
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""
_START_S = 60.0
_ANSWER_S = 60.0
_LOOK_EVERY_S = 0.1


@contextlib.contextmanager
def open_contextpilot(python: str) -> Iterator[tuple[int, str]]:
    """Its process, and its URL."""
    port = free_port()
    url = f"http://{HOST}:{port}"
    flags = ["--host", HOST, "--port", str(port), "--infer-api-url", f"http://{HOST}:9"]  # nothing is sent through it
    with _open_process([python, "-c", LAUNCHER, SERVER, *flags]) as pid:
        deadline = time.monotonic() + _START_S
        while not _answers(url):
            if time.monotonic() > deadline:
                raise BenchError(f"--contextpilot: {python} has no ContextPilot whose server starts")
            time.sleep(_LOOK_EVERY_S)
        yield pid, url


def index_contexts(url: str, contexts: Sequence[Sequence[int]]) -> list[str]:
    """There is no index before the first call."""
    try:
        response = httpx.post(f"{url}/reorder", json={"contexts": contexts}, timeout=_ANSWER_S, trust_env=False)
        request_ids: list[str] = response.raise_for_status().json()["request_ids"]
    except (httpx.HTTPError, ValueError, KeyError) as error:
        raise BenchError(f"ContextPilot indexed nothing: {error!r}") from error
    return request_ids


@contextlib.contextmanager
def _open_process(command: list[str]) -> Iterator[int]:
    try:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, process_group=0)
    except OSError as error:
        raise BenchError(f"{command[0]} does not run: {error}") from error
    try:
        yield process.pid
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # also of a stopped one, and of its pool
        process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False
