"""A cluster over several hosts: router, prefill worker, decode workers and etcd, each in a network namespace of its own, with
a cluster key, and KV that moves by NIXL over TCP. Then cables are pulled and plugged in again.

What must hold: a stream survives the loss of its prefill worker, and that of its decode worker if another one can take over or
the lost one comes back within --failover-wait-s; it goes on with no gap and no repeat; a worker whose cable is plugged in again
is used again; nothing hangs; and in the end no block is held by anybody.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import itertools
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from etcd_server import EtcdServer
from namespaces import Host, hosts, why_not
from patience import PATIENCE_S
from server import is_idle
from tiny_models import tiny_model

from kvrelay import LLM, SamplingParams
from kvrelay.planes.cluster_key import write_new_key

REASON = why_not()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)

HTTP_PORT = 8000
LEASE_S = 1.0
MODEL_LEN = 4096
LONG = 700  # tokens of a stream that is still running when the cable is pulled
EVENT_PORTS = {"--events-port": "5702", "--replay-port": "5703"}
WORKER_PORTS = {
    "prefill": {"--worker-port": "5700", "--signal-port": "5701", **EVENT_PORTS},
    "decode": {"--worker-port": "5700", **EVENT_PORTS},
}
UCX = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "eth0", "UCX_TCP_PORT_RANGE": "21000-21099"}
PROMPT = "The quick brown fox jumps over the lazy dog. " * 12


class Net:
    """The cluster, and how a client on another host talks to it."""

    def __init__(self, machines: dict[str, Host], model: pathlib.Path, folder: pathlib.Path) -> None:
        self.machines = machines
        self._model = model
        self._folder = folder
        self._key = folder / "cluster.key"
        write_new_key(self._key)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        place = machines["etcd"]
        self._etcd = EtcdServer(folder / "etcd", host=place.address, client_port=2379, peer_port=2380, prefix=place.command())

    def start(self) -> None:
        self._etcd.start(wait=False)
        self._run(
            "router",
            *("router", str(self._model), "--host", self.machines["router"].address, "--port", str(HTTP_PORT)),
            *("--local-prefill-tokens", "0", "--failover-wait-s", "20"),
        )
        for name, machine in self.machines.items():
            if name.startswith(("prefill", "decode")):
                self._run(
                    name,
                    *("worker", str(self._model), "--role", name.partition("-")[0], "--worker-host", machine.address),
                    *itertools.chain(*WORKER_PORTS[name.partition("-")[0]].items()),
                    *("--transfer", "nixl", "--threads", "1", "--kv-blocks", "600", "--max-batch", "16"),
                )
        workers = [name for name in self.machines if name.startswith(("prefill", "decode"))]
        self.until_ready(*workers)

    def _run(self, name: str, *arguments: str) -> None:
        common = ("--registry", self._etcd.address, "--cluster-key", str(self._key), "--registration-s", str(LEASE_S))
        command = self.machines[name].command(sys.executable, "-m", "kvrelay", *arguments, *common)
        with self.log(name).open("wb") as log:
            self._processes[name] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **UCX})

    def log(self, name: str) -> pathlib.Path:
        return self._folder / f"{name}.log"

    def stop(self) -> None:
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._etcd.kill()

    # The client

    def connect(self) -> http.client.HTTPConnection:
        return self.machines["client"].http(self.machines["router"].address, HTTP_PORT, PATIENCE_S)

    def ask(self, path: str, body: dict[str, Any] | None = None) -> tuple[dict[str, Any], dict[str, str]]:
        with contextlib.closing(self.connect()) as connection:
            connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body))
            response = connection.getresponse()
            answer = json.loads(response.read())
            assert response.status == 200, answer
            return answer, {name.lower(): value for name, value in response.getheaders()}

    def complete(self, prompt: str, max_tokens: int) -> tuple[str, dict[str, str]]:
        answer, headers = self.ask("/v1/completions", request(prompt, max_tokens))
        assert answer["usage"]["completion_tokens"] == max_tokens
        return answer["choices"][0]["text"], headers

    def stream(self, prompt: str, max_tokens: int) -> Stream:
        return Stream(self.connect(), request(prompt, max_tokens) | {"stream": True})

    def num_failovers(self) -> float:
        with contextlib.closing(self.connect()) as connection:
            connection.request("GET", "/metrics")
            page = connection.getresponse().read().decode()
        return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith("kvrelay_failovers_total"))

    def workers(self) -> dict[str, dict[str, Any]]:
        """By host. The router shows addresses' owners by what they are called there: all of them run on one machine."""
        by_address = {machine.address: name for name, machine in self.machines.items()}
        listed: list[dict[str, Any]] = self.ask("/cluster")[0]["workers"]
        listed = [worker for worker in listed if worker["address"]]  # one that is starting has none yet
        return {by_address[worker["address"].removeprefix("tcp://").rpartition(":")[0]]: worker for worker in listed}

    def until(self, condition: Any, says: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException):
                if condition():
                    return
            assert time.monotonic() < deadline, f"{says}\n{self.tails()}"
            time.sleep(0.05)

    def until_ready(self, *names: str) -> None:
        def all_ready() -> bool:
            workers = self.workers()
            return all(name in workers and workers[name]["state"] == "ready" for name in names)

        self.until(all_ready, f"{', '.join(names)} did not come up (again)")

    def until_lost(self, name: str) -> None:
        def is_lost() -> bool:
            workers = self.workers()
            return name not in workers or workers[name]["state"] != "ready"

        self.until(is_lost, f"the router never noticed that {name} is gone")

    def until_idle(self) -> None:
        """The leak check."""
        self.until(lambda: all(map(is_idle, self.workers().values())), f"blocks are still held: {self.workers()}")

    def tails(self) -> str:
        return "\n".join(f"--- {name}\n{self.log(name).read_text()[-2000:]}" for name in self._processes)


