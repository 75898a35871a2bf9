"""The cluster key: on every plane, whoever does not hold it gets nowhere, and whoever does notices nothing of that."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

import pytest
import zmq
from patience import PATIENCE_S, eventually
from registry_records import make_record
from stub_worker import StubWorker
from transfer.relay_pair import Producer
from zmq.utils.monitor import parse_monitor_message

from kvrelay.discovery.embedded import EmbeddedMembership, EmbeddedRegistration
from kvrelay.events.publisher import EventPublisher, PublisherSettings
from kvrelay.ids import new_router_id, new_worker_id
from kvrelay.planes import curve as plane
from kvrelay.planes.cluster_key import ClusterKey, derive
from kvrelay.planes.connection import Connection
from kvrelay.wire import PROTOCOL_VERSION, kv, relay
from kvrelay.wire.codec import encode
from kvrelay.wire.events import Replay
from kvrelay.wire.registry import Register
from kvrelay.wire.serving import Hello

PATIENCE_MS = 60_000
KEY, OTHER = derive(b"k" * 32), derive(b"o" * 32)
MARKER = "words-that-nobody-else-may-read"
PUBLISHER = new_worker_id("whole")

Protect = Callable[[plane.Socket], None]


@pytest.fixture(autouse=True)
def _key_of_this_process() -> Iterator[None]:
    plane.use_key(KEY)
    yield
    plane.use_key(None)


@dataclass
class Spoken:
    """How to talk to one plane: what to connect, and what to say first. A subscriber says nothing."""

    address: str
    kind: int
    frame: bytes = b""
    identity: bytes = b""


@contextlib.asynccontextmanager
async def registry_plane() -> AsyncIterator[Spoken]:
    membership = EmbeddedMembership("tcp://127.0.0.1:*")
    membership.start(lambda _: None, lambda _: None, lambda *_: None)
    yield Spoken(membership.address, zmq.DEALER, encode(Register(record=make_record(), ttl_s=60.0)))
    membership.close()


@contextlib.asynccontextmanager
async def serving_plane() -> AsyncIterator[Spoken]:
    worker = StubWorker("")
    hello = Hello(version=PROTOCOL_VERSION, router_id=new_router_id(), silence_s=60.0)
    yield Spoken(worker.address, zmq.DEALER, encode(hello))
    worker.stop()


@contextlib.asynccontextmanager
async def signal_plane() -> AsyncIterator[Spoken]:
    producer, worker = Producer(), new_worker_id("decode")
    hello = relay.Hello(version=kv.KV_VERSION, worker_id=worker, fingerprint="tiny/float32")
    yield Spoken(producer.relay.signal_address, zmq.DEALER, encode(hello), worker.encode())
    producer.close()


@contextlib.asynccontextmanager
async def event_plane() -> AsyncIterator[Spoken]:
    """An idle worker, which says so again and again."""
    with _publishing() as publisher:
        yield Spoken(publisher.events_address, zmq.SUB)


@contextlib.asynccontextmanager
async def replay_plane() -> AsyncIterator[Spoken]:
    with _publishing() as publisher:
        yield Spoken(publisher.replay_address, zmq.DEALER, encode(Replay(worker_id=PUBLISHER, first=1)))


@contextlib.contextmanager
def _publishing() -> Iterator[EventPublisher]:
    publisher = EventPublisher(PUBLISHER, host="127.0.0.1", settings=PublisherSettings(beat_s=0.01))
    publisher.start()
    yield publisher
    publisher.close()


PLANES = {
    "registry": registry_plane,
    "serving": serving_plane,
    "signal": signal_plane,
    "events": event_plane,
    "replay": replay_plane,
}


def no_key(_: plane.Socket) -> None:
    """As any program that speaks ZMQ."""


def a_password(stranger: plane.Socket) -> None:
    stranger.setsockopt(zmq.PLAIN_USERNAME, b"admin")
    stranger.setsockopt(zmq.PLAIN_PASSWORD, b"admin")


def another_key(stranger: plane.Socket) -> None:
    _show(stranger, OTHER.server_public, OTHER)


def only_the_servers_key(stranger: plane.Socket) -> None:
    """Enough for CURVE itself: it is the guard that refuses this one."""
    _show(stranger, KEY.server_public, OTHER)


def only_the_clients_key(stranger: plane.Socket) -> None:
    _show(stranger, OTHER.server_public, KEY)


def _show(stranger: plane.Socket, server_public: bytes, key: ClusterKey) -> None:
    stranger.setsockopt(zmq.CURVE_SERVERKEY, server_public)
    stranger.setsockopt(zmq.CURVE_PUBLICKEY, key.client_public)
    stranger.setsockopt(zmq.CURVE_SECRETKEY, key.client_secret)


STRANGERS: list[Protect] = [no_key, a_password, another_key, only_the_servers_key, only_the_clients_key]


def open_socket(kind: int, protect: Protect) -> plane.Socket:
    made: plane.Socket = zmq.Context.instance().socket(kind)
    made.setsockopt(zmq.LINGER, 0)
    protect(made)
    return made


def speak(spoken: Spoken, talker: plane.Socket) -> None:
    if spoken.identity:
        talker.setsockopt(zmq.IDENTITY, spoken.identity)
    if spoken.kind == zmq.SUB:
        talker.setsockopt(zmq.SUBSCRIBE, b"")
    talker.connect(spoken.address)
    if spoken.frame:
        with contextlib.suppress(zmq.Again):  # the connection may have been refused by now
            talker.send(spoken.frame, zmq.NOBLOCK)


def host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


def is_answered(spoken: Spoken) -> bool:
    """As a member of the cluster."""
    with plane.connecting(spoken.kind) as member:
        speak(spoken, member)
        return bool(member.poll(PATIENCE_MS)) and bool(member.recv())


def is_refused(spoken: Spoken, protect: Protect) -> bool:
    """Waits for the end of the handshake; then nothing may have come, and nothing may come."""
    with open_socket(spoken.kind, protect) as stranger:
        monitor: plane.Socket = stranger.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_DISCONNECTED
        )
        speak(spoken, stranger)
        assert monitor.poll(PATIENCE_MS), "neither accepted nor refused"
        event = parse_monitor_message(monitor.recv_multipart())["event"]
        heard = stranger.poll(50)
        stranger.disable_monitor()
        monitor.close()
    return event != zmq.EVENT_HANDSHAKE_SUCCEEDED and not heard


@pytest.mark.parametrize("name", PLANES)
async def test_strangers_are_refused_and_counted_and_members_served(name: str) -> None:
    async with PLANES[name]() as spoken:
        num_refused = plane.num_refused()
        assert await asyncio.to_thread(is_answered, spoken)
        assert plane.num_refused() == num_refused
        for stranger in STRANGERS:
            num_refused = plane.num_refused()
            assert await asyncio.to_thread(is_refused, spoken, stranger), stranger.__name__
            await eventually(lambda before=num_refused: plane.num_refused() > before)  # type: ignore[misc]
        assert await asyncio.to_thread(is_answered, spoken)


@pytest.mark.parametrize("name", PLANES)
async def test_a_raw_connection_reads_nothing_but_the_greeting(name: str) -> None:
    def read_all(address: str) -> bytes:
        with socket.create_connection(host_and_port(address), timeout=PATIENCE_MS / 1000) as raw:
            raw.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48))  # a ZMTP greeting without security
            received = b""
            with contextlib.suppress(ConnectionResetError):
                while piece := raw.recv(4096):
                    received += piece
        return received

    async with PLANES[name]() as spoken:
        received = await asyncio.to_thread(read_all, spoken.address)
        assert len(received) <= 64  # a greeting names a version and a mechanism, and says nothing else
        assert await asyncio.to_thread(is_answered, spoken)


@pytest.mark.parametrize("name", PLANES)
async def test_without_a_key_everybody_is_served(name: str) -> None:
    """What the tests above tell apart."""
    plane.use_key(None)
    async with PLANES[name]() as spoken:
        assert await asyncio.to_thread(is_answered, spoken)
        assert not await asyncio.to_thread(is_refused, spoken, no_key)


def be_an_impostor(impostor: plane.Socket) -> None:
    impostor.setsockopt(zmq.CURVE_SERVER, 1)
    impostor.setsockopt(zmq.CURVE_SECRETKEY, OTHER.server_secret)


@pytest.mark.parametrize("protect", [no_key, be_an_impostor])
def test_a_worker_tells_nothing_to_a_registry_without_the_key(protect: Protect) -> None:
    with open_socket(zmq.ROUTER, protect) as impostor:
        port = impostor.bind_to_random_port("tcp://127.0.0.1")
        registration = EmbeddedRegistration(f"tcp://127.0.0.1:{port}", timeout_s=0.3)
        assert not registration.register(make_record(), 4.0)
        assert not impostor.poll(0)
        registration.close()


async def test_a_router_takes_up_a_worker_whose_key_was_put_right() -> None:
    up = asyncio.Event()
    impostor = open_socket(zmq.ROUTER, no_key)
    port = impostor.bind_to_random_port("tcp://127.0.0.1")
    address = f"tcp://127.0.0.1:{port}"
    connection = Connection(
        address, identity=None, silence_s=1.0, on_up=up.set, on_down=lambda: None, on_message=lambda _: None
    )
    await asyncio.to_thread(_until_refused, impostor)
    impostor.close()
    worker = plane.listening(zmq.ROUTER)
    await asyncio.to_thread(_bind_again, worker, address)
    try:
        await asyncio.wait_for(up.wait(), PATIENCE_MS / 1000)
    finally:
        connection.close()
        worker.close()


def _until_refused(listener: plane.Socket) -> None:
    monitor: plane.Socket = listener.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_DISCONNECTED)
    assert monitor.poll(PATIENCE_MS)
    listener.disable_monitor()
    monitor.close()


def _bind_again(listener: plane.Socket, address: str) -> None:
    """The address is free as soon as ZMQ's own thread has closed the other socket."""
    while True:
        try:
            listener.bind(address)
        except zmq.ZMQError:
            threading.Event().wait(0.01)
        else:
            return


