"""A worker in a real etcd: lost leases, lost keys, an etcd that is away, stopped, or refuses."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest
from etcd_server import EtcdServer, free_port
from etcd_tools import Etcdctl, View, register, renewed, until_renewed
from registry_records import make_record

from kvrelay.discovery.base import Loss
from kvrelay.discovery.etcd import EtcdRegistration
from kvrelay.discovery.etcd_members import key_of, value_of
from kvrelay.errors import ProtocolError
from kvrelay.states import WorkerState
from kvrelay.wire.registry import WorkerLoad, WorkerRecord


async def test_a_lost_lease_is_registered_again(server: EtcdServer, view: View, registration: EtcdRegistration) -> None:
    record = await register(registration)
    await view.until_members(record)
    lease = Etcdctl(server).get(key_of(record))["lease"]
    await asyncio.to_thread(Etcdctl(server).post, "/v3/lease/revoke", {"ID": lease})
    await view.until_members()
    assert view.losses == {record.id: Loss.EXPIRED}
    assert await renewed(registration)
    await view.until_members(record)


async def test_a_put_under_a_lease_that_just_ended_registers_again_next_time(
    server: EtcdServer, view: View, registration: EtcdRegistration, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = await register(registration)
    lease = Etcdctl(server).get(key_of(record))["lease"]
    await asyncio.to_thread(Etcdctl(server).post, "/v3/lease/revoke", {"ID": lease})
    with monkeypatch.context() as patch:
        patch.setattr(registration._gateway, "keep_alive", lambda lease: True)  # it ended between this and the put
        assert not await asyncio.to_thread(registration.renew, WorkerState.DRAINING, WorkerLoad())
    assert await renewed(registration)
    await view.until_members(record)


async def test_load_is_written_about_once_a_second_and_a_state_at_once(server: EtcdServer) -> None:
    now = [100.0]
    registration = EtcdRegistration(server.address, clock=lambda: now[0])
    record = await register(registration)

    def held() -> WorkerRecord:
        return msgspec.json.decode(Etcdctl(server).get(key_of(record))["value"], type=WorkerRecord)

    now[0] += 0.5
    assert await renewed(registration, WorkerLoad(running=1))
    assert held().load.running == 0
    now[0] += 0.6
    assert await renewed(registration, WorkerLoad(running=2))
    assert held().load.running == 2
    assert await asyncio.to_thread(registration.renew, WorkerState.DRAINING, WorkerLoad(running=3))
    assert (held().state, held().load.running) == (WorkerState.DRAINING, 3)
    registration.close()


async def test_a_key_that_somebody_deleted_or_overwrote_comes_back(server: EtcdServer, view: View) -> None:
    now = [100.0]
    registration = EtcdRegistration(server.address, clock=lambda: now[0])
    record = await register(registration)
    await view.until_members(record)
    await asyncio.to_thread(Etcdctl(server).delete, key_of(record))
    await view.until_members()
    now[0] += 10.0
    assert await renewed(registration)
    await view.until_members(record)
    await asyncio.to_thread(Etcdctl(server).put, key_of(record), value_of(record))  # the same, but under no lease
    now[0] += 10.0
    assert await renewed(registration)
    assert "lease" in Etcdctl(server).get(key_of(record))
    registration.close()


async def test_leaving_takes_the_key_and_the_lease_and_is_told_as_such(
    server: EtcdServer, view: View, registration: EtcdRegistration
) -> None:
    registration.leave()  # harmless before it registered
    record = await register(registration)
    await view.until_members(record)
    await asyncio.to_thread(registration.leave)
    await view.until_members()
    assert view.losses == {record.id: Loss.LEFT}
    assert "leases" not in await asyncio.to_thread(Etcdctl(server).post, "/v3/lease/leases", {})


async def test_etcd_that_is_down_or_stopped_costs_no_more_than_the_time_limit(
    server: EtcdServer, hasty_registration: EtcdRegistration
) -> None:
    await register(hasty_registration)
    server.pause()
    began_at = time.monotonic()
    assert not await renewed(hasty_registration)
    assert time.monotonic() - began_at < 5.0  # the limit is 0.5 s
    await asyncio.to_thread(hasty_registration.leave)
    server.resume()
    await asyncio.to_thread(server.kill)
    assert not await asyncio.to_thread(hasty_registration.register, make_record(), 30.0)
    await asyncio.to_thread(server.start)
    await register(hasty_registration)


async def test_a_registration_that_timed_out_keeps_its_lease(server: EtcdServer, hasty_registration: EtcdRegistration) -> None:
    """Else the put that was given up, carried out late, could tie the key to a lease that nobody renews."""
    record = await register(hasty_registration)
    lease = Etcdctl(server).get(key_of(record))["lease"]
    server.pause()
    assert not await asyncio.to_thread(hasty_registration.renew, WorkerState.DRAINING, WorkerLoad())
    assert not await asyncio.to_thread(hasty_registration.register, record, 30.0)
    server.resume()
    await until_renewed(hasty_registration)
    assert Etcdctl(server).get(key_of(record))["lease"] == lease


async def test_etcd_that_wants_a_password_refuses_a_new_worker_and_does_not_stop_an_old_one(
    server: EtcdServer, registration: EtcdRegistration
) -> None:
    await register(registration)
    control = Etcdctl(server)
    for path, body in (
        ("/v3/auth/user/add", {"name": "root", "password": "secret"}),
        ("/v3/auth/role/add", {"name": "root"}),
        ("/v3/auth/user/grant", {"user": "root", "role": "root"}),
        ("/v3/auth/enable", {}),
    ):
        await asyncio.to_thread(control.post, path, body)
    assert not await asyncio.to_thread(registration.renew, WorkerState.DRAINING, WorkerLoad())
    stranger = EtcdRegistration(server.address)
    with pytest.raises(ProtocolError, match="etcd refused this worker"):
        await asyncio.to_thread(stranger.register, make_record(), 30.0)
    stranger.close()


@pytest.mark.parametrize(("changes", "ttl_s"), [({"max_batch": 0}, 4.0), ({"id": "x"}, 4.0), ({}, 0.0), ({}, 1e9)])
def test_a_record_that_cannot_work_is_refused_by_the_worker_itself(changes: dict[str, object], ttl_s: float) -> None:
    registration = EtcdRegistration(f"etcd://127.0.0.1:{free_port()}")
    with pytest.raises(ProtocolError):
        registration.register(make_record(**changes), ttl_s)
    registration.close()
