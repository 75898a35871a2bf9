"""The sockets of the signal plane: a producer's ROUTER, and a consumer's DEALERs, one per producer. Frames in, frames out.

The DEALER's identity is the consumer's WorkerId, so the ROUTER knows who speaks before it has understood a word. No call
blocks; one thread uses a socket. What cannot be sent is dropped and counted: heartbeats repair it.

A consumer also finds out here that a producer is dead. Silence proves nothing (its process may be stopped, and wake up in the
middle of a write). Proof is that no process listens at its address any more: a listening socket lives as long as its process.
"""

from __future__ import annotations

import errno
import select
import socket as sockets
from collections.abc import Callable, Iterable, Iterator

import zmq

from kvrelay.errors import ProtocolError, WrongIdError
from kvrelay.ids import WorkerId, as_worker_id
from kvrelay.log import Log
from kvrelay.planes.curve import Socket, connecting, listening
from kvrelay.planes.loop_socket import bound_address, try_send

log = Log("transfer.signal")

_MAX_FRAME_BYTES = 16 * 1024 * 1024
_LINGER_MS = 200  # for the last words of a worker that goes
# After a broken network, TCP itself waits ever longer before it tries again; a new connection is there within a second or two.
_RECONNECTING = (
    (zmq.RECONNECT_IVL, 50),
    (zmq.RECONNECT_IVL_MAX, 1000),
    (zmq.CONNECT_TIMEOUT, 1000),
    (zmq.HEARTBEAT_IVL, 1000),
    (zmq.HEARTBEAT_TIMEOUT, 3000),
)
_MESSAGES_PER_TURN = 256  # then moves and commands have their turn


class ProducerSocket:
    """Listens for consumers. A consumer that reconnects takes its identity over from its old connection."""

    def __init__(self, host: str, port: int = 0) -> None:
        self._socket = _set_up(listening(zmq.ROUTER))
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.bind(f"tcp://{host}:{port or '*'}")
        self.address = bound_address(self._socket)

    def register(self, poller: zmq.Poller) -> None:
        poller.register(self._socket, zmq.POLLIN)

    def receive(self, on_stranger: Callable[[WrongIdError], None]) -> Iterator[tuple[WorkerId, bytes]]:
        """`on_stranger` hears of messages of peers whose identity is no WorkerId."""
        for _ in range(_MESSAGES_PER_TURN):
            try:
                frames = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            try:
                yield as_worker_id(frames[0].decode(errors="replace")), _only_frame(frames[1:])
            except WrongIdError as error:
                on_stranger(error)

    def send(self, peer: WorkerId, frame: bytes) -> None:
        try_send(self._socket, [peer.encode(), frame])

    def close(self) -> None:
        self._socket.close(linger=_LINGER_MS)


class ConsumerSockets:
    """Connects to producers on demand."""

    def __init__(self, worker_id: WorkerId) -> None:
        self._worker_id = worker_id
        self._sockets: dict[WorkerId, Socket] = {}
        self._monitors: dict[WorkerId, Socket] = {}
        self._addresses: dict[WorkerId, str] = {}
        self._disconnected: set[WorkerId] = set()
        self._probes: dict[WorkerId, Probe] = {}

    def connect(self, peer: WorkerId, address: str, poller: zmq.Poller) -> str:
        """Harmless if connected. Returns why it cannot be, or nothing."""
        if peer in self._sockets:
            return ""
        try:
            socket = _set_up(connecting(zmq.DEALER))
        except ProtocolError as error:
            return str(error)
        socket.setsockopt(zmq.IDENTITY, self._worker_id.encode())
        for option, value in _RECONNECTING:
            socket.setsockopt(option, value)
        try:
            monitor: Socket = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED)
            socket.connect(address)
        except zmq.ZMQError as error:
            socket.disable_monitor()
            socket.close()
            return f"cannot connect to {address[:80]!r}: {error}"
        poller.register(socket, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        self._sockets[peer], self._monitors[peer], self._addresses[peer] = socket, monitor, address
        return ""

    def disconnect_all_but(self, wanted: Iterable[WorkerId], poller: zmq.Poller) -> None:
        for peer in set(self._sockets) - set(wanted):
            socket, monitor = self._sockets.pop(peer), self._monitors.pop(peer)
            poller.unregister(socket)
            poller.unregister(monitor)
            # The monitor stays open until its socket does not send to it: ZMQ's own thread would wait for ever, holding a lock.
            socket.disable_monitor()
            monitor.close()
            socket.close(linger=_LINGER_MS)
            del self._addresses[peer]
            self._disconnected.discard(peer)
            if peer in self._probes:
                self._probes.pop(peer).close()

    def receive(self) -> Iterator[tuple[WorkerId, bytes]]:
        for peer, socket in list(self._sockets.items()):
            for _ in range(_MESSAGES_PER_TURN):
                try:
                    yield peer, _only_frame(socket.recv_multipart(zmq.DONTWAIT))
                except zmq.Again:
                    break

    def send(self, peer: WorkerId, frame: bytes) -> None:
        if peer in self._sockets:
            try_send(self._sockets[peer], [frame])

    def find_dead(self) -> list[WorkerId]:
        """Of those whose connection broke, or was never made, the ones at whose address no process listens: they are dead."""
        self._watch()
        for peer in self._disconnected - set(self._probes):
            self._probes[peer] = Probe(self._addresses[peer])
        dead = []
        for peer, probe in list(self._probes.items()):
            refused = probe.refused()
            if refused is not None:
                self._probes.pop(peer).close()
                self._disconnected.discard(peer)  # should it go on, ZMQ says so again with its next attempt
                if refused:
                    dead.append(peer)
        return dead

    @property
    def probing(self) -> bool:
        return bool(self._probes)

    def _watch(self) -> None:
        for peer, monitor in self._monitors.items():
            try:
                while True:
                    monitor.recv_multipart(zmq.DONTWAIT)
                    self._disconnected.add(peer)
            except zmq.Again:
                continue

    def close(self, poller: zmq.Poller) -> None:
        self.disconnect_all_but([], poller)


class Probe:
    """One attempt to reach a TCP address, without blocking."""

    def __init__(self, address: str) -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        family = sockets.AF_INET6 if ":" in host else sockets.AF_INET
        self._socket = sockets.socket(family, sockets.SOCK_STREAM)
        self._socket.setblocking(False)
        try:
            self._error = self._socket.connect_ex((host.strip("[]"), int(port)))
        except (OSError, ValueError, OverflowError) as error:  # a peer's address may be anything
            log.seldom("cannot probe", address=address, error=error)
            self._error = errno.EINVAL

    def refused(self) -> bool | None:
        """None while the attempt is under way. Any other failure than a refusal proves nothing."""
        if self._error == errno.EINPROGRESS:
            poll = select.poll()
            poll.register(self._socket, select.POLLOUT)
            if not poll.poll(0):
                return None
            self._error = self._socket.getsockopt(sockets.SOL_SOCKET, sockets.SO_ERROR)
        return self._error == errno.ECONNREFUSED

    def close(self) -> None:
        self._socket.close()


def _set_up(socket: Socket) -> Socket:
    socket.setsockopt(zmq.MAXMSGSIZE, _MAX_FRAME_BYTES)
    socket.setsockopt(zmq.IPV6, 1)
    return socket


def _only_frame(frames: list[bytes]) -> bytes:
    """A message is one frame; anything else decodes to nothing, and is counted and answered like any malformed one."""
    return frames[0] if len(frames) == 1 else b""
