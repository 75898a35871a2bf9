"""A request gets the same tokens whether one worker serves it or two, over every transport, in both modes."""

from __future__ import annotations

import functools

import pytest
from cluster import Answer, Cluster, Shape, ask, collect, random_prompts, relay, run_alone, solo
from parity import assert_parity, reference_tokens
from tiny_models import EOS_TOKEN_ID, VOCAB_SIZE, reference_model, tiny_model

from kvrelay.config import EngineOptions, ModelOptions, read_environment
from kvrelay.engine.engine import Engine
from kvrelay.ids import new_worker_id
from kvrelay.progress import Silent
from kvrelay.router.backend import GenerateRequest
from kvrelay.runner.build import build_runner
from kvrelay.sampling import Grammar, GrammarKind
from kvrelay.states import FinishReason

EVERY_WAY = [(transfer, mode) for transfer in ("shm", "nixl", "mooncake") for mode in ("write", "read")]
MODES = ["write", "read"]


def assert_all_handed_over(cluster: Cluster) -> None:
    """No decode worker computed a prompt, as it does when a hand-over failed."""
    for worker in cluster.decode:
        load = worker.engine.load()
        assert load.preemptions or not load.prompt_tokens
        assert load.transfers.done


@pytest.mark.parametrize(
    ("transfer", "pairs"),
    [
        ("shm", 2),
        ("nixl", 1),
        *(pytest.param(*case, marks=pytest.mark.long) for case in (("shm", 1), ("nixl", 2), ("mooncake", 1), ("mooncake", 2))),
    ],
)
async def test_200_random_prompts_in_each_mode(transfer: str, pairs: int) -> None:
    shape = Shape(prefill=pairs, decode=pairs, transfer=transfer)  # type: ignore[arg-type]
    async with relay(shape) as cluster:
        for mode in ("write", "read"):
            cluster.use_mode(mode)
            prompts = random_prompts(200, seed=2 * pairs + (mode == "read"))
            requests = [ask(prompt, max_tokens=2 + len(prompt) % 6) for prompt in prompts]
            answers = await cluster.answers(requests)
            for request, answer, expected in zip(requests, answers, solo(requests, shape), strict=True):
                assert answer.said == expected.said, f"{mode}: prompt of {len(request.prompt)} tokens"
        assert_all_handed_over(cluster)
        for worker in cluster.workers:
            assert worker.engine.load().cached_tokens > 0


UNEQUAL = [
    ((16, 32), "shm", "write"),
    ((32, 16), "shm", "read"),
    ((16, 24), "shm", "write"),
    ((24, 16), "nixl", "read"),
    ((16, 32), "nixl", "write"),
    ((32, 16), "mooncake", "read"),
]
OTHER_MODE = [(sizes, transfer, "read" if mode == "write" else "write") for sizes, transfer, mode in UNEQUAL]


@pytest.mark.parametrize(
    ("block_sizes", "transfer", "mode"), [*UNEQUAL, *(pytest.param(*case, marks=pytest.mark.long) for case in OTHER_MODE)]
)
async def test_unequal_block_sizes_with_prefix_hits(block_sizes: tuple[int, int], transfer: str, mode: str) -> None:
    shape = Shape(block_sizes=block_sizes, transfer=transfer, mode=mode)  # type: ignore[arg-type]
    requests = [ask(prompt, max_tokens=4) for prompt in random_prompts(60, seed=3)]
    async with relay(shape) as cluster:
        for answer, expected in zip(await cluster.answers(requests), solo(requests, shape), strict=True):
            assert answer.said == expected.said
        assert_all_handed_over(cluster)
        sent = sum(worker.engine.load().transfers.bytes for worker in cluster.workers)  # whoever moves counts
        everything = sum(len(request.prompt) for request in requests) * 2 * 2 * 8  # layers, keys and values, bytes
        assert 0 < sent < everything, "the decode worker's own prefix hits were sent"


