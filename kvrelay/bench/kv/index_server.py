"""A context index that knows nothing and answers every `POST /evict`: what a real one is, seen from the router.

python -m kvrelay.bench.kv.index_server     says its port on a line of its own; ends when its input does
"""

from __future__ import annotations

import asyncio
import sys

import msgspec

from kvrelay.bench.harness.child import say


class Ready(msgspec.Struct):
    port: int


class _Evict(msgspec.Struct):
    request_ids: list[str]


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while head := await reader.readuntil(b"\r\n\r\n"):
            lines = head.decode("latin-1").lower().split("\r\n")
            length = next(int(line.partition(":")[2]) for line in lines if line.startswith("content-length:"))
            request_ids = msgspec.json.decode(await reader.readexactly(length), type=_Evict).request_ids
            body = msgspec.json.encode({"evicted_request_ids": [], "not_found": request_ids})
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def _main() -> None:
    server = await asyncio.start_server(_serve, "127.0.0.1", 0)
    say(Ready(port=server.sockets[0].getsockname()[1]))
    await asyncio.to_thread(sys.stdin.read)
    server.close()


if __name__ == "__main__":
    asyncio.run(_main())
