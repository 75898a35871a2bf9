"""Continuation as HTTP asks for it, and what the answer says of it.

continuation_of            an earlier request: its continuation id, the id its client gave it, or its answer's id
continuation_suffix        what is appended to its tokens: text, tokenised alone and without special tokens,
continuation_token_ids     or token ids; neither: the answer goes on where the other ended
keep_kv                    whether, or for how many seconds, the KV of this request is kept for others to continue from
"""

from __future__ import annotations

import asyncio
import dataclasses
import time

import msgspec

from kvrelay.errors import ConflictError, DeadlineError, InvalidRequestError
from kvrelay.frontend.answer.types import Continuation, ContinuationSource, Provenance
from kvrelay.frontend.http.auth import owner_of
from kvrelay.frontend.http.call import Call, DisconnectWatch
from kvrelay.frontend.http.deadline import remaining_s
from kvrelay.frontend.http.errors import ClientGoneError
from kvrelay.frontend.prompt.types import ChatRequest, CompletionRequest, SamplingFields
from kvrelay.frontend.service import Service
from kvrelay.router.continuations import Continuations
from kvrelay.router.parent import Parent
from kvrelay.wire.serving import Inherited

_MAX_WAIT_S = 120.0  # for a parent that is still being generated
_NO_NEWS = "its worker has not confirmed it in time"


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """What a request continues from."""

    handle: str  # as the client named it
    parent: Parent
    prompt: list[int]  # all tokens of the parent, and the suffix


async def origin_of(service: Service, call: Call, request: CompletionRequest | ChatRequest) -> Origin | None:
    """None: the request has a prompt of its own. Waits for a parent that is still being generated."""
    handle = request.continuation_of
    if handle is None:
        for field, value in (
            ("continuation_suffix", request.continuation_suffix),
            ("continuation_token_ids", request.continuation_token_ids),
        ):
            if value is not None:
                raise InvalidRequestError(f"{field} needs continuation_of", param=field)
        return None
    _check_fields(request)
    suffix = await _suffix(service, request)
    parent = await _parent(service, call, handle, request.timeout)
    if parent.cache_salt != (request.cache_salt or ""):
        reason = f"continuation_of: {handle!r} has another cache_salt than this request"
        raise InvalidRequestError(reason, param="cache_salt")
    return Origin(handle, parent, [*parent.tokens, *suffix])


def _check_fields(request: CompletionRequest | ChatRequest) -> None:
    """Nothing that speaks of a prompt goes with the tokens of another request."""
    refused: dict[str, object] = {
        "prompt_logprobs": request.prompt_logprobs,
        "truncate_prompt_tokens": request.truncate_prompt_tokens,
    }
    if isinstance(request, ChatRequest):
        refused |= {
            "messages": request.messages,
            "add_generation_prompt": request.add_generation_prompt,
            "add_special_tokens": request.add_special_tokens or None,
            "continue_final_message": request.continue_final_message or None,
            "chat_template_kwargs": request.chat_template_kwargs,
            "mm_processor_kwargs": request.mm_processor_kwargs,
        }
    else:
        refused |= {"prompt": request.prompt, "echo": request.echo or None}
    for field, value in refused.items():
        if value is not None:
            raise InvalidRequestError(f"{field} cannot be combined with continuation_of", param=field)


async def _suffix(service: Service, request: SamplingFields) -> list[int]:
    text, tokens = request.continuation_suffix, request.continuation_token_ids
    if text is not None and tokens is not None:
        raise InvalidRequestError(
            "continuation_token_ids cannot be combined with continuation_suffix", param="continuation_token_ids"
        )
    if tokens is not None:
        service.check_tokens(tokens, "continuation_token_ids")
        return _without_images(service, tokens, "continuation_token_ids")
    encoded = await service.encode(text, add_special_tokens=False) if text else []
    return _without_images(service, encoded, "continuation_suffix")


def _without_images(service: Service, suffix: list[int], field: str) -> list[int]:
    if service.media is not None and service.media.spec.image_token_id in suffix:
        raise InvalidRequestError(f"{field} may not hold the token that stands for an image", param=field)
    return suffix


async def _parent(service: Service, call: Call, handle: str, timeout_s: float | None) -> Parent:
    backend, owner = service.backend, owner_of(service, call)
    if backend.continuations.has_ended(handle, owner):
        return backend.continuations.find(handle, owner)
    left_s = remaining_s(service, call, timeout_s)
    wait_s = _MAX_WAIT_S if left_s is None else min(left_s, _MAX_WAIT_S)
    finding = asyncio.ensure_future(backend.find_parent(handle, owner, wait_s=wait_s))

    def give_up() -> None:
        finding.cancel()

    watch = DisconnectWatch(call, give_up)
    try:
        return await finding
    except asyncio.CancelledError:
        if finding.cancelled():
            raise ClientGoneError from None
        finding.cancel()
        raise
    except ConflictError as error:
        if left_s is None or left_s > _MAX_WAIT_S:
            raise
        raise DeadlineError(f"{error.message}, all it was given", param="timeout", code="deadline") from error
    finally:
        watch.stop()


def keep_s(service: Service, request: SamplingFields, *, obstacle: str = "") -> float:
    """For how long its KV is to be kept; 0: not at all. `obstacle` is a field that makes it impossible."""
    options, wanted = service.options, request.keep_kv
    if obstacle and wanted:
        raise InvalidRequestError(f"keep_kv cannot be combined with {obstacle}", param="keep_kv")
    if obstacle or wanted is False:
        return 0.0
    if wanted is None or wanted is True:
        seconds = options.keep_kv_s if wanted is None else options.keep_kv_default_s
        return min(seconds, options.max_keep_kv_s)
    if wanted > options.max_keep_kv_s:
        raise InvalidRequestError(f"keep_kv is at most {options.max_keep_kv_s:g} seconds here", param="keep_kv")
    return wanted


# What the answer says


def shown(continuations: Continuations, parent: Parent) -> Continuation:
    """Of one choice. Rounded down: a client's clock is never ahead of its lease."""
    assert parent.kept_id is not None
    if not parent.kept:
        return Continuation(id=parent.kept_id, kept=False, reason=parent.reason or _NO_NEWS)
    left_s = continuations.remaining_s(parent)
    return Continuation(
        id=parent.kept_id, kept=True, expires_at=int(time.time() + left_s), expires_in_s=int(left_s * 1000) / 1000
    )


def provenance(origin: Origin, inherited: Inherited | None, cached_tokens: int) -> Provenance:
    """Of the whole answer: which step of the ladder its prompt was on."""
    taken = 0 if inherited is None else inherited.num_tokens
    source = ContinuationSource(
        of=origin.handle,
        source="lease" if taken else "prefix_cache" if cached_tokens else "prefill",
        inherited_tokens=taken,
        computed_tokens=len(origin.prompt) - max(cached_tokens, taken),
    )
    return Provenance(continuation=source)


def missing(field: str) -> InvalidRequestError:
    return InvalidRequestError(f"missing field: {field}", param=field, code="missing_required_parameter")


def as_extra(told: Provenance | msgspec.UnsetType) -> bytes:
    """As a member of a stream's last chunks."""
    return b"" if isinstance(told, msgspec.UnsetType) else b',"kvrelay":' + msgspec.json.encode(told)
