"""The embedded registry's own duties: registrations by the clock, restarts, and peers that talk nonsense."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import msgspec
import pytest
import zmq
import zmq.asyncio
from patience import PATIENCE_S
from registry_records import make_record

from kvrelay.discovery.base import Loss
from kvrelay.discovery.embedded import EmbeddedMembership, EmbeddedRegistration
from kvrelay.errors import ConfigError, ProtocolError
from kvrelay.ids import WorkerId
from kvrelay.states import WorkerState
from kvrelay.wire import PROTOCOL_VERSION
from kvrelay.wire.codec import Decoder, encode
from kvrelay.wire.registry import (
    FromRegistry,
    Leave,
    Register,
    Registered,
    RegistryRefused,
    Renew,
    Unknown,
    WorkerLoad,
    WorkerRecord,
)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Registry:
    """A membership with a clock of its own, and a plain socket that talks to it."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.members: dict[WorkerId, WorkerRecord] = {}
        self.losses: list[tuple[WorkerId, Loss]] = []
        self.num_malformed = 0
        self.membership = EmbeddedMembership("tcp://127.0.0.1:*", clock=self.clock, on_malformed=self._malformed)
        self.membership.start(self._member, self._member, self._left)
        self.socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(self.membership.address)
        self._decoder: Decoder[FromRegistry] = Decoder(FromRegistry)

    def _malformed(self) -> None:
        self.num_malformed += 1

    def _member(self, record: WorkerRecord) -> None:
        self.members[record.id] = record

    def _left(self, worker_id: WorkerId, loss: Loss) -> None:
        del self.members[worker_id]
        self.losses.append((worker_id, loss))

    async def ask(self, *frames: bytes) -> FromRegistry:
        await self.socket.send_multipart(frames)
        async with asyncio.timeout(PATIENCE_S):
            return self._decoder.decode(await self.socket.recv())

    def close(self) -> None:
        self.socket.close()
        self.membership.close()


@pytest.fixture
async def registry() -> AsyncIterator[Registry]:
    made = Registry()
    yield made
    made.close()


async def test_a_registration_ends_by_the_clock_and_a_renewal_extends_it(registry: Registry) -> None:
    record = make_record()
    assert await registry.ask(encode(Register(record=record, ttl_s=10.0))) == Registered(version=PROTOCOL_VERSION)
    registry.clock.now += 9.0
    renewal = Renew(worker_id=record.id, state=WorkerState.READY, load=WorkerLoad(running=1))
    assert await registry.ask(encode(renewal)) == Registered(version=PROTOCOL_VERSION)
    registry.clock.now += 9.9
    registry.membership.expire()
    assert registry.members[record.id].load.running == 1
    registry.clock.now += 0.2
    registry.membership.expire()
    assert registry.losses == [(record.id, Loss.EXPIRED)]
    assert await registry.ask(encode(renewal)) == Unknown(worker_id=record.id)


async def test_leaving_twice_is_harmless(registry: Registry) -> None:
    record = make_record()
    await registry.ask(encode(Register(record=record, ttl_s=10.0)))
    for _ in range(2):
        assert await registry.ask(encode(Leave(worker_id=record.id))) == Registered(version=PROTOCOL_VERSION)
    assert registry.losses == [(record.id, Loss.LEFT)]


@pytest.mark.parametrize(
    ("changes", "ttl_s", "complaint"),
    [
        ({"version": PROTOCOL_VERSION + 2}, 4.0, "protocol"),
        ({"id": "router-0123456789ab"}, 4.0, "WorkerId"),
        ({"serving_address": "inproc://me"}, 4.0, "serving address"),
        ({"max_batch": 0}, 4.0, "positive"),
        ({}, 0.0, "registration"),
        ({}, float("nan"), "registration"),
        ({}, 1e9, "registration"),
    ],
)
async def test_a_record_that_cannot_work_is_refused(
    registry: Registry, changes: dict[str, object], ttl_s: float, complaint: str
) -> None:
    answer = await registry.ask(encode(Register(record=make_record(**changes), ttl_s=ttl_s)))
    assert isinstance(answer, RegistryRefused)
    assert complaint in answer.reason
    assert not registry.members


async def test_nonsense_is_refused_and_counted_and_the_registry_lives(registry: Registry) -> None:
    draw = random.Random(7)
    good = encode(Register(record=make_record(), ttl_s=4.0))
    nonsense: list[list[bytes]] = [
        [b""],
        [b"\xc1"],
        [good, good],
        [good[:-3]],
        [b"\x93" * 5000],
        [msgspec.msgpack.encode({"type": "X"})],
    ]
    nonsense += [[draw.randbytes(draw.randint(1, 200))] for _ in range(200)]
    for frames in nonsense:
        assert isinstance(await registry.ask(*frames), RegistryRefused)
    assert registry.num_malformed == len(nonsense)
    assert await registry.ask(good) == Registered(version=PROTOCOL_VERSION)


async def test_a_registry_that_restarts_learns_its_workers_again() -> None:
    first = EmbeddedMembership("tcp://127.0.0.1:*")
    address = first.address
    first.start(lambda _: None, lambda _: None, lambda *_: None)
    registration = EmbeddedRegistration(address, timeout_s=0.5)
    record = make_record()
    assert await asyncio.to_thread(registration.register, record, 4.0)
    first.close()
    assert not await asyncio.to_thread(registration.renew, WorkerState.READY, WorkerLoad())

    joined: list[WorkerRecord] = []
    second = EmbeddedMembership(address)
    second.start(joined.append, lambda _: None, lambda *_: None)
    async with asyncio.timeout(PATIENCE_S):
        while not await asyncio.to_thread(registration.renew, WorkerState.DRAINING, WorkerLoad(running=2)):
            pass
    assert joined == [msgspec.structs.replace(record, state=WorkerState.DRAINING, load=WorkerLoad(running=2))]
    registration.close()
    second.close()


async def test_a_refused_worker_hears_why() -> None:
    membership = EmbeddedMembership("tcp://127.0.0.1:*")
    membership.start(lambda _: None, lambda _: None, lambda *_: None)
    registration = EmbeddedRegistration(membership.address)
    with pytest.raises(ProtocolError, match=f"protocol {PROTOCOL_VERSION + 2}"):
        await asyncio.to_thread(registration.register, make_record(version=PROTOCOL_VERSION + 2), 4.0)
    registration.close()
    membership.close()


async def test_workers_are_not_taken_for_dead_because_the_registry_stood_still(registry: Registry) -> None:
    record = make_record()
    await registry.ask(encode(Register(record=record, ttl_s=10.0)))
    registry.clock.now += 3600.0  # as after a stopped process: the next tick comes an hour late
    await asyncio.sleep(0.5)
    assert record.id in registry.members


async def test_an_address_in_use_is_a_clear_error() -> None:
    first = EmbeddedMembership("tcp://127.0.0.1:*")
    with pytest.raises(ConfigError, match="cannot listen"):
        EmbeddedMembership(first.address)
    first.close()
