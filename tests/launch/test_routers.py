"""`kvrelay serve --routers 2` as processes: one port, either router goes on where the other was, and each can be replaced."""

from __future__ import annotations

import functools
import http.client
import json
import os
import re
import signal
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import zmq
from patience import PATIENCE_S, until
from server import Server, is_idle, serve
from tiny_models import tiny_model

from kvrelay.config import ClusterOptions, ModelOptions, RouterOptions, read_environment
from kvrelay.launch.launch import Launch
from kvrelay.launch.routers import router_commands
from kvrelay.planes.curve import connecting


class Line:
    """One connection: whatever is asked on it, the same router answers."""

    def __init__(self, server: Server) -> None:
        address = urllib.parse.urlsplit(server.url)
        assert address.hostname is not None
        self._connection = http.client.HTTPConnection(address.hostname, address.port, timeout=PATIENCE_S)
        self.cluster = self.get("/cluster")
        self.router: str = self.cluster["router"]

    def get(self, path: str) -> Any:
        return json.loads(self.text(path))

    def text(self, path: str, method: str = "GET") -> str:
        self._connection.request(method, path)
        return self._connection.getresponse().read().decode()

    def send(self, body: dict[str, Any]) -> http.client.HTTPResponse:
        return self._post("/v1/completions", {"temperature": 0, "ignore_eos": True} | body)

    def _post(self, path: str, body: dict[str, Any]) -> http.client.HTTPResponse:
        self._connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        return self._connection.getresponse()

    def complete(self, **body: Any) -> dict[str, Any]:
        response = self.send(body)
        answer: dict[str, Any] = json.loads(response.read())
        assert response.status == 200, answer
        return answer

    def respond(self, **body: Any) -> dict[str, Any]:
        response = self._post("/v1/responses", {"temperature": 0, "max_output_tokens": 4} | body)
        answer: dict[str, Any] = json.loads(response.read())
        assert response.status == 200, answer
        return answer

    def close(self) -> None:
        self._connection.close()


