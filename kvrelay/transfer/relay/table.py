"""The transfers of one side: by their TransferId, towards peers, and by the name that their owner gave them (a RequestId).

The life of an entry: made by `add`, when this worker is told of the transfer; used by `find` for every message of a peer; gone
with `end`, when the transfer has its outcome, which is remembered.

Messages about a transfer that is not known yet are held back, bounded in number and age, and come out of `take_held_back` when
it is. A bounded number of ended transfers is remembered, so that late messages are recognised and lost ones can be said again.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Generic, TypeVar

from kvrelay.ids import TransferId, WorkerId
from kvrelay.transfer.relay.desk import RelayCounts
from kvrelay.transfer.relay.kind import End
from kvrelay.transfer.relay.link import TransferSettings
from kvrelay.transfer.relay.seam import Transfer
from kvrelay.wire.relay import TransferMessage

T = TypeVar("T", bound=Transfer[Any, Any, Any])


class TransferTable(Generic[T]):
    def __init__(self, settings: TransferSettings, counts: RelayCounts) -> None:
        self._settings = settings
        self._counts = counts
        self._live: dict[TransferId, T] = {}
        self._by_name: dict[str, T] = {}
        self._ended: OrderedDict[TransferId, End] = OrderedDict()
        # The last message of each peer about each transfer: it says all that the earlier ones did.
        self._held_back: OrderedDict[tuple[TransferId, WorkerId], tuple[float, TransferMessage]] = OrderedDict()

    def add(self, transfer: T) -> None:
        assert not self.knows(transfer.transfer_id), transfer.transfer_id
        assert transfer.name not in self._by_name, transfer.name
        self._live[transfer.transfer_id] = transfer
        self._by_name[transfer.name] = transfer

    def find(self, transfer_id: TransferId, peer: WorkerId) -> T | None:
        """The live transfer that a message of this peer is about."""
        self._counts.lookups += 1
        transfer = self._live.get(transfer_id)
        return transfer if transfer is not None and peer in transfer.peers else None

    def named(self, name: str) -> T | None:
        return self._by_name.get(name)

    def live(self) -> list[T]:
        return list(self._live.values())

    def live_with(self, peer: WorkerId) -> list[T]:
        return [transfer for transfer in self._live.values() if peer in transfer.peers]

    def is_live(self, transfer: T) -> bool:
        return self._live.get(transfer.transfer_id) is transfer

    def knows(self, transfer_id: TransferId) -> bool:
        return transfer_id in self._live or transfer_id in self._ended

    @property
    def num_live(self) -> int:
        return len(self._live)

    # Ended transfers

    def end(self, transfer: T) -> None:
        del self._live[transfer.transfer_id]
        del self._by_name[transfer.name]
        self.remember(transfer.transfer_id, transfer.end)

    def remember(self, transfer_id: TransferId, end: End) -> None:
        """Also for one that ended before it was known here."""
        self._ended[transfer_id] = end
        self._ended.move_to_end(transfer_id)
        while len(self._ended) > self._settings.max_ended:
            self._ended.popitem(last=False)

    def ended(self, transfer_id: TransferId, peer: WorkerId) -> End | None:
        end = self._ended.get(transfer_id)
        return end if end is not None and end.concerns(peer) else None

    def state_of(self, transfer_id: TransferId) -> object:
        """None if it is not known, or not any more."""
        known = self._live.get(transfer_id) or self._ended.get(transfer_id)
        return known.state if known is not None else None

    @property
    def num_remembered(self) -> int:
        return len(self._ended)

    # Messages that came too early

    def hold_back(self, peer: WorkerId, message: TransferMessage, now: float) -> None:
        self._held_back[message.transfer_id, peer] = (now, message)
        while len(self._held_back) > self._settings.max_held_back:
            self._held_back.popitem(last=False)
            self._counts.held_back_dropped += 1

    def take_held_back(self, transfer_id: TransferId, peer: WorkerId) -> TransferMessage | None:
        _, message = self._held_back.pop((transfer_id, peer), (0.0, None))
        return message

    def drop_old_messages(self, now: float) -> None:
        old = [key for key, (came_at, _) in self._held_back.items() if now >= came_at + self._settings.held_back_s]
        for key in old:
            del self._held_back[key]
            self._counts.held_back_dropped += 1

    @property
    def num_held_back(self) -> int:
        return len(self._held_back)
