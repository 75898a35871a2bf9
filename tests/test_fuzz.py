"""Malformed and hostile bytes on every port of a running cluster: the processes live, serve, and neither swell nor chatter.

A router, a prefill and a decode worker run as processes. Each test throws thousands of cases at one port and then asks: is
every process still the same one, is a request answered as before, and did memory and logs stay in bounds?
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import random
import socket
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import psutil
import pytest
import zmq
from fuzzing import GREETING, READY, hostile_messages, hostile_openings, hostile_requests
from patience import PATIENCE_S
from process_cluster import ProcessCluster
from server import is_idle
from tiny_models import tiny_model

from kvrelay.ids import TransferId, new_request_id, new_router_id, new_transfer_id, new_worker_id
from kvrelay.sampling import Grammar, GrammarKind, SamplingParams
from kvrelay.states import ConsumerState, FinishReason, Role, WorkerState
from kvrelay.wire import PROTOCOL_VERSION, relay
from kvrelay.wire import events as events_plane
from kvrelay.wire import kv as signal_plane
from kvrelay.wire import serving as serving_plane
from kvrelay.wire.codec import Decoder, encode
from kvrelay.wire.registry import Leave, Register, Renew, WorkerLoad, WorkerRecord

SEED = int(os.environ.get("KVRELAY_FUZZ_SEED", "1"))
CASES = int(os.environ.get("KVRELAY_FUZZ_CASES", "3000"))  # a port; `make test-all` has 10,000
BATCH = CASES // 4
OPENINGS = 400  # of these cases, connections that do not speak ZMQ, or not to the end
MAX_GROWTH_BYTES = 80 << 20  # of one process, by one port's cases
MAX_LINES = 300  # logged by one process about one port's cases
PATIENCE_MS = 60_000
PROMPT = list(range(5, 45))
NOWHERE = "tcp://127.0.0.1:1"

to_router: Decoder[serving_plane.ToRouter] = Decoder(serving_plane.ToRouter)
to_subscriber: Decoder[events_plane.ToSubscriber] = Decoder(events_plane.ToSubscriber)


class Target:
    """The cluster under attack, and what was true of it before."""

    def __init__(self, cluster: ProcessCluster) -> None:
        self.cluster = cluster
        self.pids = [cluster.router.pid, *(worker.pid for worker in cluster.workers)]
        self.workers = {entry["role"]: entry for entry in cluster.shown()}
        self.answer = self.ask()
        self.records = {role: self._record(role) for role in ("prefill", "decode")}

    def ask(self) -> Any:
        body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "return_token_ids": True}
        return self.cluster.post("/v1/completions", body)["choices"][0]["token_ids"]

    def _record(self, role: str) -> WorkerRecord:
        """As a router gets it: with the addresses that /cluster does not show."""
        with dealer(self.workers[role]["address"], new_router_id()) as link:
            link.send(encode(serving_plane.Hello(version=PROTOCOL_VERSION, router_id=new_router_id(), silence_s=1.0)))
            assert link.poll(PATIENCE_MS)
            welcome = to_router.decode(link.recv())
        assert isinstance(welcome, serving_plane.Welcome)
        return welcome.worker

    def check(self) -> None:
        """Everybody is still there, and serves."""
        assert self.ask() == self.answer
        assert all(psutil.pid_exists(pid) for pid in self.pids)
        ready = {entry["id"] for entry in self.cluster.shown() if entry["state"] == "ready"}
        assert {entry["id"] for entry in self.workers.values()} <= ready, self.cluster.logs()

    def until_idle(self) -> None:
        """The leak check."""
        self.cluster.until(lambda: all(is_idle(entry) for entry in self.cluster.shown()))

    def sizes(self) -> list[int]:
        return [psutil.Process(pid).memory_info().rss for pid in self.pids]

    def num_lines(self) -> list[int]:
        paths = [self.cluster.router_log, *(worker.log for worker in self.cluster.workers)]
        return [path.read_bytes().count(b"\n") for path in paths]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    flags = ("--kv-blocks", "128", "--threads", "1", "--progress", "plain", "--transfer-lease-s", "3")
    folder = tmp_path_factory.mktemp("fuzz")
    router = ("--local-prefill-tokens", "0")
    model = str(tiny_model("llama"))
    with ProcessCluster(model, folder, registration_s=4.0, router_flags=router, worker_flags=flags) as cluster:
        cluster.add("prefill")
        cluster.add("decode")
        cluster.until_ready(2)
        yield Target(cluster)


@contextlib.contextmanager
def bounded(target: Target, max_lines: int = MAX_LINES) -> Iterator[None]:
    """Neither memory nor logs grow with the number of cases."""
    sizes, lines = target.sizes(), target.num_lines()
    yield
    target.check()
    grown = [after - before for after, before in zip(target.sizes(), sizes, strict=True)]
    assert max(grown) < MAX_GROWTH_BYTES, f"grew by {grown} bytes"
    said = [after - before for after, before in zip(target.num_lines(), lines, strict=True)]
    assert max(said) < max_lines, f"logged {said} lines\n{target.cluster.logs(5)}"


@contextlib.contextmanager
def dealer(address: str, identity: str, kind: int = zmq.DEALER) -> Iterator[zmq.Socket[bytes]]:
    link: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    for option, value in ((zmq.LINGER, 0), (zmq.SNDHWM, 0), (zmq.RCVHWM, 0), (zmq.RECONNECT_IVL, 10)):
        link.setsockopt(option, value)
    if identity:
        link.setsockopt(zmq.IDENTITY, identity.encode())
    link.connect(address)
    try:
        yield link
    finally:
        link.close()


def throw(address: str, messages: Sequence[list[bytes]], last: bytes, is_last: Callable[[bytes], bool], identity: str) -> None:
    """On one connection, until the answer to `last` shows that all of them were read."""
    with dealer(address, identity) as link:
        for number, frames in enumerate(messages):
            link.send_multipart(frames)
            if number % 100 == 0:
                _drain(link)
        for _ in range(PATIENCE_MS // 500):
            link.send(last)  # again, should a frame before it have cost the connection
            while link.poll(500):
                if is_last(link.recv_multipart()[-1]):
                    return
    raise AssertionError("nobody answers any more")


def _drain(link: zmq.Socket[bytes]) -> None:
    with contextlib.suppress(zmq.Again):
        while True:
            link.recv_multipart(zmq.DONTWAIT)


def knock(address: str, openings: Sequence[bytes]) -> list[socket.socket]:
    """Connections with these openings. Some are closed at once; the others are left half open, for the caller to close."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    held = []
    for number, opening in enumerate(openings):
        link = socket.create_connection((host.strip("[]"), int(port)), timeout=PATIENCE_S)
        with contextlib.suppress(ConnectionError):
            link.sendall(opening)
        if number % 10:
            link.close()
        else:
            held.append(link)
    return held


