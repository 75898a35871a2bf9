"""A real card: the driver shares memory, PyTorch has the streams, Triton the copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from kvrelay.log import Log
from kvrelay.transfer.engines.base import Ranges, TransferError
from kvrelay.transfer.engines.cuda.card import Copier
from kvrelay.transfer.engines.cuda.driver import Driver

if TYPE_CHECKING:
    from kvrelay.transfer.engines.cuda.copy import Copies

_log = Log("transfer.cuda")

Launch = Callable[[int, int, Ranges, torch.cuda.Stream], None]
"""Queues copies to and from these addresses on the stream."""


class NvidiaCard:
    """Implements `Card`."""

    def __init__(self, device: str) -> None:
        self._device = torch.device("cuda", torch.device(device).index or 0)
        self._driver = Driver(self._device.index)
        self._make_launch = choose_launch(self._driver, self._device)

    def export(self, address: int, size_bytes: int) -> tuple[bytes, int]:
        base, size = self._driver.allocation_of(address)
        if address + size_bytes > base + size:
            raise TransferError(
                "cuda_ipc: the KV pool spans several allocations, which cannot be shared: unset expandable_segments in "
                "PYTORCH_CUDA_ALLOC_CONF"
            )
        return self._driver.handle_of(base), address - base

    def open(self, handle: bytes) -> int:
        return self._driver.open(handle)

    def close(self, address: int) -> None:
        self._driver.close(address)

    def copier(self) -> Copier:
        return StreamCopier(self._make_launch(), self._device)


class StreamCopier:
    """Implements `Copier` on a stream of its own. PyTorch's streams do not wait for its default stream, where models run."""

    def __init__(self, launch: Launch, device: torch.device) -> None:
        self._launch = launch
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def copy(self, to_address: int, from_address: int, ranges: Ranges) -> None:
        try:
            with torch.cuda.stream(self._stream):  # and its device
                self._launch(to_address, from_address, ranges, self._stream)
                self._done.record(self._stream)
            self._done.synchronize()  # without Python's lock
        except RuntimeError as error:  # PyTorch's and Triton's
            raise TransferError(f"cuda_ipc: the copy failed: {error}") from error


def choose_launch(driver: Driver, device: torch.device) -> Callable[[], Launch]:
    """Makes one for each copier: Triton's, compiled here and now, where it can be; else a call of the driver for each range."""
    try:
        from kvrelay.transfer.engines.cuda.copy import Copies, warm_up

        warm_up(device)
    except Exception as error:  # noqa: BLE001  Triton is not installed, or finds no compiler: it may raise anything
        _log.warning("Triton cannot copy here; the driver copies range by range, which is slower", error=error)
        return lambda: by_driver(driver)
    return lambda: _by_triton(Copies(device))


def _by_triton(copies: Copies) -> Launch:
    def launch(to_address: int, from_address: int, ranges: Ranges, stream: torch.cuda.Stream) -> None:
        copies.launch(to_address, from_address, ranges)  # on the current stream, which it is

    return launch


def by_driver(driver: Driver) -> Launch:
    def launch(to_address: int, from_address: int, ranges: Ranges, stream: torch.cuda.Stream) -> None:
        for there, here, size in ranges.tolist():
            driver.copy(to_address + there, from_address + here, size, stream.cuda_stream)

    return launch
