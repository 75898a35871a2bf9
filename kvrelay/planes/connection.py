"""A router's DEALER connection to one worker's serving socket: it knows whether it is up, and nothing about messages.

    on_up()              connected (again): what the worker knew of us before is lost, so the caller says Hello
    on_message(frame)    one message of the worker
    on_down()            the process ended, the host is unreachable for `silence_s`, or the network broke

`send` works only while up: nothing is queued for a worker that may come back as another one. A peer with another cluster key,
or none, is never up; it is asked again now and then, because ZMQ itself gives such a peer up for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvrelay.errors import ProtocolError
from kvrelay.log import Log
from kvrelay.planes.curve import Socket, connecting
from kvrelay.planes.loop_socket import LoopSocket

log = Log("discovery")

_SEND_QUEUE = 16_384  # messages; a worker that far behind does not read at all
_RECONNECT_MS = 100
_RECONNECT_MAX_MS = 1000
_CONNECT_TIMEOUT_MS = 2000  # then again: TCP by itself tries ever more rarely, and would be late when the network is back
_ASK_AGAIN_S = 1.0
_GIVEN_UP = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH  # ZMQ does not try again after these
_WATCHED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | _GIVEN_UP


@dataclass(eq=False)
class Connection:
    """Owns the DEALER and its monitor. Everything runs on the event loop that made it."""

    address: str
    _: KW_ONLY
    identity: bytes | None
    silence_s: float
    on_up: Callable[[], None]
    on_down: Callable[[], None]
    on_message: Callable[[bytes], None]
    is_up: bool = field(default=False, init=False)
    _strange: bool = field(default=False, init=False)  # the last attempt ended in the handshake
    _asking_again: asyncio.TimerHandle | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        socket = _dealer(self.identity, self.silence_s)
        try:
            monitor = socket.get_monitor_socket(_WATCHED)
            socket.connect(self.address)
        except zmq.ZMQError as error:
            socket.disable_monitor()
            socket.close()
            raise ProtocolError(f"{self.address[:80]!r} is no address to connect to: {error.strerror or error}") from error
        self._monitor = LoopSocket(monitor, self._on_event)
        self._data = LoopSocket(socket, self._on_frames)

    def send(self, frame: bytes) -> bool:
        """False: the connection is down, or the worker does not keep up."""
        return self.is_up and self._data.send((frame,))

    def drain(self) -> None:
        """Hands on what has arrived."""
        if self.is_up:
            self._data.drain()

    def close(self) -> None:
        """No callback runs afterwards. What was sent just before still goes out."""
        self.is_up = False
        if self._asking_again is not None:
            self._asking_again.cancel()
        if not self._data.socket.closed:
            self._data.socket.disable_monitor()  # first: ZMQ's own thread would wait for ever for a monitor that is closed
        self._monitor.close()
        self._data.close(linger_ms=200)

    def _on_frames(self, frames: list[bytes]) -> None:
        for frame in frames:
            self.on_message(frame)

    def _on_event(self, frames: list[bytes]) -> None:
        event = parse_monitor_message(frames)["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED and not self.is_up:
            self.is_up, self._strange = True, False
            self.on_up()
        elif event == zmq.EVENT_DISCONNECTED and self.is_up:
            self._data.drain()  # what the worker said last counts
            self.is_up = False
            self.on_down()
        elif event & (_GIVEN_UP | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL):
            self._on_stranger(event)

    def _on_stranger(self, event: int) -> None:
        if not self._strange:
            self._strange = True
            log.warning("no handshake with the process there: do both hold the same cluster key?", address=self.address)
        if event & _GIVEN_UP and self._asking_again is None:
            self._asking_again = asyncio.get_running_loop().call_later(_ASK_AGAIN_S, self._ask_again)

    def _ask_again(self) -> None:
        self._asking_again = None
        self._data.socket.disconnect(self.address)
        self._data.socket.connect(self.address)


def _dealer(identity: bytes | None, silence_s: float) -> Socket:
    silence_ms = max(1, round(silence_s * 1000))
    options: dict[int, int | bytes] = {
        zmq.IMMEDIATE: 1,
        zmq.SNDHWM: _SEND_QUEUE,
        zmq.RCVHWM: 0,
        zmq.RECONNECT_IVL: _RECONNECT_MS,
        zmq.RECONNECT_IVL_MAX: _RECONNECT_MAX_MS,
        zmq.CONNECT_TIMEOUT: _CONNECT_TIMEOUT_MS,
        # A silence begins right after an answer at worst: it is found out after one interval and one timeout.
        zmq.HEARTBEAT_IVL: max(1, silence_ms // 4),
        zmq.HEARTBEAT_TIMEOUT: max(1, silence_ms * 3 // 4),
    }
    return connecting(zmq.DEALER, options if identity is None else options | {zmq.IDENTITY: identity})
