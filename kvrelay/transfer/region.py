"""Memory that transfers read and write: one region per worker, registered once with every transfer engine it uses."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from dataclasses import dataclass, field

MAX_BYTES = 1 << 62  # of an address or a size that a peer may tell: far beyond any machine, and sums of two still fit
SIZE_IS_FIXED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


@dataclass(frozen=True, slots=True)
class Share:
    """A part of a region that another process has allocated on a card, and that this one has mapped."""

    address: int  # here
    handle: bytes  # by which any process of this host opens the allocation
    offset: int  # in the allocation


@dataclass(slots=True, eq=False)
class Region:
    """A stretch of memory. `fd` is set for host memory that other processes can map (made by `shared_region`). With `shares`
    it goes on in each of them, all as large as the part at `address`."""

    address: int
    size_bytes: int
    device: str = "cpu"
    fd: int | None = None
    buffer: mmap.mmap | None = field(default=None, repr=False)  # keeps host memory alive; tensors are views of it
    shares: tuple[Share, ...] = ()

    @property
    def part_bytes(self) -> int:
        return self.size_bytes // (1 + len(self.shares))

    def close(self) -> None:
        """Call when no tensor looks into it any more. The memory itself goes when the last process has closed it."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


def shared_region(size_bytes: int, name: str = "kvrelay") -> Region:
    """Zeroed host memory behind a file descriptor. It has no name in any file system, so nothing is left after a crash.

    Its size is sealed: a peer that has mapped it can never be killed by a read beyond a shortened end.
    """
    fd = new_file(name)
    try:
        os.ftruncate(fd, size_bytes)
    except OSError:
        os.close(fd)
        raise
    return region_of(fd)


def new_file(name: str = "kvrelay") -> int:
    """Of no size yet: processes that open it may fill it before it becomes a region."""
    return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def region_of(fd: int) -> Region:
    """The descriptor is the region's from now on; where this fails, it is closed."""
    try:
        size_bytes = os.fstat(fd).st_size
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SIZE_IS_FIXED)
        buffer = mmap.mmap(fd, size_bytes)
    except (OSError, ValueError):
        os.close(fd)
        raise
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    return Region(address=address, size_bytes=size_bytes, fd=fd, buffer=buffer)
