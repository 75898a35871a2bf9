"""Which of several routers on one etcd leads."""

from __future__ import annotations

from etcd_server import EtcdServer
from patience import until

from kvrelay.discovery.base import router_record
from kvrelay.discovery.etcd_lead import EtcdCompany
from kvrelay.ids import new_router_id


def company(server: EtcdServer, *, may_lead: bool = True) -> EtcdCompany:
    return EtcdCompany(server.address, router_record(new_router_id(), may_lead=may_lead), registration_s=2.0, timeout_s=5.0)


async def test_the_first_leads_until_it_goes_and_one_that_may_not_never_does(server: EtcdServer) -> None:
    shy, first = company(server, may_lead=False), company(server)
    until(lambda: first.leader == first.routers[0].id)
    second = company(server)
    until(lambda: second.leader == first.routers[0].id)
    first.close()
    until(lambda: second.leader == second.routers[0].id)
    assert shy.leader is None
    server.stop()
    until(lambda: second.leader is None)  # it cannot know whether it still leads
    second.close()
    shy.close()


async def test_a_leader_that_stands_still_leads_no_more() -> None:
    now = 0.0
    standing = EtcdCompany("etcd://127.0.0.1:1", router_record(new_router_id()), registration_s=2.0, clock=lambda: now)
    standing._known = (standing.routers[0].id, 2.0)
    assert standing.leader == standing.routers[0].id
    now = 2.0
    assert standing.leader is None
    standing.close()
