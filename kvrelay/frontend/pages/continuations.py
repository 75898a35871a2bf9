"""GET and DELETE /v1/continuations: the requests of the caller's API key that can be continued from."""

from __future__ import annotations

import time
from typing import Literal

import msgspec

from kvrelay.errors import InvalidRequestError, NotFoundError
from kvrelay.frontend.http.auth import owner_of
from kvrelay.frontend.http.call import Call
from kvrelay.frontend.service import Service
from kvrelay.router.parent import Parent
from kvrelay.states import HandleState


class ContinuationHandle(msgspec.Struct, frozen=True, kw_only=True):
    """A request that can be continued from."""

    id: str
    request_id: str
    choice: int
    state: str
    tokens: int  # prompt and output; 0 while it runs
    prompt_tokens: int
    blocks: int  # of KV that its worker keeps for it
    expires_at: int | None
    worker: str | None
    reason: str | None  # why no KV is kept
    object: Literal["continuation"] = "continuation"


class ContinuationList(msgspec.Struct, frozen=True, kw_only=True):
    data: list[ContinuationHandle]
    object: Literal["list"] = "list"


class ContinuationDeleted(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["continuation.deleted"] = "continuation.deleted"
    deleted: bool = True


async def list_continuations(service: Service, call: Call) -> None:
    """Those that asked for their KV to be kept."""
    parents = service.backend.continuations.of_owner(owner_of(call, service.options))
    await call.answer_json(ContinuationList(data=[_shown(service, parent) for parent in parents]))


async def one_continuation(service: Service, call: Call) -> None:
    handle: str = call.scope["path_params"]["id"]
    try:
        parents = await service.backend.find_parents(handle, owner_of(call, service.options))
    except NotFoundError as error:
        raise _not_found(error) from error
    if len(parents) > 1:
        raise InvalidRequestError(f"{handle[:200]!r} has {len(parents)} choices: name one by its continuation id", param="id")
    await call.answer_json(_shown(service, parents[0]))


async def delete_continuation(service: Service, call: Call) -> None:
    """Deletes all choices of that name. Workers that keep KV for them are told to free it."""
    handle: str = call.scope["path_params"]["id"]
    try:
        await service.backend.delete_parents(handle, owner_of(call, service.options))
    except NotFoundError as error:
        raise _not_found(error) from error
    await call.answer_json(ContinuationDeleted(id=handle))


def _not_found(error: NotFoundError) -> NotFoundError:
    return NotFoundError(error.message, param="id", code=error.code)


def _shown(service: Service, parent: Parent) -> ContinuationHandle:
    left_s = service.backend.continuations.remaining_s(parent) if parent.kept else None
    return ContinuationHandle(
        id=parent.kept_id or parent.answer_id or parent.external_id,
        request_id=parent.external_id,
        choice=parent.choice,
        state=parent.state.value,
        tokens=len(parent.tokens),
        prompt_tokens=parent.num_prompt_tokens,
        blocks=parent.num_blocks,
        expires_at=None if left_s is None else int(time.time() + left_s),
        worker=parent.worker_id if parent.state is HandleState.HELD else None,
        reason=parent.reason or None,
    )
