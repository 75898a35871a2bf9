"""What all transfers of one side share: where their messages and news go, and what is counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from kvrelay.ids import WorkerId
from kvrelay.transfer.relay.kind import Layout
from kvrelay.transfer.relay.link import Link, LocalSide, TransferSettings
from kvrelay.wire.relay import Message

L = TypeVar("L", bound=Layout)
N = TypeVar("N")
_PEERS_COUNTED = 64  # workers come and go; those that came first are forgotten


class RelayCounts(msgspec.Struct, kw_only=True):
    """Since the start; `num_moves` is of this moment."""

    num_moves: int = 0
    moved_bytes: int = 0
    late_bytes: int = 0  # of these, when everything was computed
    by_peer: dict[WorkerId, int] = {}  # moved bytes
    moved_tokens: int = 0  # of embeddings
    resumes: int = 0  # of embeddings
    done: int = 0
    failed: int = 0
    lookups: int = 0  # of transfers that a message was about
    duplicates: int = 0  # messages that said what was known, or came too late to matter
    unknown: int = 0  # messages about a transfer that this worker has not heard of
    foreign: int = 0  # messages about a known transfer from a worker that has no part in it: another attempt or incarnation
    held_back_dropped: int = 0  # early messages: too many, or too old
    malformed: int = 0  # frames that were no message
    reconnects: int = 0  # connections to a producer that were opened again
    repeats: int = 0  # messages that were said again, since no answer had come
    set_aside: int = 0  # prompts
    recomputed: int = 0  # prompts that were set aside, and are wanted after all


class Desk(Generic[L, N]):
    """`N` is what the owner of the transfers is told; `no_news` makes one that says nothing."""

    def __init__(self, local: LocalSide[L], settings: TransferSettings, no_news: Callable[[], N]) -> None:
        self.local = local
        self.layout = local.layout
        self.settings = settings
        self.links: dict[WorkerId, Link[L]] = {}  # of a producer
        self.counts = RelayCounts()
        self.news = no_news()
        self._no_news = no_news
        self._outgoing: list[tuple[WorkerId, Message]] = []
        self._lines: list[Callable[[], None]] = []

    def send(self, peer: WorkerId, message: Message) -> None:
        self._outgoing.append((peer, message))

    def take_outgoing(self) -> list[tuple[WorkerId, Message]]:
        outgoing, self._outgoing = self._outgoing, []
        return outgoing

    def take_news(self) -> N | None:
        """None if there is none."""
        empty = self._no_news()
        if self.news == empty:
            return None
        news, self.news = self.news, empty
        return news

    def log_later(self, line: Callable[[], None]) -> None:
        """Writes a line once owner and peers have been told: it costs as much as a message."""
        self._lines.append(line)

    def write_log(self) -> None:
        lines, self._lines = self._lines, []
        for line in lines:
            line()

    def move_ended(self, peer: WorkerId, size_bytes: int, *, moved: bool, late: bool = False) -> None:
        self.counts.num_moves -= 1
        if moved:
            self.counts.moved_bytes += size_bytes
            self.counts.late_bytes += size_bytes if late else 0
            by_peer = self.counts.by_peer
            if peer not in by_peer and len(by_peer) >= _PEERS_COUNTED:
                del by_peer[next(iter(by_peer))]
            by_peer[peer] = by_peer.get(peer, 0) + size_bytes
