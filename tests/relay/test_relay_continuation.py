"""Continuation with prefill and decode workers: the lease is on the decode worker, which computes the suffix, nothing else."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from cluster import VOCAB, Answer, Cluster, Shape, Worker, ask, collect, relay, solo
from patience import PATIENCE_S

from kvrelay.discovery.base import Loss
from kvrelay.ids import new_kept_id
from kvrelay.router.backend import GenerateRequest
from kvrelay.router.parent import Parent
from kvrelay.router.stream import RequestStream
from kvrelay.states import FinishReason, HandleState
from kvrelay.wire.serving import Keep

MODES = ["write", "read"]
SUFFIX = [5, 6, 7]


def tokens(count: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, VOCAB) for _ in range(count)]


def kept(request: GenerateRequest, name: str = "parent") -> GenerateRequest:
    keep = Keep([new_kept_id() for _ in range(request.params.n)], 60.0)
    return msgspec.structs.replace(request, keep=keep, external_id=name)


def child_of(parent: Parent, suffix: list[int], **params: Any) -> GenerateRequest:
    return msgspec.structs.replace(ask([*parent.tokens, *suffix], **params), parent=parent, external_id="child")


@asynccontextmanager
async def continuing(shape: Shape) -> AsyncIterator[Cluster]:
    """Gives all leases back, so that the leak check finds nothing."""
    async with relay(shape) as cluster:
        yield cluster
        for parent in cluster.router.continuations.of_owner(""):
            await cluster.router.delete_parents(str(parent.kept_id), "")
        await cluster.until(lambda: not any(entry["kept_kv"] for entry in cluster.router.cluster()["workers"]))


async def parent_of(cluster: Cluster, stream: RequestStream, sample: int = 0) -> Parent:
    parent = stream.parents[sample]
    async with asyncio.timeout(PATIENCE_S):
        await cluster.router.continuations.until_ended(parent, "", 20.0)
    return parent


async def held(cluster: Cluster, prompt: list[int], **params: Any) -> Parent:
    stream = cluster.submit(kept(ask(prompt, **params)))
    answer = await collect(stream)
    parent = await parent_of(cluster, stream)
    assert list(parent.tokens) == [*prompt, *answer.said[0][0]]
    assert parent.state is HandleState.HELD, parent.reason
    return parent


def holder_of(cluster: Cluster, parent: Parent) -> Worker:
    return next(worker for worker in cluster.decode if worker.id == parent.worker_id)


async def assert_inherits(cluster: Cluster, parent: Parent, suffix: list[int], **params: Any) -> None:
    """The child computes its suffix and one token more, on the worker with the lease, and says what a request from scratch
    says."""
    holder = holder_of(cluster, parent)
    before, others = holder.engine.load(), [worker for worker in cluster.workers if worker is not holder]
    computed = [worker.engine.load().prompt_tokens for worker in others]
    request = child_of(parent, suffix, **params)
    stream = cluster.submit(request)
    answer = await collect(stream)
    assert answer.said == solo([request], cluster.shape)[0].said
    assert stream.inherited is not None
    assert stream.inherited.num_tokens == len(parent.tokens) - 1
    after = holder.engine.load()
    assert after.prompt_tokens - before.prompt_tokens == len(suffix) + 1
    assert after.inherited_tokens - before.inherited_tokens == len(parent.tokens) - 1
    assert after.transfers.done == before.transfers.done
    assert [worker.engine.load().prompt_tokens for worker in others] == computed


@pytest.mark.parametrize("mode", MODES)
async def test_a_child_computes_its_suffix_where_the_lease_is(mode: Any) -> None:
    async with continuing(Shape(prefill=2, decode=2, mode=mode, prefix_cache=False)) as cluster:
        for number, length in enumerate((15, 16, 17, 40, 90)):
            parent = await held(cluster, tokens(length, number), max_tokens=6)
            for suffix in ([], SUFFIX, tokens(40, 99)):
                await assert_inherits(cluster, parent, suffix)


async def test_a_chain_and_many_children_at_once() -> None:
    async with continuing(Shape(decode=2)) as cluster:
        parent = await held(cluster, tokens(50))
        requests = [child_of(parent, [9, number], n=1 + number % 2, temperature=0.5, seed=number) for number in range(8)]
        for answer, expected in zip(await cluster.answers(requests), solo(requests, cluster.shape), strict=True):
            assert answer.said == expected.said
        for turn in range(4):
            stream = cluster.submit(kept(child_of(parent, [turn, 8]), f"turn {turn}"))
            await collect(stream)
            parent = await parent_of(cluster, stream)
            assert parent.state is HandleState.HELD
            assert stream.inherited is not None
            assert stream.inherited.num_tokens > 50
        await assert_inherits(cluster, parent, SUFFIX)


@pytest.mark.parametrize("mode", MODES)
async def test_one_token_is_enough_for_a_lease(mode: Any) -> None:
    """The prefill worker makes it, and ends the request; the decode worker receives the KV all the same."""
    async with continuing(Shape(mode=mode)) as cluster:
        await assert_inherits(cluster, await held(cluster, tokens(40), max_tokens=1), SUFFIX)
        stream = cluster.submit(kept(ask(tokens(40, 2), max_tokens=50)))
        await stream.next()
        stream.finish(0, 1, FinishReason.STOP)  # a stop string in the first token
        parent = await parent_of(cluster, stream)
        assert len(parent.tokens) == 41
        await assert_inherits(cluster, parent, SUFFIX)


@pytest.mark.parametrize("end", ["abort", "stop"])
async def test_a_parent_that_was_cut_is_continued_where_its_client_saw_it_end(end: str) -> None:
    async with continuing(Shape()) as cluster:
        stream = cluster.submit(kept(ask(tokens(40), max_tokens=150, n=2, temperature=1.0, seed=3)))
        seen: dict[int, list[int]] = {0: [], 1: []}
        while min(map(len, seen.values())) < 4:
            for output in await stream.next():
                seen[output.sample] += output.tokens
        if end == "abort":
            stream.abort()
        else:
            for sample in (0, 1):
                stream.finish(sample, 3, FinishReason.STOP)
        for sample in (0, 1):
            parent = await parent_of(cluster, stream, sample)
            shown = seen[sample] if end == "abort" else seen[sample][:3]
            assert list(parent.tokens) == [*tokens(40), *shown]
            assert parent.state is HandleState.HELD
            await assert_inherits(cluster, parent, SUFFIX)


async def test_a_client_that_leaves_before_the_first_token_leaves_nothing() -> None:
    async with continuing(Shape()) as cluster:
        cluster.prefill[0].allow(0)
        stream = cluster.submit(kept(ask(tokens(40))))
        stream.abort()
        parent = await parent_of(cluster, stream)
        assert (parent.state, list(parent.tokens)) == (HandleState.KNOWN, tokens(40))
        cluster.prefill[0].allow(None)
        await cluster.idle()
        answer = await cluster.answer(child_of(parent, SUFFIX))
        assert answer.said == solo([child_of(parent, SUFFIX)], cluster.shape)[0].said


@pytest.mark.parametrize("end", ["lost", "drained"])
async def test_without_the_holder_the_same_tokens_are_computed_elsewhere(end: str) -> None:
    async with continuing(Shape(decode=2)) as cluster:
        parent = await held(cluster, tokens(70))
        holder = holder_of(cluster, parent)
        if end == "lost":
            cluster.router._on_left(holder.id, Loss.EXPIRED)
        else:
            cluster.router.drain(holder.id)
        assert parent.state is HandleState.KNOWN
        request = child_of(parent, SUFFIX)
        stream = cluster.submit(request)
        assert stream.decode != holder.id
        assert stream.prefill == cluster.prefill[0].id
        answer = await collect(stream)
        assert answer.said == solo([request], cluster.shape)[0].said
        assert stream.inherited is None
        cluster.router._on_left(holder.id, Loss.LEFT)
        holder.halt()
        holder.engine.release_kept([parent.kept_id])  # type: ignore[list-item]


async def test_a_lease_that_is_gone_is_answered_by_the_prefix_cache() -> None:
    async with continuing(Shape()) as cluster:
        parent = await held(cluster, tokens(70))
        cluster.decode[0].engine.release_kept([parent.kept_id])  # type: ignore[list-item]
        stream = cluster.submit(child_of(parent, SUFFIX))
        outputs = await stream.next()
        answer = Answer()
        answer.take(outputs)
        assert stream.inherited is not None
        assert stream.inherited.num_tokens == 0
        assert outputs[0].cached_tokens >= 64
        await collect(stream, answer)
