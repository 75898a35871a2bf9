"""A ZMQ socket on an asyncio loop, without a task or a future per message.

ZMQ's file descriptor is edge-triggered: it becomes readable once when something changes, and any send or receive may use
that edge up. So every wake-up reads until nothing is left, and every send looks again afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import zmq

from kvrelay.planes.curve import Socket

_MESSAGES_PER_TURN = 64  # then others on the loop have their turn


def bound_address(socket: Socket) -> str:
    """Where a socket that was bound to a free port (tcp://HOST:*) listens."""
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return endpoint.rstrip(b"\0").decode()


def readable(socket: Socket) -> bool:
    events = socket.getsockopt(zmq.EVENTS)
    assert isinstance(events, int)
    return bool(events & zmq.POLLIN)


def try_send(socket: Socket, frames: Sequence[bytes]) -> bool:
    """Without blocking. False: no peer is connected (of a ROUTER: none of that identity), or it does not keep up."""
    try:
        socket.send_multipart(frames, zmq.DONTWAIT)
    except zmq.Again:
        return False
    except zmq.ZMQError as error:
        if error.errno != zmq.EHOSTUNREACH:
            raise
        return False
    return True


class LoopSocket:
    """Owns the socket. `on_message` gets the frames of each message, on the loop's thread, and must not raise."""

    def __init__(self, socket: Socket, on_message: Callable[[list[bytes]], None]) -> None:
        self.socket = socket
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._drain_scheduled = False
        self._closed = False
        self._loop.add_reader(self._descriptor, self.drain)
        self._schedule_drain()

    def send(self, frames: Sequence[bytes]) -> bool:
        """Without blocking. False: no peer is connected, or it does not keep up."""
        if self._closed:
            return False
        try:
            return try_send(self.socket, frames)
        finally:
            if readable(self.socket):
                self._schedule_drain()

    def drain(self) -> None:
        """Hands on everything that waits."""
        for _ in range(_MESSAGES_PER_TURN):
            if self._closed:
                return
            try:
                frames = self.socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            self._on_message(frames)
        self._schedule_drain()

    def close(self, *, linger_ms: int = 0) -> None:
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._descriptor)
        self.socket.close(linger=linger_ms)

    def _schedule_drain(self) -> None:
        if not self._drain_scheduled:
            self._drain_scheduled = True
            self._loop.call_soon(self._scheduled_drain)

    def _scheduled_drain(self) -> None:
        self._drain_scheduled = False
        self.drain()
