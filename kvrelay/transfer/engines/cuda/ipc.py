"""Workers on one host, memory of NVIDIA cards: the consumer maps the producer's pool and copies out of it, device to device.

1. `register` exports the allocation that holds the pool, once.
2. `local_info` tells the handle, which host this is and which process. A consumer elsewhere is refused in `add_peer`.
3. The consumer's link opens the handle once, also that of another card (peer access), and closes it when the peer is removed.
4. `read` copies on a stream of the link's own, one launch for all ranges of a move; the link's thread waits for its event.
   `write` does not exist, so no peer can write memory that its owner has reused.

The producer says what may be read when the event behind it has passed (docs/relay.md, fences), so a copy waits for nothing
there. When the producer dies, the driver keeps what is mapped: whether bytes may be used is decided by leases, not here.
A copy cannot be called back: a cancelled move ends with the group of ranges under way, in about a millisecond.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta

from kvrelay.ids import WorkerId
from kvrelay.transfer.engines.base import MoveId, Mover, Ranges, TransferError
from kvrelay.transfer.engines.cuda.card import HANDLE_BYTES, Card, Copier
from kvrelay.transfer.engines.links import CANCELLED, LinkedEngine, Way, read_info
from kvrelay.transfer.engines.moves import Move
from kvrelay.transfer.engines.ranges import groups
from kvrelay.transfer.engines.shm import host_identity
from kvrelay.transfer.region import MAX_BYTES, Region

_PROCESS = secrets.token_hex(16)  # CUDA opens no handle in the process that made it
_GROUP_BYTES = 1 << 30  # copied at once: what a cancel may have to wait for


class CudaIpcInfo(msgspec.Struct, frozen=True, tag="cuda_ipc", forbid_unknown_fields=True):
    """Where a consumer finds the pool. The digest, of all else, keeps damaged handles and addresses from the driver."""

    host: str
    process: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}$")]
    handle: Annotated[bytes, Meta(min_length=HANDLE_BYTES, max_length=HANDLE_BYTES)]
    offset: Annotated[int, Meta(ge=0, le=MAX_BYTES)]
    address: Annotated[int, Meta(gt=0, le=MAX_BYTES)]  # in its own process
    size_bytes: Annotated[int, Meta(gt=0, le=MAX_BYTES)]
    digest: bytes = b""


def nvidia_card(device: str) -> Card:
    """Loads PyTorch, which nothing else here needs."""
    from kvrelay.transfer.engines.cuda.nvidia import NvidiaCard

    return NvidiaCard(device)


class CudaIpcEngine(LinkedEngine):
    """`Mover.CONSUMER`: only `read` moves bytes. `register` is start-up: it compiles what copies."""

    name = "cuda_ipc"
    mover = Mover.CONSUMER

    def __init__(self, worker: WorkerId, open_card: Callable[[str], Card] = nvidia_card) -> None:
        super().__init__(worker)
        self._open_card = open_card

    def _open(self, region: Region) -> None:
        if not region.device.startswith("cuda"):
            raise TransferError(f"cuda_ipc moves memory of NVIDIA cards, not memory on {region.device}")
        self._card = self._open_card(region.device)
        handle, offset = self._card.export(region.address, region.size_bytes)
        info = CudaIpcInfo(host_identity(), _PROCESS, handle, offset, region.address, region.size_bytes)
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

    def _tear_down(self, region: Region) -> None:
        """What was exported goes with the pool."""


class _MappedPool:
    """The consumer's side: one producer's pool, mapped."""

    def __init__(self, card: Card, told: CudaIpcInfo, region: Region) -> None:
        self._card = card
        self._told = told
        self._region = region
        self._base: int | None = None  # of the allocation, where it had to be opened
        self._address = 0
        self._copier: Copier | None = None

    def open(self) -> None:
        self.close()
        if self._told.process == _PROCESS:
            self._address = self._told.address
        else:
            self._base = self._card.open(self._told.handle)
            self._address = self._base + self._told.offset
        self._copier = self._copier or self._card.copier()

    def move(self, move: Move, abandon: threading.Event) -> None:
        assert self._copier is not None
        for ranges in groups(move.ranges, _GROUP_BYTES):
            if move.stop.value:
                raise TransferError(CANCELLED)
            self._copier.copy(self._region.address, self._address, ranges)

    def close(self) -> None:
        base, self._base = self._base, None
        if base is not None:
            self._card.close(base)


def _digest(info: CudaIpcInfo) -> bytes:
    return hashlib.blake2b(msgspec.msgpack.encode(msgspec.structs.replace(info, digest=b"")), digest_size=16).digest()
