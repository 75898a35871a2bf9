"""--registry of routers and workers: what each form opens, and what is refused by name."""

from __future__ import annotations

import pytest

from kvrelay.config import ClusterOptions
from kvrelay.discovery.base import router_record
from kvrelay.discovery.choose import open_membership, open_registration, registry_kind
from kvrelay.discovery.etcd import EtcdMembership, EtcdRegistration
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
