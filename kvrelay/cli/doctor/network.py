"""Who reaches whom: this host's addresses and ports, the registry, other hosts, and the key they share."""

from __future__ import annotations

import errno
import functools
import ipaddress
import os
import socket
import stat
from dataclasses import dataclass

import zmq

from kvrelay.cli.doctor.finding import Checks, Finding, fail, ok, warn
from kvrelay.cli.probe import worker_state
from kvrelay.discovery.etcd_gateway import Endpoints, Gateway, NoAnswerError, Range, RangeAnswer, RefusedError
from kvrelay.errors import ConfigError, KVRelayError
from kvrelay.ids import new_worker_id
from kvrelay.planes.cluster_key import ClusterKey, load_key
from kvrelay.planes.curve import connecting, exchange, keyed
from kvrelay.states import Role, WorkerState
from kvrelay.wire.codec import Decoder, encode
from kvrelay.wire.registry import FromRegistry, RegistryRefused, Renew, WorkerLoad

_PATIENCE_S = 3.0
_USUAL_WORKER_PORT = 5700
_SOMEWHERE = "192.0.2.1"  # a documentation address; nothing is sent to it
_WILDCARDS = ("0.0.0.0", "::", "*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What the command line says about the cluster."""

    registry: str = ""
    peers: tuple[str, ...] = ()
    key_file: str = ""
    worker_host: str = ""
    ports: tuple[int, ...] = ()
    threads: int = 0


def network_checks(cluster: Cluster) -> Checks:
    checks: Checks = {
        "address": lambda: check_address(cluster.worker_host, _hosts(cluster)),
        "host name": check_host_name,
        "cluster key": lambda: check_key(cluster.key_file),
    }
    for port in cluster.ports:
        checks[f"port {port}"] = functools.partial(check_free, cluster.worker_host or "127.0.0.1", port)
    if cluster.registry:
        checks["registry"] = lambda: check_registry(cluster.registry, _key(cluster))
    for peer in cluster.peers:
        checks[f"peer {peer}"] = functools.partial(check_peer, peer, _key(cluster))
    return checks


def _key(cluster: Cluster) -> ClusterKey | None:
    """None also for a file that is no key; that is said by its own check."""
    try:
        return load_key(cluster.key_file)
    except ConfigError:
        return None


def _hosts(cluster: Cluster) -> list[str]:
    """Of others, as far as they were named."""
    registries = cluster.registry.partition("://")[2].split(",") if cluster.registry else []
    return [split_address(address)[0] for address in [*cluster.peers, *registries] if address]


def split_address(address: str) -> tuple[str, int]:
    """HOST[:PORT] or [IPV6]:PORT; port 0 if there is none."""
    host, colon, port = address.rpartition(":")
    if not colon or (":" in host and not host.startswith("[")):
        return address.strip("[]"), 0
    if not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{address!r} is not HOST or HOST:PORT")
    return host.strip("[]"), int(port)


# This host


def check_address(worker_host: str, others: list[str]) -> Finding:
    """Others are told `--worker-host`, so it must be an address of this host that they reach."""
    routes = {host: source_address(host) for host in others or [_SOMEWHERE]}
    outward = next((address for address in routes.values() if address and not _is_loopback(address)), "")
    if worker_host in _WILDCARDS:
        return fail(
            f"{worker_host} is every address", f"others are told this address: use --worker-host {outward or 'ADDRESS'}"
        )
    if not worker_host:
        if not outward:
            return warn("only this machine reaches this machine", "connect it to a network, or run everything here")
        return warn(f"others reach {outward}; workers listen on 127.0.0.1 by default", f"use --worker-host {outward}")
    if not _is_ours(worker_host):
        return fail(f"{worker_host} is no address of this host", f"use --worker-host {outward or 'ADDRESS'}")
    if _is_loopback(worker_host):
        return warn(f"{worker_host} is reached from this machine alone", f"use --worker-host {outward or 'ADDRESS'}")
    if outward and outward != worker_host and others:
        return warn(f"{worker_host}, but the way to {others[0]} leaves by {outward}", "make sure that others reach it")
    return ok(worker_host)


def source_address(host: str) -> str:
    """Which of our addresses the way to `host` begins at. Sends nothing."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as asked:
            asked.connect(address)
            name: str = asked.getsockname()[0]
            return name
    except OSError:
        return ""


def check_host_name() -> Finding:
    """A name that means loopback here means another machine elsewhere."""
    name = socket.gethostname()
    try:
        addresses = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
    except OSError as error:
        return warn(f"{name} is not known: {error.strerror}", "name hosts by address, or enter it in DNS or /etc/hosts")
    found = f"{name} is {', '.join(addresses)}"
    if all(_is_loopback(address) for address in addresses):
        return warn(found, "name this host by its address, not by its name, to itself and to others")
    return ok(found)


def check_free(host: str, port: int) -> Finding:
    if not 0 < port < 65536:
        return warn(f"{port} is no port", "choose one from 1 to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as taken:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(address)
    except OSError as error:
        return warn(f"{host}:{port} cannot be used: {error.strerror}", "choose another, or stop what listens there")
    return ok(f"free on {host}")


def check_key(path: str) -> Finding:
    if not path:
        return warn("none", "make one with `kvrelay keygen`: without it any process that reaches a worker can use it")
    try:
        load_key(path)
    except ConfigError as error:
        return fail(str(error), "make one with `kvrelay keygen`, and copy it to every host")
    mode = stat.S_IMODE(os.stat(path).st_mode)
    if mode & 0o077:
        return warn(f"{path} has mode {mode:04o}", f"chmod 600 {path}")
    return ok(path)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return address == "localhost"


def _is_ours(address: str) -> bool:
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as taken:
            taken.bind(place)
    except OSError:
        return False
    return True


# Others


def check_registry(address: str, key: ClusterKey | None) -> Finding:
    if address.startswith("etcd://"):
        return _check_etcd(address)
    if not address.startswith("tcp://"):
        return fail(f"{address} is neither tcp://HOST:PORT nor etcd://HOST:PORT", "say where the registry is")
    reached = check_reach(address.removeprefix("tcp://"))
    if reached.grade != "ok":
        return reached
    try:
        with keyed(key):
            answer = _renew_unknown(address)
    except KVRelayError as error:
        return fail(f"{address}: {error}", "is it a router's --registry-listen address?")
    if answer is None:
        remedy = "is it a registry, and is --cluster-key the same as the router's?"
        return fail(f"{address} takes connections but does not answer", remedy)
    if isinstance(answer, RegistryRefused):
        return fail(f"{address} refuses: {answer.reason}", "use the same version of kvrelay on all hosts")
    return ok(f"{address} answers{' with this key' if key else ''}")


def _renew_unknown(address: str) -> FromRegistry | None:
    """A registry has never heard of this worker, and says so: harmless, and it needs the key like any other message."""
    decoder: Decoder[FromRegistry] = Decoder(FromRegistry)
    unknown = Renew(worker_id=new_worker_id(Role.WHOLE.value), state=WorkerState.STARTING, load=WorkerLoad())
    with connecting(zmq.DEALER) as socket_:
        socket_.connect(address)
        answer = next(exchange(socket_, encode(unknown), _PATIENCE_S), None)
        return None if answer is None else decoder.decode(answer)


def _check_etcd(address: str) -> Finding:
    try:
        Endpoints(address)
    except ConfigError as error:
        return fail(str(error), "say where the registry is")
    members = address.partition("://")[2].split(",")
    failures = {member: reason for member in members if (reason := _etcd_failure(member))}
    if not failures:
        return ok(f"etcd answers at {', '.join(members)}")
    found = "; ".join(f"{member}: {reason}" for member, reason in failures.items())
    if len(failures) < len(members):
        return warn(found, "the other members answer; bring this one back")
    return fail(found, "is etcd running, does it listen on that address, and is a firewall in between?")


def _etcd_failure(member: str) -> str:
    gateway = Gateway(Endpoints(f"etcd://{member}"), timeout_s=_PATIENCE_S)
    try:
        gateway.ask("/v3/kv/range", Range(key=b"/kvrelay/", range_end=b"/kvrelay0", limit=1), RangeAnswer)
    except (NoAnswerError, RefusedError) as error:
        return str(error)
    finally:
        gateway.close()
    return ""


def check_peer(peer: str, key: ClusterKey | None) -> Finding:
    """A worker, if one answers there; else whether the host can be reached at all."""
    try:
        host, port = split_address(peer)
    except ConfigError as error:
        return fail(str(error), "name a host, or a worker's address on it")
    if not port:
        reached = check_reach(f"{host}:{_USUAL_WORKER_PORT}")
        return ok(f"{host} answers") if _is_refused(host, _USUAL_WORKER_PORT) else reached
    reached = check_reach(peer)
    if reached.grade != "ok":
        return reached
    try:
        with keyed(key):
            return ok(f"a worker: {worker_state(f'tcp://{peer}', _PATIENCE_S)}")
    except KVRelayError as error:
        remedy = "if it is a worker's serving port: is --cluster-key the same there, and is the worker alive?"
        return warn(f"takes connections, but no worker answers: {error}", remedy)


def check_reach(address: str) -> Finding:
    """Whether a TCP connection can be made."""
    host, port = split_address(address)
    if not host or not port:
        return fail(f"{address!r} is not HOST:PORT", "name the port too")
    failure = _connect(host, port)
    if failure is None:
        return ok(f"{address} takes connections")
    if failure.errno == errno.ECONNREFUSED:
        return fail(f"{host} answers, but nothing listens on port {port}", "start it there, or open the port in the firewall")
    reason = failure.strerror or "no answer"
    return fail(f"{address}: {reason}", "check the name, the route and firewalls (docs/deploy.md lists the ports)")


def _is_refused(host: str, port: int) -> bool:
    failure = _connect(host, port)
    return failure is not None and failure.errno == errno.ECONNREFUSED


def _connect(host: str, port: int) -> OSError | None:
    try:
        socket.create_connection((host, port), _PATIENCE_S).close()
    except OSError as error:
        return error
    return None
