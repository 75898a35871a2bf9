"""What happened to the prefix cache and to the KV of requests since the last `take`, in order.

    stored / removed    by the prefix cache, as it happens; what follows the last event becomes part of it
    lived               of a request, by the engine
    take                by the worker after a step: the events so far; the recorder is empty again

If `take` is not called for long, more is pending than the cache holds: then the events are forgotten and `take` says it all
anew (`Cleared`, then everything that is there). So a recorder never grows beyond a few times the size of the cache. What was
said of requests is kept even then, as far as there is room, the ends of requests before all else.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence

from kvrelay.wire.events import CacheEvent, Cleared, Freed, LifeEvent, Removed, Stored

_MIN_PENDING = 1024  # changes that are kept in any case


class EventRecorder:
    """Of one prefix cache. `cached` gives the hashes that are in it now. One thread calls it."""

    is_heard = True

    def __init__(self, cached: Callable[[], Iterable[tuple[bytes, bytes]]], max_blocks: int) -> None:
        self._cached = cached
        self._max_pending = max(_MIN_PENDING, 2 * max_blocks)
        self._pending: list[CacheEvent] = []
        self._num_pending = 0  # hashes and events of requests
        self._overflowed = False

    def __bool__(self) -> bool:
        """Whether there is anything to take."""
        return bool(self._pending) or self._overflowed

    def stored(self, hashes: Sequence[bytes], parent: bytes) -> None:
        """One after the other, the first behind `parent`."""
        if not self._overflowed:
            _add_stored(self._pending, hashes, parent)
            self._count(len(hashes))

    def removed(self, hashes: Sequence[bytes]) -> None:
        if self._overflowed or not hashes:
            return
        last = self._pending[-1] if self._pending else None
        if isinstance(last, Removed):
            last.hashes.extend(hashes)
        else:
            self._pending.append(Removed(hashes=[*hashes]))
        self._count(len(hashes))

    def lived(self, event: LifeEvent) -> None:
        self._pending.append(event)
        self._count(1)

    def take(self) -> list[CacheEvent]:
        pending, self._pending, self._num_pending = self._pending, [], 0
        if not self._overflowed:
            return pending
        self._overflowed = False
        said: list[CacheEvent] = [Cleared()]
        cached = dict(self._cached())
        for digest, parent in cached.items():
            _add_stored(said, (digest,), parent)
        return said + [_only_cached(event, cached) for event in pending]

    def _count(self, num_more: int) -> None:
        self._num_pending += num_more
        if self._num_pending > self._max_pending:
            self._overflow()

    def _overflow(self) -> None:
        """Changes of the cache can be said anew. Of requests, at least the ends should be told."""
        self._overflowed = True
        lives: list[CacheEvent] = [event for event in self._pending if not isinstance(event, Stored | Removed)]
        ends = [event for event in lives if isinstance(event, Freed)][-(self._max_pending // 2) :]
        self._pending = [*ends] if 2 * len(lives) > self._max_pending else lives
        self._num_pending = len(self._pending)


class Unheard(EventRecorder):
    """Instead of a recorder where no router follows the cache."""

    is_heard = False

    def __init__(self) -> None:
        super().__init__(tuple, 0)

    def stored(self, hashes: Sequence[bytes], parent: bytes) -> None:
        pass

    def removed(self, hashes: Sequence[bytes]) -> None:
        pass

    def lived(self, event: LifeEvent) -> None:
        pass


def _add_stored(events: list[CacheEvent], hashes: Sequence[bytes], parent: bytes) -> None:
    last = events[-1] if events else None
    if isinstance(last, Stored) and last.hashes[-1] == parent:
        last.hashes.extend(hashes)
    else:
        events.append(Stored(hashes=[*hashes], parent=parent))


def _only_cached(event: CacheEvent, cached: Container[bytes]) -> CacheEvent:
    """Hashes that went meanwhile are left out: no event will say that they went."""
    if not isinstance(event, Freed):
        return event
    return Freed(request=event.request, reason=event.reason, hashes=[digest for digest in event.hashes if digest in cached])
