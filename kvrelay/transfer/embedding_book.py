"""The transfers of one side of the embedding relay by their id: those that live, those that ended, and early messages.

Bounded: of the ended ones the last are remembered, so that late messages are recognised and lost answers can be said again;
early messages wait for so long and in such number.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

import msgspec

from kvrelay.ids import TransferId, WorkerId
from kvrelay.transfer.session import TransferSettings
from kvrelay.wire.transfer import Message, TransferMessage

T = TypeVar("T")
E = TypeVar("E", bound=msgspec.Struct)


class RelayCounts(msgspec.Struct, kw_only=True):
    """Since the start; `num_moves` is of this moment."""

    num_moves: int = 0
    moved_bytes: int = 0
    moved_tokens: int = 0
    resumes: int = 0
    done: int = 0
    failed: int = 0
    duplicates: int = 0  # said again, or too late to matter
    unknown: int = 0  # about a transfer nobody here has heard of
    foreign: int = 0  # about a known transfer, but from a worker that has no part in it
    parked_dropped: int = 0  # early messages: too many, or too old
    malformed: int = 0  # frames that were no message


class Book(Generic[T, E]):
    """`T` is a live transfer, `E` what is remembered of one that ended."""

    def __init__(self, settings: TransferSettings) -> None:
        self._settings = settings
        self._live: dict[TransferId, T] = {}
        self._ended: OrderedDict[TransferId, E] = OrderedDict()
        self._parked: OrderedDict[tuple[TransferId, WorkerId], tuple[float, TransferMessage]] = OrderedDict()
        self.counts = RelayCounts()
        self._outgoing: list[tuple[WorkerId, Message]] = []

    def add(self, transfer_id: TransferId, transfer: T) -> None:
        assert not self.knows(transfer_id), transfer_id
        self._live[transfer_id] = transfer

    def find(self, transfer_id: TransferId) -> T | None:
        return self._live.get(transfer_id)

    def live(self) -> list[T]:
        return list(self._live.values())

    @property
    def num_live(self) -> int:
        return len(self._live)

    def end(self, transfer_id: TransferId, remembered: E) -> None:
        """Harmless if it has ended; also for one that ended before it was known here."""
        self._live.pop(transfer_id, None)
        self._ended[transfer_id] = remembered
        self._ended.move_to_end(transfer_id)
        while len(self._ended) > self._settings.max_ended:
            self._ended.popitem(last=False)

    def ended(self, transfer_id: TransferId) -> E | None:
        return self._ended.get(transfer_id)

    def knows(self, transfer_id: TransferId) -> bool:
        return transfer_id in self._live or transfer_id in self._ended

    # Messages that came too early: the last of each peer about each transfer, which says all that the earlier ones did

    def park(self, peer: WorkerId, message: TransferMessage, now: float) -> None:
        self._parked[message.transfer_id, peer] = (now, message)
        while len(self._parked) > self._settings.max_parked:
            self._parked.popitem(last=False)
            self.counts.parked_dropped += 1

    def unpark(self, transfer_id: TransferId, peer: WorkerId) -> TransferMessage | None:
        _, message = self._parked.pop((transfer_id, peer), (0.0, None))
        return message

    def expire_parked(self, now: float) -> None:
        old = [key for key, (parked_at, _) in self._parked.items() if now >= parked_at + self._settings.parked_s]
        for key in old:
            del self._parked[key]
            self.counts.parked_dropped += 1

    # Messages to peers

    def send(self, peer: WorkerId, message: Message) -> None:
        self._outgoing.append((peer, message))

    def take_outgoing(self) -> list[tuple[WorkerId, Message]]:
        outgoing, self._outgoing = self._outgoing, []
        return outgoing
