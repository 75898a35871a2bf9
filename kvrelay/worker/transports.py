"""How a worker's peers reach it: its transports and its signal port."""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Iterator

import zmq

from kvrelay.config import ModelOptions
from kvrelay.errors import ConfigError
from kvrelay.ids import WorkerId
from kvrelay.log import Log
from kvrelay.transfer.engines import choose
from kvrelay.transfer.engines.base import TransferEngine, TransferError

log = Log("transfer")


def open_engines(
    name: str, worker_id: WorkerId, host: str, device: str, *, several_cards: bool = False
) -> list[TransferEngine]:
    """For memory on `device`. Where only this machine can reach it, what works within a host is all that is needed.
    `several_cards`: each rank has its share on its card, which `cuda_ipc` alone can move."""
    return _make(name, _usable("cuda_ipc" if several_cards else name, host, device), worker_id, host)


def check_ranks(name: str, options: ModelOptions) -> None:
    """Raises ConfigError, before a model is loaded whose KV that transport could not move."""
    if options.tp > 1 and options.device == "cuda" and name not in ("auto", "cuda_ipc"):
        raise ConfigError(f"--transfer {name}: KV of ranks on cards (--tp {options.tp}) is moved by cuda_ipc alone; use auto")


def open_embedding_engines(
    name: str, worker_id: WorkerId, host: str, device: str
) -> tuple[list[TransferEngine], list[TransferEngine]]:
    """For memory of a card (none, on a CPU), and for memory of its host: a transport that can move the card's does, the others
    move the host's. So a peer on a CPU is reached, too, and `--transfer cuda_ipc`, which is for KV, shuts none out."""
    name = "auto" if name == "cuda_ipc" else name
    on_card: list[str] = []
    if device != "cpu":
        try:
            on_card = _usable(name, host, device)
        except ConfigError as error:
            log.info("embeddings pass through host memory", device=device, reason=error)
    on_host = [each for each in _usable(name, host, "cpu") if each not in on_card]
    return _make(name, on_card, worker_id, host), _make(name, on_host, worker_id, host)


def _usable(name: str, host: str, device: str) -> list[str]:
    """Raises ConfigError if there is none."""
    try:
        if name != "auto":
            choose.probe(name, device)
            return [name]
        names = choose.available(device, one_host=ipaddress.ip_address(host).is_loopback)
    except (TransferError, ValueError) as error:
        raise ConfigError(f"--transfer {name}: {error}") from error
    if not names:
        raise ConfigError(f"--transfer auto: no transport can move memory on {device}{_hint(device)}")
    return names


def _make(name: str, names: list[str], worker_id: WorkerId, host: str) -> list[TransferEngine]:
    try:
        return [choose.make_engine(each, worker_id, host) for each in names]
    except TransferError as error:
        raise ConfigError(f"--transfer {name}: {error}") from error


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
