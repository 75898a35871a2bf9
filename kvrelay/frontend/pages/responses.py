"""GET and DELETE /v1/responses/{id}: the stored responses of the caller's API key."""

from __future__ import annotations

from typing import Literal
from urllib.parse import parse_qsl

import msgspec

from kvrelay.errors import InvalidRequestError, NotFoundError
from kvrelay.frontend.http.auth import owner_of
from kvrelay.frontend.http.call import Call
from kvrelay.frontend.http.errors import JSON_TYPE
from kvrelay.frontend.prompt.stored import StoredResponse, read_record
from kvrelay.frontend.service import Service


class ResponseDeleted(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


async def one_response(service: Service, call: Call) -> None:
    for name, _ in parse_qsl(call.scope["query_string"].decode("latin-1"), keep_blank_values=True):
        param = name[:100].partition("[")[0]  # of a list, such as include[]
        raise InvalidRequestError(f"{param} is not supported for a stored response", param=param, code="unsupported_parameter")
    await call.answer(200, (await _stored(service, call)).body, [JSON_TYPE])


async def delete_response(service: Service, call: Call) -> None:
    """Its KV is freed too."""
    await _stored(service, call)
    name: str = call.scope["path_params"]["id"]
    await service.backend.delete_parents(name, owner_of(call, service.options))
    await call.answer_json(ResponseDeleted(id=name))


async def _stored(service: Service, call: Call) -> StoredResponse:
    name: str = call.scope["path_params"]["id"]
    try:
        parents = await service.backend.find_parents(name, owner_of(call, service.options))
    except NotFoundError:
        parents = []
    for parent in parents:
        if (stored := read_record(parent)) is not None:
            return stored
    raise NotFoundError(f"no response {name[:200]!r} is stored", param="id", code="response_not_found")