def special_requests(seed: int) -> list[GenerateRequest]:
    """Whatever could go wrong about the first token."""
    prompts = random_prompts(30, seed)
    kinds = [
        {"max_tokens": 1},
        {"max_tokens": 2},
        {"max_tokens": 1, "n": 3, "temperature": 1.0, "seed": 5},
        {"n": 3, "temperature": 1.0, "seed": 7},
        {"n": 2, "max_tokens": 2},
        {"logprobs": 3},
        {"logprobs": 0, "n": 2, "temperature": 0.7, "seed": 1},
        {"prompt_logprobs": 2},
        {"prompt_logprobs": 0, "logprobs": 1, "max_tokens": 1},
        {"prompt_logprobs": 1, "n": 2, "temperature": 1.0, "seed": 3},
        {"temperature": 1.0, "seed": -12},
        {"min_tokens": 4},
        {"ignore_eos": True},
        {},
    ]
    return [ask(prompt, **kind) for prompt in prompts for kind in kinds]


@pytest.mark.parametrize("mode", MODES)
async def test_samples_seeds_logprobs_and_ends_at_the_first_token(mode: str) -> None:
    shape = Shape(mode=mode, eos_one_in=3)  # type: ignore[arg-type]
    requests = special_requests(seed=11)
    expected = solo(requests, shape)
    assert sum(answer.finish == {0: FinishReason.STOP} and len(answer.tokens[0]) == 1 for answer in expected) > 20
    async with relay(shape) as cluster:
        for request, answer, wanted in zip(requests, await cluster.answers(requests), expected, strict=True):
            assert answer.said == wanted.said, request.params
            assert answer.logprobs == wanted.logprobs, request.params
            assert answer.prompt_logprobs == wanted.prompt_logprobs, request.params


@pytest.mark.parametrize("mode", MODES)
async def test_a_stop_token_at_the_first_and_at_the_second_token(mode: str) -> None:
    shape = Shape(mode=mode)  # type: ignore[arg-type]
    prompts = random_prompts(20, seed=5)
    free = [answer.tokens[0] for answer in solo([ask(prompt) for prompt in prompts], shape)]
    requests = [ask(p, stop_token_ids=[tokens[at]]) for p, tokens in zip(prompts, free, strict=True) for at in (0, 1)]
    async with relay(shape) as cluster:
        answers = await cluster.answers(requests)
    for answer, expected in zip(answers, solo(requests, shape), strict=True):
        assert answer.said == expected.said
        assert answer.finish == {0: FinishReason.STOP}
        assert len(answer.tokens[0]) <= 2


async def test_one_prefill_and_one_transfer_for_all_samples_of_a_prompt() -> None:
    async with relay(Shape()) as cluster:
        answer = await cluster.answer(ask(list(range(1, 50)), n=8, temperature=1.0, seed=2))
        assert len(answer.said[0]) == 8
        assert cluster.prefill[0].engine.load().prompt_tokens == 49
        assert cluster.decode[0].engine.load().prompt_tokens == 0
        assert cluster.decode[0].engine.load().transfers.done == 1


async def test_a_prefill_worker_alone_serves_who_wants_one_token_and_a_decode_worker_short_prompts() -> None:
    async with relay(Shape(local_prefill_tokens=8)) as cluster:
        long, short = list(range(1, 30)), list(range(1, 9))
        requests = [ask(long, max_tokens=1), ask(short), ask(long)]
        streams = [cluster.submit(request) for request in requests]
        named = [(stream.prefill, stream.decode) for stream in streams]
        prefill, decode = cluster.prefill[0].id, cluster.decode[0].id
        assert named == [(prefill, prefill), ("local", decode), (prefill, decode)]
        assert [stream.transfer_id is None for stream in streams] == [True, True, False]
        for stream, expected in zip(streams, solo(requests, cluster.shape), strict=True):
            assert (await collect(stream)).said == expected.said
        await cluster.idle()
        assert cluster.decode[0].engine.load().transfers.done == 1


# Real models


REAL_LENGTH = 120


def real_shape(name: str, mode: str = "write", transfer: str = "shm", **changes: object) -> Shape:
    settings = {"checkpoint": str(tiny_model(name)), "num_blocks": (96, 96), "token_budget": 48, "max_model_len": 160}
    return Shape(mode=mode, transfer=transfer, **{**settings, **changes})  # type: ignore[arg-type]