def attack(
    target: Target,
    address: str,
    valid: Sequence[bytes],
    last: bytes,
    is_last: Callable[[bytes], bool],
    *,
    identities: Sequence[str],
) -> None:
    """All cases of a ZMQ port: first those who do not get as far as a message, then messages."""
    rng = random.Random(SEED)
    cases = hostile_messages(rng, valid)
    with bounded(target):
        held = knock(address, list(itertools.islice(hostile_openings(rng), OPENINGS)))
        for start in range(OPENINGS, CASES, BATCH):
            batch = list(itertools.islice(cases, min(BATCH, CASES - start)))
            throw(address, batch, last, is_last, identities[start // BATCH % len(identities)])
            target.check()
        for link in held:
            link.close()


def is_message(decoder: Decoder[Any], *kinds: type) -> Callable[[bytes], bool]:
    return lambda frame: isinstance(decoder.decode(frame), kinds)


def record(**changes: object) -> WorkerRecord:
    made = WorkerRecord(
        id=new_worker_id("decode"),
        role=Role.DECODE,
        state=WorkerState.READY,
        host="there",
        pid=1,
        serving_address=NOWHERE,
        model="tiny",
        fingerprint="tiny",
        max_model_len=128,
        max_batch=8,
        max_queue=8,
        version=PROTOCOL_VERSION,
        signal_address=NOWHERE,
        events_address=NOWHERE,
        replay_address=NOWHERE,
        block_size=16,
    )
    return msgspec.structs.replace(made, **changes)


def registry_messages() -> list[bytes]:
    records = [record() for _ in range(12)]
    made: list[msgspec.Struct] = [Register(record=each, ttl_s=0.5) for each in records]
    made += [Renew(worker_id=each.id, state=WorkerState.READY, load=WorkerLoad(running=2)) for each in records[:4]]
    made += [Leave(worker_id=records[0].id), Register(record=record(role=Role.WHOLE, version=1), ttl_s=0.5)]
    return [encode(each) for each in made]


def test_the_registry_lives(target: Target) -> None:
    unknown = new_worker_id("whole")
    last = encode(Renew(worker_id=unknown, state=WorkerState.READY, load=WorkerLoad()))
    attack(
        target,
        target.cluster.registry,
        registry_messages(),
        last,
        lambda frame: unknown.encode() in frame,
        identities=[""],
    )


def test_workers_that_do_not_exist_do_not_keep_others_out(target: Target) -> None:
    """Each has links of its own in the router, for as long as its lease lasts. Joining and leaving have a line each."""
    unknown = new_worker_id("whole")
    last = encode(Renew(worker_id=unknown, state=WorkerState.READY, load=WorkerLoad()))
    crowd = [[encode(Register(record=record(), ttl_s=1.0))] for _ in range(400)]
    with bounded(target, max_lines=3 * len(crowd)):
        throw(target.cluster.registry, crowd, last, lambda frame: unknown.encode() in frame, "")
        target.check()
        target.cluster.until(lambda: len(target.cluster.shown()) == 2)


def submit(**changes: object) -> serving_plane.Submit:
    made = serving_plane.Submit(
        request_id=new_request_id(), external_id="fuzz", prompt=[5, 6, 7], params=SamplingParams(max_tokens=2)
    )
    return msgspec.structs.replace(made, **changes)


def serving_messages(target: WorkerRecord) -> list[bytes]:
    producers, consumers = [new_worker_id("prefill") for _ in range(6)], [new_worker_id("decode") for _ in range(6)]
    transfers = [
        serving_plane.TransferInfo(
            transfer_id=new_transfer_id(),
            mode="write" if number % 2 else "read",
            producer=target.id if target.role is Role.PREFILL else producers[number],
            consumer=target.id if target.role is Role.DECODE else consumers[number],
            signal_address=NOWHERE,
        )
        for number in range(6)
    ]
    made: list[msgspec.Struct] = [submit(transfer=each, prompt=PROMPT) for each in transfers]
    made += [
        submit(),
        submit(resume=[serving_plane.Resumed(0, [7])]),
        submit(params=SamplingParams(n=3, logprobs=2, prompt_logprobs=1, seed=5, stop_token_ids=[4], logit_bias={3: 1.0})),
        submit(params=SamplingParams(grammar=Grammar(kind=GrammarKind.REGEX, source="a(b"))),
        serving_plane.Hello(version=PROTOCOL_VERSION, router_id=new_router_id()),
        serving_plane.Abort(request_ids=[new_request_id()]),
        serving_plane.Finish(request_id=new_request_id(), sample=0, keep_tokens=1, reason=FinishReason.STOP),
        serving_plane.Ping(),
        serving_plane.PeerLost(worker_id=new_worker_id("prefill")),
    ]
    return [encode(each) for each in made]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_lives(target: Target, role: str) -> None:
    """Of its routers one has said Hello, and gets through to the engine; the other has not."""
    router = new_router_id()
    hello = encode(serving_plane.Hello(version=PROTOCOL_VERSION, router_id=router, silence_s=5.0))
    welcomed = is_message(to_router, serving_plane.Welcome)
    address = target.workers[role]["address"]
    valid = serving_messages(target.records[role])
    throw(address, [[hello]], hello, welcomed, router)
    attack(target, address, [*valid, hello], hello, welcomed, identities=[router, "nobody"])
    throw(address, [], hello, welcomed, router)  # who says Hello again has lost what it had
    target.until_idle()


def signal_messages(target: WorkerRecord, consumer: str) -> list[bytes]:
    transfer = TransferId("xfer-00000000-0000-0000-0000-000000000000")
    layout = signal_plane.Layout(
        num_layers=3, num_blocks=128, block_size=16, num_kv_heads=2, head_dim=8, dtype="float32", item_bytes=4
    )
    engines = [relay.EngineInfo(name=name, info=b"\x01" * 40) for name in ("shm", "memory", "nixl")]
    made: list[msgspec.Struct] = [
        relay.Hello(version=signal_plane.KV_VERSION, worker_id=consumer, fingerprint=target.fingerprint),  # type: ignore[arg-type]
        relay.Map(layout=layout, host="there", engines=engines),
        signal_plane.Reserve(transfer_id=transfer, blocks=[0, 1, 2], skip_tokens=0),
        signal_plane.Reserve(transfer_id=new_transfer_id(), blocks=[0, 1, 2], skip_tokens=0),
        signal_plane.Pull(transfer_id=transfer, skip_tokens=0),
        signal_plane.ReadDone(transfer_id=transfer),
        signal_plane.Release(transfer_id=transfer),
        relay.Heartbeat(number=1, transfers=[(transfer, ConsumerState.RESERVED)]),
        relay.Abort(transfer_id=transfer, reason="because"),
        relay.AbortAck(transfer_id=transfer),
    ]
    return [encode(each) for each in made]


def test_a_producer_lives(target: Target) -> None:
    consumer, prefill = new_worker_id("decode"), target.records["prefill"]
    valid = signal_messages(prefill, consumer)
    answered = lambda frame: isinstance(signal_plane.decode_for_consumer(frame), relay.Welcome)  # noqa: E731
    throw(prefill.signal_address, [], valid[0], answered, consumer)
    attack(target, prefill.signal_address, valid, valid[0], answered, identities=[consumer])
    with dealer(prefill.signal_address, "a stranger") as link:
        for frame in valid * 100:
            link.send(frame)
    target.check()


def test_the_replay_port_lives(target: Target) -> None:
    worker = target.records["prefill"]
    assert worker.replay_address
    good = encode(events_plane.Replay(worker_id=worker.id, first=1))
    valid = [good, encode(events_plane.Replay(worker_id=new_worker_id("decode"), first=2**40))]
    answered = is_message(to_subscriber, events_plane.Beat, events_plane.Snapshot)
    attack(target, worker.replay_address, valid, good, answered, identities=[""])


def test_the_event_port_lives(target: Target) -> None:
    """A subscriber can say nothing but which topics it wants."""
    worker, rng = target.records["prefill"], random.Random(SEED)
    with bounded(target):
        held = knock(worker.events_address, list(itertools.islice(hostile_openings(rng), OPENINGS)))
        for _ in range(4):
            with dealer(worker.events_address, "", zmq.XSUB) as link:
                for frames in itertools.islice(hostile_messages(rng, [b"\x01topic", b"\x00topic", b"\x01"]), CASES // 4):
                    link.send_multipart(frames)
                link.send(b"\x01")
                assert link.poll(PATIENCE_MS), "no event comes any more"
                to_subscriber.decode(link.recv())
            target.check()
        for half_open in held:
            half_open.close()


def test_the_http_port_lives(target: Target) -> None:
    rng = random.Random(SEED)
    requests = hostile_requests(rng)
    with bounded(target):
        held: list[socket.socket] = []
        for number in range(CASES // 20):
            _send_http(target, b"".join(itertools.islice(requests, 10)))
            for case in itertools.islice(requests, 10):
                held += _send_http(target, case, keep=number % 20 == 0)
            if number % 125 == 0:
                target.check()
        for link in held:
            link.close()


def _send_http(target: Target, data: bytes, *, keep: bool = False) -> list[socket.socket]:
    link = socket.create_connection((target.cluster.host, target.cluster.port), timeout=20)  # some are never answered
    with contextlib.suppress(OSError):
        link.sendall(data)
        if not keep:
            link.shutdown(socket.SHUT_WR)
            while link.recv(65536):
                pass
    if keep:
        return [link]
    link.close()
    return []


def test_headers_without_end_are_cut_off(target: Target) -> None:
    with bounded(target):
        link = socket.create_connection((target.cluster.host, target.cluster.port), timeout=PATIENCE_S)
        link.sendall(b"GET /cluster HTTP/1.1\r\n")
        line = b"x-%d: " + b"y" * 8000 + b"\r\n"
        with pytest.raises(ConnectionError):  # noqa: PT012
            for number in range(100_000):
                link.sendall(line % number)
        link.close()


def test_a_body_beyond_the_limit_is_not_taken(target: Target) -> None:
    with bounded(target):
        request = urllib.request.Request(target.cluster.url + "/v1/completions", b"x" * (33 << 20))
        with pytest.raises(OSError):
            urllib.request.urlopen(request, timeout=PATIENCE_S)


def test_a_frame_beyond_the_limit_costs_the_connection(target: Target) -> None:
    with bounded(target):
        host, _, port = target.cluster.registry.removeprefix("tcp://").rpartition(":")
        link = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
        link.sendall(GREETING + READY + b"\x02" + (2 << 20).to_bytes(8))
        with contextlib.suppress(ConnectionError):
            while link.recv(4096):
                pass
        link.close()


# Peers that the cluster itself connects to


@contextlib.contextmanager
def lair(kind: int) -> Iterator[tuple[zmq.Socket[bytes], str]]:
    """A socket that waits for its victims, and its address."""
    trap: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    trap.setsockopt(zmq.LINGER, 0)
    trap.setsockopt(zmq.SNDHWM, 0)
    port = trap.bind_to_random_port("tcp://127.0.0.1")
    try:
        yield trap, f"tcp://127.0.0.1:{port}"
    finally:
        trap.close()


def test_a_hostile_worker_does_not_hurt_the_router(target: Target) -> None:
    """On its link, and with its events."""
    rng = random.Random(SEED)
    with bounded(target), lair(zmq.ROUTER) as (link, address), lair(zmq.PUB) as (events, events_address):
        fake = record(serving_address=address, events_address=events_address, replay_address=address)
        with dealer(target.cluster.registry, "") as registry:
            registry.send(encode(Register(record=fake, ttl_s=30.0)))
            assert link.poll(PATIENCE_MS)
            identities = {link.recv_multipart()[0] for _ in range(2)}  # the link, and the subscriber that asks for events
            valid = [encode(each) for each in _worker_messages(fake)]
            for frames in itertools.islice(hostile_messages(rng, valid), CASES // 2):
                for identity in identities:
                    link.send_multipart([identity, *frames])
                events.send_multipart(frames)
            _drain(link)
            assert link.poll(PATIENCE_MS), "the router has stopped talking"
            target.check()
            registry.send(encode(Leave(worker_id=fake.id)))
            target.cluster.until(lambda: len(target.cluster.shown()) == 2)


def _worker_messages(fake: WorkerRecord) -> list[msgspec.Struct]:
    output = serving_plane.SequenceOutput(new_request_id(), 0, 0, [5], FinishReason.LENGTH)
    failure = serving_plane.Failure(new_request_id(), "internal_error", "broken")
    stored = events_plane.Stored(hashes=[b"h" * 16], parent=b"p" * 16)
    batch = events_plane.pack_events([stored, events_plane.Removed(hashes=[b"h" * 16]), events_plane.Cleared()])
    return [
        serving_plane.Welcome(version=PROTOCOL_VERSION, worker=fake),
        serving_plane.Refused(reason="because"),
        serving_plane.StepOutputs(worker_id=fake.id, step=1, load=WorkerLoad(), outputs=[output], news=[failure]),
        events_plane.Events(worker_id=fake.id, sequence=1, events=batch),
        events_plane.Events(worker_id=fake.id, sequence=9, events=batch),
        events_plane.Beat(worker_id=fake.id, sequence=3),
        events_plane.Snapshot(worker_id=fake.id, sequence=2, hashes=[b"h" * 16] * 3),
    ]


def test_a_hostile_producer_does_not_hurt_its_consumer(target: Target) -> None:
    rng, decode, producer = random.Random(SEED), target.records["decode"], new_worker_id("prefill")
    router = new_router_id()
    with bounded(target), lair(zmq.ROUTER) as (link, address), dealer(decode.serving_address, router) as serving:
        transfer = serving_plane.TransferInfo(
            transfer_id=new_transfer_id(), mode="write", producer=producer, consumer=decode.id, signal_address=address
        )
        serving.send(encode(serving_plane.Hello(version=PROTOCOL_VERSION, router_id=router, silence_s=9.0)))
        serving.send(encode(submit(transfer=transfer, prompt=PROMPT)))
        assert link.poll(PATIENCE_MS), "the consumer does not come"
        identity = link.recv_multipart()[0]
        valid = [encode(each) for each in _producer_messages(producer, transfer.transfer_id)]
        for frames in itertools.islice(hostile_messages(rng, valid), CASES):
            link.send_multipart([identity, *frames])
        _drain(link)
        target.check()
    target.until_idle()


def _producer_messages(producer: str, transfer: TransferId) -> list[msgspec.Struct]:
    layout = signal_plane.Layout(
        num_layers=3, num_blocks=128, block_size=16, num_kv_heads=2, head_dim=8, dtype="float32", item_bytes=4
    )
    first = serving_plane.FirstToken(0, 5)
    return [
        relay.Welcome(version=signal_plane.KV_VERSION, worker_id=producer),  # type: ignore[arg-type]
        relay.Mapped(layout=layout, engine=relay.EngineInfo(name="shm", info=b"\x01" * 40)),
        relay.Refused(reason="because", about="sender"),
        signal_plane.Starting(transfer_id=transfer, num_tokens=len(PROMPT)),
        signal_plane.Computed(transfer_id=transfer, blocks=[0, 1, 2], num_tokens=32, next_tokens=40, layers=2),
        signal_plane.WriteDone(transfer_id=transfer, first_tokens=[first], blocks=[0, 1, 2]),
        signal_plane.Ready(transfer_id=transfer, blocks=[0, 1, 2], num_tokens=40, first_tokens=[first]),
        signal_plane.NotReady(transfer_id=transfer),
        relay.HeartbeatAck(number=1, transfers=[(transfer, None)]),
        relay.AbortAck(transfer_id=transfer),
    ]


def test_the_log_of_a_cluster_under_attack_can_still_be_read(target: Target) -> None:
    text = target.cluster.router_log.read_text(errors="replace")
    assert "Traceback" not in text, text[text.index("Traceback") :][:3000]
    for worker in target.cluster.workers:
        text = pathlib.Path(worker.log).read_text(errors="replace")
        assert "Traceback" not in text, text[text.index("Traceback") :][:3000]