class Stream:
    """A streamed completion that is read bit by bit."""

    def __init__(self, connection: http.client.HTTPConnection, body: dict[str, Any]) -> None:
        self._connection = connection
        connection.request("POST", "/v1/completions", json.dumps(body))
        self._response = connection.getresponse()
        assert self._response.status == 200, self._response.read()
        self.text = ""
        self.num_events = 0

    def read_events(self, count: int) -> None:
        while self.num_events < count:
            assert self._read_event(), "the stream ended early"

    def read_all(self) -> str:
        while self._read_event():
            pass
        self._connection.close()
        return self.text

    def _read_event(self) -> bool:
        while not (line := self._response.readline().strip()).startswith(b"data: "):
            assert line == b"", line
        if line == b"data: [DONE]":
            return False
        event = json.loads(line.removeprefix(b"data: "))
        assert "error" not in event, event
        self.text += "".join(choice["text"] for choice in event["choices"])
        self.num_events += 1
        return True


def request(prompt: str, max_tokens: int) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A tiny model with room for streams that last for seconds."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    shutil.copytree(tiny_model("llama"), folder)
    for name, key in (("config.json", "max_position_embeddings"), ("tokenizer_config.json", "model_max_length")):
        settings = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(settings | {key: MODEL_LEN}))
    return folder


@pytest.fixture(scope="module")
def alone(model: pathlib.Path) -> Iterator[LLM]:
    """One worker that does everything, in this process: what the cluster must equal."""
    llm = LLM(str(model), kv_blocks=600, threads=1)
    yield llm
    llm.close()


def expected(alone: LLM, prompt: str, max_tokens: int) -> str:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return alone.generate([prompt], params)[0].outputs[0].text


@contextlib.contextmanager
def cluster(lab: str, model: pathlib.Path, folder: pathlib.Path, *workers: str) -> Iterator[Net]:
    with hosts(lab, ["client", "router", "etcd", *workers]) as machines:
        net = Net(machines, model, folder)
        try:
            net.start()
            yield net
            net.until_idle()
        finally:
            net.stop()


@pytest.fixture(scope="module")
def pair(model: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Net]:
    with cluster("pair", model, tmp_path_factory.mktemp("pair"), "prefill", "decode") as net:
        yield net


