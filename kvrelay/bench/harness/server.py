"""`kvrelay serve` as users run it, in processes of its own, and reached over HTTP."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from kvrelay.bench.harness.child import Child
from kvrelay.config import ModelOptions
from kvrelay.errors import BenchError

HOST = "127.0.0.1"
_START_S = 180.0
_ANSWER_S = 300.0
_LOOK_EVERY_S = 0.1


@dataclass(frozen=True)
class Server:
    """`workers` are those of GET /cluster, once all of them were ready."""

    url: str
    process: Child
    workers: list[dict[str, Any]]

    def client(self) -> httpx.AsyncClient:
        """For as many requests at once as a benchmark likes."""
        timeout, limits = httpx.Timeout(_ANSWER_S, pool=None), httpx.Limits(max_connections=None)
        return httpx.AsyncClient(base_url=self.url, timeout=timeout, limits=limits)


@contextlib.contextmanager
def serve(
    model: ModelOptions, settings: Mapping[str, object], *, prefill: int, decode: int, log: str = "warning"
) -> Iterator[Server]:
    """`settings` are further options of `kvrelay serve`, without their dashes. `model.model` is a folder."""
    url = f"http://{HOST}:{free_port()}"
    port = url.rpartition(":")[2]
    options = {"load": model.load, "prefill": prefill, "decode": decode, "host": HOST, "port": port, **settings}
    flags = [f"--{name}={value}" for name, value in options.items()]
    with Child(["kvrelay", "serve", model.model, *flags], None, {"KVRELAY_LOG": log}) as process:
        yield Server(url, process, _await_workers(url, process, prefill + decode))


def _await_workers(url: str, process: Child, count: int) -> list[dict[str, Any]]:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        workers: list[dict[str, Any]] = msgspec.json.decode(await_page(f"{url}/cluster", process))["workers"]
        if len(workers) == count and all(worker["state"] == "ready" for worker in workers):
            return workers
        time.sleep(_LOOK_EVERY_S)
    raise BenchError(f"the workers were not ready within {_START_S:g} s")


def await_page(url: str, process: Child) -> bytes:
    """The page, as soon as the process gives it."""
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        if not process.running:
            raise BenchError("the server ended early; its messages are above")
        with contextlib.suppress(httpx.TransportError):
            answer = httpx.get(url, timeout=5.0)
            if answer.status_code == 200:
                return answer.content
        time.sleep(_LOOK_EVERY_S)
    raise BenchError(f"the server did not give {url} within {_START_S:g} s")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port
