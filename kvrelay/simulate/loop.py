"""Virtual time: an event loop whose clock jumps to the next event.

It has what the router asks of an event loop (time, callbacks, timers) and a cheaper door for the simulation itself (`at`).
Events of one moment happen in the order in which they were asked for, so a run can be repeated.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
from collections.abc import Callable
from typing import Any, cast

Event = tuple[float, int, Callable[..., object], tuple[Any, ...]]


class VirtualLoop:
    """Has the part of an event loop that a router uses: it runs no coroutines and has no sockets."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[Event] = []
        self._number = 0

    def at(self, when: float, function: Callable[..., object], *arguments: Any) -> None:
        self._number += 1
        heapq.heappush(self._events, (when, self._number, function, arguments))

    def run(self, is_over: Callable[[], bool], until: float = float("inf")) -> None:
        """Until `is_over`, which is asked after every event; or until the events before `until` are done."""
        events, pop = self._events, heapq.heappop
        asyncio._set_running_loop(cast(asyncio.AbstractEventLoop, self))
        try:
            while events and events[0][0] < until and not is_over():
                self.now, _, function, arguments = pop(events)
                function(*arguments)
        finally:
            asyncio._set_running_loop(None)

    # What the router calls

    def time(self) -> float:
        return self.now

    def get_debug(self) -> bool:
        return False

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, cast(asyncio.AbstractEventLoop, self), context)
        self.at(when, _fire, handle)
        return handle

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        return self.call_at(self.now, callback, *args, context=context)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Its event finds it cancelled."""


def _fire(handle: asyncio.TimerHandle) -> None:
    if not handle.cancelled():
        handle._run()
