"""What happened to the prefix cache and to the KV of requests since the last `take`, in order.

    stored / removed    by the prefix cache, as it happens
    lived               of a request, by the engine
    take                by the worker after a step: the events so far, neighbours merged; the recorder is empty again

If `take` is not called for long, more is pending than the cache holds: then the events are forgotten and `take` says it all
anew (`Cleared`, then everything that is there). So a recorder never grows beyond a few times the size of the cache. What was
said of requests is kept even then, as far as there is room, the ends of requests before all else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvrelay.wire.events import CacheEvent, Cleared, Freed, LifeEvent, Removed, Stored

_MIN_PENDING = 1024  # changes that are kept in any case

Change = tuple[bytes, bytes | None]
"""A hash, and the parent's if it was stored."""


class EventRecorder:
    """Of one prefix cache. `cached` gives the hashes that are in it now. One thread calls it."""

    is_heard = True

    def __init__(self, cached: Callable[[], Iterable[tuple[bytes, bytes]]], max_blocks: int) -> None:
        self._cached = cached
        self._max_pending = max(_MIN_PENDING, 2 * max_blocks)
        self._pending: list[Change | LifeEvent] = []
        self._overflowed = False

    def __bool__(self) -> bool:
        """Whether there is anything to take."""
        return bool(self._pending) or self._overflowed

    def stored(self, digest: bytes, parent: bytes) -> None:
        self._add((digest, parent))

    def removed(self, digest: bytes) -> None:
        self._add((digest, None))

    def lived(self, event: LifeEvent) -> None:
        self._add(event)

    def take(self) -> list[CacheEvent]:
        pending, self._pending = self._pending, []
        if not self._overflowed:
            return _merged(pending)
        self._overflowed = False
        chains = list(self._cached())
        cached = {digest for digest, _ in chains}
        lives = [_only_cached(life, cached) for life in pending if not isinstance(life, tuple)]
        return [Cleared(), *_merged(chains), *lives]

    def _add(self, change: Change | LifeEvent) -> None:
        if self._overflowed and isinstance(change, tuple):
            return
        self._pending.append(change)
        if len(self._pending) > self._max_pending:
            self._overflow()

    def _overflow(self) -> None:
        """Changes of the cache can be said anew. Of requests, at least the ends should be told."""
        self._overflowed = True
        lives = [life for life in self._pending if not isinstance(life, tuple)]
        ends = [life for life in lives if isinstance(life, Freed)][-(self._max_pending // 2) :]
        self._pending = [*ends] if 2 * len(lives) > self._max_pending else [*lives]


class Unheard(EventRecorder):
    """Instead of a recorder where no router follows the cache."""

    is_heard = False

    def __init__(self) -> None:
        super().__init__(tuple, 0)

    def _add(self, change: Change | LifeEvent) -> None:
        pass


def _only_cached(life: LifeEvent, cached: set[bytes]) -> LifeEvent:
    """Hashes that went meanwhile are left out: no event will say that they went."""
    if not isinstance(life, Freed):
        return life
    return Freed(request=life.request, reason=life.reason, hashes=[digest for digest in life.hashes if digest in cached])


def _merged(changes: Iterable[Change | LifeEvent]) -> list[CacheEvent]:
    """Blocks that follow each other become one event."""
    events: list[CacheEvent] = []
    for change in changes:
        if not isinstance(change, tuple):
            events.append(change)
            continue
        digest, parent = change
        last = events[-1] if events else None
        if parent is None:
            if isinstance(last, Removed):
                last.hashes.append(digest)
            else:
                events.append(Removed(hashes=[digest]))
        elif isinstance(last, Stored) and last.hashes[-1] == parent:
            last.hashes.append(digest)
        else:
            events.append(Stored(hashes=[digest], parent=parent))
    return events
