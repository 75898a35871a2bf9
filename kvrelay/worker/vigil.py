"""Notices that this process stood still: it was stopped (SIGSTOP, a debugger, a frozen container) and goes on now.

Meanwhile its lease may have run out, routers sent its requests elsewhere, and peers gave their transfers up. What it remembers
is of a world that is gone, so this incarnation is over: it says nothing more to anybody and begins anew as another worker.

Standing still is seen by looking at the clock more often than anything may take: a thread does nothing else, and whoever is
about to act for this worker looks first. So neither a busy engine nor a registry that does not answer is taken for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvrelay.log import Log

log = Log("worker")

_LOOKS_PER_LEASE = 10
# Of a lease. Renewals come every third of one, and links are given up after three quarters of silence: nobody can have taken a
# process for lost that stood still for less than this.
_STILL = 2 / 3


class Vigil:
    """`look` may be called from any thread, and costs next to nothing."""

    def __init__(self, lease_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._lease_s = lease_s
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
        if still_s > self._lease_s * _STILL and not self.over:
            self.over = True
            log.warning("this process stood still and may have been taken for lost; it begins anew", seconds=round(still_s, 1))
        return self.over

    def _watch(self) -> None:
        while not self.look() and not self._stopping.wait(self._lease_s / _LOOKS_PER_LEASE):
            pass
