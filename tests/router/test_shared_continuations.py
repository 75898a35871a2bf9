"""Several routers with the same workers: what one served, another can continue from, also if the first is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
from patience import PATIENCE_S, eventually
from stub_worker import StubWorker
from test_router import Cluster, expected, tokens_of

from kvrelay.discovery.base import Alone, router_record
from kvrelay.discovery.static import StaticMembership
from kvrelay.errors import NotFoundError
from kvrelay.ids import new_kept_id, new_router_id
from kvrelay.metrics import Metrics
from kvrelay.router.backend import GenerateRequest
from kvrelay.router.parent import Parent
from kvrelay.router.router import Router
from kvrelay.sampling import SamplingParams
from kvrelay.states import HandleState
from kvrelay.wire.serving import Image, Keep, ParentInfo
from kvrelay.worker.remembered import Remembered

PROMPT = [1, 2, 3]


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    made = Cluster(wait_s=PATIENCE_S)
    yield made
    await made.close()


@pytest.fixture
def opened() -> Iterator[list[Router]]:
    routers: list[Router] = []
    yield routers
    for router in routers:
        router.close()


async def open_router(workers: list[StubWorker], opened: list[Router]) -> Router:
    router_id = new_router_id()
    membership = StaticMembership([worker.loop.address for worker in workers], router_id=router_id, registration_s=4.0)
    company = Alone(router_record(router_id), is_shared=True)
    router = Router(membership=membership, metrics=Metrics(), model="stub", router_id=router_id, company=company)
    router.start()
    opened.append(router)
    async with asyncio.timeout(PATIENCE_S):
        await router.until_usable(len(workers))
    return router


async def served(
    router: Router, *, n: int = 1, keep: bool = False, is_stored: bool = False, rank: int | None = None
) -> list[Parent]:
    request = GenerateRequest(
        external_id="mine",
        answer_id="resp_1",
        owner="me",
        cache_salt="salt",
        prompt=PROMPT,
        params=SamplingParams(n=n, max_tokens=4),
        keep=Keep([new_kept_id() for _ in range(n)], 30.0, "me") if keep else None,
        is_stored=is_stored,
        data_parallel_rank=rank,
    )
    stream = router.submit(request)
    await tokens_of(stream)
    await router.continuations.until_settled(stream.parents, PATIENCE_S)
    return stream.parents


def num_remembered(workers: list[StubWorker]) -> int:
    return sum(len(worker.loop._remembered) for worker in workers)


@pytest.mark.parametrize("first_is_gone", [False, True])
async def test_tokens_are_known_to_every_router(cluster: Cluster, opened: list[Router], first_is_gone: bool) -> None:
    workers = [await cluster.add_ready() for _ in range(2)]
    first, second = await open_router(workers, opened), await open_router(workers, opened)
    (parent,) = await served(first)
    await eventually(lambda: num_remembered(workers) == 2)
    tokens = list(parent.tokens)
    if first_is_gone:
        first.close()
    for handle in ("mine", "resp_1"):
        found = await second.find_parent(handle, "me", wait_s=1.0)
        assert (list(found.tokens), found.state, found.cache_salt) == (tokens, HandleState.KNOWN, "salt")
    with pytest.raises(NotFoundError, match="nothing is known"):
        await second.find_parent("mine", "you", wait_s=1.0)
    request = GenerateRequest(
        external_id="child",
        owner="me",
        cache_salt="salt",
        prompt=[*tokens, 8],
        params=SamplingParams(max_tokens=3),
        parent=found,
    )
    assert await tokens_of(second.submit(request)) == {0: expected([*tokens, 8], 3)}


async def test_the_loss_of_one_worker_loses_nothing(cluster: Cluster, opened: list[Router]) -> None:
    workers = [await cluster.add_ready() for _ in range(2)]
    first, second = await open_router(workers, opened), await open_router(workers, opened)
    (parent,) = await served(first)
    await eventually(lambda: num_remembered(workers) == 2)
    lost = next(worker for worker in workers if worker.engine.worker_id == parent.worker_id)
    await asyncio.to_thread(lost.stop)
    await eventually(lambda: second.num_usable == 1)
    assert list((await second.find_parent("mine", "me", wait_s=1.0)).tokens) == list(parent.tokens)


async def test_kept_kv_is_found_under_the_name_of_the_answer(cluster: Cluster, opened: list[Router]) -> None:
    workers = [await cluster.add_ready() for _ in range(2)]
    first, second = await open_router(workers, opened), await open_router(workers, opened)
    parents = await served(first, n=2, keep=True)
    await eventually(lambda: num_remembered(workers) == 4)
    found = await second.find_parents("resp_1", "me")
    assert {one.kept_id for one in found} == {one.kept_id for one in parents}
    assert all(one.state is HandleState.HELD and one.worker_id == parents[0].worker_id for one in found)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("rank", [None, 0, 1])
async def test_the_rank_that_a_parent_asked_for_is_known_to_every_router(
    cluster: Cluster, opened: list[Router], rank: int | None, keep: bool
) -> None:
    workers = [await cluster.add_ready(data_parallel_rank=rank) for rank in range(2)]
    first, second = await open_router(workers, opened), await open_router(workers, opened)
    await served(first, keep=keep, rank=rank)
    await eventually(lambda: num_remembered(workers) == 2)
    (found,) = await second.find_parents("resp_1", "me")
    assert (found.data_parallel_rank, found.kept) == (rank, keep)


async def test_a_stored_answer_is_known_to_every_router_until_it_is_deleted(cluster: Cluster, opened: list[Router]) -> None:
    workers = [await cluster.add_ready()]
    first, second = await open_router(workers, opened), await open_router(workers, opened)
    (parent,) = await served(first, is_stored=True)
    first.continuations.store(parent, b"the answer")
    await eventually(lambda: num_remembered(workers) == 1)
    (found,) = await second.find_parents("resp_1", "me")
    assert (found.record, found.is_stored) == (b"the answer", True)
    await second.delete_parents("resp_1", "me")
    await eventually(lambda: num_remembered(workers) == 0 and parent.state is HandleState.GONE)
    third = await open_router(workers, opened)
    with pytest.raises(NotFoundError):
        await third.find_parents("resp_1", "me")


def info(number: int, **fields: object) -> ParentInfo:
    usual = {"external_id": f"name-{number}", "answer_id": f"answer-{number}", "choice": 0, "owner": "me", "cache_salt": ""}
    return ParentInfo(**{**usual, "num_prompt_tokens": 1, "tokens": b"1234", **fields})  # type: ignore[arg-type]


def test_a_worker_remembers_what_there_is_room_for() -> None:
    remembered = Remembered(max_bytes=100, max_parents=3)
    for number in range(5):
        remembered.add(info(number))
    assert [len(remembered.find(f"name-{number}", "me")) for number in range(5)] == [0, 0, 1, 1, 1]
    remembered.add(info(4, record=b"x" * 80))
    assert len(remembered) == 3
    assert remembered.find("answer-4", "me")[0].record
    remembered.add(info(5, images=[Image(digest="d", start=0, num_tokens=1, grid=(1, 1, 1), data=b"y" * 90)]))
    assert len(remembered) == 1
    remembered.forget("name-5", "you")
    assert len(remembered) == 1
    remembered.forget("name-5", "me")
    assert (len(remembered), remembered._num_bytes) == (0, 0)


def test_a_name_that_is_used_again_stands_for_the_latest() -> None:
    remembered = Remembered()
    remembered.add(info(1, external_id="mine"))
    for choice in range(2):
        remembered.add(info(2, external_id="mine", choice=choice))
    assert [(one.answer_id, one.choice) for one in remembered.find("mine", "me")] == [("answer-2", 0), ("answer-2", 1)]
