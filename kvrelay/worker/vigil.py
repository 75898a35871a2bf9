"""Notices that this process stood still: it was stopped (SIGSTOP, a debugger, a frozen container) and goes on now.

Meanwhile its registration may have run out, routers sent its requests elsewhere, and peers gave their transfers up. What it
remembers is of a world that is gone, so this incarnation is over: it says nothing more and begins anew as another worker.

Standing still is seen by looking at the clock more often than anything may take: a thread does nothing else, and every
other one looks before it acts for this worker. So neither a busy engine nor a registry that does not answer is taken for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvrelay.log import Log

log = Log("worker")

_NUM_LOOKS = 10
# Of a registration's time. Renewals come every third of it, and links are given up after three quarters of silence: no peer can
# have taken a process for lost that stood still for less than this.
_STILL = 2 / 3


class Vigil:
    """`look` may be called from any thread, and costs next to nothing."""

    def __init__(self, registration_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._registration_s = registration_s
        self._clock = clock
        self._looked_at = clock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="vigil", daemon=True)
        self.over = False

    def start(self) -> None:
        self._looked_at = self._clock()
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()

    def look(self) -> bool:
        """Whether this incarnation is over."""
        now = self._clock()
        still_s, self._looked_at = now - self._looked_at, now
        if still_s > self._registration_s * _STILL and not self.over:
            self.over = True
            log.warning("this process stood still and may have been taken for lost; it begins anew", seconds=round(still_s, 1))
        return self.over

    def _watch(self) -> None:
        while not self.look() and not self._stopping.wait(self._registration_s / _NUM_LOOKS):
            pass