# On the wire


class Tap:
    """A TCP proxy that keeps all it forwards."""

    def __init__(self, address: str) -> None:
        self._target = host_and_port(address)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.seen = b""
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._forward, args=[source, sink], daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self.seen += data
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()


@pytest.mark.parametrize("key", [KEY, None], ids=["key", "open"])
async def test_what_a_listener_on_the_wire_sees(key: ClusterKey | None) -> None:
    """The registry's record goes one way, the model's name with it; events go the other, each with its worker's name."""
    plane.use_key(key)
    async with registry_plane() as registry, event_plane() as events:
        taps = [Tap(registry.address), Tap(events.address)]
        record = encode(Register(record=make_record(model=MARKER), ttl_s=60.0))
        assert await asyncio.to_thread(is_answered, Spoken(taps[0].address, zmq.DEALER, record))
        assert await asyncio.to_thread(is_answered, Spoken(taps[1].address, zmq.SUB))
        for tap, marker in zip(taps, (MARKER, PUBLISHER), strict=True):
            tap.close()
            assert len(tap.seen) > 200
            assert (marker.encode() in tap.seen) is (key is None)


# Whose key it is


async def test_clusters_with_and_without_keys_live_in_one_process() -> None:
    keys = [KEY, OTHER, None]
    async with contextlib.AsyncExitStack() as stack:
        talks = []
        for key in keys:
            with plane.keyed(key):
                talks.append(await stack.enter_async_context(registry_plane()))
        for key, talk in zip(keys, talks, strict=True):
            with plane.keyed(key):
                assert await asyncio.to_thread(is_answered, talk)
        assert await asyncio.to_thread(is_refused, talks[0], another_key)
        assert not await asyncio.to_thread(is_refused, talks[1], another_key)
        assert plane.current_key() is KEY