def line_to(server: Server, is_wanted: Callable[[str], bool]) -> Line:
    """The system deals connections: new ones until the right router takes one."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        line = Line(server)
        if is_wanted(line.router):
            return line
        line.close()
        assert time.monotonic() < deadline, "no such router takes connections"


def routers(server: Server) -> dict[str, int]:
    """With their processes."""
    return {router["id"]: router["pid"] for router in server.get("/cluster")["routers"]}


def until_idle(line: Line) -> None:
    until(lambda: all(map(is_idle, line.get("/cluster")["workers"])))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    options = ("--routers", "2", "--whole", "1", "--max-batch", "8", "--kv-blocks", "64", "--registration-s", "2")
    options += ("--shutdown-wait-s", "60")  # a slow machine must not cut the responses of a router that ends
    with serve(str(tiny_model("llama")), *options, fresh=True) as made:
        yield made
        until(lambda: all(map(is_idle, made.get("/cluster")["workers"])))
        family = [psutil.Process(made.process.pid), *psutil.Process(made.process.pid).children(recursive=True)]
        made.stop()
        assert made.process.returncode == 0
        _, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
        assert not alive


def test_both_answer_and_say_which_of_them_does(server: Server) -> None:
    assert sum("2 routers, 1 whole worker" in line for line in server.lines) == 1
    known = routers(server)
    assert len(known) == 2
    for name in known:
        line = line_to(server, lambda router, name=name: router == name)  # type: ignore[misc]
        assert f'router="{name}"' in line.text("/metrics")
        assert {router["id"] for router in line.cluster["routers"]} == set(known)
        line.close()


def test_what_the_launchers_registry_refuses_is_counted_by_every_router(server: Server) -> None:
    (worker,) = server.get("/cluster")["workers"]
    (address,) = re.findall(r"--registry=(\S+)", " ".join(psutil.Process(worker["pid"]).cmdline()))
    with connecting(zmq.DEALER) as stranger:
        stranger.connect(address)
        stranger.send(b"no message")
        for name in routers(server):
            line = line_to(server, lambda router, name=name: router == name)  # type: ignore[misc]
            until(lambda line=line: 'kvrelay_malformed_messages_total{plane="registry"} 1.0' in line.text("/metrics"))  # type: ignore[misc]
            line.close()


def test_what_one_has_served_the_other_continues(server: Server) -> None:
    first = Line(server)
    second = line_to(server, lambda router: router != first.router)
    parent = first.complete(prompt="The quick", max_tokens=6, keep_kv=True)
    whole = first.complete(prompt="The quick", max_tokens=10)
    child = second.complete(continuation_of=parent["id"], max_tokens=4)
    assert parent["choices"][0]["text"] + child["choices"][0]["text"] == whole["choices"][0]["text"]
    until_idle(second)

    def shown(line: Line, answer: dict[str, Any]) -> dict[str, Any]:
        """Its worker may tell of it a moment after its end."""
        until(lambda: line.get(f"/requests/{answer['id']}")["data"][0]["clocks"])
        (found,) = line.get(f"/requests/{answer['id']}")["data"]
        return dict(found)

    for line in (first, second):
        assert {one["stage"] for one in shown(line, parent)["stages"]} >= {"route", "queue", "prefill", "decode"}
        assert shown(line, parent)["router"] == first.router != shown(line, child)["router"]
        assert shown(line, parent)["children"] == [shown(line, child)["id"]]
        assert [one["answer_id"] for one in line.get("/requests?limit=3")["data"]] == [child["id"], whole["id"], parent["id"]]
    assert first.get("/requests/unknown")["error"]["code"] == "request_not_found"
    first.close()
    second.close()


def test_a_response_that_one_has_stored_the_other_shows_continues_and_deletes(server: Server) -> None:
    first = Line(server)
    second = line_to(server, lambda router: router != first.router)
    made = first.respond(input="The quick", store=True)
    path = f"/v1/responses/{made['id']}"
    until(lambda: second.get(path) == made, says=lambda: (second.get(path), made))
    for line in (first, second):
        until(lambda line=line: line.get(f"/v1/continuations/{made['id']}").get("state") == "held")  # type: ignore[misc]
    after = {"input": "and then?", "previous_response_id": made["id"]}
    here, there = (line.respond(**after, store=False) for line in (first, second))
    assert here["output"][0]["content"] == there["output"][0]["content"]
    assert {one["kvrelay"]["continuation"]["source"] for one in (here, there)} == {"lease"}
    assert json.loads(second.text(path, "DELETE"))["deleted"] is True
    for line in (second, first):
        until(lambda line=line: (line.get(path).get("error") or {}).get("code") == "response_not_found")  # type: ignore[misc]
        line.close()


def test_what_continues_from_a_response_is_the_same_whether_its_kv_was_kept(server: Server) -> None:
    line = Line(server)
    found = []
    for fields in ({"store": True}, {}):
        made = line.respond(input="Of two responses", **fields)
        child = line.respond(input="and then?", previous_response_id=made["id"], store=False)
        found.append(
            (child["kvrelay"]["continuation"]["source"], child["output"][0]["content"], child["usage"]["input_tokens"])
        )
    (kept, *answer), (unkept, *same) = found
    assert (kept, unkept) == ("lease", "prefix_cache")
    assert answer == same
    line.close()


def test_a_router_that_is_killed_is_replaced_and_its_requests_are_aborted(server: Server) -> None:
    victim = Line(server)
    other = line_to(server, lambda router: router != victim.router)
    known = routers(server)
    stream = victim.send({"prompt": "The quick", "max_tokens": 900, "stream": True})
    assert stream.readline()
    os.kill(known[victim.router], signal.SIGKILL)
    assert other.complete(prompt="The quick", max_tokens=4)["usage"]["completion_tokens"] == 4
    until_idle(other)
    until(lambda: victim.router not in routers(server) and len(routers(server)) == 2)
    again = line_to(server, lambda router: router not in known)
    until(lambda: any(worker["state"] == "ready" for worker in again.get("/cluster")["workers"]))
    assert again.complete(prompt="The quick", max_tokens=4)["usage"]["completion_tokens"] == 4
    for line in (victim, other, again):
        line.close()


def test_every_router_counts_a_worker_that_crashed(server: Server) -> None:
    (worker,) = server.get("/cluster")["workers"]
    os.kill(worker["pid"], signal.SIGKILL)
    for name in routers(server):
        line = line_to(server, lambda router, name=name: router == name)  # type: ignore[misc]
        until(functools.partial(has_successor, line, worker["id"]))
        assert 'kvrelay_worker_crashes_total{outcome="restarted"} 1.0' in line.text("/metrics")
        line.close()


def has_successor(line: Line, worker: str) -> bool:
    return worker not in line.text("/cluster") and line.get("/health") == {"status": "ok"}


def test_routers_are_replaced_one_after_the_other_and_no_request_is_lost(server: Server) -> None:
    known = routers(server)
    for name, pid in known.items():
        line = line_to(server, lambda router, name=name: router == name)  # type: ignore[misc]
        response = line.send({"prompt": "The quick", "max_tokens": 24, "stream": True})
        first = response.readline()
        reader = threading.Thread(target=os.kill, args=[pid, signal.SIGTERM])
        reader.start()
        events = first + response.read()
        reader.join()
        assert b"[DONE]" in events
        line.close()
        until(lambda name=name: name not in routers(server) and len(routers(server)) == 2)  # type: ignore[misc]
    until(lambda: not set(known) & set(routers(server)))  # whichever of them tells
    with urllib.request.urlopen(server.url + "/health", timeout=PATIENCE_S) as answer:
        assert answer.status == 200


def test_keys_are_in_files_that_only_the_user_can_read_not_on_command_lines(tmp_path: Any) -> None:
    options = RouterOptions(api_key="very-secret", own_port=9000, served_model_name="a,b")
    launch = Launch(ModelOptions(), options, ClusterOptions(routers=2), read_environment())
    commands = router_commands(launch, tmp_path, tmp_path, 8123, "tcp://127.0.0.1:5600")
    assert "very-secret" not in str(commands)
    said = [json.loads((tmp_path / f"router-{number}.json").read_text()) for number in range(2)]
    assert [one["api_key"] for one in said] == ["very-secret"] * 2
    assert [one["own_port"] for one in said] == [9000, 9001]
    assert [one.get("eviction_sync", "evicted") for one in said] == ["evicted", "off"]
    assert {one["port"] for one in said} == {8123}
