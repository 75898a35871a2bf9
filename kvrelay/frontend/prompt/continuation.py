"""The fields of continuation.

continuation_of            an earlier request: its continuation id, the id its client gave it, or its answer's id
prompt, messages           beside it: computed instead if the earlier request's tokens are gone, and not used otherwise
continuation_suffix        text that is appended to its tokens, tokenised alone and without special tokens,
continuation_token_ids     or token ids; without either, the answer goes on where the earlier one ended
keep_kv                    whether, or for how many seconds, the KV of this request is kept for continuations
"""

from __future__ import annotations

import asyncio

from kvrelay.errors import ConflictError, DeadlineError, InvalidRequestError, NotFoundError
from kvrelay.frontend.http.auth import owner_of
from kvrelay.frontend.http.call import Call, Watch
from kvrelay.frontend.http.errors import ClientGoneError, refuse
from kvrelay.frontend.prompt.types import ChatRequest, CompletionRequest, SamplingFields
from kvrelay.frontend.prompt.work import LostOrigin, Origin
from kvrelay.frontend.service import Service
from kvrelay.router.parent import Parent

_MAX_WAIT_S = 120.0  # for a parent that is still being generated


async def origin_of(service: Service, call: Call, request: CompletionRequest | ChatRequest) -> Origin | LostOrigin | None:
    """None: the request has nothing but a prompt of its own. Waits for a parent that is still being generated."""
    handle = request.continuation_of
    if handle is None:
        suffixes = {
            "continuation_suffix": request.continuation_suffix,
            "continuation_token_ids": request.continuation_token_ids,
        }
        refuse(suffixes, "needs continuation_of")
        return None
    has_prompt = bool(request.messages if isinstance(request, ChatRequest) else request.prompt)
    _check_fields(request, has_prompt=has_prompt)
    suffix = await _suffix(service, request)
    try:
        parent = await parent_of(service, call, handle, request.timeout)
    except NotFoundError:
        if not has_prompt:
            raise
        return LostOrigin(handle)
    if parent.cache_salt != (request.cache_salt or ""):
        reason = f"continuation_of: {handle!r} and this request have different cache_salts"
        raise InvalidRequestError(reason, param="cache_salt")
    if parent.adapter != service.adapter_of(request.model):
        reason = f"continuation_of: {handle!r} was generated with another LoRA adapter than model {request.model!r}"
        raise InvalidRequestError(reason, param="model")
    return Origin(handle, parent, [*parent.tokens, *suffix])


def _check_fields(request: CompletionRequest | ChatRequest, *, has_prompt: bool) -> None:
    """Fields about a prompt make no sense for the tokens of another request; those that say how messages are rendered, only
    beside messages."""
    refused: dict[str, object] = {
        "prompt_logprobs": request.prompt_logprobs,
        "truncate_prompt_tokens": request.truncate_prompt_tokens,
    }
    if isinstance(request, CompletionRequest):
        refused["echo"] = request.echo or None
    elif not has_prompt:
        refused |= {
            "add_generation_prompt": request.add_generation_prompt,
            "add_special_tokens": request.add_special_tokens or None,
            "continue_final_message": request.continue_final_message or None,
            "chat_template_kwargs": request.chat_template_kwargs,
            "mm_processor_kwargs": request.mm_processor_kwargs,
        }
    refuse(refused, "cannot be combined with continuation_of")


async def _suffix(service: Service, request: SamplingFields) -> list[int]:
    text, tokens = request.continuation_suffix, request.continuation_token_ids
    if text is not None and tokens is not None:
        raise InvalidRequestError(
            "continuation_token_ids cannot be combined with continuation_suffix", param="continuation_token_ids"
        )
    if tokens is not None:
        service.check_tokens(tokens, "continuation_token_ids")
        service.images.check_text(tokens, "continuation_token_ids")
        return tokens
    encoded = await service.encode(text, add_special_tokens=False) if text else []
    service.images.check_text(encoded, "continuation_suffix")
    return encoded


async def parent_of(service: Service, call: Call, handle: str, timeout_s: float | None) -> Parent:
    """The one of that name, once it has ended. Raises as `Backend.find_parent`, and ClientGoneError."""
    backend, owner = service.backend, owner_of(call, service.options)
    if backend.continuations.has_ended(handle, owner):
        return backend.continuations.find(handle, owner)
    left_s = call.remaining_s(timeout_s, service.options.request_timeout_s)
    wait_s = _MAX_WAIT_S if left_s is None else min(left_s, _MAX_WAIT_S)
    finding = asyncio.ensure_future(backend.find_parent(handle, owner, wait_s=wait_s))
    watch = Watch(call, finding.cancel)
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
        raise DeadlineError(f"{error.message}, the time limit of this request", param="timeout", code="deadline") from error
    finally:
        watch.cancel()


def keep_s(service: Service, request: SamplingFields, *, obstacle: str = "") -> float:
    """How long the request's KV is to be kept; 0: not at all. `obstacle` is a field that makes it impossible."""
    options, wanted = service.options, request.keep_kv
    if obstacle and wanted:
        raise InvalidRequestError(f"keep_kv cannot be combined with {obstacle}", param="keep_kv")
    if obstacle or wanted is False:
        return 0.0
    if wanted is None or wanted is True:
        seconds = options.keep_kv_s if wanted is None else options.keep_kv_default_s
        return min(seconds, options.max_keep_kv_s)
    if wanted > options.max_keep_kv_s:
        raise InvalidRequestError(f"keep_kv must be at most {options.max_keep_kv_s:g} seconds on this server", param="keep_kv")
    return wanted
