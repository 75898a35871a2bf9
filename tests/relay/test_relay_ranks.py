"""Workers of several ranks hand over to each other, whatever the number of each, and give the tokens of one process."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch.distributed as dist
from cluster import Shape, ask, random_prompts, relay
from parity import assert_parity, reference_tokens
from tiny_models import VOCAB_SIZE, reference_model, tiny_model

from kvrelay.runner.ranks import group
from kvrelay.sampling import BeamSearch

NUM_PROMPTS = 10


@functools.cache
def prompts() -> list[list[int]]:
    return random_prompts(2 * NUM_PROMPTS, seed=23, longest=120, vocab=(3, VOCAB_SIZE))


@functools.cache
def expected(name: str, index: int) -> tuple[list[int], list[bool]]:
    return reference_tokens(reference_model(name), prompts()[index], 8)


def shape_of(name: str, tp: tuple[int, int], **changes: object) -> Shape:
    settings = {"checkpoint": str(tiny_model(name)), "num_blocks": (96, 96), "token_budget": 48, "max_model_len": 160}
    return Shape(tp=tp, **{**settings, **changes})  # type: ignore[arg-type]


async def compare(name: str, shape: Shape) -> None:
    """In both modes, with transformers."""
    async with relay(shape) as cluster:
        for first, mode in ((0, "write"), (NUM_PROMPTS, "read")):
            cluster.use_mode(mode)
            chosen = range(first, first + NUM_PROMPTS)
            answers = await cluster.answers(ask(prompts()[index], max_tokens=8, ignore_eos=True) for index in chosen)
            for index, answer in zip(chosen, answers, strict=True):
                assert_parity(answer.said[0][0], *expected(name, index), f"{name} {mode} prompt {index}")
        (decode,) = cluster.decode
        load = decode.engine.load()
        assert not load.prompt_tokens, "a decode worker computed a prompt: a hand-over failed"
        assert (load.transfers.done, load.transfers.failed) == (2 * NUM_PROMPTS, 0)


# KV heads that every rank has (kv1), that are split one to each (kv2) or several (kv8)
QUICK = {
    ("kv1", (1, 2)),
    ("kv1", (2, 2)),
    ("kv1", (4, 1)),
    ("kv2", (2, 1)),
    ("kv2", (2, 2)),
    ("kv8", (1, 1)),
    ("kv8", (1, 2)),
    ("kv8", (4, 1)),
}
EVERY = itertools.product(("kv1", "kv2", "kv8"), ((1, 1), (1, 2), (2, 1), (2, 2), (4, 1)))


@pytest.mark.parametrize(
    ("name", "tp"), [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.long) for case in EVERY], ids=str
)
async def test_any_number_of_ranks_hands_over_to_any_other(name: str, tp: tuple[int, int]) -> None:
    await compare(name, shape_of(name, tp))


async def test_heads_that_cannot_be_split_evenly_and_blocks_of_another_size() -> None:
    await compare("kv3", shape_of("kv3", (1, 2), block_sizes=(16, 24)))


async def test_ranks_without_native_code_meet_by_torch_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "shared_functions", lambda: None)
    try:
        await compare("kv2", shape_of("kv2", (2, 1)))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


async def test_ranks_hand_over_through_a_transport_that_writes() -> None:
    await compare("kv2", shape_of("kv2", (2, 1), transfer="nixl"))


async def test_samples_beams_and_logprobs_of_ranks_are_those_of_one_process() -> None:
    """Forks copy blocks of every rank."""
    requests = [
        ask(prompts()[0], n=4, temperature=1.0, seed=3, max_tokens=20),
        ask(prompts()[1], beam=BeamSearch(width=3), max_tokens=12, n=3),
        ask(prompts()[2], logprobs=3, prompt_logprobs=2, max_tokens=10),
    ]
    said = []
    for tp in ((1, 1), (2, 2)):
        async with relay(shape_of("kv2", tp)) as cluster:
            answers = await cluster.answers(requests)
            said.append([answer.said for answer in answers])
    assert said[0] == said[1]
