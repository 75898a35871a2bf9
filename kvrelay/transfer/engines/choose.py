"""Which transports work here, and which one two workers use."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from kvrelay.ids import WorkerId
from kvrelay.log import Log
from kvrelay.transfer.engines import mooncake, nixl
from kvrelay.transfer.engines.base import TransferEngine, TransferError
from kvrelay.transfer.engines.mooncake import MooncakeEngine
from kvrelay.transfer.engines.nixl import NixlEngine
from kvrelay.transfer.engines.shm import ShmEngine

_log = Log("transfer")

PREFERENCE = ("shm", "nixl", "mooncake")  # best first
_ONE_HOST_ONLY = frozenset({"shm"})


def available(device: str) -> list[str]:
    """The engines that can move memory of `device` ("cpu", "cuda:0") on this machine, best first."""
    probes: dict[str, Callable[[str], None]] = {"shm": _probe_shm, "nixl": _probe_nixl, "mooncake": _probe_mooncake}
    return [name for name in PREFERENCE if _works(probes[name], device)]


def make_engine(name: str, worker: WorkerId, host: str = "127.0.0.1") -> TransferEngine:
    """`host` is the address at which peers reach this worker. Raises TransferError, with what to install, if it cannot work."""
    match name:
        case "shm":
            return ShmEngine(worker)
        case "nixl":
            return NixlEngine(worker, host)
        case "mooncake":
            return MooncakeEngine(worker, host)
    raise TransferError(f"no transfer engine is called {name!r}; there are {', '.join(PREFERENCE)}")


def pick(mine: Sequence[str], theirs: Sequence[str], *, same_host: bool) -> str:
    """What `--transfer auto` uses between two workers, given what each has. `same_host`: equal `shm.host_identity`."""
    usable = [name for name in PREFERENCE if same_host or name not in _ONE_HOST_ONLY]
    for name in usable:
        if name in mine and name in theirs:
            return name
    where = "one host" if same_host else "different hosts"
    raise TransferError(
        f"no transfer engine works between these two workers on {where}: "
        f"one has {', '.join(mine) or 'none'}, the other {', '.join(theirs) or 'none'}"
    )


def _works(probe: Callable[[str], None], device: str) -> bool:
    try:
        probe(device)
    except TransferError as error:
        _log.debug("a transfer engine is not available", error=error)
        return False
    return True


def _probe_shm(device: str) -> None:
    if device != "cpu" or "memfd_create" not in dir(os):
        raise TransferError(f"shm moves host memory on Linux, not memory on {device}")


def _probe_nixl(device: str) -> None:
    nixl.load_bindings()


def _probe_mooncake(device: str) -> None:
    if device != "cpu":
        raise TransferError(f"mooncake moves host memory here, not memory on {device}")
    mooncake.load_library()
