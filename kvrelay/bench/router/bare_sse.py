"""The reference beside the router: the same web framework with an endpoint that streams one token and does nothing else."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from kvrelay.bench.harness.child import say

_FIRST = b'data: {"choices":[{"index":0,"delta":{"content":" the"}}]}\n\n'
_REST = b'data: {"choices":[],"usage":{"completion_tokens":1}}\n\ndata: [DONE]\n\n'


class Listening(msgspec.Struct, frozen=True, kw_only=True):
    port: int


async def _events() -> AsyncIterator[bytes]:
    yield _FIRST
    yield _REST


async def stream(request: Request) -> StreamingResponse:
    return StreamingResponse(_events(), media_type="text/event-stream")


APP = Starlette(routes=[Route("/v1/chat/completions", stream, methods=["POST"])])


def main() -> None:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    server = uvicorn.Server(uvicorn.Config(APP, log_level="warning", access_log=False, loop="uvloop", http="httptools"))
    say(Listening(port=listener.getsockname()[1]))
    server.run([listener])


if __name__ == "__main__":
    main()
