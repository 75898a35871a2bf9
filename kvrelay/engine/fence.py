"""How far a device has come with what it was given.

A card computes behind its host: when a call that launched work returns, the work has been queued, not done. Before others may
touch memory that the work reads or writes, a fence is put behind it, and has to pass.

Each fence belongs to one moment and is never put up again elsewhere, so several may be waited for by several threads while
further passes are launched.
"""

from __future__ import annotations

from typing import Protocol


class Fence(Protocol):
    def passed(self) -> bool:
        """Whether what it stands for has been computed: of a runner's fence everything launched before it, of a layer's its KV.
        Once true, always true. Any thread may ask, and none waits."""


class _Passed:
    def passed(self) -> bool:
        return True


PASSED: Fence = _Passed()
"""Of a device that is done with what it was given when the call returns: a CPU."""
