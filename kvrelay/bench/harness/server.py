"""Servers in processes of their own, reached over HTTP: `kvrelay serve` as users run it, and small ones beside it."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn

from kvrelay.bench.harness.child import Command
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
    process: Command
    workers: list[dict[str, Any]]

    def client(self) -> httpx.AsyncClient:
        """For as many requests at once as a benchmark likes."""
        timeout, limits = httpx.Timeout(_ANSWER_S, pool=None), httpx.Limits(max_connections=None)
        return httpx.AsyncClient(base_url=self.url, timeout=timeout, limits=limits)


@contextlib.contextmanager
def serve(
    model: ModelOptions,
    settings: Mapping[str, object],
    *,
    whole: int = 0,
    prefill: int = 0,
    decode: int = 0,
    log: str = "warning",
    environment: Mapping[str, str] | None = None,
    start_s: float = _START_S,
) -> Iterator[Server]:
    """`settings` are further options of `kvrelay serve`, without their dashes. `model.model` is a folder."""
    port = free_port()
    url = f"http://{HOST}:{port}"
    workers = {"whole": whole, "prefill": prefill, "decode": decode}
    options = {
        "load": model.load,
        **{name: count for name, count in workers.items() if count},
        "host": HOST,
        "port": port,
        **settings,
    }
    flags = [f"--{name}={value}" for name, value in options.items()]

    def all_ready(cluster: Any) -> bool:
        states = [worker["state"] for worker in cluster["workers"]]
        return states == ["ready"] * sum(workers.values())

    with Command(["serve", model.model, *flags], environment={"KVRELAY_LOG": log, **(environment or {})}) as process:
        shown = await_page(f"{url}/cluster", process, "the workers were not ready", all_ready, start_s)
        yield Server(url, process, shown["workers"])


def await_page(
    url: str,
    process: Command,
    excuse: str = "",
    good: Callable[[Any], bool] = lambda page: True,
    start_s: float = _START_S,
) -> Any:
    """The JSON, as soon as the process gives one that is good."""
    deadline = time.monotonic() + start_s
    while time.monotonic() < deadline:
        if not process.running:
            raise BenchError("the server ended early; its messages are above")
        with contextlib.suppress(httpx.TransportError):
            answer = httpx.get(url, timeout=5.0)
            if answer.status_code == 200 and good(page := answer.json()):
                return page
        time.sleep(_LOOK_EVERY_S)
    raise BenchError(f"{excuse or f'the server did not give {url}'} within {start_s:g} s")


def serve_app(name: str) -> int:
    """Serves a web application, `MODULE:NAME`, in a thread of this process. Returns its port."""
    listener = socket.create_server((HOST, 0))
    server = uvicorn.Server(uvicorn.Config(name, log_level="warning", access_log=False, loop="uvloop", http="httptools"))
    threading.Thread(target=server.run, args=[[listener]], daemon=True).start()
    port: int = listener.getsockname()[1]
    return port


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port
