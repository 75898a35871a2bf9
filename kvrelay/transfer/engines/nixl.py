"""NIXL over UCX: RDMA, TCP and GPU memory between hosts; also runs without any of these, on host memory.

NIXL's calls look asynchronous but move bytes inside `postXferReq` and `getXferStatus`, so each peer has a thread that makes
them (links.py). The agent's own progress thread answers peers; it sleeps in `poll` and wakes on traffic.

The Python API of NIXL fixes the progress thread's delay to 0, which burns a core per idle worker; therefore this file uses
the bindings below it.

How moves end: NIXL cannot call back what it has posted. A request that is released early, or whose peer is forgotten, still
moves its bytes when the peer wakes up. So a cancelled move, and one whose peer was removed, ends when what was posted has come
to rest: in milliseconds with a live peer; at once when its process has died; by UCX's keepalive (about a minute) when its host
has vanished. A peer that hangs keeps it open until it goes on or dies, or until `close`, which destroys the agent.
"""

from __future__ import annotations

import hashlib
import importlib
import ipaddress
import logging
import os
import secrets
import threading
import time
from collections import Counter
from types import ModuleType
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from kvrelay.ids import WorkerId, new_worker_id
from kvrelay.transfer.engines.base import Mover, Ranges, TransferError
from kvrelay.transfer.engines.links import CANCELLED, CLOSED, LinkedEngine, Way, read_info
from kvrelay.transfer.engines.moves import Move
from kvrelay.transfer.engines.ranges import groups
from kvrelay.transfer.region import MAX_BYTES, Region

INSTALL = "pip install nixl-cu12   (or nixl-cu13 for CUDA 13)"
_PACKAGES = ("nixl_cu12", "nixl_cu13")
_PROGRESS_DELAY_US = 10_000  # how long the progress thread sleeps without traffic: idle costs 0.4 % of a core
_POLL_S = 0.0002
_POST_BYTES = 64 << 20  # posted at once: what a cancel may have to wait for
# NIXL and UCX print what we report as a move's error. To see it, set these variables.
_QUIET = {"NIXL_LOG_LEVEL": "FATAL", "UCX_LOG_LEVEL": "fatal"}


class NixlInfo(msgspec.Struct, frozen=True, tag="nixl", forbid_unknown_fields=True):
    """A NIXL agent and the region it registered. The digest, of all else, keeps damaged metadata from NIXL's own parser."""

    agent: str
    metadata: bytes
    address: Annotated[int, Meta(gt=0, le=MAX_BYTES)]
    size_bytes: Annotated[int, Meta(gt=0, le=MAX_BYTES)]
    device: Annotated[str, Meta(pattern=r"^(cpu|cuda(:[0-9]{1,3})?)$")]
    digest: bytes = b""


def load_bindings() -> ModuleType:
    """NIXL's bindings, or TransferError with the command that installs them."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    logging_raises = logging.raiseExceptions
    reasons = []
    for package in sorted(_PACKAGES, key=lambda package: not package.endswith(f"_cu{_cuda_version()}")):
        try:
            return importlib.import_module(f"{package}._bindings")
        except ImportError as error:
            reasons.append(str(error))
        finally:
            logging.raiseExceptions = logging_raises  # NIXL's import changes it for the whole process
    raise TransferError(f"nixl is not usable here: {'; '.join(reasons)}. Install it with: {INSTALL}")


def _cuda_version() -> str:
    """That PyTorch was built for, which the card's libraries in this process are of; "" if for none."""
    import torch

    return (torch.version.cuda or "").partition(".")[0]


def try_card(device: str) -> None:
    """Registers a little of a card's memory: UCX may have no part that knows cards. Raises TransferError."""
    import torch

    memory = torch.zeros(1 << 16, dtype=torch.uint8, device=device)
    engine = NixlEngine(new_worker_id("prefill"))
    engine.register(Region(address=memory.data_ptr(), size_bytes=memory.numel(), device=device))
    engine.close()


class NixlEngine(LinkedEngine):
    """`Mover.PRODUCER`: reads and writes. `host` is the address peers reach this worker at; loopback stays on loopback.

    `register` is start-up, not traffic: making a UCX context takes up to half a second.
    """

    name = "nixl"
    mover = Mover.PRODUCER

    def __init__(self, worker: WorkerId, host: str = "127.0.0.1") -> None:
        super().__init__(worker)
        self._nixl = load_bindings()
        self._agent_name = f"{worker}-{secrets.token_hex(4)}"
        self._host = host

    def _open(self, region: Region) -> None:
        self._agent = _Agent(self._nixl, self._agent_name, self._host, region)

    def _info(self, region: Region) -> NixlInfo:
        return self._agent.info

    def _way_to(self, peer: WorkerId, info: bytes, region: Region) -> tuple[Way, int]:
        told = read_info(self.name, peer, info, NixlInfo)
        if told.digest != _digest(told):
            raise TransferError(f"nixl: the info of {peer} makes no sense: it was damaged")
        return _RemoteAgent(self._agent, told), told.size_bytes

    def _tear_down(self, region: Region) -> None:
        self._agent.close()


