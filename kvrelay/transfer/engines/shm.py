"""Workers on one host, host memory: the consumer maps the producer's region and copies out of it, at memory speed.

1. The producer's region is a memfd. A thread of its engine waits on an abstract Unix socket.
2. `local_info` tells the socket's name, a token, and which host this is. A consumer elsewhere is refused in `add_peer`.
3. The consumer's link connects, shows the token, receives the file descriptor and maps it, read-only.
4. `read` copies on the link's thread, one native call per batch; `write` does not exist, so no peer can write memory that
   its owner has reused. When the producer dies, its memory stays mapped: a copy that runs ends normally, and whether the
   bytes may be used is decided by leases, not here.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import mmap
import os
import pathlib
import secrets
import socket
import struct
import threading
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from kvrelay.ids import WorkerId
from kvrelay.log import Log
from kvrelay.transfer.copy import copy_ranges
from kvrelay.transfer.engines.base import MoveId, Mover, Ranges, TransferError
from kvrelay.transfer.engines.links import CANCELLED, CLOSE_WAIT_S, LinkedEngine, Way, read_info
from kvrelay.transfer.engines.moves import Move
from kvrelay.transfer.region import MAX_BYTES, SIZE_IS_FIXED, Region

_log = Log("transfer.shm")
_CONNECT_TIMEOUT_S = 5.0  # on the link's thread; a producer that does not answer within it is stuck
_TOKEN_TIMEOUT_S = 1.0
_TOKEN_CHARACTERS = 32


class ShmInfo(msgspec.Struct, frozen=True, tag="shm", forbid_unknown_fields=True):
    """Where a consumer finds the region. The token keeps strangers on the host from mapping it by chance or by guess."""

    host: str
    socket_name: Annotated[str, Meta(pattern=r"^kvrelay/[a-z0-9/-]{1,90}$")]
    token: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}$")]
    size_bytes: Annotated[int, Meta(gt=0, le=MAX_BYTES)]


def host_identity() -> str:
    """Equal for two processes exactly if they can share memory by `shm`: one kernel, and sockets that see each other."""
    try:
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # a sandbox whose kernel has no such file
        stat = pathlib.Path("/proc/stat").read_text(encoding="ascii")
        boot = f"{os.uname().nodename}-{stat.partition('btime ')[2].partition(chr(10))[0]}"
    return f"{boot}/{pathlib.Path('/proc/self/ns/net').stat().st_ino}"


class ShmEngine(LinkedEngine):
    """`Mover.CONSUMER`: only `read` moves bytes."""

    name = "shm"
    mover = Mover.CONSUMER

    def _open(self, region: Region) -> None:
        if region.fd is None or region.device != "cpu":
            raise TransferError(f"shm moves host memory made by shared_region, not memory on {region.device}")
        self._door = _Door(self._worker, region.fd)

    def _info(self, region: Region) -> ShmInfo:
        return ShmInfo(host_identity(), self._door.socket_name, self._door.token, region.size_bytes)

    def _way_to(self, peer: WorkerId, info: bytes, region: Region) -> tuple[Way, int]:
        told = read_info(self.name, peer, info, ShmInfo)
        if told.host != host_identity():
            raise TransferError(f"shm: {peer} is on another host or in another container; use nixl or mooncake")
        return _MappedPeer(told, region), told.size_bytes

    def write(self, peer: WorkerId, ranges: Ranges) -> MoveId:
        raise TransferError("shm: the consumer copies; a producer never writes a peer's memory")

    def _tear_down(self, region: Region) -> None:
        self._door.close()


class _Door:
    """The producer's side: hands the region's file descriptor to a peer that shows the token."""

    def __init__(self, worker: WorkerId, fd: int) -> None:
        self.socket_name = f"kvrelay/{worker}/{secrets.token_hex(8)}"
        self.token = secrets.token_hex(_TOKEN_CHARACTERS // 2)
        self._fd = os.dup(fd)  # so that closing the region first does not hand out another file
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind("\0" + self.socket_name)
        self._listener.listen(128)
        self._thread = threading.Thread(target=self._serve, name=f"shm-door-{worker}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # wakes accept; already shut down if it broke before
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(CLOSE_WAIT_S)
        self._listener.close()
        os.close(self._fd)

    def _serve(self) -> None:
        while True:
            try:
                visitor, _ = self._listener.accept()
            except OSError:
                return  # closed
            with visitor:
                try:
                    self._answer(visitor)
                except OSError as error:
                    _log.warning("a peer that wanted to map the region went away", error=error)

    def _answer(self, visitor: socket.socket) -> None:
        _, user, _ = struct.unpack("3i", visitor.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
        if user not in (os.getuid(), 0):  # before it can make us wait
            _log.warning("refused to share memory with another user", user=user)
            return
        visitor.settimeout(_TOKEN_TIMEOUT_S)
        if not hmac.compare_digest(_receive_exactly(visitor, _TOKEN_CHARACTERS), self.token.encode()):
            _log.warning("refused to share memory: wrong token")
            return
        socket.send_fds(visitor, [b"\1"], [self._fd])


class _MappedPeer:
    """The consumer's side: one producer's region, mapped read-only."""

    def __init__(self, info: ShmInfo, region: Region) -> None:
        self._info = info
        self._region = region
        self._address = 0
        self._mapping: npt.NDArray[np.uint8] | None = None

    def open(self) -> None:
        try:
            fd = self._fetch()
        except OSError as error:
            raise TransferError(f"shm: the producer did not share its memory: {error}") from error
        try:
            self._map(fd)
        finally:
            os.close(fd)

    def move(self, move: Move, abandon: threading.Event) -> None:
        if not copy_ranges(self._region.address, self._address, move.ranges, move.stop):
            raise TransferError(CANCELLED)

    def close(self) -> None:
        self._mapping = None  # the last reference: unmapped here

    def _fetch(self) -> int:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_CONNECT_TIMEOUT_S)
            connection.connect("\0" + self._info.socket_name)
            connection.sendall(self._info.token.encode())
            _, fds, _, _ = socket.recv_fds(connection, 1, 1)
        if len(fds) != 1:
            raise TransferError("shm: the producer refused to share its memory")
        return fds[0]

    def _map(self, fd: int) -> None:
        size = os.fstat(fd).st_size
        # A file that could still shrink would kill this process when it reads beyond the new end.
        if size < self._info.size_bytes or fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SIZE_IS_FIXED != SIZE_IS_FIXED:
            raise TransferError(f"shm: the producer shared {size} bytes where {self._info.size_bytes} of fixed size were told")
        memory = mmap.mmap(fd, self._info.size_bytes, prot=mmap.PROT_READ)
        self._mapping = np.frombuffer(memory, dtype=np.uint8)
        self._address = self._mapping.ctypes.data


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        piece = connection.recv(size - len(received))
        if not piece:
            break
        received += piece
    return received
