"""The contract of every transfer engine.

Who drives it: one thread, the worker's transfer thread, makes every call. What may block: nothing. How often a result
appears: every id that `write` or `read` returned appears in exactly one later `poll`, done or failed, also after `cancel`,
`remove_peer` and `close`.

    engine.register(region)                       once, before anything else
    engine.local_info()  -> bytes                 travels to the peer in the signal plane's hello
    engine.add_peer(peer, info)                   on both sides, before the first transfer between them
    id = engine.write(peer, ranges)               local -> remote     (only if `writes`)
    id = engine.read(peer, ranges)                remote -> local
    engine.poll() -> [Completion(id, error)]      as often as you like

A completion means rest: once an id has appeared, its move touches no memory any more, here or there. Where a transport cannot
call back what it has started, a cancelled move, or one whose peer was removed, appears when that is over (each engine says how
long that may take); `close` waits for nothing but tears down what could still move.

Memory safety: `Mover.PRODUCER` engines let a producer write into a consumer's memory; a consumer may reuse that memory only
after the producer has said that it drained, or `remove_peer`/`close` has made further writes impossible. `Mover.CONSUMER`
engines never write remote memory: the consumer copies what the producer has announced.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NewType, Protocol

import numpy as np
import numpy.typing as npt

from kvrelay.errors import KVRelayError
from kvrelay.ids import WorkerId
from kvrelay.transfer.region import Region

MoveId = NewType("MoveId", int)

Ranges = npt.NDArray[np.int64]
"""[count, 3]: local offset, remote offset, size in bytes, relative to the two registered regions."""


class Mover(enum.Enum):
    """Which side moves the bytes of a hand-over in write mode."""

    PRODUCER = "producer"  # writes into the consumer's blocks
    CONSUMER = "consumer"  # copies when told that the producer's blocks are ready


class TransferError(KVRelayError):
    """A call that could not be carried out: unknown peer, ranges outside a region, no such library."""


@dataclass(frozen=True, slots=True)
class Completion:
    """How one move ended. `error` is empty when every byte has arrived."""

    id: MoveId
    error: str = ""


class TransferEngine(Protocol):
    """Moves bytes between the registered regions of two workers."""

    @property
    def name(self) -> str: ...

    @property
    def mover(self) -> Mover: ...

    def register(self, region: Region) -> None: ...

    def local_info(self) -> bytes:
        """What a peer's `add_peer` needs. Never a secret, never pickled."""

    def add_peer(self, peer: WorkerId, info: bytes) -> None:
        """Raises TransferError if the info makes no sense. Adding a known peer again replaces what was known."""

    def remove_peer(self, peer: WorkerId) -> None:
        """Moves with it that still run fail, each as soon as it has come to rest. Harmless if unknown."""

    def write(self, peer: WorkerId, ranges: Ranges) -> MoveId:
        """Local -> remote. Raises TransferError on an unknown peer, wrong ranges, or where only the consumer moves."""

    def read(self, peer: WorkerId, ranges: Ranges) -> MoveId:
        """Remote -> local. Raises as `write`."""

    def poll(self) -> list[Completion]: ...

    def cancel(self, move: MoveId) -> None:
        """As soon as possible. What was moved by then is undefined; the id still appears in `poll`. Harmless if it has."""

    def close(self) -> None:
        """Ends everything; a last `poll` gives what was open. May be called twice."""