class _Agent:
    """Our NIXL agent with its one registered region. The threads of all links call it; NIXL locks inside."""

    def __init__(self, nixl: ModuleType, name: str, host: str, region: Region) -> None:
        self.nixl: Any = nixl  # compiled, without types
        self.region = region
        self._lock = threading.Lock()
        self._num_links: Counter[str] = Counter()  # by the remote agent's name
        config = self.nixl.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = _PROGRESS_DELAY_US
        config.syncMode = self.nixl.NIXL_THREAD_SYNC_STRICT
        try:
            self.agent: Any = self.nixl.nixlAgent(name, config)
            self.backend = self.agent.createBackend("UCX", _backend_options(host))
            self._memory = self.nixl.nixlRegDList(*self._registration())
            self.agent.registerMem(self._memory, [self.backend])
            metadata = bytes(self.agent.getLocalMD())
        except Exception as error:  # the library may raise anything
            raise TransferError(f"nixl: could not register {region.size_bytes} bytes on {region.device}: {error}") from error
        info = NixlInfo(name, metadata, region.address, region.size_bytes, region.device)
        self.info = msgspec.structs.replace(info, digest=_digest(info))

    def _registration(self) -> tuple[Any, list[tuple[int, int, int, str]]]:
        region = self.region
        return self.memory_type(region.device), [(region.address, region.size_bytes, device_index(region.device), "")]

    def memory_type(self, device: str) -> Any:
        return self.nixl.DRAM_SEG if device == "cpu" else self.nixl.VRAM_SEG

    def descriptors(self, address: int, device: str, offsets: Ranges, sizes: Ranges) -> Any:
        rows = np.empty((len(offsets), 3), dtype=np.uint64)
        rows[:, 0] = offsets + address
        rows[:, 1] = sizes
        rows[:, 2] = device_index(device)
        return self.nixl.nixlXferDList(self.memory_type(device), rows)

    def connect(self, info: NixlInfo) -> None:
        """Makes a remote agent known to ours. An old and a new link to one peer share what NIXL knows of it."""
        with self._lock:
            if self.agent is None:
                raise TransferError(CLOSED)
            if self._num_links[info.agent] == 0:
                self._load(info)
            self._num_links[info.agent] += 1

    def _load(self, info: NixlInfo) -> None:
        try:
            name = bytes(self.agent.loadRemoteMD(info.metadata)).decode()
        except Exception as error:  # the library may raise anything
            raise TransferError(f"nixl: no way to {info.agent}: {error}") from error
        if name != info.agent:
            if self._num_links[name] == 0:
                self.agent.invalidateRemoteMD(name)
            raise TransferError(f"nixl: metadata of {name} was told to be that of {info.agent}")

    def disconnect(self, info: NixlInfo) -> None:
        with self._lock:
            self._num_links[info.agent] -= 1
            if self._num_links[info.agent] or self.agent is None:
                return
            try:
                self.agent.invalidateRemoteMD(info.agent)
            except self.nixl.nixlNotFoundError:
                return  # NIXL forgot it by itself when the connection broke

    def close(self) -> None:
        with self._lock:
            try:
                self.agent.deregisterMem(self._memory, [self.backend])
            except Exception as error:  # the library may raise anything
                raise TransferError(f"nixl: could not deregister memory: {error}") from error
            finally:
                self.agent = None  # the last reference: ends its threads and connections


class _RemoteAgent:
    """One peer's agent, known to ours while the way is open."""

    def __init__(self, local: _Agent, info: NixlInfo) -> None:
        self._local = local
        self._info = info
        self._is_known = False

    def open(self) -> None:
        self.close()
        self._local.connect(self._info)
        self._is_known = True

    def move(self, move: Move, abandon: threading.Event) -> None:
        for ranges in groups(move.ranges, _POST_BYTES):
            if move.stop.value:
                raise TransferError(CANCELLED)
            self._post(move.writes, ranges, abandon)

    def close(self) -> None:
        if self._is_known:
            self._is_known = False
            self._local.disconnect(self._info)

    def _post(self, writes: bool, ranges: Ranges, abandon: threading.Event) -> None:
        local, info, nixl = self._local, self._info, self._local.nixl
        here = local.descriptors(local.region.address, local.region.device, ranges[:, 0], ranges[:, 2])
        there = local.descriptors(info.address, info.device, ranges[:, 1], ranges[:, 2])
        operation = nixl.NIXL_WRITE if writes else nixl.NIXL_READ
        try:
            handle = local.agent.createXferReq(operation, here, there, info.agent, b"", [local.backend])
        except Exception as error:  # the library may raise anything
            raise TransferError(f"nixl: {info.agent} is out of reach: {error}") from error
        try:
            status = local.agent.postXferReq(handle, b"")
            while status == nixl.NIXL_IN_PROG and not abandon.is_set():
                time.sleep(_POLL_S)
                status = local.agent.getXferStatus(handle)
        except Exception as error:  # the library may raise anything
            raise TransferError(f"nixl: the connection to {info.agent} failed: {error}") from error
        finally:
            local.agent.releaseXferReq(handle)
        if status != nixl.NIXL_SUCCESS:
            raise TransferError(f"nixl: moving bytes with {info.agent} ended with {status.name}")


def device_index(device: str) -> int:
    """`cuda:1` -> 1; host memory and plain `cuda` are 0."""
    _, _, index = device.partition(":")
    return int(index) if index else 0


def _backend_options(host: str) -> dict[str, str]:
    try:
        is_loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name: some interface of the network
        is_loopback = False
    return {"engine_config": "NET_DEVICES=lo"} if is_loopback else {}


def _digest(info: NixlInfo) -> bytes:
    return hashlib.blake2b(msgspec.msgpack.encode(msgspec.structs.replace(info, digest=b"")), digest_size=16).digest()
