"""Keeps the prefix index in step with the workers: one subscription for each that publishes events.

joined(record)    subscribe; the index fills
left(worker)      the subscription ends, and the index forgets the worker

The eviction sync hears the same, each time after the prefix index.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

from kvrelay.errors import ProtocolError
from kvrelay.events.eviction_sync import EvictionSync
from kvrelay.ids import WorkerId
from kvrelay.log import Log
from kvrelay.metrics import Metrics
from kvrelay.router.outside import Outside, Subscription
from kvrelay.router.prefix_index import PrefixIndex
from kvrelay.states import FreeReason
from kvrelay.wire.events import CacheEvent, Cleared, Freed, FreedForNow, Removed, Restored, Stored, Swapped
from kvrelay.wire.registry import WorkerRecord

log = Log("router")


class NoFeed:
    """Of a router that has no use for events."""

    def joined(self, record: WorkerRecord) -> None: ...

    def left(self, worker_id: WorkerId) -> None: ...

    def close(self) -> None: ...


class EventFeed(NoFeed):
    """Owns the subscriptions. Everything runs on the event loop's thread."""

    def __init__(
        self, index: PrefixIndex, metrics: Metrics, sync: EvictionSync | None = None, outside: Outside | None = None
    ) -> None:
        self._index = index
        self._sync = EvictionSync() if sync is None else sync
        self._metrics = metrics
        self._subscribe = (outside or Outside()).subscribe
        self._subscribers: dict[WorkerId, Subscription] = {}
        metrics.prefix_index_blocks.set_function(lambda: len(index))
        metrics.prefix_index_bytes.set_function(lambda: index.size_bytes)

    def joined(self, record: WorkerRecord) -> None:
        """Harmless if the worker publishes nothing, or is known."""
        if not record.events_address or not record.replay_address or record.id in self._subscribers:
            return
        try:
            self._subscribers[record.id] = self._subscribe(record.id, record.events_address, record.replay_address, self)
        except ProtocolError as error:
            self.malformed(record.id, str(error))

    def left(self, worker_id: WorkerId) -> None:
        subscriber = self._subscribers.pop(worker_id, None)
        if subscriber is not None:
            subscriber.close()
            self._index.drop(worker_id)
            self._sync.on_worker_left(worker_id)

    def close(self) -> None:
        """The workers live on: nothing is gone but our knowledge of it."""
        self._sync = EvictionSync()
        for worker_id in list(self._subscribers):
            self.left(worker_id)

    # What subscribers say (EventOwner)

    def happened(self, worker_id: WorkerId, event: CacheEvent) -> None:
        """The first three say what can be found; the others, which tell of one request, are nothing to the prefix index."""
        sync = self._sync
        match event:
            case Stored():
                self._index.add(worker_id, event.hashes)
            case Removed():
                self._index.remove(worker_id, event.hashes)
                sync.on_blocks_removed(event.hashes)
            case Cleared():
                self._index.clear(worker_id)
                sync.on_cache_lost()
            case Freed():
                handed_over = event.reason is FreeReason.HANDED_OVER
                sync.on_kv_blocks_freed(worker_id, event.request, terminal=True, handed_over=handed_over, hashes=event.hashes)
            case FreedForNow():
                sync.on_kv_blocks_freed(worker_id, event.request, terminal=False)
            case Swapped():
                sync.on_kv_blocks_swapped(worker_id, event.request)
            case Restored():
                pass
            case _:
                assert_never(event)

    def replaced(self, worker_id: WorkerId, hashes: Iterable[bytes]) -> None:
        self._index.replace(worker_id, hashes)
        self._sync.on_cache_lost()

    def gap(self, worker_id: WorkerId) -> None:
        self._metrics.event_gaps.inc()
        log.info("events of a worker were lost", worker=worker_id)

    def repaired(self, worker_id: WorkerId, *, by_snapshot: bool) -> None:
        self._metrics.event_repairs.labels("snapshot" if by_snapshot else "replay").inc()

    def malformed(self, worker_id: WorkerId, reason: str) -> None:
        self._metrics.malformed.labels("events").inc()
        log.seldom("malformed message on the event plane", worker=worker_id, reason=reason)
