"""The seam to a context index: a service beside the cluster that knows which requests share context, and reorders prompts so
that more of them is found in the KV cache. It must be told what is gone.

    ContextIndex.remove_requests(ids)    these have nothing cached any more
        ContextPilotIndex                the real one (contextpilot.py)
        RecordingIndex                   keeps what it was told; fails on demand

Contract: ids are the clients' own, word for word. Removing an id that is not there, or was removed before, is no error, so
whatever failed may be sent again. A call may take long or fail (`errors.ContextIndexError`); it never blocks the loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from kvrelay.errors import ContextIndexError


class Removal(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one call."""

    num_removed: int
    num_not_found: int  # not there, or removed before


class ContextIndex(Protocol):
    async def remove_requests(self, request_ids: Sequence[str]) -> Removal:
        """Raises IndexNotReadyError if there is no index yet, IndexRefusedError if it would refuse the same again, and
        ContextIndexError for everything that may pass by itself."""

    async def close(self) -> None: ...


class RecordingIndex:
    """A fake that knows the ids it was given. `failures` are raised by the next calls, one each."""

    def __init__(self, request_ids: Iterable[str] = ()) -> None:
        self.listed = set(request_ids)
        self.calls: list[list[str]] = []  # those that were carried out
        self.failures: deque[ContextIndexError] = deque()
        self.closed = False

    async def remove_requests(self, request_ids: Sequence[str]) -> Removal:
        if self.failures:
            raise self.failures.popleft()
        self.calls.append(list(request_ids))
        found = self.listed.intersection(request_ids)
        self.listed -= found
        return Removal(num_removed=len(found), num_not_found=len(set(request_ids) - found))

    async def close(self) -> None:
        self.closed = True

    @property
    def removed(self) -> list[str]:
        """Every id of every call, in order."""
        return [request_id for call in self.calls for request_id in call]
