"""Workers on one host, memory of NVIDIA cards: the consumer maps the producer's pool and copies out of it, device to device.

1. `register` exports the allocation that holds the pool, once. Of a worker whose ranks have a pool each, it has the handles
   of the others.
2. `local_info` tells the handles, which host this is and which process. A consumer elsewhere is refused in `add_peer`.
3. The consumer's link opens each handle once, also that of another card (peer access), and closes it when the peer is removed.
4. `read` launches all ranges of a move at once, on a stream of the link's own, and `poll` asks whether its event has passed.
   What was asked for before the handle is open, and what is very large, is copied by the link's thread. `write` does not
   exist, so no peer can write memory that its owner has reused.

The producer says what may be read when the event behind it has passed (docs/relay.md, fences), so a copy waits for nothing
there. When the producer dies, the driver keeps what is mapped: whether bytes may be used is decided by leases, not here.
A copy cannot be called back: a cancelled move ends with the ranges under way, in about a millisecond.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import threading
from collections.abc import Callable
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from kvrelay.ids import WorkerId
from kvrelay.native.driver import HANDLE_BYTES
from kvrelay.transfer.engines.base import Completion, MoveId, Mover, Ranges, TransferError
from kvrelay.transfer.engines.cuda.card import Card, Copier, Copying
from kvrelay.transfer.engines.links import CANCELLED, PEER_REMOVED, Link, LinkedEngine, Way, read_info
from kvrelay.transfer.engines.moves import Move
from kvrelay.transfer.engines.ranges import Scanned, groups, scan
from kvrelay.transfer.engines.shm import host_identity
from kvrelay.transfer.region import MAX_BYTES, Region, Share
from kvrelay.wire.kv import MAX_RANKS

_PROCESS = secrets.token_hex(16)  # CUDA opens no handle in the process that made it
_GROUP_BYTES = 1 << 30  # copied at once: what a cancel may have to wait for


class PoolPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of one rank."""

    handle: Annotated[bytes, Meta(min_length=HANDLE_BYTES, max_length=HANDLE_BYTES)]
    offset: Annotated[int, Meta(ge=0, le=MAX_BYTES)]
    address: Annotated[int, Meta(gt=0, le=MAX_BYTES)]  # in the process of rank 0


class CudaIpcInfo(msgspec.Struct, frozen=True, tag="cuda_ipc", forbid_unknown_fields=True):
    """Where a consumer finds the pool. The digest, of all else, keeps damaged handles and addresses from the driver."""

    host: str
    process: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}$")]
    parts: Annotated[list[PoolPart], Meta(min_length=1, max_length=MAX_RANKS)]  # equally large
    size_bytes: Annotated[int, Meta(gt=0, le=MAX_BYTES)]  # of all parts
    digest: bytes = b""


def nvidia_card(device: str) -> Card:
    """Loads PyTorch, which nothing else here needs."""
    from kvrelay.transfer.engines.cuda.nvidia import NvidiaCard

    return NvidiaCard(device)


class CudaIpcEngine(LinkedEngine):
    """`Mover.CONSUMER`: only `read` moves bytes. `register` is start-up: it compiles what copies."""

    name = "cuda_ipc"
    mover = Mover.CONSUMER
    takes_shares = True

    def __init__(self, worker: WorkerId, open_card: Callable[[str], Card] = nvidia_card) -> None:
        super().__init__(worker)
        self._open_card = open_card
        self._started: list[tuple[Move, Link, Copying]] = []

    def _open(self, region: Region) -> None:
        if not region.device.startswith("cuda"):
            raise TransferError(f"cuda_ipc moves memory of NVIDIA cards, not memory on {region.device}")
        self._card = self._open_card(region.device)
        own = Share(region.address, *self._card.export(region.address, region.part_bytes))
        parts = [PoolPart(share.handle, share.offset, share.address) for share in (own, *region.shares)]
        info = CudaIpcInfo(host_identity(), _PROCESS, parts, region.size_bytes)
        self._told = msgspec.structs.replace(info, digest=_digest(info))

    def _info(self, region: Region) -> CudaIpcInfo:
        return self._told

    def _way_to(self, peer: WorkerId, info: bytes, region: Region) -> tuple[Way, int]:
        told = read_info(self.name, peer, info, CudaIpcInfo)
        if told.digest != _digest(told):
            raise TransferError(f"cuda_ipc: the info of {peer} makes no sense: it was damaged")
        if told.host != host_identity():
            raise TransferError(f"cuda_ipc: {peer} is on another host or in another container")
        return _MappedPool(self._card, told, region), told.size_bytes

    def write(self, peer: WorkerId, ranges: Ranges) -> MoveId:
        raise TransferError("cuda_ipc: the consumer copies; a producer never writes a peer's memory")

    def read(self, peer: WorkerId, ranges: Ranges) -> MoveId:
        region, link = self._registered(), self._link_to(peer)
        scanned = scan(ranges, region.size_bytes, link.remote_size_bytes)
        assert isinstance(link.way, _MappedPool)
        if not link.way.takes(scanned):
            return super().read(peer, ranges)
        move = self._book.open(peer, ranges, writes=False)
        self._book.start(move)
        try:
            self._started.append((move, link, link.way.start(scanned)))
        except TransferError as error:
            self._book.end(move, str(error))
        return move.id

    def poll(self) -> list[Completion]:
        self._started = [each for each in self._started if not self._has_ended(*each)]
        return super().poll()

    def _has_ended(self, move: Move, link: Link, copying: Copying) -> bool:
        error = ""
        try:
            if not copying.passed():
                return False
        except TransferError as failure:
            error = str(failure)
        if move.stop.value:
            error = PEER_REMOVED if link.is_leaving else CANCELLED
        self._book.end(move, error)
        return True

    def close(self) -> None:
        for move, _, copying in self._started:
            with contextlib.suppress(TransferError):
                copying.wait()
            self._book.rest(move)
        self._started = []
        super().close()

    def _tear_down(self, region: Region) -> None:
        """What was exported goes with the pool."""


