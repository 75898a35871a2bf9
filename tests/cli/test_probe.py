"""`kvrelay probe`: what its exit status says about workers and routers."""

from __future__ import annotations

import contextlib
import http.server
import pathlib
import threading
import time
from collections.abc import Iterator

import pytest
import zmq
from stub_worker import StubWorker

from kvrelay.cli import main as cli
from kvrelay.ids import new_request_id, new_router_id
from kvrelay.planes.cluster_key import load_key, write_new_key
from kvrelay.planes.curve import connecting, keyed
from kvrelay.sampling import SamplingParams
from kvrelay.wire import PROTOCOL_VERSION
from kvrelay.wire.codec import encode
from kvrelay.wire.serving import Hello, Submit


@pytest.fixture
def worker() -> Iterator[StubWorker]:
    worker = StubWorker("")
    yield worker
    worker.stop()


@contextlib.contextmanager
def busy(worker: StubWorker) -> Iterator[None]:
    """With a request that does not end while the engine's gate is shut."""
    with connecting(zmq.DEALER) as router:
        router.connect(worker.address)
        router.send(encode(Hello(version=PROTOCOL_VERSION, router_id=new_router_id(), silence_s=60.0)))
        assert router.poll(10_000)
        params = SamplingParams(max_tokens=1000)
        router.send(encode(Submit(request_id=new_request_id(), external_id="client", prompt=[1, 2], params=params)))
        while not worker.engine.submitted:
            time.sleep(0.005)
        yield


def probe(*arguments: str) -> int:
    return cli.main(["probe", *arguments])


def test_a_ready_worker(worker: StubWorker, capsys: pytest.CaptureFixture[str]) -> None:
    assert probe(worker.address) == 0
    assert capsys.readouterr().out == ""
    assert probe(worker.address, "--state") == 0
    assert capsys.readouterr().out == "ready\n"


def test_a_draining_worker_is_alive_but_not_ready(worker: StubWorker, capsys: pytest.CaptureFixture[str]) -> None:
    worker.engine.gate.clear()
    with busy(worker):
        worker.drain()
        while probe(worker.address) == 0:  # it drains at its next turn
            time.sleep(0.005)
        assert probe(worker.address, "--alive", "--state") == 0
        assert capsys.readouterr().out == "draining\n"


def test_a_stuck_worker_does_not_answer(worker: StubWorker, capsys: pytest.CaptureFixture[str]) -> None:
    worker.engine.stuck_s = 1.0
    with busy(worker):
        assert probe(worker.address, "--alive", "--timeout-s", "0.3") == 1
        assert "no answer within 0.3 s" in capsys.readouterr().err
        worker.engine.stuck_s = 0.0


def test_nobody_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert probe("tcp://127.0.0.1:9", "--timeout-s", "0.2") == 1
    assert probe("http://127.0.0.1:9") == 1
    assert "tcp://127.0.0.1:9: no answer" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [("here",), ("tcp://no port",), ("tcp://127.0.0.1:9", "--timeout-s", "0"), ()])
def test_a_question_that_makes_no_sense(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert probe(*arguments) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_a_worker_with_a_cluster_key(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong = tmp_path / "right.key", tmp_path / "wrong.key"
    write_new_key(right)
    write_new_key(wrong)
    with keyed(load_key(str(right))):
        worker = StubWorker("")
    try:
        assert probe(worker.address, "--cluster-key", str(right)) == 0
        assert probe(worker.address, "--timeout-s", "0.3") == 1
        assert probe(worker.address, "--timeout-s", "0.3", "--cluster-key", str(wrong)) == 1
        assert probe(worker.address, "--cluster-key", str(tmp_path / "none.key")) == 2
        monkeypatch.setenv("KVRELAY_CLUSTER_KEY", str(right))
        assert probe(worker.address) == 0
    finally:
        worker.stop()


def test_probes_leave_nothing_behind(worker: StubWorker) -> None:
    for _ in range(5):
        assert probe(worker.address) == 0
    with busy(worker):
        assert worker.loop.tally.serving_malformed == 0


class Health(http.server.BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.mark.parametrize(
    ("status", "ready", "alive", "shown"), [(200, 0, 0, "ready"), (503, 1, 0, "not ready"), (500, 1, 1, "")]
)
def test_a_router(status: int, ready: int, alive: int, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    handler = type("Handler", (Health,), {"status": status})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert probe(url, "--state") == ready
        assert capsys.readouterr().out.strip() == shown
        assert probe(url + "/", "--alive") == alive
        server.shutdown()
