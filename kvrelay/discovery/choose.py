"""Which registry the command line means. Routers and workers each name it with --registry.

router                                  worker
  embedded                                tcp://HOST:PORT (where that router's --registry-listen is)
  etcd://HOST:PORT[,HOST:PORT...]         the same
  static:tcp://HOST:PORT,...              static
"""

from __future__ import annotations

from typing import Literal

from kvrelay.config import ClusterOptions
from kvrelay.discovery.base import Membership, Registration
from kvrelay.discovery.embedded import EmbeddedMembership, EmbeddedRegistration
from kvrelay.discovery.static import StaticMembership, StaticRegistration
from kvrelay.errors import ConfigError
from kvrelay.ids import RouterId
from kvrelay.metrics import Metrics
from kvrelay.planes.curve import warn_if_open

Kind = Literal["embedded", "etcd", "static"]


def registry_kind(cluster: ClusterOptions) -> Kind:
    """Of a router. Raises ConfigError."""
    registry = cluster.registry
    if registry == "embedded":
        return "embedded"
    if cluster.registry_listen:
        raise ConfigError(f"--registry-listen is where an embedded registry listens; there is none with --registry {registry}")
    if registry.startswith("etcd://"):
        return "etcd"
    if registry.startswith("static:"):
        return "static"
    raise ConfigError(
        f"--registry {registry!r} is neither embedded, etcd://HOST:PORT[,HOST:PORT...] nor static:tcp://HOST:PORT,..."
    )


def open_membership(cluster: ClusterOptions, router_id: RouterId, metrics: Metrics, default_listen: str) -> Membership:
    """The router's end. On the loop that will run it."""
    malformed = metrics.malformed.labels("registry").inc
    kind = registry_kind(cluster)
    if kind == "etcd":
        from kvrelay.discovery.etcd import EtcdMembership  # it loads an HTTP client, which the others do not need

        return EtcdMembership(
            cluster.registry,
            registration_s=cluster.registration_s,
            on_malformed=malformed,
            on_reachable=metrics.registry_up.set,
        )
    metrics.registry_up.set(1)  # it is in this process
    if kind == "embedded":
        listen = cluster.registry_listen or default_listen
        warn_if_open("--registry-listen", listen.removeprefix("tcp://").rpartition(":")[0])
        return EmbeddedMembership(listen, on_malformed=malformed)
    addresses = cluster.registry.removeprefix("static:").split(",")
    return StaticMembership(addresses, router_id=router_id, registration_s=cluster.registration_s, on_malformed=malformed)


def open_registration(address: str) -> Registration:
    """The worker's end."""
    if address == "static":
        return StaticRegistration()
    if address.startswith("etcd://"):
        from kvrelay.discovery.etcd import EtcdRegistration

        return EtcdRegistration(address)
    if not address.startswith("tcp://"):
        raise ConfigError(f"--registry {address!r} is neither tcp://HOST:PORT, etcd://HOST:PORT[,HOST:PORT...] nor static")
    return EmbeddedRegistration(address)
