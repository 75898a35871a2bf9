"""Two processes that know each other, with memory and a transfer engine each: one moves bytes, the other is there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvrelay.bench.harness.child import Child
from kvrelay.errors import BenchError
from kvrelay.ids import WorkerId, new_worker_id
from kvrelay.states import Role
from kvrelay.transfer.engines.base import Ranges, TransferError


class Side(Protocol):
    """Kept by a child."""

    def __init__(self, engine: str, worker: WorkerId, size_bytes: int) -> None:
        """Its memory holds what no other side's does. Raises TransferError where the engine cannot work."""

    def info(self) -> Sequence[bytes]:
        """What the peer is to be told."""

    def meet(self, peer: WorkerId, info: Sequence[bytes]) -> None: ...

    def digest(self, places: Ranges) -> str:
        """Of the bytes at these places: offset, size."""


class EngineMissing(BenchError):
    """A library that is not installed here, or cannot run."""


@dataclass(frozen=True)
class Pair:
    """The process that moves and the other one, each of which keeps a side of this kind."""

    kind: type[Side]
    mover: Child
    other: Child

    def check(self, ranges: Ranges) -> None:
        """A rate of wrong bytes is no rate. Ranges are the mover's offset, the other's, size."""
        if self.mover.ask(self.kind.digest, ranges[:, [0, 2]]) != self.other.ask(self.kind.digest, ranges[:, [1, 2]]):
            raise BenchError("the bytes that arrived are not those that were sent")


@contextlib.contextmanager
def open_pair(
    kind: type[Side], engine: str, size_bytes: int, cores: tuple[int | None, int | None] = (None, None), **options: Any
) -> Iterator[Pair]:
    """The processes run on a core each, or wherever the kernel puts them, and have as much memory each. `options` are the
    kind's own. Raises EngineMissing."""
    with Child(cores[0]) as mover, Child(cores[1]) as other:
        sides = {new_worker_id(Role.DECODE): mover, new_worker_id(Role.PREFILL): other}
        try:
            for worker, side in sides.items():
                side.keep(kind, engine, worker, size_bytes, **options)
            for (worker, side), peer in zip(sides.items(), (other, mover), strict=True):
                peer.ask(kind.meet, worker, side.ask(kind.info))
        except TransferError as error:
            raise EngineMissing(str(error)) from error
        yield Pair(kind, mover, other)
