"""Which registry the command line means. Routers and workers each name it with --registry.

router                                  worker
  embedded                                tcp://HOST:PORT (where that router's --registry-listen is)
  tcp://HOST:PORT (of another router)     the same
  etcd://HOST:PORT[,HOST:PORT...]         the same
  static:tcp://HOST:PORT,...              static
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from kvrelay.config import ClusterOptions
from kvrelay.discovery.base import Alone, Company, Membership, Registration
from kvrelay.discovery.embedded import EmbeddedMembership, EmbeddedRegistration
from kvrelay.discovery.joined import JoinedMembership
from kvrelay.discovery.static import StaticMembership, StaticRegistration
from kvrelay.errors import ConfigError
from kvrelay.metrics import Metrics
from kvrelay.planes.curve import warn_if_open
from kvrelay.wire.registry import RouterRecord

Kind = Literal["embedded", "joined", "etcd", "static"]


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
    if registry.startswith("tcp://"):
        return "joined"
    raise ConfigError(
        f"--registry {registry!r} is neither embedded, tcp://HOST:PORT (another router's), etcd://HOST:PORT[,HOST:PORT...] nor"
        " static:tcp://HOST:PORT,..."
    )


def open_membership(
    cluster: ClusterOptions, router: RouterRecord, metrics: Metrics, default_listen: str
) -> tuple[Membership, Company]:
    """The router's end, and what it tells of other routers. On the loop that will run it."""
    malformed, retry = metrics.malformed.labels("registry").inc, metrics.registry_retries.inc
    kind, registration_s = registry_kind(cluster), cluster.registration_s
    if kind == "etcd":
        from kvrelay.discovery.etcd import EtcdMembership  # it loads an HTTP client, which the others do not need
        from kvrelay.discovery.etcd_lead import EtcdCompany

        etcd = EtcdMembership(
            cluster.registry,
            registration_s=registration_s,
            on_malformed=malformed,
            on_reachable=metrics.registry_up.set,
            on_retry=retry,
        )
        return etcd, EtcdCompany(cluster.registry, router, registration_s=registration_s, on_retry=retry)
    if kind == "joined":
        joined = JoinedMembership(
            cluster.registry,
            router=router,
            registration_s=registration_s,
            on_malformed=malformed,
            on_reachable=metrics.registry_up.set,
            on_retry=retry,
        )
        return joined, joined
    metrics.registry_up.set(1)  # it is in this process
    if kind == "embedded":
        refused = metrics.refused_peers.inc
        embedded = open_embedded(cluster, default_listen, router=router, on_malformed=malformed, on_refused=refused)
        return embedded, embedded
    addresses = cluster.registry.removeprefix("static:").split(",")
    static = StaticMembership(addresses, router_id=router.id, registration_s=registration_s, on_malformed=malformed)
    return static, Alone(router, is_shared=True)


def open_embedded(
    cluster: ClusterOptions,
    default_listen: str,
    *,
    router: RouterRecord | None = None,
    on_malformed: Callable[[], None] = lambda: None,
    on_refused: Callable[[], None] = lambda: None,
) -> EmbeddedMembership:
    listen = cluster.registry_listen or default_listen
    warn_if_open("--registry-listen", listen.removeprefix("tcp://").rpartition(":")[0])
    return EmbeddedMembership(listen, router=router, on_malformed=on_malformed, on_refused=on_refused)


def open_registration(address: str, on_retry: Callable[[], None] = lambda: None) -> Registration:
    """The worker's end. `on_retry` hears of attempts that failed, on the thread that made them."""
    if address == "static":
        return StaticRegistration()
    if address.startswith("etcd://"):
        from kvrelay.discovery.etcd import EtcdRegistration

        return EtcdRegistration(address, on_retry=on_retry)
    if not address.startswith("tcp://"):
        raise ConfigError(f"--registry {address!r} is neither tcp://HOST:PORT, etcd://HOST:PORT[,HOST:PORT...] nor static")
    return EmbeddedRegistration(address, on_retry=on_retry)
