"""Tells a context index what to forget, in the background: the caller hands over an id to remove and goes on.

    add(id) -> a bounded queue -> at most 50 ms later, or when 100 have come -> one call of the index
        done                          counted: removed, not found
        no index yet                  kept; asked again after a pause that grows to 5 s
        a failure that may pass       kept; sent again after a short pause that doubles
        three failures in a row       CLOSED -> OPEN: nothing is sent for a pause that grows to 30 s, then
                                      HALF_OPEN: one id finds out: -> CLOSED, or -> OPEN again
        refused                       a mistake of ours: sent in halves until what is refused stands alone, and is dropped

There is one call at a time, on the router's loop but in a task of its own: a slow or dead index costs memory up to the bound,
and no request time. When the queue is full the oldest ids are dropped, and counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Sequence

import msgspec

from kvrelay.discovery.breaker import FAILURES, FIRST_PAUSE_S, LONGEST_PAUSE_S, Breaker
from kvrelay.errors import ContextIndexError, IndexNotReadyError, IndexRefusedError
from kvrelay.events.context_index import ContextIndex
from kvrelay.log import Log
from kvrelay.metrics import Metrics
from kvrelay.states import BreakerState

log = Log("eviction-sync")


class RemovalSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Times and bounds; tests shorten them."""

    batch_ids: int = 100
    gather_s: float = 0.05
    max_waiting: int = 65_536
    first_pause_s: float = 0.1
    not_ready_pause_s: float = 5.0  # the longest
    failures: int = FAILURES  # in a row, before nothing is sent for a while
    first_open_s: float = FIRST_PAUSE_S
    longest_open_s: float = LONGEST_PAUSE_S


class RemovalQueue:
    """Made on a running loop. `add` and `cancel` never wait."""

    def __init__(self, index: ContextIndex, metrics: Metrics, settings: RemovalSettings | None = None) -> None:
        self._index = index
        self._settings = settings or RemovalSettings()
        self._outcomes = metrics.eviction_sync
        self._waiting: dict[str, None] = {}
        self._in_flight: dict[str, None] = {}
        self._news = asyncio.Event()
        self._full = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._breaker = Breaker(
            max_failures=self._settings.failures,
            first_pause_s=self._settings.first_open_s,
            longest_pause_s=self._settings.longest_open_s,
        )
        self._pause_s = self._settings.first_pause_s
        metrics.eviction_sync_waiting.set_function(lambda: len(self))
        metrics.eviction_sync_up.set_function(lambda: self.state is BreakerState.CLOSED)
        self._task = asyncio.get_running_loop().create_task(self._run())

    def __len__(self) -> int:
        return len(self._waiting) + len(self._in_flight)

    @property
    def state(self) -> BreakerState:
        return self._breaker.state

    def add(self, request_id: str) -> None:
        """Once is enough; twice is harmless."""
        self._waiting[request_id] = None
        self._bound()
        self._idle.clear()
        self._news.set()
        if len(self._waiting) >= self._settings.batch_ids:
            self._full.set()

    def cancel(self, request_id: str) -> None:
        """A new request has the id: what was to be removed is there again. Too late for what is on its way."""
        self._waiting.pop(request_id, None)
        self._in_flight.pop(request_id, None)

    async def until_idle(self) -> None:
        """Returns when everything has been sent or given up."""
        await self._idle.wait()

    async def close(self, wait_s: float = 0.0) -> None:
        """What waits may still be sent for `wait_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self.until_idle()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._outcomes.labels("dropped").inc(len(self))
        self._waiting.clear()
        self._in_flight.clear()
        await self._index.close()

    # The task

    async def _run(self) -> None:
        while True:
            await self._news.wait()
            await self._gather()
            pause_s = await self._send()
            if not self._waiting:
                self._news.clear()
                self._idle.set()
            if pause_s:
                await asyncio.sleep(pause_s)

    async def _gather(self) -> None:
        if len(self._waiting) < self._settings.batch_ids:
            self._full.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.gather_s):
                    await self._full.wait()

    async def _send(self) -> float:
        """One batch. Returns how long to wait before the next."""
        if not self._waiting:  # all of it was cancelled
            return 0.0
        size = self._settings.batch_ids if self.state is BreakerState.CLOSED else 1
        batch = list(itertools.islice(self._waiting, size))
        self._in_flight = dict.fromkeys(batch)
        for request_id in batch:
            del self._waiting[request_id]
        try:
            await self._deliver(batch)
            return self._succeeded()
        except IndexNotReadyError:
            return self._not_ready()
        except ContextIndexError as error:
            return self._failed(str(error))
        except Exception as error:  # the task's main: whatever the index does, the next id gets its turn
            log.exception("telling the context index failed unexpectedly")
            return self._failed(repr(error))
        finally:
            self._waiting = {**self._in_flight, **self._waiting}  # what was not delivered comes first again
            self._in_flight = {}
            self._bound()

    async def _deliver(self, batch: Sequence[str]) -> None:
        """Takes what was settled out of `_in_flight`."""
        try:
            removal = await self._index.remove_requests(batch)
        except IndexRefusedError as error:
            if len(batch) > 1:
                await self._deliver(batch[: len(batch) // 2])
                await self._deliver(batch[len(batch) // 2 :])
                return
            log.error("the context index refuses a request id", request=batch[0], reason=error)
            self._outcomes.labels("dropped").inc()
        else:
            self._outcomes.labels("sent").inc(len(batch))
            self._outcomes.labels("removed").inc(removal.num_removed)
            self._outcomes.labels("not_found").inc(removal.num_not_found)
        for request_id in batch:
            self._in_flight.pop(request_id, None)

    # How it went

    def _succeeded(self) -> float:
        if self.state is not BreakerState.CLOSED:
            log.info("the context index answers again")
        self._breaker.succeeded()
        self._pause_s = self._settings.first_pause_s
        return 0.0

    def _not_ready(self) -> float:
        """It answers, so it works."""
        self._breaker.succeeded()
        pause_s = self._pause_s
        self._pause_s = min(self._settings.not_ready_pause_s, 2 * pause_s)
        return pause_s

    def _failed(self, reason: str) -> float:
        self._breaker.failed()
        if self.state is BreakerState.CLOSED:
            pause_s = self._pause_s
            self._pause_s = 2 * pause_s
            return pause_s
        pause_s = self._breaker.remaining_s
        log.seldom("the context index does not answer", reason=reason, waiting=len(self), pause_s=round(pause_s, 3))
        return pause_s

    def _bound(self) -> None:
        while len(self._waiting) > self._settings.max_waiting:
            del self._waiting[next(iter(self._waiting))]
            self._outcomes.labels("dropped").inc()
