"""The feed of the dashboard: what happens on this router, once a second, for all pages that are open.

    open    -> a Viewer; with the first one a task begins that looks once a second
    look    -> event `tick`: workers and counters, the same for all; event `requests`: what changed, per owner
    leave   -> with the last viewer the task ends: nothing is computed while no page is open

Counters are sent as they are. The page makes rates and quantiles of them, from two ticks.
A viewer that does not read loses the feed, and gets everything anew when it asks again.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Any

import msgspec
from prometheus_client import Counter, Histogram

from kvrelay.errors import UnavailableError
from kvrelay.metrics import Metrics
from kvrelay.router.backend import Backend

EVERY_S = 1.0
LONGEST_S = 600.0  # then the page asks again, and with API keys its key is checked again
SHOWN_REQUESTS = 40
_MAX_VIEWERS = 64
_MAX_WAITING = 8  # events that a viewer has not read

_encoder = msgspec.json.Encoder()


def event(name: str, value: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _encoder.encode(value))


class Viewer:
    """One open page: events that it has not read yet."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self._events: deque[bytes] = deque()
        self._changed = asyncio.Event()
        self._is_closed = False

    def put(self, events: bytes) -> None:
        self._events.append(events)
        if len(self._events) > _MAX_WAITING:
            self.close()
        self._changed.set()

    def close(self) -> None:
        self._is_closed = True
        self._changed.set()

    async def next(self) -> bytes:
        """All events that wait; empty: there will be none any more."""
        while not self._is_closed and not self._events:
            self._changed.clear()
            await self._changed.wait()
        if self._is_closed:
            return b""
        events = b"".join(self._events)
        self._events.clear()
        return events


class Feed:
    """Of one server. Everything runs on the event loop's thread."""

    def __init__(self, backend: Backend, metrics: Metrics, *, every_s: float = EVERY_S) -> None:
        self._backend = backend
        self._every_s = every_s
        self._histograms = {
            "ttft": metrics.ttft_seconds,
            "inter_token": metrics.inter_token_seconds,
            "queue": metrics.queue_seconds,
        }
        self._counters = {
            "dispatched": metrics.dispatched,
            "failovers": metrics.failovers,
            "failures": metrics.request_failures,
            "rejected": metrics.rejected,
        }
        self._left = metrics.worker_losses
        self._viewers: list[Viewer] = []
        self._seen: dict[str, dict[int, tuple[object, ...]]] = {}  # by owner: what is known of each of its last requests
        self._task: asyncio.Task[None] | None = None

    @property
    def num_viewers(self) -> int:
        return len(self._viewers)

    @property
    def is_running(self) -> bool:
        return self._task is not None

    def open(self, owner: str) -> Viewer:
        """The viewer must `leave`. Raises UnavailableError."""
        if len(self._viewers) >= _MAX_VIEWERS:
            raise UnavailableError(f"{_MAX_VIEWERS} dashboards are open", code="too_many_viewers")
        viewer = Viewer(owner)
        viewer.put(self._tick() + event("requests", self._backend.timelines.changed(owner, SHOWN_REQUESTS, {})))
        self._viewers.append(viewer)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())
        return viewer

    def leave(self, viewer: Viewer) -> None:
        self._viewers.remove(viewer)
        if not any(other.owner == viewer.owner for other in self._viewers):
            self._seen.pop(viewer.owner, None)
        if not self._viewers and self._task is not None:
            self._task.cancel()
            self._task = None

    def close(self) -> None:
        """No page is told anything any more."""
        for viewer in self._viewers:
            viewer.close()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            self._look()

    def _look(self) -> None:
        tick = self._tick()
        news: dict[str, bytes] = {}
        for viewer in self._viewers:
            owner = viewer.owner
            if owner not in news:
                changed = self._backend.timelines.changed(owner, SHOWN_REQUESTS, self._seen.setdefault(owner, {}))
                news[owner] = event("requests", changed) if changed else b""
            viewer.put(tick + news[owner])

    def _tick(self) -> bytes:
        histograms = {name: cumulative(histogram) for name, histogram in self._histograms.items()}
        counters = {name: total(counter) for name, counter in self._counters.items()}
        counters["workers_left"] = total(self._left, reason="left")
        snapshot = {"at": time.time(), "histograms": histograms, "counters": counters, "cluster": self._backend.cluster()}
        return event("tick", snapshot)


def cumulative(histogram: Histogram) -> list[tuple[str, float]]:
    """How many observations were at most each bound; labels are summed over."""
    counts: dict[str, float] = {}
    for metric in histogram.collect():
        for sample in metric.samples:
            if sample.name.endswith("_bucket"):
                bound = sample.labels["le"]
                counts[bound] = counts.get(bound, 0.0) + sample.value
    return list(counts.items())


def total(counter: Counter, **labels: str) -> float:
    """Of all that have these labels."""
    samples = (sample for metric in counter.collect() for sample in metric.samples)
    return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())
