"""What every registry does, whichever it is: one suite over all implementations."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from typing import Protocol

import msgspec
import pytest
import zmq
from etcd_server import etcd_server
from patience import PATIENCE_S
from registry_records import make_record

from kvrelay.discovery.base import Loss, Membership, Registration, router_record
from kvrelay.discovery.embedded import EmbeddedMembership, EmbeddedRegistration
from kvrelay.discovery.etcd import EtcdMembership, EtcdRegistration
from kvrelay.discovery.joined import JoinedMembership
from kvrelay.discovery.static import StaticMembership, StaticRegistration
from kvrelay.ids import WorkerId, new_router_id
from kvrelay.states import WorkerState
from kvrelay.wire import PROTOCOL_VERSION
from kvrelay.wire.codec import Decoder, encode
from kvrelay.wire.registry import WorkerLoad, WorkerRecord
from kvrelay.wire.serving import Hello, ToWorker, Welcome

LEASE_S = 0.6


class Watcher:
    """Keeps what the router's side was told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, WorkerId]] = []
        self.records: dict[WorkerId, WorkerRecord] = {}
        self.losses: list[Loss] = []
        self._news = asyncio.Event()

    def start(self, membership: Membership) -> None:
        membership.start(self._joined, self._changed, self._left)

    def _joined(self, record: WorkerRecord) -> None:
        assert record.id not in self.records, "joined twice"
        self._tell("joined", record.id)
        self.records[record.id] = record

    def _changed(self, record: WorkerRecord) -> None:
        assert record.id in self.records, "changed before it joined"
        self._tell("changed", record.id)
        self.records[record.id] = record

    def _left(self, worker_id: WorkerId, loss: Loss) -> None:
        del self.records[worker_id]
        self.losses.append(loss)
        self._tell("left", worker_id)

    def _tell(self, event: str, worker_id: WorkerId) -> None:
        self.events.append((event, worker_id))
        self._news.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self._news.clear()
                await self._news.wait()


class Member(Protocol):
    """A worker that belongs to a registry under test."""

    record: WorkerRecord

    def renew(self, state: WorkerState, load: WorkerLoad) -> None: ...

    def leave(self) -> None: ...

    def vanish(self) -> None: ...


