"""A router that watches a real etcd: restarts, lost data, cut and silent watches, strangers, long lines."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import time

import msgspec
import pytest
from etcd_server import EtcdServer, etcd_server, free_port
from etcd_tools import LEASE_S, Etcdctl, Relay, View, register, renewed, until_renewed
from patience import PATIENCE_S, eventually
from registry_records import make_record

from kvrelay.discovery.base import Loss
from kvrelay.discovery.etcd import EtcdRegistration
from kvrelay.discovery.etcd_gateway import Event, KeyValue
from kvrelay.discovery.etcd_members import PREFIX, EtcdMembers, key_of, read_record, value_of
from kvrelay.errors import ProtocolError
from kvrelay.ids import WorkerId
from kvrelay.planes.cluster_key import derive
from kvrelay.planes.curve import keyed
from kvrelay.states import WorkerState
from kvrelay.wire import PROTOCOL_VERSION
from kvrelay.wire.registry import WorkerLoad, WorkerRecord


async def test_workers_stay_through_a_kill_and_restart_of_etcd_and_new_ones_join(
    server: EtcdServer, view: View, registration: EtcdRegistration
) -> None:
    record = await register(registration)
    await view.until_members(record)
    await asyncio.to_thread(server.kill)
    await eventually(lambda: not view.reachable[-1])
    assert not await renewed(registration)
    await asyncio.sleep(2 * LEASE_S)
    assert view.members == {record.id: record}
    await asyncio.to_thread(server.start)
    await until_renewed(registration)
    await eventually(lambda: view.reachable[-1])
    other = EtcdRegistration(server.address)
    newcomer = await register(other)
    await view.until_members(record, newcomer)
    assert view.losses == {}
    other.close()


async def test_etcd_that_lost_its_data_costs_no_living_worker(server: EtcdServer, registration: EtcdRegistration) -> None:
    view, alive = View(server.address, registration_s=60.0), await register(registration)
    drained = make_record(state=WorkerState.DRAINING)
    await asyncio.to_thread(Etcdctl(server).put_all, [drained])
    await view.until_members(alive, drained)
    await asyncio.to_thread(server.kill)
    shutil.rmtree(server.data_dir)
    await asyncio.to_thread(server.start)
    await view.until_members(alive)  # the other one had said that it goes
    await until_renewed(registration)
    await eventually(lambda: bool(Etcdctl(server).get(key_of(alive))))
    assert view.losses == {drained.id: Loss.LEFT}
    assert view.events.count(("joined", alive.id)) == 1
    view.membership.close()


def test_a_worker_that_does_not_come_back_is_given_up_after_its_grace() -> None:
    now, left = [100.0], list[tuple[WorkerId, Loss]]()
    members = EtcdMembers(lambda _: None, lambda _: None, lambda *loss: left.append(loss), grace_s=4.0, clock=lambda: now[0])
    gone, back = make_record(), make_record()
    pairs = [KeyValue(key=key_of(record), value=value_of(record), mod_revision=3) for record in (gone, back)]
    members.replace_all([*pairs, KeyValue(key=PREFIX + b"stranger", mod_revision=4)], 5)
    assert members.agrees(3, 4)
    assert not members.agrees(3, 6)
    assert not members.agrees(2, 4)
    members.replace_all([], 1)
    assert members.agrees(0, 0)
    members.apply([Event(kv=pairs[1])])
    members.replace_all(pairs[1:], 6)
    now[0] += 3.9
    members.replace_all(pairs[1:], 7)  # etcd was away again: the time begins anew
    now[0] += 3.9
    members.expire()
    assert left == []
    now[0] += 0.2
    members.expire()
    assert left == [(gone.id, Loss.EXPIRED)]
    members.apply([Event(type="DELETE", kv=pairs[1])])
    assert left[1:] == [(back.id, Loss.EXPIRED)]
    assert members.agrees(0, 0)


async def test_what_happened_while_the_router_was_cut_off_is_told_afterwards(server: EtcdServer, relay: Relay) -> None:
    view, control = View(relay.address), Etcdctl(server)
    goes, stays, changes = make_record(), make_record(), make_record()
    await asyncio.to_thread(control.put_all, [goes, stays, changes])
    await view.until_members(goes, stays, changes)
    relay.cut()  # the client connects again at once, so all that follows may or may not be seen by its watch
    comes, changed = make_record(), msgspec.structs.replace(changes, load=WorkerLoad(running=5))
    await asyncio.to_thread(control.delete, key_of(goes))
    await asyncio.to_thread(control.put_all, [comes, changed])
    await view.until_members(stays, changed, comes)
    assert view.losses == {goes.id: Loss.EXPIRED}
    view.membership.close()


async def test_a_stopped_etcd_is_noticed_and_followed_again(server: EtcdServer) -> None:
    view, record = View(server.address, timeout_s=0.5), make_record()
    await asyncio.to_thread(Etcdctl(server).put_all, [record])
    await view.until_members(record)
    server.pause()
    await eventually(lambda: not view.reachable[-1])
    server.resume()
    await eventually(lambda: view.reachable[-1])
    other = make_record()
    await asyncio.to_thread(Etcdctl(server).put_all, [other])
    await view.until_members(record, other)
    view.membership.close()


async def test_a_watch_that_fell_silent_is_noticed_by_what_it_does_not_tell(server: EtcdServer, relay: Relay) -> None:
    view, control = View(relay.address), Etcdctl(server)
    goes, changes = make_record(), make_record()
    await asyncio.to_thread(control.put_all, [goes, changes])
    await view.until_members(goes, changes)
    relay.mute_watches()
    await asyncio.to_thread(control.delete, key_of(goes))
    await view.until_members(changes)
    relay.mute_watches()
    changed = msgspec.structs.replace(changes, load=WorkerLoad(running=2))
    await asyncio.to_thread(control.put_all, [changed])
    await view.until_members(changed)
    view.membership.close()


async def test_the_watch_is_not_started_anew_while_it_works(server: EtcdServer) -> None:
    view, control, record = View(server.address, probe_every_s=0.5), Etcdctl(server), make_record()
    await asyncio.to_thread(control.put, PREFIX + b"nonsense", b"x")
    for running in range(60):
        await asyncio.to_thread(control.put_all, [msgspec.structs.replace(record, load=WorkerLoad(running=running))])
        await asyncio.sleep(0.01)
    await eventually(lambda: view.members[record.id].load.running == 59)
    await asyncio.sleep(1.2)  # two probes of an etcd in which nothing happens
    assert view.reachable == [True]
    view.membership.close()


async def test_strangers_are_counted_and_ignored(server: EtcdServer) -> None:
    view, control, record = View(server.address, probe_every_s=60.0), Etcdctl(server), make_record()
    foreign = make_record(version=PROTOCOL_VERSION + 7)
    nonsense = {
        PREFIX + b"whole/garbage": b"\xff\x00",
        PREFIX + b"\xff\xfe": value_of(record),
        PREFIX + b"prefill/" + record.id.encode(): value_of(record),
        key_of(make_record()): value_of(record),
        key_of(foreign): value_of(foreign),
        PREFIX + b"deep": b"[" * 100_000,
        PREFIX: b"",
    }
    await asyncio.to_thread(control.put_all, [record])
    for key, value in nonsense.items():
        await asyncio.to_thread(control.put, key, value)
    await eventually(lambda: view.num_malformed == len(nonsense))
    await asyncio.to_thread(control.put, key_of(record), b"{}")
    await eventually(lambda: view.num_malformed == len(nonsense) + 1)
    assert view.members == {record.id: record}
    assert view.reachable == [True]
    await asyncio.to_thread(control.delete_all)
    await view.until_members()
    view.membership.close()


async def test_lines_of_megabytes_are_read(server: EtcdServer) -> None:
    view = View(server.address, probe_every_s=60.0)
    await eventually(lambda: view.reachable == [True])
    records = [make_record() for _ in range(100)]
    pairs = {key_of(record): value_of(record) for record in records} | {PREFIX + b"large": b"x" * 1_200_000}
    puts = [{"request_put": {"key": key, "value": value}} for key, value in pairs.items()]
    await asyncio.to_thread(Etcdctl(server).post, "/v3/kv/txn", {"success": puts})  # one transaction is told in one line
    await view.until_members(*records)
    assert view.num_malformed == 1
    await asyncio.to_thread(Etcdctl(server).delete_all)
    await view.until_members()
    assert view.reachable == [True]
    view.membership.close()


@pytest.mark.parametrize("first", ["closed", "stopped"])
async def test_several_endpoints_are_tried_in_turn(server: EtcdServer, first: str) -> None:
    with contextlib.ExitStack() as stack:
        port = free_port()
        if first == "stopped":
            other = stack.enter_context(etcd_server())
            other.pause()
            port = other.client_port
        address = f"etcd://127.0.0.1:{port},{server.endpoint}"
        view, registration, record = View(address, timeout_s=0.5), EtcdRegistration(address, timeout_s=0.5), make_record()
        async with asyncio.timeout(PATIENCE_S):
            while not await asyncio.to_thread(registration.register, record, 30.0):
                pass
        await view.until_members(record)
        view.membership.close()
        registration.close()


@pytest.mark.parametrize("turns", range(4))
async def test_nothing_is_told_after_close(server: EtcdServer, turns: int) -> None:
    before = asyncio.all_tasks()
    view, control, record = View(server.address), Etcdctl(server), make_record()
    await asyncio.to_thread(control.put_all, [record])
    await view.until_members(record)
    control.delete(key_of(record))  # blocks the loop: the event waits in the socket, or on its way from there
    time.sleep(0.1)
    for _ in range(turns):
        await asyncio.sleep(0)
    view.membership.close()
    told = list(view.events)
    await asyncio.sleep(0.1)
    assert view.events == told
    assert asyncio.all_tasks() <= before


async def test_members_equal_what_etcd_holds_after_random_changes_and_cuts(server: EtcdServer, relay: Relay) -> None:
    draw, control, view = random.Random(3), Etcdctl(server), View(relay.address, timeout_s=0.5)
    records = [make_record() for _ in range(12)]
    held: dict[WorkerId, WorkerRecord] = {}
    for step in range(250):
        record = draw.choice(records)
        if record.id in held and draw.random() < 0.4:
            del held[record.id]
            await asyncio.to_thread(control.delete, key_of(record))
        else:
            held[record.id] = msgspec.structs.replace(record, load=WorkerLoad(steps=step))
            await asyncio.to_thread(control.put_all, [held[record.id]])
        if draw.random() < 0.04:
            draw.choice([relay.cut, relay.mute, relay.mute_watches])()
    await view.until_members(*held.values())
    view.membership.close()


def test_in_a_cluster_with_a_key_only_signed_records_count() -> None:
    ours, other = derive(b"a" * 32), derive(b"b" * 32)
    record = make_record()
    with keyed(ours):
        signed = KeyValue(key=key_of(record), value=value_of(record), mod_revision=1)
        assert read_record(signed) == record
        with keyed(other), pytest.raises(ProtocolError, match="not signed"):
            read_record(signed)
        for value in (msgspec.json.encode(record), b"", b" " + msgspec.json.encode(record), signed.value + b" "):
            with pytest.raises(ProtocolError, match="not signed"):
                read_record(KeyValue(key=key_of(record), value=value, mod_revision=1))
    with pytest.raises(ProtocolError, match="no worker's record"):
        read_record(signed)
