"""The seam to a context index: a service beside the cluster that knows which requests share context, and reorders prompts so
that more of them is found in the KV cache. It must be told what is gone.

    ContextIndex.remove_requests(ids)    these have nothing cached any more
        ContextPilotIndex                the real one (contextpilot.py); tests have one that keeps what it was told

Contract: ids are the clients' own, word for word. Removing an id that is not there, or was removed before, is no error, so
whatever failed may be sent again. A call may take long or fail (`errors.ContextIndexError`); it never blocks the loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec


class Removal(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one call."""

    num_removed: int
    num_not_found: int  # not there, or removed before


class ContextIndex(Protocol):
    async def remove_requests(self, request_ids: Sequence[str]) -> Removal:
        """Raises IndexNotReadyError if there is no index yet, IndexRefusedError if it would refuse the same again, and
        ContextIndexError for everything that may pass by itself."""

    async def close(self) -> None: ...
