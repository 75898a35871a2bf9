"""What an answer says of continuation: whether each choice's KV is kept, and where the KV of its own prompt came from."""

from __future__ import annotations

import time

import msgspec

from kvrelay.frontend.answer.types import Continuation, ContinuationSource, Provenance
from kvrelay.frontend.prompt.work import Origin
from kvrelay.router.continuations import Continuations
from kvrelay.router.parent import Parent
from kvrelay.wire.serving import Inherited

_NO_NEWS = "its worker has not confirmed it in time"


def shown(continuations: Continuations, parent: Parent) -> Continuation:
    """Of one choice. Rounded down, so that the client never expects its KV to be kept longer than it is."""
    assert parent.kept_id is not None
    if not parent.kept:
        return Continuation(id=parent.kept_id, kept=False, reason=parent.reason or _NO_NEWS)
    left_s = continuations.remaining_s(parent)
    return Continuation(
        id=parent.kept_id, kept=True, expires_at=int(time.time() + left_s), expires_in_s=int(left_s * 1000) / 1000
    )


def provenance(origin: Origin, inherited: Inherited | None, cached_tokens: int) -> Provenance:
    """Of the whole answer: kept KV, the prefix cache, or prefill."""
    taken = 0 if inherited is None else inherited.num_tokens
    source = ContinuationSource(
        of=origin.handle,
        source="lease" if taken else "prefix_cache" if cached_tokens else "prefill",
        inherited_tokens=taken,
        computed_tokens=len(origin.prompt) - max(cached_tokens, taken),
    )
    return Provenance(continuation=source)


def as_extra(source: Provenance | msgspec.UnsetType) -> bytes:
    """As a member of a stream's last chunks."""
    return b"" if isinstance(source, msgspec.UnsetType) else b',"kvrelay":' + msgspec.json.encode(source)
