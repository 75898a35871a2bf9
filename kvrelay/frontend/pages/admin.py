"""POST /admin/drain and POST /admin/role: an operator's orders to one worker. They need an API key if /v1 does."""

from __future__ import annotations

from typing import Literal

import msgspec

from kvrelay.errors import InvalidRequestError
from kvrelay.frontend.http.call import Call
from kvrelay.frontend.service import Service
from kvrelay.states import Role


class DrainRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    worker: str  # its id, as GET /cluster shows it


class RoleRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    worker: str
    role: Literal["prefill", "decode", "whole", "encode"]


_drain = msgspec.json.Decoder(DrainRequest)
_role = msgspec.json.Decoder(RoleRequest)


async def drain(service: Service, call: Call) -> None:
    """The worker finishes its requests and leaves. Answered at once; GET /cluster shows the progress."""
    request = await call.read(_drain, service.options.max_body_bytes)
    await call.answer_json(service.backend.drain(request.worker))


async def change_role(service: Service, call: Call) -> None:
    """The worker finishes its requests and comes back as a new worker of the same process."""
    request = await call.read(_role, service.options.max_body_bytes)
    role = Role(request.role)
    if role is Role.ENCODE and not service.images.takes_images:
        raise InvalidRequestError("the model takes no images: there is nothing to encode", param="role")
    await call.answer_json(service.backend.drain(request.worker, role))
