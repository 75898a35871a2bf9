"""A peer of another version is refused on every plane, by both numbers and with what to do about it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import zmq
import zmq.asyncio
from patience import PATIENCE_S, eventually
from registry_records import make_record
from stub_worker import StubWorker

from kvrelay.discovery.embedded import EmbeddedMembership, _check_answer
from kvrelay.discovery.static import StaticMembership
from kvrelay.errors import VersionMismatchError
from kvrelay.ids import new_router_id
from kvrelay.metrics import Metrics
from kvrelay.router.router import Router
from kvrelay.wire import PROTOCOL_VERSION, check_version
from kvrelay.wire.codec import Decoder, encode
from kvrelay.wire.events import EVENTS_VERSION
from kvrelay.wire.registry import FromRegistry, Register, Registered, RegistryRefused
from kvrelay.wire.serving import Hello, Refused, ToRouter, Welcome

OTHERS = [0, PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1]
REMEDY = "run the same version of kvrelay on both"

from_registry: Decoder[FromRegistry] = Decoder(FromRegistry)
to_router: Decoder[ToRouter] = Decoder(ToRouter)


def assert_tells(reason: str, version: int) -> None:
    for part in (f"protocol {version}", f"protocol {PROTOCOL_VERSION}", REMEDY):
        assert part in reason


class Answering:
    """A worker's serving socket that answers every Hello with one message."""

    def __init__(self, version: int, record_version: int = PROTOCOL_VERSION) -> None:
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.record = make_record(serving_address=f"tcp://127.0.0.1:{port}", version=record_version)
        self._welcome = encode(Welcome(version=version, worker=self.record))
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            identity, _ = await self._socket.recv_multipart()
            await self._socket.send_multipart([identity, self._welcome])

    def close(self) -> None:
        self._task.cancel()
        self._socket.close()


def test_the_same_version_passes() -> None:
    check_version("the worker", PROTOCOL_VERSION)
    check_version("the worker", EVENTS_VERSION, EVENTS_VERSION, "event")


def test_a_plane_with_a_number_of_its_own_is_named() -> None:
    with pytest.raises(VersionMismatchError, match=f"event protocol 9, this process event protocol {EVENTS_VERSION}: {REMEDY}"):
        check_version("the worker", 9, EVENTS_VERSION, "event")


@pytest.mark.parametrize("version", OTHERS)
async def test_a_registry_refuses_a_worker_of_another_version(version: int) -> None:
    joined: list[Any] = []
    malformed: list[None] = []
    membership = EmbeddedMembership("tcp://127.0.0.1:*", on_malformed=lambda: malformed.append(None))
    membership.start(joined.append, joined.append, lambda worker_id, loss: None)
    socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(membership.address)
    try:
        await socket.send(encode(Register(record=make_record(version=version), ttl_s=9.0)))
        async with asyncio.timeout(PATIENCE_S):
            answer = from_registry.decode(await socket.recv())
        assert isinstance(answer, RegistryRefused)
        assert_tells(answer.reason, version)
        assert (joined, len(malformed)) == ([], 1)
    finally:
        socket.close()
        membership.close()


@pytest.mark.parametrize("version", OTHERS)
def test_a_worker_refuses_a_registry_of_another_version(version: int) -> None:
    with pytest.raises(VersionMismatchError) as refused:
        _check_answer(Registered(version=version))
    assert_tells(str(refused.value), version)


@pytest.mark.parametrize("version", OTHERS)
async def test_a_worker_refuses_a_router_of_another_version(version: int) -> None:
    worker = StubWorker("")
    socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(worker.address)
    try:
        for said in (version, PROTOCOL_VERSION):
            await socket.send(encode(Hello(version=said, router_id=new_router_id())))
            async with asyncio.timeout(PATIENCE_S):
                answer = to_router.decode(await socket.recv())
            if said == version:
                assert isinstance(answer, Refused)
                assert_tells(answer.reason, version)
            else:
                assert isinstance(answer, Welcome)
    finally:
        socket.close()
        await asyncio.to_thread(worker.stop)


@pytest.mark.parametrize("version", OTHERS)
async def test_a_router_refuses_a_worker_of_another_version(version: int) -> None:
    """The registry let it in, or is an older one itself: the handshake is the second check."""
    worker = Answering(version)
    membership = EmbeddedMembership("tcp://127.0.0.1:*")
    router = Router(membership=membership, metrics=Metrics())
    router.start()
    try:
        membership._answer(b"worker", [encode(Register(record=worker.record, ttl_s=9.0))])
        await eventually(lambda: "protocol" in router.cluster()["workers"][0]["problem"])
        assert_tells(router.cluster()["workers"][0]["problem"], version)
        assert not router.ready
    finally:
        router.close()
        worker.close()


@pytest.mark.parametrize("version", OTHERS)
async def test_a_named_worker_of_another_version_does_not_join(version: int) -> None:
    worker = Answering(version, record_version=version)
    joined: list[Any] = []
    malformed: list[None] = []
    address = worker.record.serving_address
    membership = StaticMembership(
        [address], router_id=new_router_id(), registration_s=30.0, on_malformed=lambda: malformed.append(None)
    )
    membership.start(joined.append, joined.append, lambda worker_id, loss: None)
    try:
        await eventually(lambda: bool(malformed))
        assert joined == []
    finally:
        membership.close()
        worker.close()