class RegisteredMember:
    """Of a registry that workers speak to: renews from a thread, as a real worker does."""

    def __init__(self, registration: Registration) -> None:
        self.record = make_record()
        self._registration = registration
        self._state, self._load = self.record.state, self.record.load
        self._stop = threading.Event()
        self._leaving = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def renew(self, state: WorkerState, load: WorkerLoad) -> None:
        self._state, self._load = state, load

    def leave(self) -> None:
        self._leaving = True
        self.vanish()

    def vanish(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._registration.register(self.record, LEASE_S):
            pass
        while not self._stop.wait(LEASE_S / 4):
            self._registration.renew(self._state, self._load)
        if self._leaving:
            self._registration.leave()
        self._registration.close()


class ListeningMember:
    """Of a static registry: answers Hello at a fixed address."""

    def __init__(self, port: int = 0) -> None:
        self._socket = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(f"tcp://127.0.0.1:{port or '*'}")
        self.address = self._socket.getsockopt(zmq.LAST_ENDPOINT).decode()
        self.record = make_record(serving_address=self.address)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def renew(self, state: WorkerState, load: WorkerLoad) -> None:
        self.record = msgspec.structs.replace(self.record, state=state, load=load)

    def leave(self) -> None:
        self.vanish()

    def vanish(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        registration = StaticRegistration()
        assert registration.register(self.record, LEASE_S)
        decoder: Decoder[ToWorker] = Decoder(ToWorker)
        while not self._stop.is_set():
            if self._socket.poll(20):
                identity, frame = self._socket.recv_multipart()
                assert isinstance(decoder.decode(frame), Hello)
                self._socket.send_multipart([identity, encode(Welcome(version=PROTOCOL_VERSION, worker=self.record))])
        registration.leave()
        self._socket.close()


@contextlib.asynccontextmanager
async def embedded() -> AsyncIterator[tuple[Watcher, Callable[[], Member]]]:
    membership = EmbeddedMembership("tcp://127.0.0.1:*")
    watcher = Watcher()
    watcher.start(membership)
    yield watcher, lambda: RegisteredMember(EmbeddedRegistration(membership.address))
    membership.close()


@contextlib.asynccontextmanager
async def joined() -> AsyncIterator[tuple[Watcher, Callable[[], Member]]]:
    owner = EmbeddedMembership("tcp://127.0.0.1:*")
    Watcher().start(owner)
    membership = JoinedMembership(owner.address, router=router_record(new_router_id()), registration_s=LEASE_S)
    watcher = Watcher()
    watcher.start(membership)
    yield watcher, lambda: RegisteredMember(EmbeddedRegistration(membership.address))
    membership.close()
    owner.close()


@contextlib.asynccontextmanager
async def etcd() -> AsyncIterator[tuple[Watcher, Callable[[], Member]]]:
    with etcd_server() as server:
        membership = EtcdMembership(server.address, registration_s=LEASE_S)
        watcher = Watcher()
        watcher.start(membership)
        yield watcher, lambda: RegisteredMember(EtcdRegistration(membership.address))
        membership.close()


@contextlib.asynccontextmanager
async def static() -> AsyncIterator[tuple[Watcher, Callable[[], Member]]]:
    members = [ListeningMember(), ListeningMember()]
    waiting = list(members)
    addresses = [member.address for member in members]
    membership = StaticMembership(addresses, router_id=new_router_id(), registration_s=LEASE_S)
    watcher = Watcher()
    watcher.start(membership)
    yield watcher, lambda: waiting.pop()
    membership.close()
    for member in members:
        member.vanish()


@pytest.fixture(params=[embedded, joined, etcd, static], ids=["embedded", "joined", "etcd", "static"])
async def registry(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Watcher, Callable[[], Member]]]:
    async with request.param() as made:
        yield made


async def test_a_worker_joins_with_its_whole_record(registry: tuple[Watcher, Callable[[], Member]]) -> None:
    watcher, new_member = registry
    member = new_member()
    await watcher.until(lambda: member.record.id in watcher.records)
    assert watcher.records[member.record.id] == member.record
    await asyncio.to_thread(member.leave)


async def test_state_and_load_are_told_while_a_worker_lives(registry: tuple[Watcher, Callable[[], Member]]) -> None:
    watcher, new_member = registry
    member = new_member()
    await watcher.until(lambda: member.record.id in watcher.records)
    member.renew(WorkerState.DRAINING, WorkerLoad(running=3, steps=7))
    await watcher.until(lambda: watcher.records[member.record.id].load.running == 3)
    assert watcher.records[member.record.id].state is WorkerState.DRAINING
    await asyncio.sleep(2 * LEASE_S)
    assert ("left", member.record.id) not in watcher.events
    await asyncio.to_thread(member.leave)


async def test_a_silent_worker_is_lost_and_the_others_stay(registry: tuple[Watcher, Callable[[], Member]]) -> None:
    watcher, new_member = registry
    gone, stays = new_member(), new_member()
    await watcher.until(lambda: {gone.record.id, stays.record.id} <= watcher.records.keys())
    await asyncio.to_thread(gone.vanish)
    await watcher.until(lambda: gone.record.id not in watcher.records)
    assert watcher.losses == [Loss.EXPIRED]
    assert stays.record.id in watcher.records
    await asyncio.to_thread(stays.leave)


async def test_a_drained_worker_leaves(registry: tuple[Watcher, Callable[[], Member]]) -> None:
    watcher, new_member = registry
    member = new_member()
    await watcher.until(lambda: member.record.id in watcher.records)
    member.renew(WorkerState.DRAINING, WorkerLoad())
    await watcher.until(lambda: watcher.records[member.record.id].state is WorkerState.DRAINING)
    await asyncio.to_thread(member.leave)
    await watcher.until(lambda: member.record.id not in watcher.records)
    assert watcher.losses == [Loss.LEFT]