def whole(name: str, requests: list[GenerateRequest]) -> list[Answer]:
    """The same checkpoint in one worker."""
    options = EngineOptions(max_model_len=160, kv_blocks=512, prefix_cache=False)
    model = ModelOptions(model=name, dtype="float32", threads=1)
    runner = build_runner(model, options, tiny_model(name), read_environment(), Silent())
    engine = Engine(
        options=options,
        runner=runner,
        worker_id=new_worker_id("whole"),
        eos_token_ids=runner.eos_token_ids,
        max_model_len=runner.max_model_len,
        vocab_size=runner.spec.vocab_size,
        cache_seed=runner.fingerprint,
    )
    return run_alone(engine, requests)


@functools.cache
def expected(name: str, index: int, count: int) -> tuple[list[int], list[bool]]:
    return reference_tokens(reference_model(name), real_prompts(200)[index], count, frozenset({EOS_TOKEN_ID}))


@functools.cache
def real_prompts(count: int) -> list[list[int]]:
    return random_prompts(count, seed=17, longest=REAL_LENGTH, vocab=(3, VOCAB_SIZE))


async def compare_with_transformers(name: str, shape: Shape, count: int) -> None:
    async with relay(shape) as cluster:
        answers = await cluster.answers(ask(prompt, max_tokens=8) for prompt in real_prompts(200)[:count])
        assert_all_handed_over(cluster)
    for index, answer in enumerate(answers):
        tokens, ties = expected(name, index, 8)
        assert_parity(answer.said[0][0], tokens, ties, f"{name} prompt {index}")


@pytest.mark.parametrize(
    ("name", "transfer", "mode"),
    [("llama", "shm", "write"), ("llama", "nixl", "read"), ("qwen3", "mooncake", "write"), ("qwen3", "shm", "read")],
)
async def test_real_models_equal_transformers(name: str, transfer: str, mode: str) -> None:
    await compare_with_transformers(name, real_shape(name, mode, transfer), 24)


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(("transfer", "mode"), EVERY_WAY)
@pytest.mark.parametrize("pairs", [1, 2])
async def test_200_prompts_of_real_models_equal_transformers(name: str, transfer: str, mode: str, pairs: int) -> None:
    await compare_with_transformers(name, real_shape(name, mode, transfer, prefill=pairs, decode=pairs), 200)


async def test_real_kv_fits_blocks_of_another_size() -> None:
    await compare_with_transformers("llama", real_shape("llama", block_sizes=(16, 24)), 24)
    await compare_with_transformers("qwen3", real_shape("qwen3", "read", block_sizes=(32, 16)), 24)


@pytest.mark.parametrize("mode", MODES)
async def test_penalties_seeds_and_grammars_go_on_across_the_hand_over(mode: str) -> None:
    prompts = real_prompts(200)[:6]
    digits = Grammar(kind=GrammarKind.REGEX, source=r"[0-9]{3}-[a-f]{4}x{1,3}")
    kinds = [
        {"repetition_penalty": 1.8},
        {"presence_penalty": 1.5, "frequency_penalty": 1.0, "temperature": 0.9, "seed": 4},
        {"grammar": digits, "max_tokens": 12},
        {"grammar": digits, "temperature": 1.0, "seed": 6, "n": 3, "max_tokens": 12},
        {"logit_bias": {7: 30.0}, "repetition_penalty": 5.0},
        {"allowed_token_ids": list(range(40, 60)), "bad_tokens": [[41], [42, 43]], "temperature": 1.0, "seed": 3},
        {"temperature": 1.0, "seed": 8, "n": 2, "top_k": 20, "top_p": 0.9},
        {"logprobs": 4, "prompt_logprobs": 2, "temperature": 0.5, "seed": 9, "min_p": 0.01},
    ]
    requests = [ask(prompt, **{"max_tokens": 10, **kind}) for prompt in prompts for kind in kinds]
    async with relay(real_shape("llama", mode)) as cluster:
        answers = await cluster.answers(requests)
    for request, answer, wanted in zip(requests, answers, whole("llama", requests), strict=True):
        assert answer.said == wanted.said, request.params
        for sample, entries in wanted.logprobs.items():
            assert [e.logprob for e in answer.logprobs[sample]] == pytest.approx([e.logprob for e in entries], abs=1e-4)
        assert (answer.prompt_logprobs is None) == (wanted.prompt_logprobs is None)
        assert len(answer.prompt_logprobs or []) == len(wanted.prompt_logprobs or [])
