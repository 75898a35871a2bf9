"""The worker's serving socket against peers that misbehave, vanish or come back."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator

import msgspec
import pytest
import zmq
from patience import PATIENCE_S, until
from stub_worker import StubEngine, StubWorker, stub_token

from kvrelay.ids import RequestId, new_request_id, new_router_id
from kvrelay.sampling import SamplingParams
from kvrelay.states import FinishReason
from kvrelay.wire import PROTOCOL_VERSION
from kvrelay.wire.codec import Decoder, encode
from kvrelay.wire.serving import (
    Abort,
    Failure,
    Finish,
    Hello,
    Ping,
    Refused,
    Resumed,
    StepOutputs,
    Submit,
    ToRouter,
    Welcome,
    of_kind,
)
from kvrelay.worker import serving
from kvrelay.worker.serving import ServingLoop
from kvrelay.worker.worker import handle_signals


class Peer:
    """A router's socket without a router."""

    def __init__(self, address: str, identity: bytes | None = None) -> None:
        self.router_id = new_router_id()
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.IDENTITY, identity or self.router_id.encode())
        self.socket.connect(address)
        self._decoder: Decoder[ToRouter] = Decoder(ToRouter)

    def send(self, *messages: msgspec.Struct) -> None:
        for message in messages:
            self.socket.send(encode(message))

    def receive(self) -> ToRouter:
        assert self.socket.poll(PATIENCE_S * 1000), "no answer"
        return self._decoder.decode(self.socket.recv())

    def hello(self, version: int = PROTOCOL_VERSION, silence_s: float = 30.0) -> ToRouter:
        self.send(Hello(version=version, router_id=self.router_id, silence_s=silence_s))
        return self.receive()

    def submit(self, prompt: list[int], **params: object) -> RequestId:
        request_id = new_request_id()
        settings = SamplingParams(**{"max_tokens": 3, **params})  # type: ignore[arg-type]
        self.send(Submit(request_id=request_id, external_id="client", prompt=prompt, params=settings))
        return request_id

    def outputs(self) -> StepOutputs:
        """The next step with something in it."""
        while True:
            message = self.receive()
            assert isinstance(message, StepOutputs), message
            if message.outputs or message.news:
                return message

    def tokens(self, request_id: RequestId) -> list[int]:
        tokens: list[int] = []
        while True:
            for output in self.outputs().outputs:
                assert output.request_id == request_id
                tokens += output.tokens
                if output.finish is not None:
                    return tokens

    def close(self) -> None:
        self.socket.close()


@pytest.fixture
def worker() -> Iterator[StubWorker]:
    made = StubWorker("")
    yield made
    made.stop()


@pytest.fixture
def peer(worker: StubWorker) -> Iterator[Peer]:
    made = Peer(worker.address)
    yield made
    made.close()


def test_hello_is_answered_with_the_record(worker: StubWorker, peer: Peer) -> None:
    welcome = peer.hello()
    assert isinstance(welcome, Welcome)
    record = msgspec.structs.replace(worker.record, load=msgspec.structs.replace(worker.record.load, connections=1))
    assert welcome.worker == record


