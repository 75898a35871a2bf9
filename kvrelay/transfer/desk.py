"""What all transfers of one worker share: where their messages and news go, and what is counted."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from kvrelay.engine.movers import ConsumerNews, ProducerNews
from kvrelay.ids import WorkerId
from kvrelay.states import ConsumerState, ProducerState
from kvrelay.transfer.layout import KVLayout
from kvrelay.wire.registry import TransferCounts
from kvrelay.wire.transfer import Message, WriteDone


class ProducerEnd(msgspec.Struct, frozen=True):
    """What a producer remembers of a transfer that ended."""

    state: ProducerState
    reason: str = ""
    replay: WriteDone | None = None  # said again to a consumer that has not heard it


class ConsumerEnd(msgspec.Struct, frozen=True):
    """What a consumer remembers of a transfer that ended."""

    state: ConsumerState
    reason: str = ""


@dataclass(slots=True)
class Desk:
    """Messages out, and counts since the start."""

    layout: KVLayout
    outgoing: list[tuple[WorkerId, Message]] = field(default_factory=list)
    num_moves: int = 0  # under way
    moved_bytes: int = 0
    late_bytes: int = 0  # of these, when the prompt had been computed
    duplicates: int = 0
    done: int = 0
    failed: int = 0

    def send(self, peer: WorkerId, message: Message) -> None:
        self.outgoing.append((peer, message))

    def take_outgoing(self) -> list[tuple[WorkerId, Message]]:
        outgoing, self.outgoing = self.outgoing, []
        return outgoing

    def counts(self, in_flight: int) -> TransferCounts:
        return TransferCounts(
            in_flight=in_flight, done=self.done, failed=self.failed, bytes=self.moved_bytes, late_bytes=self.late_bytes
        )

    def count_moved(self, size_bytes: int, *, late: bool) -> None:
        self.moved_bytes += size_bytes
        self.late_bytes += size_bytes if late else 0


@dataclass(slots=True)
class ProducerDesk(Desk):
    news: ProducerNews = field(default_factory=ProducerNews)


@dataclass(slots=True)
class ConsumerDesk(Desk):
    news: ConsumerNews = field(default_factory=ConsumerNews)
