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

import pytest
from devices import ON_A_CARD
from parity import assert_parity, reference_tokens
from patience import PATIENCE_S
from server import is_idle
from tiny_models import reference_model, tiny_model


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


PROMPT = list(range(20, 90))
PAIRS = [
    ("cpu", "cpu", "auto"),
    *(
        pytest.param(*pair, transfer, marks=ON_A_CARD)
        for pair in (("cuda", "cpu"), ("cpu", "cuda"))
        for transfer in ("nixl", "mooncake")
    ),
]


@pytest.mark.parametrize(("prefill_on", "decode_on", "transfer"), PAIRS)
def test_a_router_hands_requests_to_the_pair_it_was_told(prefill_on: str, decode_on: str, transfer: str) -> None:
    """Also if one has its memory on a card and the other on its host, where their transport moves both."""
    folder, (http, prefill, decode) = str(tiny_model("llama")), (free_port() for _ in range(3))
    pool = ("--kv-blocks", "64", "--max-batch", "8", "--threads", "1", "--dtype", "float32", "--transfer", transfer)
    listed = f"static:tcp://127.0.0.1:{prefill},tcp://127.0.0.1:{decode}"
    url = f"http://127.0.0.1:{http}"
    with contextlib.ExitStack() as stack:
        for role, port, device in (("prefill", prefill, prefill_on), ("decode", decode, decode_on)):
            where = ("--registry", "static", "--worker-port", str(port), "--device", device)
            stack.enter_context(running("worker", folder, "--role", role, *where, *pool))
        stack.enter_context(running("router", folder, "--registry", listed, "--port", str(http), "--local-prefill-tokens", "0"))
        until_ready(url)
        fields = {"prompt": PROMPT, "temperature": 0, "max_tokens": 6, "ignore_eos": True, "return_token_ids": True}
        answer, headers = ask(url + "/v1/completions", fields)
        expected, ties = reference_tokens(reference_model("llama"), PROMPT, 6)
        assert_parity(answer["choices"][0]["token_ids"], expected, ties, transfer)  # type: ignore[index]
        assert headers["x-kvrelay-prefill"].startswith("prefill-")
        assert headers["x-kvrelay-transfer-id"].startswith("xfer-")
        deadline = time.monotonic() + PATIENCE_S
        while not all(is_idle(worker) for worker in ask(url + "/cluster")[0]["workers"]):  # type: ignore[attr-defined]
            assert time.monotonic() < deadline, "blocks are still held"
            time.sleep(0.2)
