"""Before a server is up, and when it is: keys, open files, the HTTP port, and the line that tells of it."""

from __future__ import annotations

import contextlib
import resource
import socket
from collections.abc import Iterator, Sequence

from kvrelay.config import ClusterOptions, Environment, RouterOptions
from kvrelay.errors import ConfigError
from kvrelay.log import Log
from kvrelay.planes.cluster_key import key_file, load_key
from kvrelay.planes.curve import is_loopback, use_key
from kvrelay.states import Role

log = Log("serve")

BACKLOG = 4096
_SPARE_DESCRIPTORS = 1024  # for workers, logs and files, besides one per HTTP connection


def prepare(router: RouterOptions, cluster: ClusterOptions, environment: Environment) -> None:
    """Before anything is opened."""
    use_key(load_key(key_file(cluster.cluster_key, environment)))
    if not is_loopback(router.host) and not router.api_key and not router.api_key_file:
        log.warning(
            "every client that reaches this address can use the server; protect it with --api-key-file",
            option="--host",
            address=router.host,
        )
    _allow_descriptors(router.max_connections + _SPARE_DESCRIPTORS)


def _allow_descriptors(wanted: int) -> None:
    """Every connection takes one. Most systems give a process few of them unless it asks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        log.warning("the system allows fewer open files than --max-connections needs", allowed=allowed, wanted=wanted)


@contextlib.contextmanager
def listening(host: str, port: int, *, is_shared: bool = False, accepts: bool = True) -> Iterator[socket.socket]:
    """The HTTP port, taken before anything slow happens. `is_shared`: with other processes, among which the system deals new
    connections. One that does not `accept` gets none of them: it only holds the port for others."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ConfigError(f"--host {host}: {error.strerror}") from error
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            if is_shared:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind(address)
            if accepts:
                listener.listen(BACKLOG)
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror} (choose another with --port)") from error
        yield listener


def ready_line(listener: socket.socket, model: str, roles: Sequence[Role], *, routers: int = 1, registry: str = "") -> str:
    """`registry` is where workers of elsewhere register."""
    host, port = listener.getsockname()[:2]
    shown = "127.0.0.1" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    counted = " + ".join(f"{roles.count(role)} {role.value}" for role in Role if role in roles)
    what = f"{counted} worker{'s' if len(roles) > 1 else ''}" if roles else "router only" if routers == 1 else "routers only"
    many = f", {routers} routers" if routers > 1 else ""
    where = f"; workers register at {registry}" if not roles and registry else ""
    return f"kvrelay ready on http://{shown}:{port} (model {model}{many}, {what}{where})"
