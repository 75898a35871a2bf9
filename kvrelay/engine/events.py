"""What happened to the prefix cache since somebody last asked, in order.

    stored / removed    by the prefix cache, as it happens
    take                by the worker after a step: the events so far, neighbours merged; the recorder is empty again

If nobody asks for long, more is pending than the cache holds: then the events are forgotten and `take` says it all anew
(`Cleared`, then everything that is there). So a recorder never grows beyond a few times the size of the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvrelay.wire.events import CacheEvent, Cleared, Removed, Stored

_MIN_PENDING = 1024  # changes that are kept in any case


class EventRecorder:
    """Of one prefix cache. `cached` gives the hashes that are in it now. One thread calls it."""

    def __init__(self, cached: Callable[[], Iterable[tuple[bytes, bytes]]], max_blocks: int) -> None:
        self._cached = cached
        self._max_pending = max(_MIN_PENDING, 2 * max_blocks)
        self._pending: list[tuple[bytes, bytes | None]] = []  # hash, and the parent's if it was stored
        self._overflowed = False

    def __bool__(self) -> bool:
        """Whether there is anything to take."""
        return bool(self._pending) or self._overflowed

    def stored(self, digest: bytes, parent: bytes) -> None:
        self._add((digest, parent))

    def removed(self, digest: bytes) -> None:
        self._add((digest, None))

    def take(self) -> list[CacheEvent]:
        pending, self._pending = self._pending, []
        if not self._overflowed:
            return _merged(pending)
        self._overflowed = False
        return [Cleared(), *_merged(self._cached())]

    def _add(self, change: tuple[bytes, bytes | None]) -> None:
        if self._overflowed:
            return
        self._pending.append(change)
        if len(self._pending) > self._max_pending:
            self._pending = []
            self._overflowed = True


def _merged(changes: Iterable[tuple[bytes, bytes | None]]) -> list[CacheEvent]:
    """Blocks that follow each other become one event."""
    events: list[CacheEvent] = []
    for digest, parent in changes:
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
