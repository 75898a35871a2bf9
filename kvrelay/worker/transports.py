"""How a worker's peers reach it: its transports and its signal port."""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Iterator

import zmq

from kvrelay.errors import ConfigError
from kvrelay.ids import WorkerId
from kvrelay.transfer.engines import choose
from kvrelay.transfer.engines.base import TransferEngine, TransferError


def open_engines(
    name: str, worker_id: WorkerId, host: str, device: str, *, several_cards: bool = False
) -> list[TransferEngine]:
    """For memory on `device`. Where only this machine can reach it, what works within a host is all that is needed.
    `several_cards`: each rank has its share on its card, which `cuda_ipc` alone can move."""
    if several_cards and name not in ("auto", "cuda_ipc"):
        raise ConfigError(f"--transfer {name}: KV of ranks on cards (--tp) is moved by cuda_ipc alone; use auto")
    try:
        if several_cards:
            name = "cuda_ipc"
        if name != "auto":
            choose.probe(name, device)
            return [choose.make_engine(name, worker_id, host)]
        names = choose.available(device, one_host=ipaddress.ip_address(host).is_loopback)
        engines = [choose.make_engine(each, worker_id, host) for each in names]
    except (TransferError, ValueError) as error:
        raise ConfigError(f"--transfer {name}: {error}") from error
    if not engines:
        raise ConfigError(f"--transfer auto: no transport can move memory on {device}{_hint(device)}")
    return engines


def _hint(device: str) -> str:
    return "; install kvrelay[nixl]" if device == "cpu" else ": cuda_ipc needs NVIDIA's driver (kvrelay doctor)"


@contextlib.contextmanager
def signal_port(host: str, port: int) -> Iterator[None]:
    """Around what listens there for its peers."""
    try:
        yield
    except zmq.ZMQError as error:
        reason = error.strerror or error
        raise ConfigError(f"the signal plane cannot listen on {host}:{port} (--signal-port): {reason}") from error
