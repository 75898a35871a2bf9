"""The reference beside the router: the same web framework with an endpoint that does nothing but stream one event."""

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

_EVENT = b'data: {"choices":[{"index":0,"delta":{"content":" the"}}]}\n\n'


class Listening(msgspec.Struct, frozen=True, kw_only=True):
    port: int


async def _events() -> AsyncIterator[bytes]:
    yield _EVENT
    yield b"data: [DONE]\n\n"


async def stream(request: Request) -> StreamingResponse:
    return StreamingResponse(_events(), media_type="text/event-stream")


def main() -> None:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    app = Starlette(routes=[Route("/stream", stream)])
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, loop="uvloop", http="httptools"))
    say(Listening(port=listener.getsockname()[1]))
    server.run([listener])


if __name__ == "__main__":
    main()
