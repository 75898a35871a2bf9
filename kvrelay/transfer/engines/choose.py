"""Which transports work here, and which one two workers use."""

from __future__ import annotations

import os
from collections.abc import Sequence

from kvrelay.ids import WorkerId
from kvrelay.log import Log
from kvrelay.transfer.engines import mooncake, nixl
from kvrelay.transfer.engines.base import TransferEngine, TransferError
from kvrelay.transfer.engines.cuda.card import check_driver
from kvrelay.transfer.engines.cuda.ipc import CudaIpcEngine
from kvrelay.transfer.engines.mooncake import MooncakeEngine
from kvrelay.transfer.engines.nixl import NixlEngine
from kvrelay.transfer.engines.shm import ShmEngine

_log = Log("transfer")

PREFERENCE = ("cuda_ipc", "shm", "nixl", "mooncake")  # best first
_ONE_HOST_ONLY = frozenset({"cuda_ipc", "shm"})


def available(device: str, *, one_host: bool = False) -> list[str]:
    """The engines that can move memory of `device` ("cpu", "cuda:0") on this machine, best first. `one_host`: no peer is
    elsewhere, so if one that works between processes of a host does, that is all."""
    near = [name for name in PREFERENCE if name in _ONE_HOST_ONLY and _works(name, device)]
    if near and one_host:
        return near
    return near + [name for name in PREFERENCE if name not in _ONE_HOST_ONLY and _works(name, device)]


def probe(name: str, device: str) -> None:
    """Raises TransferError if this engine cannot move memory of `device` here."""
    match name:
        case "cuda_ipc":
            _probe_cuda_ipc(device)
        case "shm":
            _probe_shm(device)
        case "nixl":
            nixl.load_bindings()
            if device != "cpu":
                check_driver()
                nixl.try_card(device)
        case "mooncake":
            mooncake.load_library()
            if device != "cpu":
                mooncake.try_card(device)
                check_driver()
        case _:
            raise _unknown(name)


def make_engine(name: str, worker: WorkerId, host: str = "127.0.0.1") -> TransferEngine:
    """`host` is the address at which peers reach this worker. Raises TransferError, with what to install, if it cannot work."""
    match name:
        case "cuda_ipc":
            return CudaIpcEngine(worker)
        case "shm":
            return ShmEngine(worker)
        case "nixl":
            return NixlEngine(worker, host)
        case "mooncake":
            return MooncakeEngine(worker, host)
    raise _unknown(name)


def _unknown(name: str) -> TransferError:
    return TransferError(f"no transfer engine is called {name!r}; there are {', '.join(PREFERENCE)}")


def pick(mine: Sequence[str], theirs: Sequence[str], *, same_host: bool) -> str:
    """What `--transfer auto` uses between two workers, given what each has. `same_host`: equal `shm.host_identity`."""
    usable = [name for name in PREFERENCE if same_host or name not in _ONE_HOST_ONLY]
    for name in usable:
        if name in mine and name in theirs:
            return name
    where = "one host" if same_host else "different hosts"
    if ("cuda_ipc" in mine) != ("cuda_ipc" in theirs):
        where += ", of which one has its memory on a card and the other on its host"
    raise TransferError(
        f"no transfer engine works between these two workers on {where}: "
        f"one has {', '.join(mine) or 'none'}, the other {', '.join(theirs) or 'none'}"
    )


def _works(name: str, device: str) -> bool:
    try:
        probe(name, device)
    except TransferError as error:
        _log.debug("a transfer engine is not available", error=error)
        return False
    return True


def _probe_cuda_ipc(device: str) -> None:
    if not device.startswith("cuda"):
        raise TransferError(f"cuda_ipc moves memory of NVIDIA cards, not memory on {device}")
    check_driver()


def _probe_shm(device: str) -> None:
    if device != "cpu" or "memfd_create" not in dir(os):
        raise TransferError(f"shm moves host memory on Linux, not memory on {device}")
