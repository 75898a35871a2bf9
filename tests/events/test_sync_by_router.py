"""What a real router tells the eviction sync of its requests, and where its options come from."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator

import pytest
from patience import PATIENCE_S, eventually
from stub_worker import StubWorker

from kvrelay.config import RouterOptions, read_environment
from kvrelay.discovery.static import StaticMembership
from kvrelay.errors import UnavailableError
from kvrelay.events.eviction_sync import EvictionSyncAdapter
from kvrelay.ids import new_answer_id, new_router_id
from kvrelay.launch.serve import _open_removals, with_index
from kvrelay.metrics import Metrics
from kvrelay.router.backend import GenerateRequest
from kvrelay.router.failover import RetryRules
from kvrelay.router.router import Router
from kvrelay.router.stream import RequestStream
from kvrelay.sampling import SamplingParams


class Told:
    def __init__(self) -> None:
        self.ids: list[str] = []

    def add(self, request_id: str) -> None:
        self.ids.append(request_id)

    def cancel(self, request_id: str) -> None: ...


class World:
    """A router over two workers that publish no events, so that a request's end is all there is."""

    def __init__(self) -> None:
        self.workers = [StubWorker(""), StubWorker("")]
        self.told = Told()
        router_id, metrics = new_router_id(), Metrics()
        self.router = Router(
            membership=StaticMembership([worker.address for worker in self.workers], router_id=router_id, registration_s=2.0),
            metrics=metrics,
            policy="round_robin",
            registration_s=2.0,
            router_id=router_id,
            rules=RetryRules(max_retries=2, wait_s=0.2),
            sync=functools.partial(EvictionSyncAdapter, self.told, mode="evicted", metrics=metrics),
        )
        self.router.start()

    def submit(self, name: str, max_tokens: int = 4) -> RequestStream:
        params = SamplingParams(max_tokens=max_tokens)
        return self.router.submit(GenerateRequest(external_id=name, prompt=[1, 2, 3], params=params))

    def gate(self, *, is_open: bool) -> None:
        for worker in self.workers:
            worker.engine.gate.set() if is_open else worker.engine.gate.clear()
            worker.loop.wake()

    def worker_of(self, stream: RequestStream) -> StubWorker:
        return next(worker for worker in self.workers if worker.id == stream.decode)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    async with asyncio.timeout(PATIENCE_S):
        await made.router.until_usable(2)
    yield made
    made.router.close()
    for worker in made.workers:
        worker.stop()


async def drain(stream: RequestStream) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await stream.next():
            pass


async def test_ends_are_told_and_made_up_ids_are_not(world: World) -> None:
    await drain(world.submit("a"))
    await drain(world.submit(new_answer_id("chatcmpl-")))
    assert world.told.ids == ["a"]


async def test_an_abort_is_an_end(world: World) -> None:
    world.gate(is_open=False)
    stream = world.submit("a")
    assert world.told.ids == []
    stream.abort()
    assert world.told.ids == ["a"]


async def test_a_request_that_is_sent_again_keeps_its_id(world: World) -> None:
    world.gate(is_open=False)
    stream = world.submit("a")
    first = world.worker_of(stream)
    first.crash()
    await eventually(lambda: stream.decode != first.id)
    assert world.told.ids == []
    world.gate(is_open=True)
    await drain(stream)
    assert world.told.ids == ["a"]


async def test_a_request_that_fails_for_good_has_ended(world: World) -> None:
    world.gate(is_open=False)
    stream = world.submit("a")
    for worker in world.workers:
        worker.crash()
    with pytest.raises(UnavailableError):
        await drain(stream)
    assert world.told.ids == ["a"]


async def test_the_index_is_named_by_an_option_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONTEXTPILOT_INDEX_URL", "http://127.0.0.1:1")
    environment = read_environment()
    assert with_index(RouterOptions(), environment).context_index == "http://127.0.0.1:1"
    named = with_index(RouterOptions(context_index="http://127.0.0.1:2"), environment)
    assert named.context_index == "http://127.0.0.1:2"
    removals = _open_removals(named, Metrics())
    assert removals is not None
    await removals.close()
    assert _open_removals(RouterOptions(context_index="http://127.0.0.1:2", eviction_sync="off"), Metrics()) is None
    assert _open_removals(RouterOptions(), Metrics()) is None
