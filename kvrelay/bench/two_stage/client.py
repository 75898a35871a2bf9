"""What `kvrelay bench two-stage` asks of a server over HTTP.

async with open_client(server) as client:
    await client.ask({...})             one completion, checked and timed
    await client.first_token({...})     one that is streamed, timed until its first token
    await client.rest()                 until nothing is running and nothing is copied
    await client.num_pinned_blocks()    blocks of kept KV that are on the device
    client.num_evictions                blocks that left the workers' caches since it was opened, as their events tell
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from kvrelay.bench.harness.server import Server
from kvrelay.cli.events import EventWorker, Listener
from kvrelay.config import read_environment
from kvrelay.errors import BenchError
from kvrelay.planes.cluster_key import key_file, load_key
from kvrelay.planes.curve import keyed

_REST_S = 300.0
_LOOK_EVERY_S = 0.1
_LOOKS_AT_REST = 10
_BUSY = ("running", "waiting", "transferring", "swapped")


class Handle(msgspec.Struct, frozen=True):
    """How to continue from a choice."""

    id: str
    kept: bool
    reason: str = ""


class Choice(msgspec.Struct, frozen=True):
    token_ids: list[int]
    cumulative_logprob: float = 0.0
    continuation: Handle | None = None


class CachedTokens(msgspec.Struct, frozen=True):
    cached_tokens: int


class TokenCounts(msgspec.Struct, frozen=True):
    prompt_tokens: int
    prompt_tokens_details: CachedTokens

    @property
    def prefilled(self) -> int:
        return self.prompt_tokens - self.prompt_tokens_details.cached_tokens


class Event(msgspec.Struct, frozen=True):
    """Of a stream; the last one has the usage."""

    usage: TokenCounts | None = None


class Answer(msgspec.Struct, frozen=True):
    """A completion, as far as it matters here."""

    choices: list[Choice]
    usage: TokenCounts
    kvrelay: dict[str, Any] = {}  # of a continuation, where its KV came from

    @property
    def is_from_kept_kv(self) -> bool:
        return bool(self.kvrelay.get("continuation", {}).get("source") == "lease")


@dataclass(frozen=True)
class Timed:
    answer: Answer
    seconds: float


class _Evictions:
    """Counts instead of showing (`cli/events.py`)."""

    def __init__(self) -> None:
        self.num_blocks = 0

    def show(self, at: float, worker_id: str, kind: str, **fields: Any) -> None:
        if kind == "Removed":
            self.num_blocks += len(fields["hashes"])


class TwoStageClient:
    """Made by `open_client`, which also closes it."""

    def __init__(self, client: httpx.AsyncClient, evictions: _Evictions) -> None:
        self._client = client
        self._evictions = evictions

    @property
    def num_evictions(self) -> int:
        return self._evictions.num_blocks

    async def ask(self, body: dict[str, Any]) -> Timed:
        began_at = time.perf_counter()
        try:
            response = await self._client.post("/v1/completions", json={"return_token_ids": True, "ignore_eos": True, **body})
        except httpx.HTTPError as error:
            raise BenchError(f"the server did not answer: {error!r}") from error
        seconds = time.perf_counter() - began_at
        if response.status_code != 200:
            raise BenchError(f"the server answered {response.status_code}: {response.text[:500]}")
        return Timed(msgspec.json.decode(response.content, type=Answer), seconds)

    async def first_token(self, body: dict[str, Any]) -> tuple[float, int]:
        """Seconds until it is there, and how many tokens of the prompt were computed."""
        sent = {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}, **body}
        began_at, seconds, counts = time.perf_counter(), 0.0, None
        async with self._client.stream("POST", "/v1/completions", json=sent) as response:
            async for line in response.aiter_lines():
                seconds = seconds or time.perf_counter() - began_at
                if line.startswith("data: {"):
                    counts = msgspec.json.decode(line[6:], type=Event).usage
        if counts is None:
            raise BenchError(f"the server answered {response.status_code}, and no stream that has an end")
        return seconds, counts.prefilled

    async def rest(self) -> None:
        """Workers that have nothing to do copy blocks to the host and back: until their blocks are the same for a while."""
        deadline, num_same = time.monotonic() + _REST_S, 0
        blocks: list[tuple[dict[str, int], dict[str, int]]] = []
        while time.monotonic() < deadline:
            workers = (await self._client.get("/cluster")).json()["workers"]
            before, blocks = blocks, [(worker["host_blocks"], worker["blocks"]) for worker in workers]
            is_busy = any(worker[name] for worker in workers for name in _BUSY)
            is_copying = any(worker["blocks"]["quarantined"] for worker in workers)
            num_same = num_same + 1 if before == blocks and not is_busy and not is_copying else 0
            if num_same == _LOOKS_AT_REST:
                return
            await asyncio.sleep(_LOOK_EVERY_S)
        raise BenchError(f"the workers did not come to rest within {_REST_S:g} s")

    async def num_pinned_blocks(self) -> int:
        workers = (await self._client.get("/cluster")).json()["workers"]
        return sum(worker["blocks"]["pinned"] for worker in workers)

    async def release(self, handles: list[Handle]) -> None:
        for handle in handles:
            await self._client.delete(f"/v1/continuations/{handle.id}")


@contextlib.asynccontextmanager
async def open_client(server: Server) -> AsyncIterator[TwoStageClient]:
    evictions = _Evictions()
    with keyed(load_key(key_file("", read_environment()))):
        listener = Listener(evictions)
        try:
            listener.update(msgspec.convert(server.workers, list[EventWorker]))
            async with server.client() as client:
                yield TwoStageClient(client, evictions)
        finally:
            listener.close()
