"""The routers on one etcd, and which of them leads."""

from __future__ import annotations

from etcd_server import EtcdServer
from etcd_tools import Etcdctl
from patience import until
from registry_records import make_record

from kvrelay.discovery.base import router_record
from kvrelay.discovery.etcd_lead import ROUTERS, EtcdCompany
from kvrelay.discovery.etcd_members import value_of
from kvrelay.ids import new_router_id
from kvrelay.wire.registry import RouterRecord


def company(server: EtcdServer, router: RouterRecord) -> EtcdCompany:
    return EtcdCompany(server.address, router, registration_s=2.0, timeout_s=5.0)


def router(*, may_lead: bool = True) -> RouterRecord:
    return router_record(new_router_id(), may_lead=may_lead)


async def test_the_first_leads_until_it_goes_and_one_that_may_not_never_does(server: EtcdServer) -> None:
    records = [router(may_lead=False), router(), router()]
    shy, first = (company(server, record) for record in records[:2])
    until(lambda: first.leader == records[1].id)
    second = company(server, records[2])
    until(lambda: second.leader == records[1].id)
    first.close()
    until(lambda: second.leader == records[2].id)
    assert shy.leader is None
    server.stop()
    until(lambda: second.leader is None)  # it cannot know whether it still leads
    second.close()
    shy.close()


async def test_each_knows_all_the_oldest_first_until_they_go_and_keeps_them_while_etcd_is_away(server: EtcdServer) -> None:
    records = [router(may_lead=False), router(), router(may_lead=False)]
    companies: list[EtcdCompany] = []
    for record in records:
        companies.append(company(server, record))
        until(lambda: companies[0].routers == records[: len(companies)])
    Etcdctl(server).put(ROUTERS + b"stranger", b"no record")
    Etcdctl(server).put(ROUTERS + new_router_id().encode(), value_of(records[0]))  # a copy
    worker = make_record()
    Etcdctl(server).put(ROUTERS + worker.id.encode(), value_of(worker))
    companies.pop(1).close()
    until(lambda: all(each.routers == [records[0], records[2]] for each in companies))
    server.stop()
    for each in companies:
        each.close()
        assert each.routers == [records[0], records[2]]


async def test_a_router_whose_key_was_deleted_puts_it_again(server: EtcdServer) -> None:
    records = [router(), router()]
    companies = [company(server, record) for record in records]
    until(lambda: all(len(each.routers) == 2 for each in companies))
    Etcdctl(server).delete(ROUTERS + records[0].id.encode())
    until(lambda: companies[1].routers == [records[1]])
    until(lambda: companies[1].routers == [records[1], records[0]])
    for each in companies:
        each.close()


async def test_a_leader_that_stands_still_leads_no_more() -> None:
    now = 0.0
    record = router()
    standing = EtcdCompany("etcd://127.0.0.1:1", record, registration_s=2.0, clock=lambda: now)
    standing.close()
    standing._known = (record.id, 2.0)
    assert standing.leader == record.id
    now = 2.0
    assert standing.leader is None
