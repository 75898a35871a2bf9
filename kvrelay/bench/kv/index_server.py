"""A context index that knows nothing and answers every `POST /evict`: what a real one is, seen from the router."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route


async def evict(request: Request) -> JSONResponse:
    return JSONResponse({"evicted_request_ids": [], "not_found": (await request.json())["request_ids"]})


APP = Starlette(routes=[Route("/evict", evict, methods=["POST"])])