def test_a_signal_is_noticed_while_nothing_happens(worker: StubWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_IDLE_WAIT_MS", int(10_000 * PATIENCE_S))
    loop = ServingLoop(StubEngine(worker.id), host="127.0.0.1", port=0)
    loop.record = worker.record
    before = signal.getsignal(signal.SIGTERM)
    handle_signals(loop, launched=True)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
    try:
        loop.run(on_draining=lambda: None)  # it would wait longer than a test may take
    finally:
        signal.signal(signal.SIGTERM, before)
        loop.close()
    loop.wake()  # as a signal would, that comes now


def test_connected_routers_are_counted_and_those_that_fell_silent_are_not(worker: StubWorker) -> None:
    peers = [Peer(worker.address) for _ in range(2)]
    for count, peer in enumerate(peers, start=1):
        for _ in range(2):  # who says Hello again is counted once
            welcome = peer.hello(silence_s=0.3 if count == 2 else 30.0)
            assert isinstance(welcome, Welcome)
            assert welcome.worker.load.connections == count
    until(lambda: worker.loop.status.load.connections == 1)  # what the heartbeat tells
    for peer in peers:
        peer.close()


def test_only_the_samples_that_go_on_keep_a_resumed_request_open(worker: StubWorker, peer: Peer) -> None:
    peer.hello()
    resume = [Resumed(2, [stub_token([4], 2, 0)]), Resumed(0, [])]
    params = SamplingParams(n=3, max_tokens=3)
    peer.send(Submit(request_id=new_request_id(), external_id="", prompt=[4], params=params, resume=resume))
    outputs = []
    while sum(output.finish is not None for output in outputs) < 2:
        outputs += peer.outputs().outputs
    assert sorted((output.sample, output.position) for output in outputs) == [(0, 0), (0, 1), (0, 2), (2, 1), (2, 2)]
    until(lambda: worker.loop.num_open == 0)


def test_another_protocol_version_is_refused(peer: Peer) -> None:
    answer = peer.hello(version=PROTOCOL_VERSION + 2)
    assert isinstance(answer, Refused)
    assert f"protocol {PROTOCOL_VERSION + 2}" in answer.reason


@pytest.mark.parametrize("silence_s", [0.0, -1.0, float("nan"), float("inf"), 1e6])
def test_a_silence_that_cannot_be_awaited_is_refused(peer: Peer, silence_s: float) -> None:
    answer = peer.hello(silence_s=silence_s)
    assert isinstance(answer, Refused)
    assert "silence" in answer.reason


def test_whoever_did_not_say_hello_is_refused(peer: Peer) -> None:
    for message in (
        Ping(),
        Abort(request_ids=[]),
        Submit(request_id=new_request_id(), external_id="", prompt=[1], params=SamplingParams()),
    ):
        peer.send(message)
        answer = peer.receive()
        assert isinstance(answer, Refused)
        assert "Hello" in answer.reason


def test_nonsense_is_refused_and_counted_and_others_are_served(worker: StubWorker, peer: Peer) -> None:
    peer.hello()
    attacker = Peer(worker.address, identity=b"attacker")
    draw = random.Random(3)
    good = encode(Hello(version=PROTOCOL_VERSION, router_id=attacker.router_id))
    nonsense = [b"", b"\xc1", good[:-2], good + b"\x00", b"\x91" * 10_000, msgspec.msgpack.encode({"type": "Submit"})]
    nonsense += [draw.randbytes(draw.randint(1, 300)) for _ in range(300)]
    for frame in nonsense:
        attacker.socket.send(frame)
        assert isinstance(attacker.receive(), Refused)
    attacker.socket.send_multipart([good, good])
    assert isinstance(attacker.receive(), Refused)
    assert worker.loop.tally.serving_malformed == len(nonsense) + 1
    attacker.close()
    request_id = peer.submit([1, 2])
    assert peer.tokens(request_id) == [stub_token([1, 2], 0, position) for position in range(3)]


def test_ids_of_another_kind_are_refused(worker: StubWorker, peer: Peer) -> None:
    peer.hello()
    bad = Submit(request_id=RequestId("xfer-1"), external_id="", prompt=[1], params=SamplingParams())
    peer.send(bad)
    answer = peer.receive()
    assert isinstance(answer, Refused)
    assert "RequestId" in answer.reason
    assert worker.engine.submitted == []


def test_the_same_request_twice_runs_once(worker: StubWorker, peer: Peer) -> None:
    peer.hello()
    worker.engine.gate.clear()
    submit = Submit(request_id=new_request_id(), external_id="", prompt=[4], params=SamplingParams(max_tokens=2))
    peer.send(submit, submit)
    assert isinstance(peer.receive(), StepOutputs | Refused)
    worker.engine.gate.set()
    until(lambda: worker.loop.num_open == 0)
    assert worker.engine.submitted == [submit]


def test_parameters_that_cannot_be_served_are_answered_by_a_failure(worker: StubWorker, peer: Peer) -> None:
    peer.hello()
    for params, param in (({"n": 10**9}, "n"), ({"n": 0}, "n"), ({"temperature": -1.0}, "temperature")):
        request_id = peer.submit([1], **params)
        (failure,) = of_kind(Failure, peer.outputs().news)
        assert (failure.request_id, failure.kind, failure.param) == (request_id, "invalid_request_error", param)
    assert worker.loop.num_open == 0


def test_each_router_gets_its_own_outputs_and_all_get_the_idle_load(worker: StubWorker, peer: Peer) -> None:
    other = Peer(worker.address)
    peer.hello()
    other.hello()
    worker.engine.gate.clear()
    mine, theirs = peer.submit([1]), other.submit([2])
    until(lambda: worker.loop.num_open == 2)
    worker.engine.gate.set()
    assert peer.tokens(mine) == [stub_token([1], 0, position) for position in range(3)]
    assert other.tokens(theirs) == [stub_token([2], 0, position) for position in range(3)]
    for socket in (peer, other):
        last = socket.receive()
        while isinstance(last, StepOutputs) and last.load.running:
            last = socket.receive()
        assert isinstance(last, StepOutputs)
        assert last.load.blocks.in_use == 0
    other.close()


def test_a_router_cannot_abort_or_finish_what_is_not_its_own(worker: StubWorker, peer: Peer) -> None:
    other = Peer(worker.address)
    peer.hello()
    other.hello()
    worker.engine.gate.clear()
    mine = peer.submit([1])
    until(lambda: worker.loop.num_open == 1)
    other.send(Abort(request_ids=[mine]), Finish(request_id=mine, sample=0, keep_tokens=0, reason=FinishReason.STOP))
    other.hello()
    assert worker.loop.num_open == 1
    assert worker.engine.aborted == worker.engine.finished == []
    worker.engine.gate.set()
    assert len(peer.tokens(mine)) == 3
    other.close()


def test_a_router_that_says_hello_again_has_nothing_left(worker: StubWorker, peer: Peer) -> None:
    peer.hello()
    worker.engine.gate.clear()
    request_id = peer.submit([1])
    until(lambda: worker.loop.num_open == 1)
    peer.send(Hello(version=PROTOCOL_VERSION, router_id=peer.router_id))
    until(lambda: worker.engine.aborted == [request_id])
    assert worker.loop.num_open == 0


def test_a_silent_router_has_its_requests_aborted_and_must_say_hello_again() -> None:
    worker = StubWorker("")
    silent, alive = Peer(worker.address), Peer(worker.address)
    silent.hello(silence_s=0.4)
    alive.hello(silence_s=2.0)
    worker.engine.gate.clear()
    lost, kept = silent.submit([1]), alive.submit([2])

    def aborted() -> bool:
        alive.send(Ping())
        return worker.engine.aborted == [lost]

    until(aborted)
    silent.send(Ping())
    answer = silent.receive()
    while isinstance(answer, StepOutputs):
        answer = silent.receive()
    assert isinstance(answer, Refused)
    worker.engine.gate.set()
    assert len(alive.tokens(kept)) == 3
    worker.stop()
    silent.close()
    alive.close()


def test_a_step_longer_than_the_lease_does_not_make_a_router_silent() -> None:
    worker = StubWorker("")
    peer = Peer(worker.address)
    peer.hello(silence_s=0.3)
    worker.engine.stuck_s = 1.0
    request_id = peer.submit([1])  # three steps of a second
    pinging = threading.Event()

    def ping() -> None:
        while not pinging.wait(0.1):
            peer.send(Ping())

    thread = threading.Thread(target=ping)
    thread.start()
    tokens = peer.tokens(request_id)
    pinging.set()
    thread.join()
    assert len(tokens) == 3
    assert worker.engine.aborted == []
    worker.stop()
    peer.close()


def test_a_router_whose_connection_is_gone_has_its_requests_aborted(worker: StubWorker, peer: Peer) -> None:
    peer.hello()
    request_id = peer.submit([1], max_tokens=10**9)
    peer.outputs()
    peer.close()
    until(lambda: worker.engine.aborted == [request_id])


def test_a_stopped_worker_tells_its_open_requests(worker: StubWorker, peer: Peer) -> None:
    peer.hello()
    worker.engine.gate.clear()
    request_id = peer.submit([1])
    until(lambda: worker.loop.num_open == 1)
    worker.stop()
    (failure,) = of_kind(Failure, peer.outputs().news)
    assert (failure.request_id, failure.kind) == (request_id, "service_unavailable_error")
