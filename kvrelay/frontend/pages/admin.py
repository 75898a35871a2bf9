"""POST /admin/drain and POST /admin/role: an operator's words to one worker. They need an API key wherever /v1 does."""

from __future__ import annotations

from typing import Literal

import msgspec

from kvrelay.errors import InvalidRequestError
from kvrelay.frontend.http.call import Call
from kvrelay.frontend.http.errors import invalid_body
from kvrelay.frontend.service import Service
from kvrelay.states import Role


class DrainRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    worker: str  # its id, as GET /cluster shows it


class RoleRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    worker: str
    role: Literal["prefill", "decode", "whole", "encode"]


_drain_decoder: msgspec.json.Decoder[DrainRequest] = msgspec.json.Decoder(DrainRequest)
_role_decoder: msgspec.json.Decoder[RoleRequest] = msgspec.json.Decoder(RoleRequest)


async def drain(service: Service, call: Call) -> None:
    """The worker finishes what it has and leaves. Answered at once; GET /cluster shows how far it is."""
    body = await call.body(service.options.max_body_bytes)
    try:
        request = _drain_decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise invalid_body(error) from error
    await call.answer_json(service.backend.drain(request.worker))


async def change_role(service: Service, call: Call) -> None:
    """The worker finishes what it has, and comes back as a new worker of the same process."""
    body = await call.body(service.options.max_body_bytes)
    try:
        request = _role_decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise invalid_body(error) from error
    role = Role(request.role)
    if role is Role.ENCODE and service.media is None:
        raise InvalidRequestError("the model takes no images: there is nothing to encode", param="role")
    await call.answer_json(service.backend.drain(request.worker, role))
