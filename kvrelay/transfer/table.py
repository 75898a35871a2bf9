"""TransferId <-> RequestId: the two names of a transfer, and what is known of transfers that are over.

The life of an entry: made by `add`, when the request is known to this worker; used by `find` for every message of the peer;
its TransferId goes with `end`, when the transfer has its outcome, and is remembered as ended; its RequestId goes with `remove`,
when that outcome has been handed to the scheduler.

Messages about a transfer that is not known yet are parked, bounded in number and age, and come out of `unpark` when it is. A
bounded number of ended transfers is remembered, so that late messages are recognised and lost ones can be said again.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Generic, Protocol, TypeVar

import msgspec

from kvrelay.ids import RequestId, TransferId, WorkerId
from kvrelay.transfer.plan import TransferMeta
from kvrelay.wire.transfer import TransferMessage


class TableStats(msgspec.Struct, kw_only=True):
    """Of one table since its start; `size`, `parked` and `remembered` are of this moment."""

    size: int = 0
    parked: int = 0
    remembered: int = 0  # ended transfers
    lookups: int = 0
    lookup_s: float = 0.0
    parked_total: int = 0
    parked_dropped: int = 0  # too many, or too old
    duplicates: int = 0  # said again about a transfer that has moved on
    unknown: int = 0  # about a transfer nobody here has heard of
    foreign: int = 0  # about a known transfer, but from a worker that is not its peer: another attempt or incarnation


class HasMeta(Protocol):
    @property
    def meta(self) -> TransferMeta: ...


T = TypeVar("T", bound=HasMeta)
E = TypeVar("E", bound=msgspec.Struct)
Key = tuple[TransferId, WorkerId]


class TransferTable(Generic[T, E]):
    """`T` is a live transfer, `E` what is remembered of one that ended."""

    def __init__(self, *, max_parked: int, parked_s: float, max_ended: int) -> None:
        self._max_parked = max_parked
        self._parked_s = parked_s
        self._max_ended = max_ended
        self._live: dict[TransferId, T] = {}
        self._by_request: dict[RequestId, T] = {}
        self._ended: OrderedDict[TransferId, tuple[WorkerId, E]] = OrderedDict()
        self._parked: OrderedDict[int, tuple[float, Key, TransferMessage]] = OrderedDict()
        self._next_parked = 0
        self.stats = TableStats()

    def add(self, transfer: T) -> None:
        meta = transfer.meta
        assert meta.transfer_id not in self._live, meta
        assert meta.request_id not in self._by_request, meta
        self._live[meta.transfer_id] = transfer
        self._by_request[meta.request_id] = transfer

    def find(self, transfer_id: TransferId, peer: WorkerId) -> T | None:
        """The live transfer that a message of this peer is about."""
        begun = time.perf_counter()
        transfer = self._live.get(transfer_id)
        self.stats.lookups += 1
        self.stats.lookup_s += time.perf_counter() - begun
        return transfer if transfer is not None and transfer.meta.peer == peer else None

    def of_request(self, request_id: RequestId) -> T | None:
        return self._by_request.get(request_id)

    @property
    def num_live(self) -> int:
        return len(self._live)

    def live(self) -> list[T]:
        return list(self._live.values())

    def live_with(self, peer: WorkerId) -> list[T]:
        return [transfer for transfer in self._live.values() if transfer.meta.peer == peer]

    def is_live(self, transfer: T) -> bool:
        return self._live.get(transfer.meta.transfer_id) is transfer

    def knows(self, transfer_id: TransferId) -> bool:
        return transfer_id in self._live or transfer_id in self._ended

    # Ended transfers

    def end(self, transfer: T, remembered: E) -> None:
        del self._live[transfer.meta.transfer_id]
        self.remember(transfer.meta.transfer_id, transfer.meta.peer, remembered)

    def remember(self, transfer_id: TransferId, peer: WorkerId, remembered: E) -> None:
        """Also for one that ended before it was known here."""
        self._ended[transfer_id] = (peer, remembered)
        self._ended.move_to_end(transfer_id)
        while len(self._ended) > self._max_ended:
            self._ended.popitem(last=False)

    def ended(self, transfer_id: TransferId, peer: WorkerId) -> E | None:
        whose, remembered = self._ended.get(transfer_id, (None, None))
        return remembered if whose == peer else None

    def remove(self, request_id: RequestId) -> None:
        """Its outcome has reached the scheduler. Harmless while it is live or when it is gone."""
        transfer = self._by_request.get(request_id)
        if transfer is not None and transfer.meta.transfer_id not in self._live:
            del self._by_request[request_id]

    # Messages that came too early

    def park(self, peer: WorkerId, message: TransferMessage, now: float) -> None:
        self._parked[self._next_parked] = (now, (message.transfer_id, peer), message)
        self._next_parked += 1
        self.stats.parked_total += 1
        while len(self._parked) > self._max_parked:
            self._parked.popitem(last=False)
            self.stats.parked_dropped += 1

    def unpark(self, transfer_id: TransferId, peer: WorkerId) -> list[TransferMessage]:
        numbers = [number for number, (_, key, _) in self._parked.items() if key == (transfer_id, peer)]
        return [self._parked.pop(number)[2] for number in numbers]

    def expire_parked(self, now: float) -> None:
        while self._parked:
            number, (parked_at, _, _) = next(iter(self._parked.items()))
            if now < parked_at + self._parked_s:
                return
            del self._parked[number]
            self.stats.parked_dropped += 1

    def snapshot(self) -> TableStats:
        return msgspec.structs.replace(
            self.stats, size=len(self._by_request), parked=len(self._parked), remembered=len(self._ended)
        )
