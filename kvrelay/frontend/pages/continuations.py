"""GET and DELETE /v1/continuations: the requests that can be continued from, as far as they are the caller's own."""

from __future__ import annotations

import time

from kvrelay.errors import InvalidRequestError, NotFoundError
from kvrelay.frontend.answer.types import ContinuationDeleted, ContinuationHandle, ContinuationList
from kvrelay.frontend.http.auth import owner_of
from kvrelay.frontend.http.call import Call
from kvrelay.frontend.service import Service
from kvrelay.router.parent import Parent
from kvrelay.states import HandleState


async def list_continuations(service: Service, call: Call) -> None:
    """Those whose KV was to be kept."""
    parents = service.backend.continuations.of_owner(owner_of(service, call))
    await call.answer_json(ContinuationList(data=[_shown(service, parent) for parent in parents]))


async def one_continuation(service: Service, call: Call) -> None:
    handle: str = call.scope["path_params"]["id"]
    try:
        parents = await service.backend.find_parents(handle, owner_of(service, call))
    except NotFoundError as error:
        raise _not_found(error) from error
    if len(parents) > 1:
        raise InvalidRequestError(f"{handle[:200]!r} has {len(parents)} choices: name the id of one of them", param="id")
    await call.answer_json(_shown(service, parents[0]))


async def delete_continuation(service: Service, call: Call) -> None:
    """All choices of that name. A worker that keeps KV for one of them is told to give it up."""
    handle: str = call.scope["path_params"]["id"]
    try:
        await service.backend.delete_parents(handle, owner_of(service, call))
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
