"""Decides when a context index must forget a request: never while the request, or KV of it, may still be used.

    on_request_started, _sent_again    by the router: the request is open, and these workers have it
    on_request_ended                   by the router: the client has its last word, or left
    on_kv_blocks_freed                 by a worker. Terminal: its part is over, and these blocks of it stay in its cache.
                                       Not terminal: it lost its blocks and goes on, so whatever follows is deferred
    on_kv_blocks_swapped               by a worker: the KV is on the host; nothing follows
    on_blocks_removed, on_cache_lost   by a worker: blocks are gone, one by one or all at once

A request is over when it is not open and every worker that had it has said its last word; one that dies has said it. A word
that does not come (events are lost, another router's request moved) is waited for at most `settle_s`. Then, by mode:

    terminal    it is removed
    evicted     it is removed as soon as no worker holds any of its blocks. Until then one block that is held is its witness:
                only when that one is gone are the others looked at

Requests of other routers are known from their workers alone. A request that starts under an id that was used before begins a
new life: a removal that has not been sent is taken back. Ids that we made up are in no index, and are not followed.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec

from kvrelay.ids import WorkerId, is_answer_id
from kvrelay.metrics import Metrics
from kvrelay.native.hashing import HASH_BYTES

Mode = Literal["evicted", "terminal"]


class Removals(Protocol):
    """Who tells the index (removals.py)."""

    def add(self, request_id: str) -> None: ...

    def cancel(self, request_id: str) -> None: ...


class EvictionSync:
    """What a sync is told, by the ids that clients know. This one does nothing, for routers beside which there is no index."""

    def on_request_started(self, request_id: str, workers: Iterable[WorkerId]) -> None: ...

    def on_request_sent_again(self, request_id: str, workers: Iterable[WorkerId]) -> None: ...

    def on_request_ended(self, request_id: str) -> None: ...

    def on_kv_blocks_freed(
        self, worker_id: WorkerId, request_id: str, *, terminal: bool, handed_over: bool = False, hashes: Iterable[bytes] = ()
    ) -> None: ...

    def on_kv_blocks_swapped(self, worker_id: WorkerId, request_id: str) -> None:
        """Recoverable: the request goes on, and so does its id."""

    def on_blocks_removed(self, hashes: Iterable[bytes]) -> None: ...

    def on_cache_lost(self) -> None: ...

    def on_worker_left(self, worker_id: WorkerId) -> None: ...

    def close(self) -> None: ...


class SyncSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Times and bounds; tests shorten them."""

    settle_s: float = 30.0
    max_requests: int = 65_536  # a prefix that all requests share would keep every one of them for ever
    max_hashes: int = 4_000_000  # of all of them together; 64 MB


@dataclass(slots=True)
class _Followed:
    """One request id that the index may know."""

    num_open: int = 0  # streams of this router: one per prompt of the request
    legs: Counter[WorkerId] = field(default_factory=Counter)  # how often it was sent there without a last word since
    deferred: set[WorkerId] = field(default_factory=set)  # lost its blocks there and goes on
    expects_more: bool = False  # handed over by a worker; we do not know to whom
    hashes: bytes = b""  # of its blocks that stayed in a cache, joined
    witness: bytes | None = None  # one of them that a worker holds

    @property
    def settled(self) -> bool:
        return not self.legs and not self.deferred and not self.expects_more

    def end_leg(self, worker_id: WorkerId) -> None:
        self.legs -= Counter([worker_id])  # which takes out those that have none left


