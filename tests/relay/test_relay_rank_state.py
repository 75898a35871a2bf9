"""What a worker of several ranks keeps and moves besides running sequences: adapters, kept KV, swapped KV."""

from __future__ import annotations

import functools
from typing import Any

import msgspec
import pytest
from cluster import Cluster, Shape, ask, collect, random_prompts, relay
from lora_adapters import adapted_model, adapter_folder
from parity import assert_parity, reference_tokens
from test_relay_continuation import continuing, kept, parent_of
from test_relay_ranks import compare, shape_of
from tiny_models import VOCAB_SIZE, reference_model

from kvrelay.router.backend import GenerateRequest
from kvrelay.router.parent import Parent
from kvrelay.sampling import BeamSearch
from kvrelay.states import HandleState

MODEL = "kv2"
SUFFIX = [5, 6, 7]
ADAPTERS = ("all", "queries")


@functools.cache
def prompts() -> list[list[int]]:
    return random_prompts(12, seed=31, longest=100, vocab=(3, VOCAB_SIZE))


@functools.cache
def expected(adapter: str, prompt: tuple[int, ...], count: int) -> tuple[list[int], list[bool]]:
    reference = adapted_model(MODEL, adapter) if adapter else reference_model(MODEL)
    return reference_tokens(reference, list(prompt), count)


def check(tokens: list[int], prompt: list[int], adapter: str = "") -> None:
    assert_parity(tokens, *expected(adapter, tuple(prompt), len(tokens)), f"{adapter or 'the base'} of ranks")


def greedy(prompt: list[int], max_tokens: int = 8, digest: str = "", **params: Any) -> GenerateRequest:
    request = ask(prompt, max_tokens=max_tokens, ignore_eos=True, **params)
    return msgspec.structs.replace(request, adapter=digest)


def digests(cluster: Cluster) -> dict[str, str]:
    return {"": "", **{name: adapter.digest for name, adapter in cluster.router.adapters.items()}}


def continued(parent: Parent, digest: str = "", **params: Any) -> GenerateRequest:
    request = greedy([*parent.tokens, *SUFFIX], digest=digest, **params)
    return msgspec.structs.replace(request, parent=parent, external_id="child")


async def hold(cluster: Cluster, request: GenerateRequest) -> Parent:
    stream = cluster.submit(kept(request))
    await collect(stream)
    parent = await parent_of(cluster, stream)
    assert parent.state is HandleState.HELD, parent.reason
    return parent


def lora_shape(tp: tuple[int, int]) -> Shape:
    return shape_of(MODEL, tp, lora=tuple(f"{name}={adapter_folder(MODEL, name)}" for name in ADAPTERS))


async def test_adapters_of_ranks_are_handed_over_searched_and_continued() -> None:
    searched = []
    for tp in ((2, 2), (1, 1)):
        async with continuing(lora_shape(tp)) as cluster:
            known = digests(cluster)
            work = [(adapter, prompt) for prompt in prompts()[:3] for adapter in ("all", "", "queries")]
            answers = await cluster.answers(greedy(prompt, digest=known[adapter]) for adapter, prompt in work)
            for (adapter, prompt), answer in zip(work, answers, strict=True):
                check(answer.said[0][0], prompt, adapter)
            assert not cluster.decode[0].engine.load().prompt_tokens, "a decode worker computed a prompt: a hand-over failed"
            search = greedy(prompts()[4], max_tokens=5, digest=known["all"], beam=BeamSearch(width=3), n=3)
            searched.append((await cluster.answer(search)).said)
            parent = await hold(cluster, greedy(prompts()[5], digest=known["queries"]))
            stream = cluster.submit(continued(parent, known["queries"]))
            check((await collect(stream)).said[0][0], [*parent.tokens, *SUFFIX], "queries")
            assert stream.inherited is not None
    assert searched[0] == searched[1]


@pytest.mark.parametrize("tp", [(2, 1), (1, 2)], ids=str)
async def test_ranks_of_unequal_number_hand_over_through_mooncake(tp: tuple[int, int]) -> None:
    await compare(MODEL, shape_of(MODEL, tp, transfer="mooncake"))


async def test_sequences_of_ranks_are_swapped_out_and_resumed() -> None:
    """Five that grow to ten blocks each, of which the decode worker has thirty."""
    shape = shape_of(MODEL, (1, 2), num_blocks=(96, 30), swap_blocks=64, prefix_cache=False)
    async with relay(shape) as cluster:
        chosen = [prompt for prompt in prompts() if len(prompt) > 20][:5]
        answers = await cluster.answers(greedy(prompt, max_tokens=150 - len(prompt)) for prompt in chosen)
        for prompt, answer in zip(chosen, answers, strict=True):
            check(answer.said[0][0], prompt)
        assert cluster.decode[0].engine.load().host.swapped_out > 0


async def test_kept_kv_of_ranks_moves_to_the_host_and_back() -> None:
    shape = shape_of(MODEL, (2, 2), num_blocks=(96, 24), swap_blocks=64, prefix_cache=False)
    async with continuing(shape) as cluster:
        (decode,) = cluster.decode
        parent = await hold(cluster, greedy(list(range(10, 70))))
        await cluster.until(lambda: decode.engine.load().blocks.pinned > 0)
        chosen = [list(range(20 + number, 60 + number)) for number in range(2)]
        for prompt, answer in zip(
            chosen, await cluster.answers(greedy(prompt, max_tokens=110) for prompt in chosen), strict=True
        ):
            check(answer.said[0][0], prompt)
        await cluster.until(lambda: decode.engine.load().blocks.pinned == 0)
        before = decode.engine.load()
        assert before.kept == 1, "it is on the host"
        stream = cluster.submit(continued(parent))
        check((await collect(stream)).said[0][0], [*parent.tokens, *SUFFIX])
        after = decode.engine.load()
        assert after.inherited_tokens - before.inherited_tokens == len(parent.tokens) - 1
        assert after.prompt_tokens - before.prompt_tokens == len(SUFFIX) + 1
