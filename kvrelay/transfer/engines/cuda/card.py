"""What `cuda_ipc` needs of a card.

Real cards are in `nvidia.py`; the one of the tests is host memory that another process can map.
"""

from __future__ import annotations

from typing import Protocol

from kvrelay.native.driver import DriverError, load_driver
from kvrelay.transfer.engines.base import TransferError
from kvrelay.transfer.engines.ranges import Scanned


class Copying(Protocol):
    """Copies under way. Every call may raise TransferError."""

    def passed(self) -> bool:
        """Whether every byte is there, and what is launched now sees it. Not called again once it has said so."""

    def wait(self) -> None:
        """Until it would say so, instead of asking. Blocks without Python's lock."""


class Copier(Protocol):
    """Copies within the memory of a card and of its peers, beside what else the card does. One thread at a time has it."""

    def start(self, to_address: int, from_address: int, scanned: Scanned) -> Copying:
        """Returns at once. Raises TransferError."""

    def rest(self) -> None:
        """Returns when nothing that was started copies any more. Blocks, and may be called beside `start`."""


class Card(Protocol):
    """Every call may come from any thread, and may raise TransferError."""

    def export(self, address: int, size_bytes: int) -> tuple[bytes, int]:
        """A handle by which other processes of this host reach the allocation that holds this memory, and the memory's offset
        in it. The allocation must outlive every process that has opened it."""

    def open(self, handle: bytes) -> int:
        """The address here of an allocation that another process has exported, also one of another card. Opening it again
        gives the same address; each is closed once."""

    def close(self, address: int) -> None: ...

    def copier(self) -> Copier: ...


def check_driver() -> None:
    """Raises TransferError where there is no driver, or no card."""
    try:
        load_driver()
    except DriverError as error:
        raise TransferError(str(error)) from error