class EvictionSyncAdapter(EvictionSync):
    """One per cluster, beside a router, on its loop's thread. Nothing here waits or raises."""

    def __init__(
        self,
        removals: Removals,
        *,
        mode: Mode,
        is_held: Callable[[bytes], bool],
        metrics: Metrics,
        settings: SyncSettings | None = None,
    ) -> None:
        """`is_held` says whether any worker has the block of that hash in its cache. It is up to date when we are called."""
        self._removals = removals
        self._mode: Mode = mode
        self._is_held = is_held
        self._settings = settings or SyncSettings()
        self._outcomes = metrics.eviction_sync
        self._followed: dict[str, _Followed] = {}  # the oldest first
        self._num_hashes = 0
        self._witnessed: dict[bytes, set[str]] = {}  # by witness
        self._unsettled: dict[str, float] = {}  # over, but for words that are missing: until when they are waited for
        self._timer: asyncio.TimerHandle | None = None
        metrics.eviction_sync_tracked.set_function(lambda: len(self._followed))

    def __len__(self) -> int:
        return len(self._followed)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._followed

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # What the router says of its requests

    def on_request_started(self, request_id: str, workers: Iterable[WorkerId]) -> None:
        """It was sent to these, which publish events. Once per prompt of a request."""
        if is_answer_id(request_id):
            return
        self._removals.cancel(request_id)
        before = self._followed.get(request_id)
        if before is not None and not before.num_open and before.settled:
            self._forget(request_id, before)
        followed = self._followed.setdefault(request_id, _Followed())
        followed.num_open += 1
        self._unsettled.pop(request_id, None)
        followed.legs.update(workers)

    def on_request_sent_again(self, request_id: str, workers: Iterable[WorkerId]) -> None:
        """A worker was lost or failed. The request keeps its id."""
        followed = self._followed.get(request_id)
        if followed is not None:
            followed.legs.update(workers)

    def on_request_ended(self, request_id: str) -> None:
        """For the index an abort is the same: what was computed stays cached."""
        followed = self._followed.get(request_id)
        if followed is not None and followed.num_open:
            followed.num_open -= 1
            self._consider(request_id, followed)

    # What workers say

    def on_kv_blocks_freed(
        self, worker_id: WorkerId, request_id: str, *, terminal: bool, handed_over: bool = False, hashes: Iterable[bytes] = ()
    ) -> None:
        """`hashes`: its blocks that stay in the worker's cache. `handed_over`: terminal here, but another worker goes on."""
        if is_answer_id(request_id):
            return
        followed = self._followed.setdefault(request_id, _Followed())
        if not terminal:
            followed.deferred.add(worker_id)
            self._outcomes.labels("deferred").inc()
            self._consider(request_id, followed)
            return
        followed.deferred.discard(worker_id)
        followed.expects_more = handed_over and worker_id not in followed.legs
        followed.end_leg(worker_id)
        if self._mode == "evicted":
            self._add_hashes(followed, hashes)
        self._consider(request_id, followed)
        self._bound()

    def on_blocks_removed(self, hashes: Iterable[bytes]) -> None:
        """These left a worker's cache."""
        for digest in hashes:
            if digest in self._witnessed and not self._is_held(digest):
                self._lose_witness(digest)

    def on_cache_lost(self) -> None:
        """A worker's cache was cleared, or became another in one go."""
        for digest in [digest for digest in self._witnessed if not self._is_held(digest)]:
            self._lose_witness(digest)

    def on_worker_left(self, worker_id: WorkerId) -> None:
        """It is dead or has ended: no word comes from it any more. Its requests may go on elsewhere."""
        for request_id, followed in list(self._followed.items()):
            if worker_id not in followed.legs and worker_id not in followed.deferred:
                continue
            is_ours = followed.legs.pop(worker_id, None) is not None
            followed.deferred.discard(worker_id)
            followed.expects_more = followed.expects_more or not is_ours  # its own router may send it elsewhere
            self._consider(request_id, followed)
        self.on_cache_lost()

    # One request

    def _consider(self, request_id: str, followed: _Followed) -> None:
        """Something changed: is it over, and is anything of it left?"""
        if followed.num_open:
            return
        if not followed.settled:
            self._wait_for(request_id)
            return
        self._unsettled.pop(request_id, None)
        if followed.witness is None and not self._find_witness(request_id, followed):
            self._forget(request_id, followed)
            self._removals.add(request_id)

    def _forget(self, request_id: str, followed: _Followed) -> None:
        del self._followed[request_id]
        self._num_hashes -= len(followed.hashes) // HASH_BYTES
        self._unsettled.pop(request_id, None)
        if followed.witness is not None:
            witnessed = self._witnessed[followed.witness]
            witnessed.discard(request_id)
            if not witnessed:
                del self._witnessed[followed.witness]

    def _bound(self) -> None:
        """Beyond the bounds the oldest are removed although something of them may be cached: the index then knows less than
        there is, which costs speed, not correctness."""
        while len(self._followed) > self._settings.max_requests or self._num_hashes > self._settings.max_hashes:
            oldest = next(((name, followed) for name, followed in self._followed.items() if not followed.num_open), None)
            if oldest is None:
                return
            self._forget(*oldest)
            self._outcomes.labels("early").inc()
            self._removals.add(oldest[0])

    # Its blocks

    def _add_hashes(self, followed: _Followed, hashes: Iterable[bytes]) -> None:
        """A decode worker has what the prefill worker had, and more: usually one is the beginning of the other."""
        joined = b"".join(digest for digest in hashes if len(digest) == HASH_BYTES)
        before = followed.hashes
        if joined.startswith(before):
            followed.hashes = joined
        elif not before.startswith(joined):
            followed.hashes = b"".join(dict.fromkeys([*_split(before), *_split(joined)]))
        self._num_hashes += (len(followed.hashes) - len(before)) // HASH_BYTES

    def _find_witness(self, request_id: str, followed: _Followed) -> bool:
        """From the first on: the beginning of a prompt is the last to be evicted."""
        found = next(filter(self._is_held, _split(followed.hashes)), None)
        followed.witness = found
        if found is not None:
            self._witnessed.setdefault(found, set()).add(request_id)
        return found is not None

    def _lose_witness(self, digest: bytes) -> None:
        for request_id in sorted(self._witnessed.pop(digest)):
            followed = self._followed[request_id]
            followed.witness = None
            self._consider(request_id, followed)

    # Words that do not come

    def _wait_for(self, request_id: str) -> None:
        loop = asyncio.get_running_loop()
        self._unsettled.setdefault(request_id, loop.time() + self._settings.settle_s)
        if self._timer is None:
            self._timer = loop.call_later(self._settings.settle_s, self._settle)

    def _settle(self) -> None:
        """All wait equally long, so the first is the next."""
        loop = asyncio.get_running_loop()
        self._timer = None
        while self._unsettled:
            request_id, deadline = next(iter(self._unsettled.items()))
            if deadline > loop.time():
                self._timer = loop.call_at(deadline, self._settle)
                return
            followed = self._followed[request_id]
            followed.legs.clear()
            followed.deferred.clear()
            followed.expects_more = False
            self._consider(request_id, followed)


def _split(joined: bytes) -> Iterator[bytes]:
    return (joined[start : start + HASH_BYTES] for start in range(0, len(joined), HASH_BYTES))
