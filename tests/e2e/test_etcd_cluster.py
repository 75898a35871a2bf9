"""`kvrelay serve` and a second `kvrelay router` on one etcd, as processes: both serve through the same worker."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from typing import Any

from etcd_server import etcd_server
from patience import PATIENCE_S, until
from server import Server, serve
from tiny_models import tiny_model

BODY = {"prompt": "The quick brown fox", "temperature": 0, "max_tokens": 6}


def complete(server: Server) -> Any:
    request = urllib.request.Request(server.url + "/v1/completions", json.dumps(BODY).encode())
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        return json.loads(response.read())["choices"][0]["text"]


def ready_workers(server: Server) -> set[str]:
    return {worker["id"] for worker in server.get("/cluster")["workers"] if worker["state"] == "ready"}


def test_two_routers_serve_through_the_worker_that_etcd_lists_and_through_its_restart() -> None:
    folder = str(tiny_model("llama"))
    with etcd_server() as etcd:
        registry = ("--registry", etcd.address)
        pool = ("--kv-blocks", "64", "--max-batch", "8", "--threads", "1")
        with serve(folder, "--whole", "1", *registry, *pool) as first:
            second = Server(
                subprocess.Popen(
                    [sys.executable, "-m", "kvrelay", "router", folder, *registry, "--port", "0"],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
            try:
                second.wait_ready()
                until(lambda: ready_workers(second))
                text = complete(first)
                etcd.restart()
                assert complete(second) == complete(first) == text
                assert ready_workers(first) == ready_workers(second)
            finally:
                second.stop()
