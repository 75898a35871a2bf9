"""Mooncake's transfer engine over TCP, found by peer-to-peer handshake. It moves host memory and, with its build for CUDA, a
card's, which Mooncake passes through its own buffers on the host.

What its Python API leaves to its caller, and how this file deals with it:

- Reaching a peer for the first time blocks, for a minute if the peer hangs, and blocks every other transfer of that engine.
  So each peer has a thread (links.py) and a Mooncake engine of its own, besides the one that serves our region.
- More than about 2000 queued ranges fail, and asking for a batch's status blocks on a busy core, while asking for a batch
  of one does not block. So every range is a batch of one, with a window of them in flight.
- Nothing can be cancelled. A cancelled move, and one whose peer was removed, ends when what is in flight has ended: in
  milliseconds with a live peer, within 3 s if its process died, within `_PROGRESS_TIMEOUT_S` plus that if it hangs.
- Destroying an engine waits for its threads, up to a second, holding Python's lock. So those made for peers are kept for
  later ones in this process, but not for a new peer at an address they have met: they remember what they heard about it.
- Memory of a card is copied on the card's default stream, from memory that is not pinned, and a transfer ends when its last
  copy has been queued. So the engine's passes have another stream, and a move ends behind a read that follows that copy.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib
import importlib.metadata
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvrelay.ids import WorkerId
from kvrelay.log import Log
from kvrelay.transfer.engines.base import Mover, TransferError
from kvrelay.transfer.engines.links import CANCELLED, CLOSED, LinkedEngine, Way, read_info
from kvrelay.transfer.engines.moves import Move
from kvrelay.transfer.engines.ranges import cut
from kvrelay.transfer.region import MAX_BYTES, Region

_log = Log("transfer.mooncake")
INSTALL = (
    "pip install mooncake-transfer-engine-non-cuda   (and the system's RDMA libraries; "
    "Debian, Ubuntu: apt install libibverbs1 librdmacm1 libnuma1 liburing2)"
)
_KNOW_CARDS = frozenset({"mooncake-transfer-engine", "mooncake-transfer-engine-cuda13"})  # builds
_PROGRESS_TIMEOUT_S = 10
WINDOW = 256  # ranges in flight per peer
_PIECE_BYTES = 4 << 20  # a longer range is cut, so that a cancel need not wait for all of it
_POLL_S = 0.0002
_DONE = 1
_SETTINGS = {"MC_LOG_LEVEL": "ERROR", "MC_TCP_PROGRESS_TIMEOUT_SEC": str(_PROGRESS_TIMEOUT_S)}
_LOG_NOTHING = 3  # of glog's levels: only what ends the process


class MooncakeInfo(msgspec.Struct, frozen=True, tag="mooncake", forbid_unknown_fields=True):
    """Where a peer's Mooncake engine listens, and the region it registered. `engine` tells it from a later one there."""

    engine: str
    host: Annotated[str, Meta(min_length=1, max_length=255)]
    port: Annotated[int, Meta(gt=0, lt=65536)]
    address: Annotated[int, Meta(gt=0, le=MAX_BYTES)]
    size_bytes: Annotated[int, Meta(gt=0, le=MAX_BYTES)]
    on_card: bool = False

    @property
    def segment(self) -> str:
        """Mooncake's name for the peer."""
        return f"{self.host}:{self.port}"


