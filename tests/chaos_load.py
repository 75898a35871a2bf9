"""The clients of the chaos test: streams of requests whose right answers are known beforehand.

A client speaks HTTP/1.0, so that the body of an answer is its events and nothing else. Each request ends in exactly one
`Outcome`; only COMPLETED and LEFT are as they should be, and NO_WORKER where there was none.
"""

from __future__ import annotations

import asyncio
import collections
import enum
import json
import pathlib
import random
import time
from dataclasses import dataclass, field
from typing import Any

from patience import PATIENCE_S
from tiny_models import VOCAB_SIZE

from kvrelay.offline.llm import LLM
from kvrelay.sampling import SamplingParams

_LONGEST_PROMPT = 150
_SPECIAL_TOKENS = 3
_LEAVING = 0.08  # of the clients go before the end


class Kind(enum.StrEnum):
    COMPLETED = "completed"  # with the tokens of its solo run
    LEFT = "left"  # by the client, in mid-stream
    WRONG = "wrong tokens"
    NO_WORKER = "503"
    REFUSED = "another status"
    BROKEN = "error inside a stream"
    CUT = "connection cut"
    HUNG = "hung"


@dataclass(frozen=True)
class Asked:
    """One request, and what it must be answered."""

    body: bytes
    answer: dict[int, tuple[list[int], str]]  # of each sample: tokens, finish reason
    num_tokens: int


@dataclass(frozen=True)
class Outcome:
    kind: Kind
    began_at: float
    ended_at: float
    detail: str = ""
    longest_gap_s: float = 0.0


@dataclass
class Load:
    """What all clients saw."""

    outcomes: list[Outcome] = field(default_factory=list)
    num_open: int = 0

    def count(self) -> dict[str, int]:
        return dict(collections.Counter(outcome.kind.value for outcome in self.outcomes))


def make_requests(model: pathlib.Path, seed: int, count: int) -> list[Asked]:
    """Of all lengths, greedy and sampled, one sample or two; some begin alike. Answered one by one by a lone engine."""
    rng = random.Random(seed)
    llm = LLM(str(model), progress=False, kv_blocks=256, threads=1, prefix_cache=False)
    stem = _tokens(rng, 48)
    requests = [_make_request(rng, llm, stem) for _ in range(count)]
    llm.close()
    return requests


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(_SPECIAL_TOKENS, VOCAB_SIZE) for _ in range(count)]


