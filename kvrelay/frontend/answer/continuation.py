"""What an answer says of continuation: whether each choice's KV is kept, and where the KV of its own prompt came from."""

from __future__ import annotations

import time

import msgspec

from kvrelay.frontend.answer.types import Continuation, ContinuationSource, Continued, Provenance, Source
from kvrelay.frontend.prompt.work import LostOrigin, Origin
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


def provenance(origin: Origin | LostOrigin, inherited: Inherited | None, prompt_tokens: int, cached_tokens: int) -> Provenance:
    """Of the whole answer: kept KV, the prefix cache, or prefill; or the prompt that came beside the parent's name."""
    taken = 0 if inherited is None else inherited.num_tokens
    found: Source = "lease" if taken else "prefix_cache" if cached_tokens else "prefill"
    source = ContinuationSource(
        of=origin.handle,
        source="prompt" if isinstance(origin, LostOrigin) else found,
        inherited_tokens=taken,
        computed_tokens=prompt_tokens - max(cached_tokens, taken),
    )
    return Provenance(continuation=source, continued=continued(origin))


def continued(origin: Origin | LostOrigin) -> Continued:
    return "parent" if isinstance(origin, Origin) else "prefill"


def as_extra(source: Provenance | msgspec.UnsetType) -> bytes:
    """As a member of a stream's last chunks."""
    return b"" if isinstance(source, msgspec.UnsetType) else b',"kvrelay":' + msgspec.json.encode(source)
