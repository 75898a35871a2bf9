"""--registry of routers and workers: what each form opens, and what is refused by name."""

from __future__ import annotations

import pytest
from etcd_server import free_port
from patience import eventually
from registry_records import make_record

from kvrelay.config import ClusterOptions
from kvrelay.discovery.base import router_record
from kvrelay.discovery.choose import open_membership, open_registration, registry_kind
from kvrelay.discovery.embedded import EmbeddedMembership
from kvrelay.discovery.etcd import EtcdMembership, EtcdRegistration
from kvrelay.discovery.joined import JoinedMembership
from kvrelay.discovery.static import StaticRegistration
from kvrelay.errors import ConfigError
from kvrelay.ids import new_router_id
from kvrelay.metrics import Metrics


@pytest.mark.parametrize(
    ("registry", "kind"),
    [("embedded", "embedded"), ("etcd://h:1,i:1", "etcd"), ("static:tcp://h:1", "static"), ("tcp://h:1", "joined")],
)
def test_every_registry_is_known_by_its_form(registry: str, kind: str) -> None:
    assert registry_kind(ClusterOptions(registry=registry)) == kind


@pytest.mark.parametrize("registry", ["", "etcd", "etcds://h:1", "zookeeper://h:1", "static", "EMBEDDED"])
def test_a_router_refuses_any_other(registry: str) -> None:
    with pytest.raises(ConfigError, match="--registry"):
        registry_kind(ClusterOptions(registry=registry))


def test_only_an_embedded_registry_listens() -> None:
    with pytest.raises(ConfigError, match="--registry-listen"):
        registry_kind(ClusterOptions(registry="etcd://h:1", registry_listen="tcp://127.0.0.1:5600"))


def test_workers_register_at_the_etcd_that_routers_watch() -> None:
    metrics = Metrics()
    options = ClusterOptions(registry="etcd://127.0.0.1:1")
    membership, company = open_membership(options, router_record(new_router_id()), metrics, "tcp://127.0.0.1:*")
    company.close()
    assert company.is_shared
    assert isinstance(membership, EtcdMembership)
    assert metrics.registry.get_sample_value("kvrelay_registry_up") == 0.0
    registration = open_registration(membership.address)
    assert isinstance(registration, EtcdRegistration)
    registration.close()
    assert isinstance(open_registration("static"), StaticRegistration)


@pytest.mark.parametrize("address", ["", "embedded", "etcd://h", "http://h:1", "static:tcp://h:1"])
def test_a_worker_refuses_any_other(address: str) -> None:
    with pytest.raises(ConfigError, match="--registry"):
        open_registration(address)


@pytest.mark.parametrize("may_lead", [False, True])
@pytest.mark.parametrize("scheme", ["tcp", "etcd"])
async def test_a_router_counts_its_attempts_at_a_registry_that_does_not_answer(scheme: str, may_lead: bool) -> None:
    """With etcd one that may lead asks on a thread of its own, too: that is counted even where nothing watches."""
    metrics, port = Metrics(), free_port()
    options = ClusterOptions(registry=f"{scheme}://127.0.0.1:{port}", registration_s=0.3)
    record = router_record(new_router_id(), may_lead=may_lead)
    membership, company = open_membership(options, record, metrics, "")
    if not (may_lead and scheme == "etcd"):
        membership.start(lambda _: None, lambda _: None, lambda *_: None)
    await eventually(lambda: (metrics.registry.get_sample_value("kvrelay_registry_retries_total") or 0) >= 3)
    assert metrics.registry.get_sample_value("kvrelay_registry_up") == 0.0
    membership.close()
    company.close()


async def test_a_router_whose_registry_answers_counts_no_attempt() -> None:
    registry, metrics = EmbeddedMembership("tcp://127.0.0.1:*"), Metrics()
    registry.start(lambda _: None, lambda _: None, lambda *_: None)
    options = ClusterOptions(registry=registry.address, registration_s=60.0)
    membership, _ = open_membership(options, router_record(new_router_id()), metrics, "")
    assert isinstance(membership, JoinedMembership)
    membership.start(lambda _: None, lambda _: None, lambda *_: None)
    for _ in range(3):
        await eventually(lambda: membership._is_answered)
        membership._tick()
    assert metrics.registry.get_sample_value("kvrelay_registry_retries_total") == 0.0
    membership.close()
    registry.close()


@pytest.mark.parametrize(("ports", "num_retries"), [(1, 1), (3, 3)])
def test_a_worker_counts_every_endpoint_of_etcd_that_does_not_answer(ports: int, num_retries: int) -> None:
    """Two of three are answered by asking the next, the last one by asking again later."""
    retries: list[None] = []
    address = "etcd://" + ",".join(f"127.0.0.1:{port}" for port in {free_port() for _ in range(ports)})
    registration = open_registration(address, on_retry=lambda: retries.append(None))
    assert not registration.register(make_record(), 4.0)
    assert len(retries) == num_retries
    registration.close()