def _make_request(rng: random.Random, llm: LLM, stem: list[int]) -> Asked:
    length = rng.randint(1, _LONGEST_PROMPT)
    prompt = (stem if rng.random() < 0.4 else []) + _tokens(rng, length)
    prompt = prompt[:_LONGEST_PROMPT]
    sampled = rng.random() < 0.5
    said: dict[str, Any] = {
        "n": 2 if rng.random() < 0.25 else 1,
        "max_tokens": rng.randint(20, 80),
        "temperature": 0.9 if sampled else 0.0,
        "seed": rng.randrange(1, 2**31),
    }
    if sampled:
        said["top_p"] = 0.95
        said["frequency_penalty"] = 0.5
    solo = llm.generate([prompt], SamplingParams(**said))[0]
    answer = {each.index: (list(each.token_ids), str(each.finish_reason)) for each in solo.outputs}
    body = {"prompt": prompt, "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True, **said}
    return Asked(json.dumps(body).encode(), answer, sum(len(tokens) for tokens, _ in answer.values()))


async def keep_asking(host: str, port: int, requests: list[Asked], load: Load, rng: random.Random, over: asyncio.Event) -> None:
    """One client: one request after another."""
    while not over.is_set():
        asked = rng.choice(requests)
        leaves_after = rng.randint(1, 10) if rng.random() < _LEAVING else None
        load.num_open += 1
        load.outcomes.append(await ask(host, port, asked, leaves_after))
        load.num_open -= 1
        if load.outcomes[-1].kind not in (Kind.COMPLETED, Kind.LEFT):
            await asyncio.sleep(0.2)  # as a client would; and a server that refuses everything must not make this spin


async def ask(host: str, port: int, asked: Asked, leaves_after: int | None = None) -> Outcome:
    answer = _Answer()
    began_at = time.monotonic()
    try:
        async with asyncio.timeout(PATIENCE_S):
            kind, detail = await _stream(host, port, asked, answer, leaves_after)
    except TimeoutError:
        kind, detail = Kind.HUNG, f"after {answer.num_tokens} of {asked.num_tokens} tokens"
    except (OSError, asyncio.IncompleteReadError) as error:
        kind, detail = Kind.CUT, f"{type(error).__name__}: {error}"
    if kind in (Kind.COMPLETED, Kind.WRONG):
        kind, detail = answer.compare(asked)
    ended_at = time.monotonic()
    detail = f"{detail} {answer.headers}" if kind not in (Kind.COMPLETED, Kind.LEFT) else ""
    return Outcome(kind, began_at, ended_at, detail, answer.longest_gap_s)


async def _stream(host: str, port: int, asked: Asked, answer: _Answer, leaves_after: int | None) -> tuple[Kind, str]:
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 20)
    head = f"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(asked.body)}\r\n\r\n"
    try:
        writer.write(head.encode() + asked.body)
        status = int((await reader.readuntil(b"\r\n")).split()[1])
        while (line := await reader.readuntil(b"\r\n")) != b"\r\n":
            name, _, value = line.decode().partition(":")
            if name.startswith("x-kvrelay"):
                answer.headers[name.removeprefix("x-kvrelay-")] = value.strip()
        if status != 200:
            text = (await reader.read()).decode(errors="replace")
            return (Kind.NO_WORKER if status == 503 else Kind.REFUSED), f"{status}: {text[:300]}"
        while line := await reader.readline():
            if not line.startswith(b"data: "):
                continue
            if line.startswith(b"data: [DONE]"):
                return Kind.COMPLETED, ""
            event = json.loads(line[6:])
            if "error" in event:
                return Kind.BROKEN, f"after {answer.num_tokens} tokens: {event['error']}"
            answer.take(event)
            if leaves_after is not None and answer.num_tokens >= leaves_after:
                return Kind.LEFT, ""
        return Kind.CUT, f"no [DONE] after {answer.num_tokens} tokens"
    finally:
        writer.close()


class _Answer:
    """What came so far."""

    def __init__(self) -> None:
        self.samples: dict[int, tuple[list[int], list[str]]] = {}
        self.usage: int | None = None
        self.headers: dict[str, str] = {}
        self.num_tokens = 0
        self.longest_gap_s = 0.0
        self._heard_at = time.monotonic()

    def take(self, event: dict[str, Any]) -> None:
        now = time.monotonic()
        self.longest_gap_s = max(self.longest_gap_s, now - self._heard_at)
        self._heard_at = now
        for choice in event["choices"]:
            tokens, finishes = self.samples.setdefault(choice["index"], ([], []))
            new = choice.get("token_ids") or []
            tokens += new
            self.num_tokens += len(new)
            if choice["finish_reason"] is not None:
                finishes.append(choice["finish_reason"])
        if event.get("usage"):
            self.usage = event["usage"]["completion_tokens"]

    def compare(self, asked: Asked) -> tuple[Kind, str]:
        for index, (tokens, finish) in asked.answer.items():
            got, finishes = self.samples.get(index, ([], []))
            if got != tokens:
                at = next((place for place, pair in enumerate(zip(got, tokens, strict=False)) if pair[0] != pair[1]), len(got))
                return Kind.WRONG, f"sample {index} differs at token {at}: {len(got)} tokens, {len(tokens)} expected"
            if finishes != [finish]:
                return Kind.WRONG, f"sample {index} finished as {finishes}, expected {finish}"
        if self.usage != asked.num_tokens:
            return Kind.WRONG, f"usage says {self.usage} tokens, expected {asked.num_tokens}"
        return Kind.COMPLETED, ""