def test_a_chat_equals_that_of_one_worker(pair: Net, alone: LLM) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    answer, headers = pair.ask("/v1/chat/completions", {"messages": messages, "max_tokens": 40, "temperature": 0})
    reference = alone.chat(messages, SamplingParams(temperature=0, max_tokens=40)).outputs[0]
    assert answer["choices"][0]["message"]["content"] == reference.text
    assert answer["usage"]["completion_tokens"] == len(reference.token_ids)
    assert headers["x-kvrelay-prefill"].startswith("prefill-")
    assert headers["x-kvrelay-transfer-id"].startswith("xfer-")
    pair.until(
        lambda: any(name == "decode" and entry["transfers"]["done"] > 0 for name, entry in pair.workers().items()),
        "no KV went from one host to the other",
    )


def test_workers_listen_where_a_firewall_lets_through(pair: Net) -> None:
    for name, ports in WORKER_PORTS.items():
        for port in ports.values():
            pair.machines["client"].connect(pair.machines[name].address, int(port)).close()


def test_the_prefill_workers_cable_is_pulled(pair: Net, alone: LLM) -> None:
    failovers = pair.num_failovers()
    running = pair.stream(PROMPT, LONG)
    running.read_events(20)
    pair.machines["prefill"].pull_cable()
    # Nobody knows yet: this one is sent to the worker that cannot be reached.
    text, _ = pair.complete("A stranger. " + PROMPT, 30)
    assert pair.num_failovers() > failovers
    pair.until_lost("prefill")
    assert text == expected(alone, "A stranger. " + PROMPT, 30)
    assert running.read_all() == expected(alone, PROMPT, LONG)
    assert pair.complete("Alone. " + PROMPT, 8)[0] == expected(alone, "Alone. " + PROMPT, 8)
    pair.machines["prefill"].plug_cable()
    pair.until_ready("prefill", "decode")
    text, headers = pair.complete("Together. " + PROMPT, 30)
    assert text == expected(alone, "Together. " + PROMPT, 30)
    assert headers["x-kvrelay-prefill"].startswith("prefill-"), "the worker that came back is not used"
    pair.until_idle()


def test_the_decode_workers_cable_is_pulled(pair: Net, alone: LLM) -> None:
    failovers = pair.num_failovers()
    running = pair.stream("Decode. " + PROMPT, LONG)
    running.read_events(20)
    pair.machines["decode"].pull_cable()
    pair.until_lost("decode")
    pair.machines["decode"].plug_cable()
    assert running.read_all() == expected(alone, "Decode. " + PROMPT, LONG)
    assert pair.num_failovers() > failovers, "the stream was over before the cable was pulled"
    pair.until_ready("prefill", "decode")
    text, headers = pair.complete("Again. " + PROMPT, 30)
    assert text == expected(alone, "Again. " + PROMPT, 30)
    assert headers["x-kvrelay-prefill"].startswith("prefill-")
    pair.until_idle()


@pytest.mark.long
def test_cables_are_pulled_while_many_streams_run(model: pathlib.Path, alone: LLM, tmp_path: pathlib.Path) -> None:
    """Two workers of each kind: while one of a kind is out, the other takes over, before the cable is back."""
    prompts = [f"Number {number}. {PROMPT}" for number in range(8)]
    wanted = [expected(alone, prompt, LONG) for prompt in prompts]
    with cluster("four", model, tmp_path, "prefill-1", "prefill-2", "decode-1", "decode-2") as net:
        for name in ("decode-1", "prefill-1", "decode-2", "prefill-2"):
            streams = [net.stream(prompt, LONG) for prompt in prompts]
            for stream in streams:
                stream.read_events(5)
            net.machines[name].pull_cable()
            with concurrent.futures.ThreadPoolExecutor(len(streams)) as pool:
                assert list(pool.map(Stream.read_all, streams)) == wanted, f"{name}\n{net.tails()}"
            net.until_lost(name)
            net.machines[name].plug_cable()
            net.until_ready("prefill-1", "prefill-2", "decode-1", "decode-2")
            net.until_idle()
