"""`kvrelay serve --rebalance on` with four worker processes: prompts pile up, a decode worker becomes a prefill worker, and no
request is lost or answered otherwise."""

from __future__ import annotations

import http.client
import json
import threading
import time
import urllib.request
from collections import Counter
from typing import Any

from patience import PATIENCE_S
from server import Server, serve
from tiny_models import tiny_model

CLIENTS = 24
SLOW_PREFILL = ("--prefill-token-budget", "16", "--prefill-max-running-prefills", "1", "--no-prefix-cache")
OPTIONS = (
    *("--prefill", "2", "--decode", "2", "--local-prefill-tokens", "0", "--registration-s", "3", "--kv-blocks", "1024"),
    *("--max-batch", "64", "--rebalance", "on", "--rebalance-patience-s", "1", "--rebalance-pause-s", "3600"),
)


def complete(url: str, prompt: str) -> str:
    body = {"prompt": prompt, "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        text: str = json.loads(response.read())["choices"][0]["text"]
        return text


class Client(threading.Thread):
    """Asks the same again and again, until it is told to stop."""

    def __init__(self, server: Server, number: int, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self._server, self._stop_asking = server, stop
        self._prompt = f"{number} is a number. " * 6
        self.answers: Counter[str] = Counter()
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            while not self._stop_asking.is_set():
                self.answers[complete(self._server.url, self._prompt)] += 1
        except (OSError, ValueError, KeyError, http.client.HTTPException) as error:  # told by the test
            self.error = error


def ready(server: Server) -> Counter[str]:
    workers: list[dict[str, Any]] = server.get("/cluster")["workers"]
    return Counter(worker["role"] for worker in workers if worker["state"] == "ready")


def test_a_decode_worker_becomes_a_prefill_worker_when_prompts_pile_up_and_no_request_is_lost() -> None:
    with serve(str(tiny_model("llama")), *OPTIONS, *SLOW_PREFILL) as server:
        assert ready(server) == {"prefill": 2, "decode": 2}
        stop = threading.Event()
        clients = [Client(server, number, stop) for number in range(CLIENTS)]
        for client in clients:
            client.start()
        deadline = time.monotonic() + PATIENCE_S
        while ready(server) != {"prefill": 3, "decode": 1} and time.monotonic() < deadline:
            time.sleep(0.2)
        seen = ready(server)
        stop.set()
        for client in clients:
            client.join(PATIENCE_S)
        assert [client.error for client in clients if client.error is not None] == []
        assert seen == {"prefill": 3, "decode": 1}
        assert all(len(client.answers) == 1 for client in clients)
        with urllib.request.urlopen(server.url + "/metrics", timeout=PATIENCE_S) as page:
            metrics = page.read().decode()
        assert 'kvrelay_role_changes_total{next_role="prefill",role="decode"} 1.0' in metrics
        server.idle_workers()