def load_library() -> ModuleType:
    """Mooncake's module, or TransferError with the commands that install it."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        return importlib.import_module("mooncake.engine")
    except ImportError as error:
        raise TransferError(f"mooncake is not usable here: {error}. Install it with: {INSTALL}") from error


def try_card(device: str) -> None:
    """Raises TransferError where the build that is installed would read a card's memory as if it were the host's."""
    builds = importlib.metadata.packages_distributions().get("mooncake", [])
    if not _KNOW_CARDS.intersection(builds):
        raise TransferError(
            f"mooncake: its package without CUDA knows no memory on {device}; use cuda_ipc or nixl, or install"
            " mooncake-transfer-engine-cuda13 (with CUDA 12: mooncake-transfer-engine) instead of it"
        )


def _wait_for_copies(device: str) -> None:
    """Those that this process has given to the card on its default stream."""
    import torch

    torch.cuda.default_stream(torch.device(device)).synchronize()


class MooncakeEngine(LinkedEngine):
    """`Mover.PRODUCER`: reads and writes. `host` is the address peers reach this worker at.

    `close` takes up to a second, and five if a peer froze in the middle of saying hello: Mooncake's threads are waited for, so
    that no peer touches the region afterwards.
    """

    name = "mooncake"
    mover = Mover.PRODUCER

    def __init__(self, worker: WorkerId, host: str = "127.0.0.1") -> None:
        super().__init__(worker)
        self._library = load_library()
        self._own_name = f"{worker}-{secrets.token_hex(4)}"
        self._host = host
        self._server: Any = None
        self._clients = _clients_for(host)

    def _open(self, region: Region) -> None:
        if region.device != "cpu":
            try_card(region.device)
        server = make_engine(self._library, self._host)
        if server.register_memory(region.address, region.size_bytes) != 0:
            raise TransferError(f"mooncake: could not register {region.size_bytes} bytes")
        self._server = server
        _log.warning("mooncake listens on every address of this machine, without keys: keep strangers from its ports")

    def _info(self, region: Region) -> MooncakeInfo:
        port = self._server.get_rpc_port()
        return MooncakeInfo(self._own_name, self._host, port, region.address, region.size_bytes, region.device != "cpu")

    def _way_to(self, peer: WorkerId, info: bytes, region: Region) -> tuple[Way, int]:
        told = read_info(self.name, peer, info, MooncakeInfo)
        return _Segment(self._clients, told, region), told.size_bytes

    def _tear_down(self, region: Region) -> None:
        if self._server.unregister_memory(region.address) != 0:
            _log.warning("mooncake could not unregister the region", engine=self._own_name)
        self._server = None  # the last reference


def make_engine(library: ModuleType, host: str) -> Any:
    """A Mooncake engine that listens on a free port. Compiled, without types."""
    _silence(library)
    engine = library.TransferEngine()
    if engine.initialize(host, "P2PHANDSHAKE", "tcp", "") != 0:
        raise TransferError(f"mooncake: could not listen on {host}")
    return engine


def _silence(library: ModuleType) -> None:
    """Mooncake prints what we report as a move's error. Its setting goes only as far as errors; the logger's own goes on."""
    try:
        level = ctypes.c_int32.in_dll(ctypes.CDLL(library.__file__), "_ZN3fLI17FLAGS_minloglevelE")
    except (OSError, ValueError):  # another build of the logger
        _log.debug("mooncake's log cannot be silenced")
        return
    if os.environ["MC_LOG_LEVEL"] == _SETTINGS["MC_LOG_LEVEL"]:  # else the user wants to see it
        level.value = _LOG_NOTHING


@dataclass(slots=True, eq=False)
class _Client:
    """A Mooncake engine for one peer at a time, and whom it has met at which address."""

    engine: Any
    met: dict[str, MooncakeInfo] = field(default_factory=dict)

    def may_meet(self, info: MooncakeInfo) -> bool:
        return self.met.get(info.segment, info) == info


class _Clients:
    """Those of this process that no peer uses now. The threads of all links take and give back."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._lock = threading.Lock()
        self._idle: list[_Client] = []
        atexit.register(self._outlive_interpreter)

    def take(self, info: MooncakeInfo) -> _Client:
        with self._lock:
            client = next((client for client in self._idle if client.may_meet(info)), None)
            if client is None:
                client = _Client(make_engine(load_library(), self._host))
            else:
                self._idle.remove(client)
            client.met[info.segment] = info
            return client

    def give_back(self, client: _Client) -> None:
        with self._lock:
            self._idle.append(client)

    def _outlive_interpreter(self) -> None:
        """The end of the process is quicker than their destructors, and they move nothing."""
        for client in self._idle:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))


