"""A worker in the place of a lost one, over real sockets: requests for an adapter wait until it has loaded it, if it can."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import msgspec
import pytest
from patience import eventually
from router.test_router import Cluster, ask, expected, tokens_of
from stub_worker import StubWorker

from kvrelay.engine.interfaces import LoadedAdapter
from kvrelay.errors import InvalidRequestError, ModelError, UnavailableError
from kvrelay.wire.registry import Adapter


@dataclass
class Read:
    digest: str


@dataclass
class StubAdapters:
    """Implements `Adapters` without reading anything."""

    fails: bool = False
    may_end: threading.Event = field(default_factory=threading.Event)
    found: dict[str, Adapter] = field(default_factory=dict)

    def find(self, digest: str) -> LoadedAdapter | None:
        raise NotImplementedError

    def records(self) -> list[Adapter]:
        return list(self.found.values())

    def read(self, path: str) -> LoadedAdapter:
        self.may_end.wait()
        if self.fails:
            raise ModelError(f"{path} is no adapter")
        return Read(f"digest of {path}")

    def add(self, name: str, path: str, adapter: LoadedAdapter) -> None:
        self.found[name] = Adapter(name=name, digest=adapter.digest, path=path)

    def unload(self, name: str) -> bool:
        return self.found.pop(name, None) is not None


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    made = Cluster(wait_s=0.1)
    yield made
    await made.close()
    assert made.router.cluster()["in_flight"] == made.router.cluster()["stranded"] == 0


async def add(cluster: Cluster, adapters: StubAdapters) -> StubWorker:
    worker = StubWorker(cluster.membership.address)
    worker.loop.orders.adapters = adapters  # before the router, on this loop, can say anything
    cluster.workers.append(worker)
    usable = cluster.router.num_usable
    await eventually(lambda: cluster.router.num_usable == usable + 1)
    return worker


async def replaced(cluster: Cluster, adapters: StubAdapters) -> StubWorker:
    """A worker in the place of one that had an adapter, and is about to read it."""
    first = StubAdapters()
    first.may_end.set()
    worker = await add(cluster, first)
    assert (await cluster.router.load_adapter("sql", "/sql", in_place=False)).workers == [worker.id]
    await asyncio.to_thread(worker.crash)
    await eventually(lambda: not cluster.router.ready)
    assert list(cluster.router.adapters) == ["sql"]
    return await add(cluster, adapters)


async def test_requests_wait_until_the_worker_has_loaded_their_adapter(cluster: Cluster) -> None:
    adapters = StubAdapters()
    await replaced(cluster, adapters)
    stream = cluster.router.submit(msgspec.structs.replace(ask([5]), adapter=cluster.router.adapters["sql"].digest))
    assert await tokens_of(cluster.router.submit(ask([7]))) == {0: expected([7], 5)}  # the base waits for nothing
    assert cluster.router.cluster()["stranded"] == 1
    adapters.may_end.set()
    assert await tokens_of(stream) == {0: expected([5], 5)}


async def test_a_worker_that_cannot_load_it_is_shown_and_serves_the_rest(cluster: Cluster) -> None:
    adapters = StubAdapters(fails=True)
    adapters.may_end.set()
    worker = await replaced(cluster, adapters)
    await eventually(lambda: "adapter_failures" in cluster.shown(worker))
    assert cluster.shown(worker)["adapter_failures"] == {"sql": "/sql is no adapter"}
    with pytest.raises(UnavailableError, match="no whole worker has the LoRA adapter"):
        cluster.router.submit(msgspec.structs.replace(ask([5]), adapter=cluster.router.adapters["sql"].digest))
    assert await tokens_of(cluster.router.submit(ask([7]))) == {0: expected([7], 5)}


async def test_what_one_worker_cannot_read_replaces_nothing_on_another(cluster: Cluster) -> None:
    both = [StubAdapters(), StubAdapters()]
    for adapters in both:
        adapters.may_end.set()
        await add(cluster, adapters)
    await cluster.router.load_adapter("sql", "/sql", in_place=False)
    both[1].fails = True
    with pytest.raises(InvalidRequestError, match="/other is no adapter"):
        await cluster.router.load_adapter("sql", "/other", in_place=True)
    assert [adapters.found["sql"].path for adapters in both] == ["/sql", "/sql"]
    both[1].fails = False
    changed = await cluster.router.load_adapter("sql", "/other", in_place=True)
    assert sorted(changed.workers) == sorted(worker.id for worker in cluster.workers)
    assert [adapters.found["sql"].path for adapters in both] == ["/other", "/other"]
