"""The load generator of the router benchmark: streamed chat completions over raw sockets, as many as one core can make.

An HTTP library would spend more time per event than the router under test does, so this speaks just enough HTTP/1.1 and
looks at just enough of each event: a connection sends a request, counts the events that carry text as they arrive, and
checks at the end that the answer was whole (status 200, the promised number of tokens, matching usage, [DONE]).
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import cast

import msgspec
import uvloop

_TEXT_EVENT = re.compile(rb'"content":"[^"]')  # the role and the final event have no text
_COMPLETION_TOKENS = re.compile(rb'"completion_tokens":\s*(\d+)')
_END_OF_BODY = b"0\r\n\r\n"
_DONE = b"data: [DONE]"


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """`connections` streams of `tokens` tokens each: one after another for `duration_s`, or once each when that is 0."""

    host: str
    port: int
    model: str
    prompt: str
    tokens: int
    connections: int
    duration_s: float = 0.0
    timeout_s: float = 30.0


@dataclass(slots=True)
class LoadResult:
    """What all connections of one run saw. `problems` says, by kind, why answers were lost or wrong. Times are in seconds."""

    problems: Counter[str] = field(default_factory=Counter)
    ttft_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    token_events: int = 0
    wall_s: float = 0.0

    @property
    def completed(self) -> int:
        return len(self.ttft_s)

    @property
    def lost(self) -> int:
        return self.problems.total()


@dataclass(slots=True)
class _Answer:
    """What came of one request so far."""

    tokens_wanted: int
    outcome: asyncio.Future[str | None]  # what was wrong with the answer, or None
    sent_at: float
    first_at: float = 0.0
    last_at: float = 0.0
    num_events: int = 0
    gaps_s: list[float] = field(default_factory=list)
    head: bytes | None = None
    unfinished: bytes = b""
    usage: int | None = None
    done_seen: bool = False

    def take(self, data: bytes, now: float) -> None:
        data = self.unfinished + data
        if self.head is None:
            head, found, data = data.partition(b"\r\n\r\n")
            if not found:
                self.unfinished = head
                return
            self.head = head
        if not self.head.startswith(b"HTTP/1.1 200"):
            self.end(f"status {self.head[9:12].decode(errors='replace')}")
            return
        end = data.rfind(b"\n\n") + 2
        if end >= 2:
            self._take_events(data[:end], now)
            data = data[end:]
        self.unfinished = data
        if self.done_seen and data.endswith(_END_OF_BODY):
            self.end(self._verdict())

    def _take_events(self, events: bytes, now: float) -> None:
        if count := len(_TEXT_EVENT.findall(events)):
            if self.num_events == 0:
                self.first_at = now
            else:
                self.gaps_s.append(now - self.last_at)
            self.gaps_s.extend([0.0] * (count - 1))
            self.last_at = now
            self.num_events += count
        if _DONE in events:
            self.done_seen = True
        if usage := _COMPLETION_TOKENS.search(events):
            self.usage = int(usage[1])

    def _verdict(self) -> str | None:
        if self.num_events != self.tokens_wanted:
            return f"{self.num_events} events for {self.tokens_wanted} tokens"
        if self.usage != self.tokens_wanted:
            return f"usage says {self.usage} tokens of {self.tokens_wanted}"
        return None

    def end(self, problem: str | None) -> None:
        if not self.outcome.done():
            self.outcome.set_result(problem)


class _Connection(asyncio.Protocol):
    """One keep-alive connection with at most one request on its way."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport
        self._answer: _Answer | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it

    def start(self, request: bytes, tokens: int) -> _Answer:
        """Sends the request."""
        self._answer = _Answer(tokens, asyncio.get_running_loop().create_future(), time.perf_counter())
        if self._transport.is_closing():
            self._answer.end("connection closed")
        else:
            self._transport.write(request)
        return self._answer

    def data_received(self, data: bytes) -> None:
        if self._answer is not None:
            self._answer.take(data, time.perf_counter())

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None:
            self._answer.end("connection lost")

    def close(self) -> None:
        self._transport.close()


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


def run(load: LoadRequest) -> LoadResult:
    """To its end."""
    return uvloop.run(generate(load))


async def generate(load: LoadRequest, result: LoadResult | None = None) -> LoadResult:
    """`result`: what it has seen can be read there meanwhile."""
    result, request, start = result or LoadResult(), build_request(load), time.perf_counter()
    ends = await asyncio.gather(*(_drive(load, request, start + load.duration_s, result) for _ in range(load.connections)))
    result.wall_s = max(ends) - start
    return result


async def _drive(load: LoadRequest, request: bytes, deadline: float, result: LoadResult) -> float:
    """One connection: one request, then others until the deadline. A broken connection is replaced. Returns when it had its
    last token, or lost its last answer."""
    connection: _Connection | None = None
    while True:
        try:
            if connection is None:
                connecting = asyncio.get_running_loop().create_connection(_Connection, load.host, load.port)
                connection = (await asyncio.wait_for(connecting, load.timeout_s))[1]
            answer = connection.start(request, load.tokens)
            problem = await asyncio.wait_for(answer.outcome, load.timeout_s)
        except TimeoutError:
            problem = "timed out"
        except OSError as error:
            problem = f"connect: {error.strerror or error}"
        if problem is None:
            result.token_events += answer.num_events
            result.ttft_s.append(answer.first_at - answer.sent_at)
            result.gaps_s.extend(answer.gaps_s)
            ended_at = answer.last_at
        else:
            result.problems[problem] += 1
            ended_at = time.perf_counter()
            if connection is not None:
                connection.close()
            connection = None
            await asyncio.sleep(0.01)  # a server that refuses everything must not make this spin
        if time.perf_counter() >= deadline:
            break
    if connection is not None:
        connection.close()
    return ended_at
