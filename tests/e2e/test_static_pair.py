"""Static 1P1D: a prefill and a decode worker that listen where the command line says, and a router that names them."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

from patience import PATIENCE_S
from server import is_idle
from tiny_models import tiny_model


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


@contextlib.contextmanager
def running(*arguments: str) -> Iterator[None]:
    process = subprocess.Popen(
        [sys.executable, "-m", "kvrelay", *arguments], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def ask(url: str, body: dict[str, object] | None = None) -> tuple[dict[str, object], dict[str, str]]:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data), timeout=PATIENCE_S) as response:
        return json.loads(response.read()), dict(response.headers)


def until_ready(url: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        with contextlib.suppress(OSError):
            workers, _ = ask(url + "/cluster")
            if [worker["state"] for worker in workers["workers"]] == ["ready", "ready"]:  # type: ignore[attr-defined]
                return
        assert time.monotonic() < deadline, "the pair never came up"
        time.sleep(0.2)


def test_a_router_hands_requests_to_the_pair_it_was_told() -> None:
    folder, (http, prefill, decode) = str(tiny_model("llama")), (free_port() for _ in range(3))
    pool = ("--kv-blocks", "64", "--max-batch", "8", "--threads", "1")
    listed = f"static:tcp://127.0.0.1:{prefill},tcp://127.0.0.1:{decode}"
    url = f"http://127.0.0.1:{http}"
    with contextlib.ExitStack() as stack:
        for role, port in (("prefill", prefill), ("decode", decode)):
            where = ("--registry", "static", "--worker-port", str(port))
            stack.enter_context(running("worker", folder, "--role", role, *where, *pool))
        stack.enter_context(running("router", folder, "--registry", listed, "--port", str(http), "--local-prefill-tokens", "0"))
        until_ready(url)
        answer, headers = ask(url + "/v1/completions", {"prompt": "The quick brown fox", "temperature": 0, "max_tokens": 6})
        assert answer["usage"]["completion_tokens"] >= 1  # type: ignore[index]
        assert headers["x-kvrelay-prefill"].startswith("prefill-")
        assert headers["x-kvrelay-transfer-id"].startswith("xfer-")
        deadline = time.monotonic() + PATIENCE_S
        while not all(is_idle(worker) for worker in ask(url + "/cluster")[0]["workers"]):  # type: ignore[attr-defined]
            assert time.monotonic() < deadline, "blocks are still held"
            time.sleep(0.2)
