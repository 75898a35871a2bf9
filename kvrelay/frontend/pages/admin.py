"""An operator's orders: POST /admin/drain and /admin/role to one worker, POST /v1/load_lora_adapter and
/v1/unload_lora_adapter (vLLM's names) to all of them. Who may give them: `Operators` (http/auth.py)."""

from __future__ import annotations

from typing import Annotated, Literal

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


class LoadAdapterRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    lora_name: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    lora_path: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]  # a folder, on every worker's machine
    load_inplace: bool = False


class UnloadAdapterRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    lora_name: str


_drain = msgspec.json.Decoder(DrainRequest)
_role = msgspec.json.Decoder(RoleRequest)
_load = msgspec.json.Decoder(LoadAdapterRequest)
_unload = msgspec.json.Decoder(UnloadAdapterRequest)


async def drain(service: Service, call: Call) -> None:
    """The worker finishes its requests and leaves. Answered at once; GET /cluster shows the progress."""
    service.operators.check(call)
    request = await call.read(_drain, service.options.max_body_bytes)
    await call.answer_json(service.backend.drain(request.worker))


async def change_role(service: Service, call: Call) -> None:
    """The worker finishes its requests and comes back as a new worker of the same process."""
    service.operators.check(call)
    request = await call.read(_role, service.options.max_body_bytes)
    role = Role(request.role)
    if role is Role.ENCODE and not service.images.takes_images:
        raise InvalidRequestError("the model takes no images: there is nothing to encode", param="role")
    await call.answer_json(service.backend.drain(request.worker, role))


async def load_adapter(service: Service, call: Call) -> None:
    """Answered when every worker has it."""
    service.operators.check(call, reads_files=True)
    request = await call.read(_load, service.options.max_body_bytes)
    name = request.lora_name
    if name in service.models:
        raise InvalidRequestError(f"{name!r} is a name of the model itself", param="lora_name")
    await call.answer_json(await service.backend.load_adapter(name, request.lora_path, in_place=request.load_inplace))


async def unload_adapter(service: Service, call: Call) -> None:
    """Requests that have it keep it to their end."""
    service.operators.check(call, reads_files=True)
    request = await call.read(_unload, service.options.max_body_bytes)
    await call.answer_json(await service.backend.unload_adapter(request.lora_name))
