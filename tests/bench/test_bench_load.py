"""The load generator believes no server: only whole answers count."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from uvicorn import Config, Server

from kvrelay.bench.router.bare_sse import APP
from kvrelay.bench.router.load import LoadRequest, LoadResult, generate

TOKENS = 4


def answer(tokens: int = TOKENS, usage: int = TOKENS, done: bool = True, split: int = 1 << 20) -> list[bytes]:
    """A chunked SSE answer, cut into pieces of `split` bytes."""
    events = ['data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n']
    events += ['data: {"choices":[{"delta":{"content":" word"}}]}\n\n'] * tokens
    events += ['data: {"choices":[{"delta":{},"finish_reason":"length"}]}\n\n']
    events += [f'data: {{"choices":[],"usage":{{"completion_tokens":{usage}}}}}\n\n']
    events += ["data: [DONE]\n\n"] if done else []
    body = "".join(f"{len(event):x}\r\n{event}\r\n" for event in events) + "0\r\n\r\n"
    whole = f"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n{body}".encode()
    return [whole[start : start + split] for start in range(0, len(whole), split)]


@contextlib.asynccontextmanager
async def serving(pieces: list[bytes], *, hang_up: bool = False) -> AsyncIterator[int]:
    """Answers every request with the same pieces, each in a segment of its own."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError), contextlib.closing(writer):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                await reader.readexactly(length)
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
                if hang_up:
                    return

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def load(
    port: int, *, tokens: int = TOKENS, connections: int = 3, duration_s: float = 0.0, timeout_s: float = 5.0
) -> LoadResult:
    return await generate(
        LoadRequest(
            host="127.0.0.1",
            port=port,
            model="m",
            prompt="p",
            tokens=tokens,
            connections=connections,
            duration_s=duration_s,
            timeout_s=timeout_s,
        )
    )


@pytest.mark.parametrize("split", [1 << 20, 100, 7, 1])
async def test_whole_answers_count_however_they_are_cut(split: int) -> None:
    async with serving(answer(split=split)) as port:
        result = await load(port)
    assert (result.completed, result.lost, result.problems) == (3, 0, {})
    assert result.token_events == 3 * TOKENS
    assert len(result.ttft_s) == 3
    assert len(result.gaps_s) == 3 * (TOKENS - 1)
    assert all(0 < ttft < 5 for ttft in result.ttft_s)


async def test_a_closed_loop_reuses_its_connections_until_time_is_up() -> None:
    async with serving(answer()) as port:
        result = await load(port, connections=2, duration_s=0.2)
    assert result.lost == 0
    assert result.completed > 2


@pytest.mark.parametrize(
    ("pieces", "problem"),
    [
        (answer(tokens=TOKENS - 1), "3 events for 4 tokens"),
        (answer(tokens=TOKENS + 1), "5 events for 4 tokens"),
        (answer(usage=TOKENS + 1), "usage says 5 tokens of 4"),
        ([b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n"], "status 503"),
    ],
)
async def test_a_wrong_answer_is_lost(pieces: list[bytes], problem: str) -> None:
    async with serving(pieces) as port:
        result = await load(port)
    assert (result.completed, result.lost, result.problems) == (0, 3, {problem: 3})


async def test_an_answer_that_breaks_off_is_lost() -> None:
    async with serving([b"".join(answer())[:200]], hang_up=True) as port:
        result = await load(port)
    assert result.problems == {"connection lost": 3}


async def test_an_answer_without_done_never_ends() -> None:
    async with serving(answer(done=False)) as port:
        result = await load(port, timeout_s=0.2)
    assert result.problems == {"timed out": 3}


async def test_a_server_that_is_gone_answers_nothing() -> None:
    async with serving(answer()) as port:
        pass
    result = await load(port)
    assert (result.completed, result.lost) == (0, 3)


async def test_the_bare_endpoint_gives_whole_answers_of_one_token() -> None:
    server = Server(Config(APP, port=0, log_level="warning", lifespan="off"))
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    result = await load(port, tokens=1, connections=1, duration_s=0.05)
    server.should_exit = True
    await task
    assert (result.lost, result.problems) == (0, {})
    assert len(result.ttft_s) == result.token_events > 1
