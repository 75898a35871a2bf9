"""The real ContextPilot and a real `kvrelay serve` whose KV pools are far too small: what the index lists is what is cached."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pathlib
import random
import urllib.request
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from contextpilot_server import ContextPilotServer
from patience import PATIENCE_S, eventually
from server import Server, serve
from tiny_models import tiny_model

from kvrelay.bench.kv.contextpilot import SERVER
from kvrelay.discovery.static import StaticMembership
from kvrelay.events.subscriber import EventSubscriber
from kvrelay.ids import WorkerId, new_router_id
from kvrelay.native.hashing import extend_hashes, root_hash
from kvrelay.wire.events import CacheEvent, Cleared, Removed, Stored
from kvrelay.wire.registry import WorkerRecord

BLOCK_SIZE = 8
FIRST_TOKEN, LAST_TOKEN = 10, 300  # of the tiny model, without the special ones


@dataclass(frozen=True)
class Stack:
    """ContextPilot in front of kvrelay, which tells it what is gone."""

    kvrelay: Server
    index: ContextPilotServer

    def waiting(self) -> float:
        return self.metric("kvrelay_eviction_sync_waiting")

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(self.kvrelay.url + "/metrics", timeout=PATIENCE_S) as response:
            lines = response.read().decode().splitlines()
        return float(next(line.rpartition(" ")[2] for line in lines if line.startswith(name + " ")))


@pytest.fixture(scope="module")
def stack(contextpilot_python: pathlib.Path) -> Iterator[Stack]:
    """The index comes up after the server: that is no problem, and saves waiting."""
    index = ContextPilotServer(contextpilot_python)
    options = {
        "--block-size": BLOCK_SIZE,
        "--kv-blocks": 64,
        "--max-model-len": 128,
        "--local-prefill-tokens": 0,
        "--threads": 1,
        "--served-model-name": "tiny",
        "--context-index": index.url,
    }
    flags = [str(text) for option in options.items() for text in option]
    with serve(str(tiny_model("llama")), "--prefill", "1", "--decode", "1", *flags) as server:
        index.infer_url = server.url
        index.start()
        try:
            yield Stack(server, index)
        finally:
            index.close()


class Cache:
    """What one worker's prefix cache holds, followed over a subscription of the test's own; and which requests have had
    something in it ever since they ended."""

    def __init__(self) -> None:
        self.hashes: set[bytes] = set()
        self._lasting: dict[str, set[bytes]] = {}

    def ended(self, name: str, hashes: set[bytes]) -> None:
        self._lasting[name] = hashes
        self._look()

    @property
    def lasting(self) -> set[str]:
        return set(self._lasting)

    def _look(self) -> None:
        self._lasting = {name: hashes for name, hashes in self._lasting.items() if hashes & self.hashes}

    def happened(self, worker_id: WorkerId, event: CacheEvent) -> None:
        match event:
            case Stored():
                self.hashes.update(event.hashes)
            case Removed():
                self.hashes.difference_update(event.hashes)
                self._look()
            case Cleared():
                raise AssertionError("no test clears a cache")

    def replaced(self, worker_id: WorkerId, hashes: Iterable[bytes]) -> None:
        self.hashes = set(hashes)
        self._look()

    def gap(self, worker_id: WorkerId) -> None: ...

    def repaired(self, worker_id: WorkerId, *, by_snapshot: bool) -> None: ...

    def malformed(self, worker_id: WorkerId, reason: str) -> None:
        raise AssertionError(reason)


class Caches:
    """Of all workers, and what each request had computed."""

    def __init__(self) -> None:
        self._fingerprint = ""
        self._caches: list[Cache] = []
        self._subscribers: list[EventSubscriber] = []
        self._requests: dict[str, set[bytes]] = {}

    def joined(self, record: WorkerRecord) -> None:
        self._fingerprint = record.fingerprint
        cache = Cache()
        self._caches.append(cache)
        self._subscribers.append(EventSubscriber(record.id, record.events_address, record.replay_address, cache))

    @property
    def in_step(self) -> bool:
        return len(self._subscribers) == 2 and all(subscriber.in_step for subscriber in self._subscribers)

    def ended(self, name: str, samples: list[list[int]]) -> None:
        """A request, and the tokens of its samples that have KV."""
        hashes: set[bytes] = set()
        for tokens in samples:
            chain: list[bytes] = []
            extend_hashes(chain, root_hash(self._fingerprint, ""), tokens, BLOCK_SIZE, len(tokens) // BLOCK_SIZE)
            hashes.update(chain)
        self._requests[name] = hashes
        for cache in self._caches:
            cache.ended(name, hashes)

    def held(self) -> set[str]:
        """The requests of which a block is cached now, whoever computed it."""
        return {name for name, hashes in self._requests.items() if any(hashes & cache.hashes for cache in self._caches)}

    def lasting(self) -> set[str]:
        """Those of which a worker has had a block ever since they ended."""
        return set().union(*(cache.lasting for cache in self._caches))

    def close(self) -> None:
        for subscriber in self._subscribers:
            subscriber.close()


@contextlib.asynccontextmanager
async def caches_of(server: Server) -> AsyncIterator[Caches]:
    addresses = [worker["address"] for worker in server.get("/cluster")["workers"]]
    caches = Caches()
    membership = StaticMembership(addresses, router_id=new_router_id(), registration_s=10.0)
    membership.start(caches.joined, lambda record: None, lambda worker_id, loss: None)
    try:
        await eventually(lambda: caches.in_step)
        yield caches
    finally:
        membership.close()
        caches.close()


def document(number: int) -> list[int]:
    """Its tokens, always the same."""
    rng = random.Random(number)
    return [rng.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(rng.randrange(6, 24))]


class Client:
    """Sends requests to kvrelay by their ids, and says what each put into the caches."""

    def __init__(self, server: Server, caches: Caches, rng: random.Random) -> None:
        self._caches = caches
        self._http = httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S)
        self._room = asyncio.Semaphore(12)
        self._rng = rng

    async def ask(self, request_id: str, prompt: list[int]) -> None:
        kind = self._rng.choice(["plain", "plain", "rid", "samples", "stream", "abort", "abort"])
        body: dict[str, Any] = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": 40 if kind == "abort" else self._rng.randrange(1, 12),
            "seed": 1,
            "ignore_eos": True,
            "return_token_ids": True,
            "n": 2 if kind == "samples" else 1,
            "rid" if kind == "rid" else "request_id": request_id,
        }
        async with self._room:
            if kind in ("stream", "abort"):
                samples = [await self._stream(body, stop_after=2 if kind == "abort" else None)]
            else:
                answer = (await self._http.post("/v1/completions", json=body)).raise_for_status().json()
                samples = [choice["token_ids"] for choice in answer["choices"]]
        self._caches.ended(request_id, [prompt + tokens[:-1] for tokens in samples])

    async def _stream(self, body: dict[str, Any], stop_after: int | None) -> list[int]:
        """Its tokens; of one that is aborted, as many as we know."""
        tokens: list[int] = []
        async with self._http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                tokens += json.loads(line[6:])["choices"][0].get("token_ids") or []
                if stop_after is not None and len(tokens) >= stop_after:
                    break
        return tokens

    async def close(self) -> None:
        await self._http.aclose()


def test_the_server_is_the_one_that_the_page_starts() -> None:
    assert SERVER == "contextpilot.server.http_server"


async def test_what_the_index_lists_is_what_is_cached(stack: Stack) -> None:
    """Half of the requests share documents, so that a block may go and be computed again for another: then it is too late for
    the first. Whose documents are its own is listed exactly if one of its blocks is cached."""
    rng = random.Random(5)
    contexts = [
        rng.sample(range(60), rng.randrange(1, 4)) if number % 2 else [1000 * number, 1000 * number + 1]
        for number in range(200)
    ]
    own: set[str] = set()
    async with caches_of(stack.kvrelay) as caches:
        client = Client(stack.kvrelay, caches, rng)
        for first in range(0, 200, 50):
            batch = contexts[first : first + 50]
            request_ids = stack.index.reorder([[-1 - first - place, *context] for place, context in enumerate(batch)])
            assert len(set(request_ids)) == 50  # no two contexts are alike, so each has an id
            own.update(request_ids[::2])
            prompts = [[token for number in context for token in document(number)][:90] for context in batch]
            await asyncio.gather(*(client.ask(*pair) for pair in zip(request_ids, prompts, strict=True)))
        await client.close()
        await asyncio.to_thread(stack.kvrelay.idle_workers)

        def mistakes() -> tuple[set[str], set[str]]:
            """Listed though nothing of it is cached; not listed though it is."""
            listed = stack.index.listed()
            return listed - caches.held(), ((caches.held() & own) | caches.lasting()) - listed

        await eventually(lambda: stack.waiting() == 0 and mistakes() == (set(), set()), mistakes)
        assert 0 < len(caches.held() & own) < 50, "the pools were not too small, or everything is gone"
        assert len(caches.lasting() - own) > 0
    assert stack.metric('kvrelay_eviction_sync_requests_total{outcome="not_found"}') == 0


async def test_behind_its_proxy_reorder_serve_evict_and_reorder_again(stack: Stack) -> None:
    text = "What is the capital of France? The capital of France is Paris. " * 2
    body = {"model": "tiny", "prompt": text, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=stack.index.url, timeout=PATIENCE_S) as proxy:
        (first,) = stack.index.reorder([[5001, 5002]])
        answer = await proxy.post("/v1/completions", json={**body, "request_id": first})
        assert answer.status_code == 200, answer.text
        assert json.loads(answer.headers["x-contextpilot-result"])["request_id"] == first
        again = await proxy.post("/v1/completions", json={**body, "request_id": first})
        assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert again.json()["choices"][0]["text"] == answer.json()["choices"][0]["text"]
        assert first in stack.index.listed()
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "The quick brown fox"}], "max_tokens": 4}
        (chatted,) = stack.index.reorder([[5003]])
        assert (await proxy.post("/v1/chat/completions", json={**chat, "request_id": chatted})).status_code == 200

        for number in range(30):  # as much as the pools hold, several times over
            filler = {**body, "prompt": [FIRST_TOKEN + (7 * number + place) % 250 for place in range(90)]}
            assert (await proxy.post("/v1/completions", json=filler)).status_code == 200
        await eventually(lambda: not {first, chatted} & stack.index.listed(), stack.index.listed)

        (second,) = stack.index.reorder([[5001, 5002]])
        assert second != first
        served = await proxy.post("/v1/completions", json={**body, "request_id": second})
        assert served.json()["choices"][0]["text"] == answer.json()["choices"][0]["text"]
        assert second in stack.index.listed()


async def test_an_index_that_is_stopped_or_starts_again_is_nobodys_problem(stack: Stack) -> None:
    """Served as if nothing were, and told afterwards. The router's loop never waits: it answers all the time."""

    async def serve_and_forget(name: str) -> None:
        async with httpx.AsyncClient(base_url=stack.kvrelay.url, timeout=PATIENCE_S) as client:
            for number in range(16):
                prompt = [FIRST_TOKEN + (13 * number + place * (1 + len(name))) % 250 for place in range(90)]
                body = {"model": "tiny", "prompt": prompt, "max_tokens": 2, "request_id": f"{name}-{number}"}
                assert (await client.post("/v1/completions", json=body)).status_code == 200
                assert (await client.get("/health", timeout=PATIENCE_S)).status_code == 200

    stack.index.pause()
    try:
        await serve_and_forget("stopped")
        await eventually(lambda: stack.waiting() > 0)
    finally:
        stack.index.resume()
    await eventually(lambda: stack.waiting() == 0)
    stack.index.stop()
    await serve_and_forget("dead")
    stack.index.start()  # empty: 503 until somebody calls /reorder
    await serve_and_forget("restarted")
    await eventually(lambda: stack.waiting() > 0)
    stack.index.reorder([[1], [2]])
    await eventually(lambda: stack.waiting() == 0)
    assert stack.metric("kvrelay_eviction_sync_up") == 1
