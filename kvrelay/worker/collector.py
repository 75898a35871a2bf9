"""Python's garbage collector in a process that serves.

What exists before the first request lives as long as the process, and what a step makes is gone with the next one, without the
collector. What is left for it are the reference cycles of few requests, as of beam searches. A look at everything, with the
prefix cache's tens of thousands of blocks, stops a worker for 40 to 60 ms: with Python's own thresholds every few hundred steps
of a large batch.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

_THRESHOLDS = (20_000, 20, 50)


def spare_the_collector() -> None:
    """What exists now lives as long as the process, so it need not be looked at again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)


@contextlib.contextmanager
def spared_collector() -> Iterator[None]:
    """For a while, in a process that measures."""
    usual = gc.get_threshold()
    spare_the_collector()
    try:
        yield
    finally:
        gc.set_threshold(*usual)
        gc.unfreeze()
