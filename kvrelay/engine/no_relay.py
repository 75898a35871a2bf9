"""The movers of an engine that neither hands KV on nor takes any over."""

from __future__ import annotations

from typing import NoReturn

from kvrelay.ids import RequestId, WorkerId
from kvrelay.wire.registry import MappingCounts, TransferCounts


class NoRelay:
    """A `Producer` and a `Consumer`. The engine's admission refuses every hand-over, so that none is ever begun here."""

    has_news = False
    num_links = 0

    def abort(self, request_id: RequestId) -> None:
        pass

    def peer_lost(self, worker_id: WorkerId) -> None:
        pass

    def counts(self) -> TransferCounts:
        return TransferCounts()

    def mapping(self) -> MappingCounts:
        return MappingCounts()

    def close(self) -> None:
        pass

    def _never(self, *_: object) -> NoReturn:
        raise AssertionError("this engine has no relay")

    expect = start = begin_step = layer_done = end_step = finish = set_aside = reserve = poll = _never