@functools.cache
def _clients_for(host: str) -> _Clients:
    return _Clients(host)


class _Segment:
    """One peer's region as Mooncake sees it."""

    def __init__(self, clients: _Clients, info: MooncakeInfo, region: Region) -> None:
        self._clients = clients
        self._info = info
        self._region = region
        self._peer = info.segment
        self._scratch = ctypes.create_string_buffer(1)
        self._client: _Client | None = None

    def open(self) -> None:
        if self._client is None:
            self._client = self._clients.take(self._info)
        # The calls made for this hold Python's lock while they wait; a transfer of one byte does not.
        flight = _Flight(self._client.engine.transfer_check_status)
        self._touch(flight, threading.Event())
        if flight.has_failed:
            raise TransferError(f"mooncake: no process at {self._peer} serves the region that was told")

    def _touch(self, flight: _Flight, abandon: threading.Event) -> None:
        """Reads the first byte of the peer's region, for no one."""
        assert self._client is not None
        read = self._client.engine.batch_transfer_async_read
        flight.add(read(self._peer, [ctypes.addressof(self._scratch)], [self._info.address], [1]))
        flight.wait_until(0, abandon)

    def move(self, move: Move, abandon: threading.Event) -> None:
        flight = self._send(move, abandon)
        self._settle(move, flight, abandon)
        if flight.num_left:
            self._client = None  # the last reference: its destructor ends what is in flight
            raise TransferError(CLOSED)
        if move.stop.value:
            raise TransferError(CANCELLED)
        if flight.has_failed:
            raise TransferError(f"mooncake: the transfer with {self._peer} failed")

    def _send(self, move: Move, abandon: threading.Event) -> _Flight:
        assert self._client is not None
        engine = self._client.engine
        start = engine.batch_transfer_async_write if move.writes else engine.batch_transfer_async_read
        pieces = cut(move.ranges, _PIECE_BYTES)
        waiting = zip(
            (pieces[:, 0] + self._region.address).tolist(),
            (pieces[:, 1] + self._info.address).tolist(),
            pieces[:, 2].tolist(),
            strict=True,
        )
        flight = _Flight(engine.transfer_check_status)
        for here, there, size in waiting:
            if flight.has_failed or move.stop.value:
                break
            flight.add(start(self._peer, [here], [there], [size]))
            flight.wait_until(WINDOW - 1, abandon)
        flight.wait_until(0, abandon)
        return flight

    def _settle(self, move: Move, flight: _Flight, abandon: threading.Event) -> None:
        """Mooncake has given its last copies to a card, on the default stream, and the card may not have made them. What reads
        the card's memory on that stream comes behind them."""
        if move.writes and self._info.on_card and not flight.has_failed:
            self._touch(flight, abandon)
        elif not move.writes and self._region.device != "cpu":
            _wait_for_copies(self._region.device)

    def close(self) -> None:
        if self._client is not None:
            self._clients.give_back(self._client)
            self._client = None


class _Flight:
    """The ranges in flight, oldest first: they end in about that order, so asking for the oldest is enough."""

    def __init__(self, check_status: Callable[[int], int]) -> None:
        self._check = check_status
        self._batches: deque[int] = deque()
        self.has_failed = False

    @property
    def num_left(self) -> int:
        return len(self._batches)

    def add(self, batch: int) -> None:
        if batch:
            self._batches.append(batch)
        else:
            self.has_failed = True  # refused: not started

    def wait_until(self, num_left: int, abandon: threading.Event) -> None:
        while len(self._batches) > num_left and not abandon.is_set():
            status = self._check(self._batches[0])
            if status == 0:
                time.sleep(_POLL_S)
                continue
            self.has_failed |= status != _DONE
            self._batches.popleft()
