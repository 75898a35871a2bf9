"""An operator at work on a real `kvrelay serve`: a worker changes its role, crashes, and all of them are drained away."""

from __future__ import annotations

import json
import os
import signal
import urllib.error
import urllib.request
from typing import Any

import psutil
import pytest
from patience import PATIENCE_S, until
from server import Server, serve
from tiny_models import tiny_model

from kvrelay.cli import main as cli

KEY = "secret"


def complete(server: Server) -> str:
    body = {"prompt": "The quick brown fox", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    headers = {"content-type": "application/json", **server.headers}
    request = urllib.request.Request(server.url + "/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        text: str = json.loads(response.read())["choices"][0]["text"]
        return text


def ready(server: Server, role: str) -> list[dict[str, Any]]:
    return [entry for entry in server.get("/cluster")["workers"] if (entry["role"], entry["state"]) == (role, "ready")]


@pytest.mark.long
def test_roles_change_crashes_are_repaired_and_drained_workers_stay_away(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--prefill", "1", "--decode", "2", "--max-batch", "8", "--kv-blocks", "64", "--local-prefill-tokens", "0")
    with serve(str(tiny_model("llama")), *options, "--api-key", KEY, fresh=True) as server:
        server.headers = {"authorization": f"Bearer {KEY}"}
        there = ("--url", server.url, "--api-key", KEY)
        before = complete(server)
        worker = ready(server, "decode")[0]
        assert cli.main(["role", worker["id"], "prefill", *there]) == 0
        (back,) = [entry for entry in ready(server, "prefill") if entry["pid"] == worker["pid"]]
        assert capsys.readouterr().out == f"{worker['id']} is back as {back['id']}\n"
        assert [complete(server) for _ in range(2)] == [before] * 2

        os.kill(back["pid"], signal.SIGKILL)
        until(lambda: back["id"] not in [entry["id"] for entry in server.get("/cluster")["workers"]])
        until(lambda: len(ready(server, "prefill")) == 2)  # the crashed one is replaced in the role it had last
        assert complete(server) == before
        server.idle_workers()

        last, *others = server.get("/cluster")["workers"]
        for entry in others:
            assert cli.main(["drain", entry["id"], *there, "--timeout", str(PATIENCE_S)]) == 0
        assert cli.main(["drain", last["id"], *there, "--no-wait"]) == 0
        assert "no request can be served without it" in capsys.readouterr().err
        with pytest.raises(urllib.error.HTTPError) as refused:
            complete(server)
        assert refused.value.code == 503
        until(lambda: not psutil.Process(server.process.pid).children())
        assert server.process.poll() is None
        assert server.get("/cluster")["workers"] == []
        server.stop()
        assert server.process.returncode == 0
