"""The engine with the real runner gives transformers' greedy tokens: in mixed batches, with any chunk size, with and without
the prefix cache, and under forced preemption by recomputing and by swapping."""

from __future__ import annotations

import functools
import random

import pytest
import torch
from leaks import check_idle
from parity import assert_parity, reference_tokens
from tiny_models import NAMES, QUANTISED_NAMES, VOCAB_SIZE, reference_model, tiny_model

from kvrelay.config import EngineOptions, ModelOptions, read_environment
from kvrelay.engine.engine import Engine
from kvrelay.ids import RequestId, new_request_id, new_worker_id
from kvrelay.progress import Silent
from kvrelay.runner.build import build_runner
from kvrelay.sampling import SamplingParams
from kvrelay.wire.serving import Failure, Submit, of_kind

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
LENGTHS = (1, 2, 15, 16, 17, 31, 40, 64, 90)
NUM_TOKENS = 12
MORE_TOKENS = 28  # where growing must run into the pool's end
PREEMPTED = ("llama", "qwen2", "qwen3")


def make_engine(name: str, device: str, *, eos_token_ids: frozenset[int] = frozenset(), **options: object) -> Engine:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no NVIDIA card")
    settings = EngineOptions(**{"max_model_len": 128, "kv_blocks": 128, "check_invariants": True, **options})  # type: ignore[arg-type]
    model = ModelOptions(model=name, device=device, dtype="float32", threads=1)  # type: ignore[arg-type]
    runner = build_runner(model, settings, tiny_model(name), read_environment(), Silent())
    return Engine(
        options=settings,
        runner=runner,
        worker_id=new_worker_id("whole"),
        eos_token_ids=eos_token_ids,
        max_model_len=runner.max_model_len,
        vocab_size=runner.spec.vocab_size,
        cache_seed=runner.fingerprint,
    )


@functools.cache
def prompts() -> list[list[int]]:
    rng = random.Random(7)
    stem = [rng.randrange(3, VOCAB_SIZE) for _ in range(24)]
    fresh = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]
    return fresh + [stem + [rng.randrange(3, VOCAB_SIZE) for _ in range(count)] for count in (3, 9, 30)]


@functools.cache
def expected(name: str, index: int, count: int) -> tuple[list[int], list[bool]]:
    return reference_tokens(reference_model(name), prompts()[index], count)


def generate(engine: Engine, batch: list[list[int]], num_tokens: int = NUM_TOKENS) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens)
    ids = [new_request_id() for _ in batch]
    tokens: dict[RequestId, list[int]] = {request_id: [] for request_id in ids}
    for request_id, prompt in zip(ids, batch, strict=True):
        engine.submit(Submit(request_id=request_id, external_id="", prompt=prompt, params=params))
    while engine.has_work:
        step = engine.step()
        assert not of_kind(Failure, step.news)
        for output in step.outputs:
            tokens[output.request_id].extend(output.tokens)
    check_idle(engine.core)
    assert all(len(tokens[request_id]) == num_tokens for request_id in ids)
    return [tokens[request_id] for request_id in ids]


def assert_all_equal(name: str, got: list[list[int]], what: str) -> None:
    for index, tokens in enumerate(got):
        wanted, ties = expected(name, index, MORE_TOKENS if name in PREEMPTED else NUM_TOKENS)
        assert_parity(tokens, wanted[: len(tokens)], ties, f"{what}, prompt {index}")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [*NAMES, *QUANTISED_NAMES])
def test_a_mixed_batch_twice_so_that_the_second_is_cached(name: str, device: str) -> None:
    engine = make_engine(name, device)
    for turn in ("fresh", "cached"):
        assert_all_equal(name, generate(engine, prompts()), f"{name} {turn}")
    assert engine.load().cached_tokens > 0
    engine.close()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", PREEMPTED)
@pytest.mark.parametrize("first", [False, pytest.param(True, marks=pytest.mark.long)])
def test_any_chunk_size_with_and_without_the_prefix_cache(name: str, first: bool, device: str) -> None:
    """In turn: `first` says which begins. Models take turns too."""
    for turn, chunk in enumerate((1, 2, 3, 7, 16, 17, 33, 64), start=NAMES.index(name)):
        prefix_cache = first ^ bool(turn % 2)
        engine = make_engine(name, device, token_budget=chunk, prefix_cache=prefix_cache, max_batch=4)
        assert_all_equal(name, generate(engine, prompts()), f"{name} chunk {chunk} cache {prefix_cache}")
        engine.close()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block_size", [1, 5, 16])
@pytest.mark.parametrize("name", PREEMPTED)
def test_forced_preemption(name: str, block_size: int, device: str) -> None:
    settings = {"block_size": block_size, "kv_blocks": -(-128 // block_size), "token_budget": 40, "swap_blocks": 0}
    engine = make_engine(name, device, **settings)
    assert_all_equal(name, generate(engine, prompts(), MORE_TOKENS), f"{name} preempted")
    assert engine.load().preemptions > 0
    assert engine.load().host.swapped_out == 0
    engine.close()


@pytest.mark.parametrize("device", DEVICES)
def test_swapping_needs_no_option(device: str) -> None:
    engine = make_engine("llama", device, kv_blocks=10, token_budget=64, swap_timeout_s=60.0)
    assert_all_equal("llama", generate(engine, prompts(), MORE_TOKENS), "llama swapped by default")
    assert engine.load().host.swapped_in > 0
    engine.close()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("block_size", "preempt"), [(5, "latest"), (16, "oldest")])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_forced_swapping(name: str, block_size: int, preempt: str, device: str) -> None:
    """A pool for about three of the twelve, first with room on the host for all of it, then with slots for a few."""
    num_blocks = -(-160 // block_size)
    for swap_blocks in (4 * num_blocks, num_blocks // 2):
        engine = make_engine(
            name,
            device,
            block_size=block_size,
            kv_blocks=num_blocks,
            token_budget=64,
            swap_blocks=swap_blocks,
            swap_timeout_s=60.0,
            preempt=preempt,
        )
        assert_all_equal(name, generate(engine, prompts(), MORE_TOKENS), f"{name} swapped")
        assert engine.load().host.swapped_in > 0
        engine.close()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", PREEMPTED)
def test_logprobs_equal_those_of_the_reference(name: str, device: str) -> None:
    engine = make_engine(name, device, token_budget=19)
    prompt = prompts()[6]
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=5, prompt_logprobs=5)
    engine.submit(Submit(request_id=new_request_id(), external_id="", prompt=prompt, params=params))
    outputs = []
    while engine.has_work:
        outputs.extend(engine.step().outputs)
    assert outputs[0].prompt_logprobs is not None
    tokens = prompt + [token for output in outputs for token in output.tokens]
    entries = [*outputs[0].prompt_logprobs[1:], *(entry for output in outputs for entry in output.logprobs or [])]
    with torch.inference_mode():
        logprobs = torch.log_softmax(reference_model(name)(torch.tensor([tokens])).logits[0].float(), dim=-1)
    assert len(entries) == len(tokens) - 1
    for position, entry in enumerate(entries):
        assert entry is not None
        assert entry.logprob == pytest.approx(float(logprobs[position, tokens[position + 1]]), abs=1e-4)
        best = logprobs[position].topk(5).values
        assert [value for _, value in entry.top] == pytest.approx(best.tolist(), abs=1e-4)
    engine.close()
