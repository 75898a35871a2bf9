"""Continuation through the router, with workers in threads that keep what they are asked to keep."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from patience import PATIENCE_S, eventually
from test_router import Cluster, expected, tokens_of

from kvrelay.discovery.static import StaticMembership
from kvrelay.errors import ConflictError, DeadlineError, InvalidRequestError, NotFoundError
from kvrelay.ids import new_kept_id, new_router_id
from kvrelay.metrics import Metrics
from kvrelay.router.backend import GenerateRequest
from kvrelay.router.parent import Parent
from kvrelay.router.router import Router
from kvrelay.router.stream import RequestStream
from kvrelay.sampling import SamplingParams
from kvrelay.states import FinishReason, HandleState, Role
from kvrelay.wire.serving import Keep

PROMPT = [1, 2, 3]


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    made = Cluster(wait_s=PATIENCE_S)
    yield made
    await made.close()


def keeping(
    n: int = 1, owner: str = "", *, external_id: str = "client", prompt: list[int] = PROMPT, **fields: Any
) -> GenerateRequest:
    params = SamplingParams(n=n, max_tokens=fields.pop("max_tokens", 4))
    keep = Keep([new_kept_id() for _ in range(n)], 30.0, owner)
    return GenerateRequest(external_id=external_id, prompt=prompt, params=params, keep=keep, owner=owner, **fields)


def child_of(parent: Parent, suffix: list[int], **fields: Any) -> GenerateRequest:
    prompt = [*parent.tokens, *suffix]
    return GenerateRequest(external_id="child", prompt=prompt, params=SamplingParams(max_tokens=3), parent=parent, **fields)


async def served(cluster: Cluster, request: GenerateRequest) -> RequestStream:
    stream = cluster.router.submit(request)
    await tokens_of(stream)
    await cluster.router.continuations.until_settled(stream.parents, PATIENCE_S)
    return stream


async def held(cluster: Cluster) -> Parent:
    stream = await served(cluster, keeping())
    assert stream.parents[0].state is HandleState.HELD
    return stream.parents[0]


async def test_a_child_goes_to_the_worker_that_holds_its_parent(cluster: Cluster) -> None:
    workers = [await cluster.add_ready() for _ in range(3)]
    parent = await held(cluster)
    assert list(parent.tokens) == [*PROMPT, *expected(PROMPT, 4)]
    holder = next(worker for worker in workers if worker.id == parent.worker_id)
    assert list(holder.engine.leases) == [parent.kept_id]
    for number in range(4):
        stream = cluster.router.submit(child_of(parent, [number]))
        assert stream.decode == holder.id
        assert await tokens_of(stream) == {0: expected([*parent.tokens, number], 3)}
        assert stream.inherited is not None
        assert stream.inherited.num_tokens == len(parent.tokens) - 1
    assert [submit.inherit for submit in holder.engine.submitted[1:]] == [parent.kept_id] * 4


async def test_every_sample_has_kept_kv_of_its_own(cluster: Cluster) -> None:
    worker = await cluster.add_ready()
    stream = await served(cluster, keeping(n=3))
    assert [list(parent.tokens)[3:] for parent in stream.parents] == [expected(PROMPT, 4, sample) for sample in range(3)]
    assert set(worker.engine.leases) == {parent.kept_id for parent in stream.parents}
    with pytest.raises(InvalidRequestError, match="3 choices"):
        await cluster.router.find_parent("client", "", wait_s=1.0)
    for parent in stream.parents:
        assert await cluster.router.find_parent(str(parent.kept_id), "", wait_s=1.0) is parent


@pytest.mark.parametrize("end", ["lost", "drained", "full"])
async def test_without_the_holder_the_same_tokens_go_elsewhere(cluster: Cluster, end: str) -> None:
    workers = [await cluster.add_ready(max_batch=1, max_queue=1) for _ in range(2)]
    parent = await held(cluster)
    holder = next(worker for worker in workers if worker.id == parent.worker_id)
    other = next(worker for worker in workers if worker is not holder)
    if end == "lost":
        await asyncio.to_thread(holder.stop)
        await eventually(lambda: parent.state is HandleState.KNOWN)
        assert parent.reason
    elif end == "drained":
        cluster.router.drain(holder.id)
        assert parent.state is HandleState.KNOWN
    else:
        holder.engine.gate.clear()
        fillers = [cluster.router.submit(child_of(parent, [n], session="")) for n in range(2)]
        assert {filler.decode for filler in fillers} == {holder.id}
    stream = cluster.router.submit(child_of(parent, [9]))
    assert stream.decode == other.id
    assert await tokens_of(stream) == {0: expected([*parent.tokens, 9], 3)}
    assert stream.inherited is None
    assert other.engine.submitted[-1].inherit is None
    holder.engine.gate.set()


async def test_a_child_whose_worker_is_lost_goes_on_elsewhere_without_the_kept_kv(cluster: Cluster) -> None:
    workers = [await cluster.add_ready() for _ in range(2)]
    parent = await held(cluster)
    holder = next(worker for worker in workers if worker.id == parent.worker_id)
    other = next(worker for worker in workers if worker is not holder)
    holder.engine.gate.clear()
    stream = cluster.router.submit(child_of(parent, [9]))
    await eventually(lambda: stream.inherited is not None)
    await asyncio.to_thread(holder.stop)
    assert await tokens_of(stream) == {0: expected([*parent.tokens, 9], 3)}
    assert stream.decode == other.id
    assert stream.inherited is None, "what it took was lost before its first token"
    assert other.engine.submitted[-1].inherit is None


async def test_a_parent_that_is_sent_again_is_kept_where_it_ends(cluster: Cluster) -> None:
    workers = [await cluster.add_ready() for _ in range(2)]
    for worker in workers:
        worker.engine.gate.clear()
    stream = cluster.router.submit(keeping(max_tokens=20))
    first = next(worker for worker in workers if worker.id == stream.decode)
    other = next(worker for worker in workers if worker is not first)
    await eventually(lambda: first.loop.num_open == 1)
    other.engine.gate.set()
    await asyncio.to_thread(first.stop)
    await tokens_of(stream)
    await eventually(lambda: stream.parents[0].state is HandleState.HELD)
    assert stream.parents[0].worker_id == other.id


async def test_a_parent_whose_hand_over_failed_is_kept_all_the_same(cluster: Cluster) -> None:
    prefill, decode = [await cluster.add_ready(role=role) for role in (Role.PREFILL, Role.DECODE)]
    prefill.engine.gate.clear()
    decode.engine.gate.clear()
    stream = cluster.router.submit(keeping(prompt=list(range(100))))
    await eventually(lambda: decode.loop.num_open == 1)
    decode.engine.fail_all("hand_over_error")
    decode.engine.gate.set()
    await tokens_of(stream)
    await eventually(lambda: stream.parents[0].state is not HandleState.RUNNING)
    assert stream.parents[0].state is HandleState.HELD, stream.parents[0].reason
    assert list(decode.engine.leases) == [stream.parents[0].kept_id]


@pytest.mark.parametrize("by_producer", [True, False])
async def test_a_pair_is_kept_apart_only_if_it_is_not_the_producer_who_ended_the_hand_over(
    cluster: Cluster, by_producer: bool
) -> None:
    prefill, decode = [await cluster.add_ready(role=role) for role in (Role.PREFILL, Role.DECODE)]
    prefill.engine.gate.clear()
    decode.engine.gate.clear()
    stream = cluster.router.submit(
        GenerateRequest(external_id="", prompt=list(range(100)), params=SamplingParams(max_tokens=4))
    )
    assert stream.prefill == prefill.id
    await eventually(lambda: decode.loop.num_open == 1)
    decode.engine.fail_all("hand_over_error", by_producer=by_producer)
    decode.engine.gate.set()
    assert await tokens_of(stream) == {0: expected(list(range(100)), 4)}
    again = GenerateRequest(external_id="", prompt=list(range(100, 200)), params=SamplingParams(max_tokens=4))
    stream = cluster.router.submit(again)
    assert stream.prefill == (prefill.id if by_producer else "local")
    stream.abort()
    prefill.engine.gate.set()


async def test_a_parent_that_waits_for_another_worker_is_kept_there(cluster: Cluster) -> None:
    first = await cluster.add_ready()
    first.engine.gate.clear()
    stream = cluster.router.submit(keeping())
    await eventually(lambda: first.loop.num_open == 1)
    first.engine.fail_all("service_unavailable_error")
    await eventually(lambda: cluster.router.cluster()["stranded"] == 1)
    await asyncio.to_thread(first.stop)
    other = await cluster.add_ready()
    await tokens_of(stream)
    await eventually(lambda: stream.parents[0].state is not HandleState.RUNNING)
    assert stream.parents[0].state is HandleState.HELD, stream.parents[0].reason
    assert stream.parents[0].worker_id == other.id


async def test_an_aborted_parent_keeps_what_was_taken_of_it(cluster: Cluster) -> None:
    worker = await cluster.add_ready(step_s=0.005)
    stream = cluster.router.submit(keeping(max_tokens=1000))
    taken = [token for output in await stream.next() for token in output.tokens]
    stream.abort()
    parent = stream.parents[0]
    assert list(parent.tokens) == [*PROMPT, *taken]
    assert await cluster.router.find_parent("client", "", wait_s=PATIENCE_S) is parent
    assert parent.state is HandleState.HELD
    assert [finish.reason for finish in worker.engine.finished] == [FinishReason.ABORT]
    assert worker.engine.leases[parent.kept_id].tokens == [*PROMPT, *taken]  # type: ignore[index]
    assert cluster.router.cluster()["in_flight"] == 0


async def test_a_parent_that_took_too_long_keeps_what_came_of_it(cluster: Cluster) -> None:
    worker = await cluster.add_ready(step_s=0.005)
    stream = cluster.router.submit(keeping(max_tokens=1000, timeout_s=0.05))
    with pytest.raises(DeadlineError):
        await tokens_of(stream)
    parent = await cluster.router.find_parent("client", "", wait_s=PATIENCE_S)
    assert parent.state is HandleState.HELD
    assert worker.engine.leases[parent.kept_id].tokens == list(parent.tokens)  # type: ignore[index]


async def test_a_stop_string_cuts_the_kept_kv(cluster: Cluster) -> None:
    worker = await cluster.add_ready()
    stream = cluster.router.submit(keeping(max_tokens=1000))
    await stream.next()
    stream.finish(0, 1, FinishReason.STOP)
    parent = await cluster.router.find_parent("client", "", wait_s=PATIENCE_S)
    assert list(parent.tokens) == [*PROMPT, *expected(PROMPT, 1)]
    await eventually(lambda: parent.state is HandleState.HELD)
    assert len(worker.engine.leases) == 1


async def test_a_stop_string_found_after_the_workers_own_end_cuts_the_kept_kv(cluster: Cluster) -> None:
    worker = await cluster.add_ready()
    stream = cluster.router.submit(keeping(max_tokens=4))
    await eventually(lambda: len(stream.tokens(0)) == 4 and bool(worker.engine.leases))
    stream.finish(0, 2, FinishReason.STOP)
    parent = await cluster.router.find_parent("client", "", wait_s=PATIENCE_S)
    await eventually(lambda: parent.state is HandleState.HELD)
    assert list(parent.tokens) == [*PROMPT, *expected(PROMPT, 2)]
    assert await tokens_of(cluster.router.submit(child_of(parent, [5]))) == {0: expected([*parent.tokens, 5], 3)}


async def test_a_child_waits_for_its_parent_and_for_word_of_its_kept_kv(cluster: Cluster) -> None:
    worker = await cluster.add_ready()
    worker.engine.gate.clear()
    stream = cluster.router.submit(keeping())
    with pytest.raises(ConflictError, match="still being generated"):
        await cluster.router.find_parent("client", "", wait_s=0.01)
    finding = asyncio.create_task(cluster.router.find_parent("client", "", wait_s=PATIENCE_S))
    await asyncio.sleep(0)
    worker.engine.gate.set()
    await tokens_of(stream)
    assert (await finding).state is HandleState.HELD


async def test_what_a_worker_refuses_to_keep_is_known_all_the_same(cluster: Cluster) -> None:
    worker = await cluster.add_ready()
    worker.engine.keeps = False
    stream = await served(cluster, keeping())
    parent = stream.parents[0]
    assert (parent.state, parent.kept, parent.reason) == (HandleState.KNOWN, False, "no room")
    child = cluster.router.submit(child_of(parent, [5]))
    assert await tokens_of(child) == {0: expected([*parent.tokens, 5], 3)}
    assert 'kvrelay_kept_kv_refusals_total{reason="worker"} 1.0' in cluster.metrics.render().decode()


async def test_a_deleted_handle_is_given_up_by_its_worker(cluster: Cluster) -> None:
    worker = await cluster.add_ready()
    parent = await held(cluster)
    assert "kvrelay_kept_kv 1.0" in cluster.metrics.render().decode()
    await cluster.router.delete_parents("client", "")
    await eventually(lambda: not worker.engine.leases)
    assert parent.state is HandleState.GONE
    with pytest.raises(NotFoundError, match="deleted"):
        await cluster.router.find_parent(str(parent.kept_id), "", wait_s=1.0)


async def test_a_parent_deleted_while_it_runs_leaves_no_kept_kv(cluster: Cluster) -> None:
    worker = await cluster.add_ready()
    worker.engine.gate.clear()
    stream = cluster.router.submit(keeping())
    await cluster.router.delete_parents("client", "")
    worker.engine.gate.set()
    await tokens_of(stream)
    await eventually(lambda: bool(worker.engine.submitted) and not worker.engine.leases and worker.loop.num_open == 0)
    assert stream.parents[0].state is HandleState.GONE


async def test_the_quota_is_per_owner(cluster: Cluster) -> None:
    await cluster.add_ready(max_batch=64, max_queue=64)
    cluster.router.continuations._max_kept = 3
    first = await served(cluster, keeping(n=2, owner="a", external_id="one"))
    over = await served(cluster, keeping(n=2, owner="a", external_id="two"))
    other = await served(cluster, keeping(n=2, owner="b", external_id="three"))
    assert [parent.kept for stream in (first, over, other) for parent in stream.parents] == [
        True,
        True,
        False,
        False,
        True,
        True,
    ]
    assert "quota of 3" in over.parents[0].reason
    assert over.parents[0].state is HandleState.KNOWN
    await cluster.router.delete_parents("one", "a")
    assert (await served(cluster, keeping(n=2, owner="a", external_id="two"))).parents[0].kept


async def test_kv_kept_for_another_router_is_found(cluster: Cluster) -> None:
    workers = [await cluster.add_ready() for _ in range(2)]
    parent = (await served(cluster, keeping(owner="me", cache_salt="salt"))).parents[0]
    membership = StaticMembership([worker.loop.address for worker in workers], router_id=new_router_id(), registration_s=4.0)
    second = Router(membership=membership, metrics=Metrics(), model="stub")
    second.start()
    try:
        async with asyncio.timeout(PATIENCE_S):
            await second.until_usable(2)
        for handle in ("client", str(parent.kept_id)):
            found = await second.find_parent(handle, "me", wait_s=1.0)
            assert list(found.tokens) == list(parent.tokens)
            assert (found.state, found.worker_id, found.cache_salt) == (HandleState.HELD, parent.worker_id, "salt")
        for handle, owner in (("client", "you"), ("never", "me")):
            with pytest.raises(NotFoundError, match="nothing is known"):
                await second.find_parent(handle, owner, wait_s=1.0)
        stream = second.submit(child_of(found, [8], owner="me", cache_salt="salt"))
        assert await tokens_of(stream) == {0: expected([*parent.tokens, 8], 3)}
        assert stream.inherited is not None
    finally:
        second.close()


async def test_a_parent_of_another_model_is_refused(cluster: Cluster) -> None:
    first = await cluster.add_ready()
    parent = await held(cluster)
    await asyncio.to_thread(first.stop)
    await eventually(lambda: cluster.router.num_usable == 0)
    await cluster.add_ready(fingerprint="another")
    with pytest.raises(InvalidRequestError, match="another model") as refused:
        cluster.router.submit(child_of(parent, [5]))
    assert refused.value.param == "model"
