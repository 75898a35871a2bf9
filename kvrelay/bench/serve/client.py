"""Asks any OpenAI-compatible server for chat completions, streamed, and notes when their tokens came."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from kvrelay.bench.serve.sessions import Question, Session
from kvrelay.errors import BenchError

_ANSWER_S = 600.0


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    delta: _Delta = _Delta()


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int


class _Event(msgspec.Struct, frozen=True):
    choices: list[_Choice] = []
    usage: _Usage | None = None


@dataclass(frozen=True)
class Asked:
    """One question. Times are in seconds of `time.perf_counter`; `times` are those of events with text."""

    sent_at: float
    times: list[float]
    text: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    problem: str = ""

    @property
    def ttft_s(self) -> float:
        return self.times[0] - self.sent_at

    @property
    def per_token_s(self) -> float:
        """Of the tokens behind the first; an answer of one token has none."""
        return (self.times[-1] - self.times[0]) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0


@dataclass(frozen=True)
class Target:
    """The server, and what is said in every request."""

    url: str
    model: str
    headers: dict[str, str]
    ignore_eos: bool
    shows_special: bool = False  # so that with `ignore_eos` tokens after an answer's end have text, too

    def body(self, messages: list[dict[str, str]], max_tokens: int) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.shows_special:
            fields["skip_special_tokens"] = False
        return fields | {"ignore_eos": True} if self.ignore_eos else fields


def find_model(url: str, headers: dict[str, str]) -> str:
    """The first that the server lists. Raises BenchError."""
    try:
        answer = httpx.get(f"{url}/v1/models", headers=headers, timeout=30)
        answer.raise_for_status()
        name: str = answer.json()["data"][0]["id"]
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise BenchError(f"{url}/v1/models does not name a model: {error}") from error
    return name


async def meet(
    target: Target, sessions: Sequence[Session], concurrency: int, answered: Callable[[Asked], None]
) -> tuple[list[Asked], float]:
    """Every question of every session, at most so many at a time (0: no limit), and how long all of it took."""
    limits = httpx.Limits(max_connections=None)
    gate = asyncio.Semaphore(concurrency or sum(len(session.questions) for session in sessions))
    async with httpx.AsyncClient(headers=target.headers, timeout=_ANSWER_S, limits=limits) as client:
        begun = time.perf_counter()
        tasks = [_hold(client, target, session, begun, gate, answered) for session in sessions]
        asked = [one for each in await asyncio.gather(*tasks) for one in each]
    return asked, time.perf_counter() - begun


async def _hold(
    client: httpx.AsyncClient,
    target: Target,
    session: Session,
    begun: float,
    gate: asyncio.Semaphore,
    answered: Callable[[Asked], None],
) -> list[Asked]:
    """A conversation ends with an answer that failed."""
    await asyncio.sleep(max(0.0, begun + session.at_s - time.perf_counter()))
    messages: list[dict[str, str]] = []
    asked: list[Asked] = []
    for question in session.questions:
        messages.append({"role": "user", "content": question.text})
        async with gate:
            asked.append(await ask(client, target, messages, question))
        answered(asked[-1])
        if asked[-1].problem:
            break
        messages.append({"role": "assistant", "content": asked[-1].text})
    return asked


async def ask(client: httpx.AsyncClient, target: Target, messages: list[dict[str, str]], question: Question) -> Asked:
    sent_at, times, texts, usage = time.perf_counter(), list[float](), list[str](), None
    try:
        request = client.stream("POST", f"{target.url}/v1/chat/completions", json=target.body(messages, question.max_tokens))
        async with request as response:
            if response.status_code != 200:
                return Asked(sent_at, [], problem=f"status {response.status_code}: {(await response.aread())[:200]!r}")
            async for line in response.aiter_lines():
                event = _read(line)
                if event is None:
                    continue
                usage = event.usage or usage
                if text := "".join((each.delta.content or "") + (each.delta.reasoning_content or "") for each in event.choices):
                    times.append(time.perf_counter())
                    texts.append(text)
    except (httpx.HTTPError, msgspec.DecodeError) as error:
        return Asked(sent_at, times, problem=f"{type(error).__name__}: {error}")
    if usage is None or not times:
        return Asked(sent_at, times, problem="a stream without text or without usage")
    return Asked(sent_at, times, "".join(texts), usage.prompt_tokens, usage.completion_tokens)


def _read(line: str) -> _Event | None:
    return msgspec.json.decode(line[6:], type=_Event) if line.startswith("data: {") else None