class _MappedPool:
    """The consumer's side: one producer's pool, mapped."""

    def __init__(self, card: Card, told: CudaIpcInfo, region: Region) -> None:
        self._card = card
        self._told = told
        self._here = _Parts([region.address, *(share.address for share in region.shares)], region.size_bytes)
        self._there = _Parts([0], told.size_bytes)
        self._bases: list[int] = []  # of the allocations, where they had to be opened
        self._copier: Copier | None = None
        self._lock = threading.Lock()  # two threads start copies, and one of them closes
        self._is_open = False

    def open(self) -> None:
        self.close()
        addresses = [part.address for part in self._told.parts]
        if self._told.process != _PROCESS:
            for number, part in enumerate(self._told.parts):
                self._bases.append(self._card.open(part.handle))
                addresses[number] = self._bases[-1] + part.offset
        self._there = _Parts(addresses, self._told.size_bytes)
        self._copier = self._copier or self._card.copier()
        self._is_open = True

    def takes(self, scanned: Scanned) -> bool:
        """Whether it is open, and they can be copied at once."""
        return self._is_open and 0 < scanned.size_bytes <= _GROUP_BYTES

    def start(self, scanned: Scanned) -> Copying:
        with self._lock:
            if not self._is_open or self._copier is None:
                raise TransferError("cuda_ipc: the peer's memory is being opened anew")
            if len(self._here.addresses) == len(self._there.addresses) == 1:
                return self._copier.start(self._here.addresses[0], self._there.addresses[0], scanned)
            return self._copier.start(0, 0, scan(_with_addresses(scanned.ranges, self._here, self._there)))

    def move(self, move: Move, abandon: threading.Event) -> None:
        for ranges in groups(move.ranges, _GROUP_BYTES):
            if move.stop.value:
                raise TransferError(CANCELLED)
            self.start(scan(ranges)).wait()

    def close(self) -> None:
        with self._lock:
            self._is_open = False
        if self._copier is not None:
            self._copier.rest()
        while self._bases:
            self._card.close(self._bases.pop())


class _Parts:
    """Where a region's equal parts lie."""

    def __init__(self, addresses: list[int], size_bytes: int) -> None:
        self.addresses = addresses
        self._shifts = np.array([address - number * (size_bytes // len(addresses)) for number, address in enumerate(addresses)])
        self.part_bytes = size_bytes // len(addresses)

    def of(self, offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Addresses of offsets in the region."""
        found: npt.NDArray[np.int64] = offsets + self._shifts[offsets // self.part_bytes]
        return found


def _cut_at_parts(ranges: Ranges, part_bytes: npt.NDArray[np.int64]) -> Ranges:
    """The same bytes in ranges of which none lies in two parts of either side."""
    done: list[Ranges] = []
    while len(ranges):
        room = (part_bytes - ranges[:, :2] % part_bytes).min(axis=1)
        first, rest = ranges.copy(), ranges.copy()
        first[:, 2] = np.minimum(ranges[:, 2], room)
        rest += first[:, 2:] * np.array([1, 1, -1])
        done.append(first)
        ranges = rest[rest[:, 2] > 0]
    return np.concatenate(done) if done else ranges


def _with_addresses(ranges: Ranges, here: _Parts, there: _Parts) -> Ranges:
    """Instead of offsets."""
    ranges = _cut_at_parts(ranges, np.array([here.part_bytes, there.part_bytes]))
    return np.stack((here.of(ranges[:, 0]), there.of(ranges[:, 1]), ranges[:, 2]), axis=1)


def _digest(info: CudaIpcInfo) -> bytes:
    return hashlib.blake2b(msgspec.msgpack.encode(msgspec.structs.replace(info, digest=b"")), digest_size=16).digest()
