"""Routers that join the registry of another process: whom they see, what outlasts that process, and which of them leads."""

from __future__ import annotations

import msgspec
import pytest
from patience import eventually
from registry_records import make_record

from kvrelay.discovery.base import Loss, router_record
from kvrelay.discovery.embedded import EmbeddedMembership
from kvrelay.discovery.joined import JoinedMembership
from kvrelay.discovery.watchers import Watchers
from kvrelay.errors import ConfigError, ProtocolError
from kvrelay.ids import WorkerId, new_router_id
from kvrelay.wire.codec import encode
from kvrelay.wire.registry import Gone, Listing, RegistryRefused, RouterRecord, Seen, Watch, WorkerRecord


class Seeing:
    """A router's view. Its registry is out of reach unless a test gives it an address that answers."""

    def __init__(self, address: str = "tcp://127.0.0.1:1", *, may_lead: bool = False, registration_s: float = 5.0) -> None:
        self.now = 100.0
        self.records: dict[WorkerId, WorkerRecord] = {}
        self.losses: list[Loss] = []
        self.record = router_record(new_router_id(), may_lead=may_lead)
        self.membership = JoinedMembership(address, router=self.record, registration_s=registration_s, clock=lambda: self.now)
        self.membership.start(self._see, self._see, self._left)

    def _see(self, record: WorkerRecord) -> None:
        self.records[record.id] = record

    def _left(self, worker_id: WorkerId, loss: Loss) -> None:
        del self.records[worker_id]
        self.losses.append(loss)


def make_router(**changes: object) -> RouterRecord:
    return msgspec.structs.replace(router_record(new_router_id()), **changes)


def listing(*workers: WorkerRecord) -> Listing:
    return Listing(workers=list(workers), routers=[])


async def test_a_worker_that_a_restarted_registry_does_not_list_yet_stays_for_a_registration() -> None:
    seeing, first, second = Seeing(), make_record(), make_record()
    seeing.membership._handle(listing(first, second))
    seeing.membership._handle(listing())
    assert set(seeing.records) == {first.id, second.id}
    seeing.membership._handle(Seen(record=first))
    seeing.now += 5.0
    seeing.membership._handle(listing(first))
    assert set(seeing.records) == {first.id}
    assert seeing.losses == [Loss.EXPIRED]
    seeing.membership._handle(Gone(worker_id=first.id, said_so=True))
    assert seeing.losses == [Loss.EXPIRED, Loss.LEFT]
    seeing.membership.close()


async def test_routers_see_each_other_and_the_oldest_that_may_leads() -> None:
    registry = EmbeddedMembership("tcp://127.0.0.1:*")
    registry.start(lambda _: None, lambda _: None, lambda *_: None)
    assert not registry.is_shared
    shy = Seeing(registry.address, registration_s=1.0)
    await eventually(lambda: registry.is_shared)
    bold = Seeing(registry.address, may_lead=True, registration_s=1.0)
    await eventually(lambda: len(registry.routers) == 2)
    third = Seeing(registry.address, may_lead=True, registration_s=1.0)
    seeing = [shy, bold, third]
    await eventually(lambda: all(one.membership.routers == [other.record for other in seeing] for one in seeing))
    assert {one.membership.leader for one in seeing} == {bold.record.id}
    bold.membership.close()
    await eventually(lambda: shy.membership.leader == third.record.id == third.membership.leader)
    assert [router.id for router in registry.routers] == [shy.record.id, third.record.id]
    registry.close()
    await eventually(lambda: third.membership.leader is None)  # nobody tells it that it still is
    shy.membership.close()
    third.membership.close()


async def test_routers_that_make_no_sense_are_refused() -> None:
    registry = EmbeddedMembership("tcp://127.0.0.1:*")
    registry.start(lambda _: None, lambda _: None, lambda *_: None)
    for changes in ({"version": 0}, {"id": "whole-0123456789ab"}):
        record = make_router(**changes)
        answer = registry._answer(b"a", [encode(Watch(router=record, silence_s=1.0))])
        assert isinstance(answer, RegistryRefused)
    assert not registry.is_shared
    watchers = Watchers(None, lambda: 0.0)
    with pytest.raises(ProtocolError, match="silence"):
        watchers.heard(b"a", Watch(router=make_router(), silence_s=float("nan")))
    for number in range(64):
        watchers.heard(str(number).encode(), Watch(router=make_router(), silence_s=1.0))
    with pytest.raises(ProtocolError, match="already 64"):
        watchers.heard(b"a", Watch(router=make_router(), silence_s=1.0))
    registry.close()


async def test_what_is_no_address_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="--registry"):
        Seeing("tcp://nowhere")
