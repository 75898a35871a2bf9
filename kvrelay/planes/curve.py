"""Every ZMQ socket of the serving, registry, signal and event planes comes from here, so that one key protects them all.

    use_key(key)        once, before any socket: what this process does from now on is done with that key
    listening(kind)     to be bound: takes only peers that hold the cluster key, if there is one
    connecting(kind)    to be connected: shows that it holds the key
    exchange(socket)    a question and its answers, for as long as is given
    num_refused()       how many connections were refused since this process began

With a key every connection is encrypted and both ends have proven themselves (CURVE) before a byte of a message is read. The
listening end asks a second time: a thread, the guard, answers ZMQ's question (ZAP) whether a client's public key is the one
made from the cluster key. Without a guard no peer is let in. Peers that show no key, or another one, do not get as far as the
guard: so refusals are counted by a monitor on each listening socket, which ZMQ tells of all peers that speak its protocol (what
does not, such as HTTP, is dropped uncounted).

A process belongs to one cluster. A local cluster (launch/cluster.py) may live inside a process of another one: what its
thread does is done with its own key (`keyed`). Without a key the planes are open, and belong on loopback.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import TypeAlias

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from kvrelay.errors import ProtocolError
from kvrelay.log import Log
from kvrelay.planes.cluster_key import ClusterKey

log = Log("security")

Socket: TypeAlias = "zmq.Socket[bytes]"
Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"
Options: TypeAlias = Mapping[int, int | bytes]  # of ZMQ, for setsockopt

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_MAX_SOCKETS = 16_384  # a router has five for each worker; ZMQ's own limit is 1023


_process_key: ClusterKey | None = None
_local_key: ContextVar[ClusterKey | None] = ContextVar("cluster_key")


def use_key(key: ClusterKey | None) -> None:
    """For every socket that this process makes from now on, in any thread."""
    global _process_key
    _process_key = key


@contextlib.contextmanager
def keyed(key: ClusterKey | None) -> Iterator[None]:
    """For the sockets made inside, and by tasks and callbacks that begin there, instead of the process's key."""
    token = _local_key.set(key)
    try:
        yield
    finally:
        _local_key.reset(token)


def current_key() -> ClusterKey | None:
    return _local_key.get(_process_key)


def listening(kind: int, options: Options = MappingProxyType({}), on_refused: Callable[[], None] = lambda: None) -> Socket:
    """`on_refused` hears of every peer that is refused, on a thread of its own."""
    socket, key = _new_socket(kind, options), current_key()
    if key is not None:
        _guard(socket.context)
        _watch_refusals(socket, on_refused)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, key.server_secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, key.client_public)  # the guard lets in peers with this key
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    return socket


def connecting(kind: int, options: Options = MappingProxyType({})) -> Socket:
    socket, key = _new_socket(kind, options), current_key()
    if key is not None:
        socket.setsockopt(zmq.CURVE_SERVERKEY, key.server_public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, key.client_public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, key.client_secret)
    return socket


def exchange(socket: Socket, question: bytes, timeout_s: float) -> Iterator[bytes]:
    """Asks, and gives what is answered within `timeout_s`. A connection that breaks may take back an answer that a
    poll has seen, and a question that has no way out yet waits in `send`: neither is waited for any longer than that."""
    deadline = time.monotonic() + timeout_s
    with contextlib.suppress(zmq.Again):
        socket.setsockopt(zmq.SNDTIMEO, round(timeout_s * 1000))
        socket.send(question)
        while (left_ms := round((deadline - time.monotonic()) * 1000)) > 0:
            socket.setsockopt(zmq.RCVTIMEO, left_ms)
            yield socket.recv()


def _new_socket(kind: int, options: Options) -> Socket:
    """Of this process's one ZMQ context. Drops what is unsent when it closes, unless told otherwise. Raises ProtocolError when
    there can be no more: strangers may have caused that, so no process ends because of it."""
    context: Context = zmq.Context.instance()
    context.max_sockets = _MAX_SOCKETS  # counts from the first socket on
    try:
        socket = context.socket(kind)
    except zmq.ZMQError as error:
        raise ProtocolError(f"no more connections can be made: {error.strerror or error}") from error
    for option, value in {zmq.LINGER: 0, **options}.items():
        socket.setsockopt(option, value)
    return socket


# Open doors


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens on `host`. A name other than localhost counts as reachable."""
    bare = host.strip("[]")
    try:
        return ipaddress.ip_address(bare).is_loopback
    except ValueError:
        return bare == "localhost"


def warn_if_open(option: str, host: str) -> None:
    """For an address that ZMQ sockets are about to listen on."""
    if current_key() is None and not is_loopback(host):
        log.warning(
            "any program that reaches this address can join the cluster and read prompts; protect it with --cluster-key",
            option=option,
            address=host,
        )


# The guard

_guard_lock = threading.Lock()
_guarded: weakref.WeakSet[Context] = weakref.WeakSet()


def _guard(context: Context) -> None:
    """Makes sure that `context` has its guard before the first connection can ask for it."""
    with _guard_lock:
        if context in _guarded:
            return
        door: Socket = context.socket(zmq.REP)
        door.setsockopt(zmq.LINGER, 0)
        door.bind(_ZAP_ENDPOINT)
        _guarded.add(context)
        threading.Thread(target=_answer_all, args=[door], name="cluster-key-guard", daemon=True).start()


def _answer_all(door: Socket) -> None:
    try:
        while True:
            request = door.recv_multipart()
            admitted = _admits(request)
            door.send_multipart(_answer(request, admitted=admitted))
            if not admitted:
                log.seldom("refused a peer that does not hold the cluster key", address=_address(request))
    except zmq.ContextTerminated:
        door.close()


def _admits(request: list[bytes]) -> bool:
    """ZMQ asks with version, request id, domain, address, identity, mechanism, and for CURVE the client's public key."""
    match request:
        case [b"1.0", _, domain, _, _, b"CURVE", public_key] if len(public_key) == 32:
            return bool(z85.encode(public_key) == domain)
        case _:
            return False


def _answer(request: list[bytes], *, admitted: bool) -> list[bytes]:
    request_id = request[1] if len(request) > 1 else b""
    status, text = (b"200", b"OK") if admitted else (b"400", b"not a member of this cluster")
    return [b"1.0", request_id, status, text, b"", b""]


def _address(request: list[bytes]) -> str:
    return request[3].decode("ascii", errors="replace") if len(request) > 3 else ""


# Refusals

_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_monitor_numbers = itertools.count()
_refusal_lock = threading.Lock()
_num_refused = 0


def num_refused() -> int:
    return _num_refused


def _watch_refusals(socket: Socket, on_refused: Callable[[], None]) -> None:
    """Until `socket` closes."""
    try:
        monitor = _new_socket(zmq.PAIR, {zmq.LINGER: 0, zmq.RCVHWM: 0})  # ZMQ's own thread would wait for room
    except ProtocolError:
        socket.close(linger=0)
        raise
    address = f"inproc://refusals.{next(_monitor_numbers)}"
    socket.monitor(address, _REFUSED | zmq.EVENT_MONITOR_STOPPED)
    monitor.connect(address)
    threading.Thread(target=_count_refusals, args=[monitor, on_refused], name="refusals", daemon=True).start()


def _count_refusals(monitor: Socket, on_refused: Callable[[], None]) -> None:
    global _num_refused
    with monitor, contextlib.suppress(zmq.ContextTerminated):
        while parse_monitor_message(monitor.recv_multipart())["event"] != zmq.EVENT_MONITOR_STOPPED:
            with _refusal_lock:
                _num_refused += 1
            on_refused()
