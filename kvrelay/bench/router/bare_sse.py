"""The reference beside the router: the same web framework with an endpoint that streams one token and does nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

_FIRST = b'data: {"choices":[{"index":0,"delta":{"content":" the"}}]}\n\n'
_REST = b'data: {"choices":[],"usage":{"completion_tokens":1}}\n\ndata: [DONE]\n\n'


async def _events() -> AsyncIterator[bytes]:
    yield _FIRST
    yield _REST


async def stream(request: Request) -> StreamingResponse:
    return StreamingResponse(_events(), media_type="text/event-stream")


APP = Starlette(routes=[Route("/v1/chat/completions", stream, methods=["POST"])])
