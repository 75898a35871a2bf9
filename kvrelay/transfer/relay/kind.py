"""What every connection of one kind of memory needs to know: KV caches are one kind, embeddings another."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, Self, TypeVar

import msgspec

from kvrelay.ids import WorkerId
from kvrelay.transfer.engines.base import MoveId
from kvrelay.wire.relay import Message, TransferMessage

State = enum.StrEnum
"""Of a transfer. Each kind has its own. All call one that ends, and waits until nothing can touch its blocks, `DRAINING`, and
one that ended without success `FAILED`."""

DRAINING = "draining"
FAILED = "failed"

MoveKey = tuple[str, MoveId]
"""A transfer engine's name, and its number of a move."""


class End(msgspec.Struct, frozen=True):
    """What is remembered of a transfer that ended."""

    state: str  # of its kind
    peers: tuple[WorkerId, ...]  # none: it ended before this worker was told who they are
    reason: str = ""
    replay: TransferMessage | None = None  # the answer to a peer that asks late

    def concerns(self, peer: WorkerId) -> bool:
        return not self.peers or peer in self.peers


class Layout(Protocol):
    """The shape of a worker's memory."""

    def mismatch(self, other: Self, /) -> str:
        """Why nothing can move between the two; empty if it can."""


L = TypeVar("L", bound=Layout)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind(Generic[L]):
    name: str  # in error messages: such as "KV"
    version: int
    decode_for_producer: Callable[[bytes], Message]
    decode_for_consumer: Callable[[bytes], Message]
    read_layout: Callable[[Any], L]  # as it came over the wire; raises VersionMismatchError or TransferError
    held_back: tuple[type[TransferMessage], ...]  # early messages that wait for their transfer
    answer_unknown: Callable[[TransferMessage], TransferMessage | None]  # to one that is not held back
    unwanted: tuple[type[TransferMessage], ...]  # with which a consumer ends a transfer that it holds no blocks for
    asks: tuple[type[TransferMessage], ...]  # late messages that wait for the end's replay
    waits: frozenset[State]  # states in which a consumer waits for the end's replay
    done: State  # of a transfer that succeeded
