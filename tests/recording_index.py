"""A context index that keeps what it was told, and fails on demand."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from kvrelay.errors import ContextIndexError
from kvrelay.events.context_index import Removal


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
