"""The load generator of the router benchmark: streamed chat completions over raw sockets, as many as one core can make.

An HTTP library would spend more time per event than the router under test does, so this speaks just enough HTTP/1.1 and
looks at just enough of each event: a connection sends a request, counts the events that carry text as they arrive, and
checks at the end that the answer was whole (status 200, the promised number of tokens, matching usage, [DONE]).
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import assert_never, cast

import msgspec
import uvloop

from kvrelay.bench.harness.child import commands, say

_TEXT_EVENT = re.compile(rb'"content":"[^"]')  # the role and the final event have no text
_COMPLETION_TOKENS = re.compile(rb'"completion_tokens":\s*(\d+)')
_END_OF_BODY = b"0\r\n\r\n"
_DONE = b"data: [DONE]"


class LoadRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """`connections` streams of `tokens` tokens each: one after another for `duration_s`, or once each when that is 0."""

    host: str
    port: int
    model: str
    prompt: str
    tokens: int
    connections: int
    duration_s: float = 0.0
    timeout_s: float = 30.0


class LoadResult(msgspec.Struct, frozen=True, kw_only=True):
    """`problems` says, by kind, why answers were lost or wrong. Times are in seconds."""

    completed: int
    lost: int
    problems: dict[str, int]
    wall_s: float
    token_events: int
    ttft_s: list[float]
    gaps_s: list[float]


class BareRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Streams one after another from a plain SSE endpoint (`bare_sse.py`): what any Python server takes at least."""

    host: str
    port: int
    repeats: int


class BareResult(msgspec.Struct, frozen=True, kw_only=True):
    ttft_s: list[float]


class _Connection(asyncio.Protocol):
    """One keep-alive connection with at most one request on its way."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[str | None] | None = None
        self._unfinished = b""
        self._head: bytes | None = None
        self.sent_at = 0.0
        self.first_at = 0.0
        self.last_at = 0.0
        self.num_events = 0
        self.gaps_s: list[float] = []
        self._usage: int | None = None
        self._done_seen = False
        self._tokens_wanted = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it

    def start(self, request: bytes, tokens: int) -> asyncio.Future[str | None]:
        """Sends the request. The future's result is what was wrong with the answer, or None."""
        assert self._transport is not None
        self._answer = asyncio.get_running_loop().create_future()
        self._unfinished, self._head = b"", None
        self.first_at, self.num_events, self._usage, self._done_seen = 0.0, 0, None, False
        self.gaps_s = []
        self._tokens_wanted = tokens
        if self._transport.is_closing():
            self._answer.set_result("connection closed")
            return self._answer
        self.sent_at = time.perf_counter()
        self._transport.write(request)
        return self._answer

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        data = self._unfinished + data
        if self._head is None:
            head, found, data = data.partition(b"\r\n\r\n")
            if not found:
                self._unfinished = head
                return
            self._head = head
        if not self._head.startswith(b"HTTP/1.1 200"):
            self._finish(f"status {self._head[9:12].decode(errors='replace')}")
            return
        end = data.rfind(b"\n\n") + 2
        if end >= 2:
            self._take_events(data[:end], now)
            data = data[end:]
        self._unfinished = data
        if self._done_seen and data.endswith(_END_OF_BODY):
            self._finish(self._verdict())

    def _take_events(self, events: bytes, now: float) -> None:
        count = len(_TEXT_EVENT.findall(events))
        if count:
            if self.num_events == 0:
                self.first_at = now
            else:
                self.gaps_s.append(now - self.last_at)
            self.gaps_s.extend([0.0] * (count - 1))
            self.last_at = now
            self.num_events += count
        if _DONE in events:
            self._done_seen = True
        if usage := _COMPLETION_TOKENS.search(events):
            self._usage = int(usage[1])

    def _verdict(self) -> str | None:
        if self.num_events != self._tokens_wanted:
            return f"{self.num_events} events for {self._tokens_wanted} tokens"
        if self._usage != self._tokens_wanted:
            return f"usage says {self._usage} tokens of {self._tokens_wanted}"
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish("connection lost")

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _finish(self, problem: str | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(problem)


@dataclass(slots=True)
class _Tally:
    """What all connections of one run saw."""

    problems: Counter[str] = field(default_factory=Counter)
    ttft_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    token_events: int = 0
    ended_at: float = 0.0

    def lost(self, problem: str) -> None:
        self.problems[problem] += 1
        self.ended_at = time.perf_counter()

    def answered(self, connection: _Connection) -> None:
        self.token_events += connection.num_events
        self.ttft_s.append(connection.first_at - connection.sent_at)
        self.gaps_s.extend(connection.gaps_s)
        self.ended_at = connection.last_at


def build_request(load: LoadRequest) -> bytes:
    body = msgspec.json.encode(
        {
            "model": load.model,
            "messages": [{"role": "user", "content": load.prompt}],
            "max_tokens": load.tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {load.host}:{load.port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def generate(load: LoadRequest) -> LoadResult:
    """Runs the load to its end."""
    tally, request = _Tally(), build_request(load)
    start = time.perf_counter()
    await asyncio.gather(*(_drive(load, request, start + load.duration_s, tally) for _ in range(load.connections)))
    return LoadResult(
        completed=len(tally.ttft_s),
        lost=tally.problems.total(),
        problems=tally.problems,
        wall_s=tally.ended_at - start,
        token_events=tally.token_events,
        ttft_s=tally.ttft_s,
        gaps_s=tally.gaps_s,
    )


async def _drive(load: LoadRequest, request: bytes, deadline: float, tally: _Tally) -> None:
    """One connection: one request, then others until the deadline. A broken connection is replaced."""
    connection: _Connection | None = None
    while True:
        try:
            if connection is None:
                connection = await _connect(load)
            problem = await asyncio.wait_for(connection.start(request, load.tokens), load.timeout_s)
        except TimeoutError:
            problem = "timed out"
        except OSError as error:
            problem = f"connect: {error.strerror or error}"
        if problem is None:
            assert connection is not None
            tally.answered(connection)
        else:
            tally.lost(problem)
            if connection is not None:
                connection.close()
            connection = None
            await asyncio.sleep(0.01)  # a server that refuses everything must not make this spin
        if time.perf_counter() >= deadline:
            break
    if connection is not None:
        connection.close()


async def _connect(load: LoadRequest) -> _Connection:
    loop = asyncio.get_running_loop()
    _, connection = await asyncio.wait_for(loop.create_connection(_Connection, load.host, load.port), load.timeout_s)
    return connection


async def time_to_first_byte(bare: BareRequest) -> list[float]:
    reader, writer = await asyncio.open_connection(bare.host, bare.port)
    request = f"GET /stream HTTP/1.1\r\nHost: {bare.host}:{bare.port}\r\n\r\n".encode()
    times: list[float] = []
    with contextlib.closing(writer):
        for _ in range(bare.repeats):
            start = time.perf_counter()
            writer.write(request)
            await reader.readuntil(b"data: ")
            times.append(time.perf_counter() - start)
            await reader.readuntil(_END_OF_BODY)
    return times


async def _answer(load: LoadRequest | BareRequest) -> LoadResult | BareResult:
    match load:
        case LoadRequest():
            return await generate(load)
        case BareRequest():
            return BareResult(ttft_s=await time_to_first_byte(load))
        case _:
            assert_never(load)


def main() -> None:
    for load in commands(LoadRequest | BareRequest):
        say(uvloop.run(_answer(load)))


if __name__ == "__main__":
    main()
