"""A real card: the driver shares memory, PyTorch has the streams, Triton the copy."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from kvrelay.log import Log
from kvrelay.transfer.engines.base import TransferError
from kvrelay.transfer.engines.cuda.card import Copier
from kvrelay.transfer.engines.cuda.driver import Driver
from kvrelay.transfer.engines.ranges import Scanned

if TYPE_CHECKING:
    from kvrelay.transfer.engines.cuda.copy import Copies

_log = Log("transfer.cuda")

Launch = Callable[[int, int, Scanned, torch.cuda.Stream], None]
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
                "cuda_ipc: the pool spans several allocations, which cannot be shared: unset expandable_segments in "
                "PYTORCH_CUDA_ALLOC_CONF"
            )
        return self._driver.handle_of(base), address - base

    def open(self, handle: bytes) -> int:
        return self._driver.open(handle)

    def close(self, address: int) -> None:
        self._driver.close(address)

    def copier(self) -> Copier:
        return StreamCopier(self._make_launch, self._device)


class StreamCopier:
    """Implements `Copier` on a stream of its own. PyTorch's streams do not wait for its default stream, where models run."""

    def __init__(self, make_launch: Callable[[], Launch], device: torch.device) -> None:
        self._make_launch = make_launch
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._idle: list[StreamCopying] = []

    def start(self, to_address: int, from_address: int, scanned: Scanned) -> StreamCopying:
        with explained():
            copying = self._idle.pop() if self._idle else StreamCopying(self._make_launch(), self._idle)
            with torch.cuda.stream(self._stream):  # and its device
                copying.launch(to_address, from_address, scanned, self._stream)
                copying.done.record(self._stream)
        return copying

    def rest(self) -> None:
        with explained():
            self._stream.synchronize()


class StreamCopying:
    """Implements `Copying`. What a launch reads is its own until it has passed, then the next one's."""

    def __init__(self, launch: Launch, idle: list[StreamCopying]) -> None:
        self.launch = launch
        self.done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._idle = idle

    def passed(self) -> bool:
        with explained():
            has_passed = bool(self.done.query())  # type: ignore[no-untyped-call]
        if has_passed:
            self._idle.append(self)
        return has_passed

    def wait(self) -> None:
        with explained():
            self.done.synchronize()  # without Python's lock
        self._idle.append(self)


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Errors of PyTorch and Triton become TransferError."""
    try:
        yield
    except RuntimeError as error:
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
    def launch(to_address: int, from_address: int, scanned: Scanned, stream: torch.cuda.Stream) -> None:
        copies.launch(to_address, from_address, scanned)  # on the current stream, which it is

    return launch


def by_driver(driver: Driver) -> Launch:
    def launch(to_address: int, from_address: int, scanned: Scanned, stream: torch.cuda.Stream) -> None:
        for there, here, size in scanned.ranges.tolist():
            driver.copy(to_address + there, from_address + here, size, stream.cuda_stream)

    return launch
