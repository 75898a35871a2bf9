"""GET /requests and /requests/{id}: what became of the caller's last requests, stage by stage."""

from __future__ import annotations

from typing import Literal
from urllib.parse import parse_qs

import msgspec

from kvrelay.errors import InvalidRequestError, NotFoundError
from kvrelay.frontend.http.auth import owner_of
from kvrelay.frontend.http.call import Call
from kvrelay.frontend.service import Service
from kvrelay.wire.timelines import TimelineShown

_SHOWN = 50  # unless the caller asks for another number


class TimelineList(msgspec.Struct, frozen=True, kw_only=True):
    data: list[TimelineShown]
    object: Literal["list"] = "list"


async def list_requests(service: Service, call: Call) -> None:
    """Newest first."""
    limit = _limit(call.scope["query_string"].decode("latin-1"))
    await call.answer_json(
        TimelineList(data=await service.backend.timelines.find(owner_of(call, service.options), limit=limit))
    )


async def one_request(service: Service, call: Call) -> None:
    """By the name that its client gave it, or by the id of its answer. Of several prompts, one timeline each."""
    name: str = call.scope["path_params"]["id"]
    found = await service.backend.timelines.find(owner_of(call, service.options), name=name)
    if not found:
        raise NotFoundError(f"no request {name[:200]!r} among the last ones", param="id", code="request_not_found")
    await call.answer_json(TimelineList(data=found))


def _limit(query: str) -> int:
    asked = parse_qs(query, keep_blank_values=True)
    if unknown := next((name for name in asked if name != "limit"), None):
        raise InvalidRequestError(f"unknown query parameter {unknown[:100]!r}", param=unknown[:100])
    text = asked.get("limit", [str(_SHOWN)])[-1]
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= 10_000):
        raise InvalidRequestError("limit must be a number from 1 to 10000", param="limit")
    return int(text[:9])