def test_without_its_guard_a_listener_lets_nobody_in() -> None:
    """Another context than the process's: there is no guard in it."""
    with zmq.Context() as context:
        listener = context.socket(zmq.ROUTER)
        with plane.listening(zmq.ROUTER) as model:
            for option in (zmq.CURVE_SERVER, zmq.ZAP_DOMAIN, zmq.ZAP_ENFORCE_DOMAIN):
                listener.setsockopt(option, model.getsockopt(option))
        listener.setsockopt(zmq.CURVE_SECRETKEY, KEY.server_secret)
        port = listener.bind_to_random_port("tcp://127.0.0.1")
        spoken = Spoken(f"tcp://127.0.0.1:{port}", zmq.DEALER, b"hello")
        assert is_refused(spoken, lambda member: _show(member, KEY.server_public, KEY))
        listener.close(linger=0)


def test_the_guard_ends_with_its_context() -> None:
    """As when a worker ends its sockets in order before it starts itself again."""
    script = (
        "import zmq; from kvrelay.planes import cluster_key, curve\n"
        "curve.use_key(cluster_key.derive(bytes(32)))\n"
        "for _ in range(2):\n"
        "    curve.listening(zmq.ROUTER).close()\n"
        "    zmq.Context.instance().term()\n"
        "print('ended')"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert (result.stdout, result.stderr) == ("ended\n", "")
