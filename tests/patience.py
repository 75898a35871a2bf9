"""How long tests wait for what must happen.

Only a guard against what never does: on a busy machine, or one that others share, a second of work takes a minute.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

PATIENCE_S = 600.0
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.001, 0.05


def until(condition: Callable[[], object], says: Callable[[], object] = lambda: "it never happened") -> None:
    """`says` is asked for the failure's words, if there is one."""
    pauses = _pauses()
    while not condition():
        pause_s = next(pauses, None)
        assert pause_s is not None, says()
        time.sleep(pause_s)


async def eventually(condition: Callable[[], object], says: Callable[[], object] = lambda: "it never happened") -> None:
    """The same on a loop, whose other tasks run meanwhile."""
    pauses = _pauses()
    while not condition():
        pause_s = next(pauses, None)
        assert pause_s is not None, says()
        await asyncio.sleep(pause_s)


def _pauses() -> Iterator[float]:
    """Short ones first: most of what is waited for is near, and what is not need not be asked for often."""
    ends_at, pause_s = time.monotonic() + PATIENCE_S, _FIRST_PAUSE_S
    while time.monotonic() < ends_at:
        yield pause_s
        pause_s = min(1.2 * pause_s, _LAST_PAUSE_S)
