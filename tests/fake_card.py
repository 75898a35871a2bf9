"""A card that is none: its memory is host memory, which other processes of this user map through /proc. Copies may be late."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable

import numpy as np

from kvrelay.native.driver import HANDLE_BYTES
from kvrelay.transfer.copy import copy_ranges
from kvrelay.transfer.engines.base import TransferError
from kvrelay.transfer.engines.ranges import Scanned
from kvrelay.transfer.region import Region, shared_region

_OFFSET = 4096  # of a region in its allocation
_regions: dict[int, Region] = {}  # of this process, by their address: the allocation that holds each


def card_region(size_bytes: int) -> Region:
    """In the middle of an allocation, as PyTorch's are."""
    whole = shared_region(size_bytes + 2 * _OFFSET)
    region = Region(address=whole.address + _OFFSET, size_bytes=size_bytes, device="cuda:0", buffer=whole.buffer)
    _regions[region.address] = whole
    return region


def card_bytes(region: Region) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    assert region.buffer is not None
    return np.frombuffer(region.buffer, dtype=np.uint8)[_OFFSET : _OFFSET + region.size_bytes]


class FakeCard:
    """Implements `Card`, with the driver's rules: a handle is not opened where it was made, and opening it again counts."""

    def __init__(self, device: str, copy_delay_s: float = 0.0) -> None:
        self._copy_delay_s = copy_delay_s
        self._lock = threading.Lock()
        self._opened: dict[bytes, tuple[int, int, mmap.mmap]] = {}  # address, times, what keeps it mapped
        self.copied: list[int] = []  # ranges of each launch

    @property
    def num_opened(self) -> int:
        return len(self._opened)

    def export(self, address: int, size_bytes: int) -> tuple[bytes, int]:
        whole = _regions[address]
        return f"{os.getpid()} {whole.fd} {whole.size_bytes}".encode().ljust(HANDLE_BYTES, b"\0"), address - whole.address

    def open(self, handle: bytes) -> int:
        pid, fd, size = (int(word) for word in handle.rstrip(b"\0").split())
        assert pid != os.getpid(), "the driver opens no handle in the process that made it"
        with self._lock:
            known = self._opened.get(handle)
            if known is None:
                try:
                    opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
                except OSError as error:
                    raise TransferError(f"the allocation is gone: {error}") from error
                memory = mmap.mmap(opened, size)
                os.close(opened)
                known = (ctypes.addressof(ctypes.c_char.from_buffer(memory)), 0, memory)
            address, times, memory = known
            self._opened[handle] = (address, times + 1, memory)
            return address

    def close(self, address: int) -> None:
        with self._lock:
            handle = next(handle for handle, (known, _, _) in self._opened.items() if known == address)
            address, times, memory = self._opened.pop(handle)
            if times > 1:
                self._opened[handle] = (address, times - 1, memory)

    def copier(self) -> FakeCopier:
        return FakeCopier(self, self._copy_delay_s)


class FakeCopier:
    def __init__(self, card: FakeCard, delay_s: float) -> None:
        self._card = card
        self._delay_s = delay_s
        self._started: list[FakeCopying] = []

    def start(self, to_address: int, from_address: int, scanned: Scanned) -> FakeCopying:
        def copy() -> None:
            time.sleep(self._delay_s)
            assert copy_ranges(to_address, from_address, scanned.ranges, ctypes.c_int32(0))
            self._card.copied.append(len(scanned.ranges))

        copying = FakeCopying(copy)
        self._started.append(copying)
        return copying

    def rest(self) -> None:
        for copying in self._started:
            copying.wait()


class FakeCopying:
    """A thread copies, as a card would."""

    def __init__(self, copy: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=copy, daemon=True)
        self._thread.start()

    def passed(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        self._thread.join()
