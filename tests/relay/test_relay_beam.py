"""A beam search under disaggregation: one prefill, one transfer, and the hypotheses of a worker that does everything."""

from __future__ import annotations

import pytest
from cluster import Answer, Cluster, Shape, ask, collect, random_prompts, relay, run_alone, solo
from relay.test_relay_continuation import child_of, continuing, held
from tiny_models import EOS_TOKEN_ID, VOCAB_SIZE, tiny_model

from kvrelay.config import EngineOptions, ModelOptions, read_environment
from kvrelay.engine.engine import Engine
from kvrelay.ids import new_worker_id
from kvrelay.progress import Silent
from kvrelay.router.backend import GenerateRequest
from kvrelay.runner.build import build_runner
from kvrelay.sampling import BeamSearch


def assert_one_prefill_and_one_transfer(cluster: Cluster, request: GenerateRequest) -> None:
    (prefill,), (decode,) = ([worker.engine.load() for worker in side] for side in (cluster.prefill, cluster.decode))
    assert (prefill.prompt_tokens, decode.prompt_tokens) == (len(request.prompt), 0)
    assert (prefill.transfers.done, decode.transfers.done) == (1, 1)
    assert prefill.output_tokens == 0


@pytest.mark.parametrize("mode", ["write", "read"])
async def test_a_search_of_32_beams_costs_one_prefill_and_one_transfer(mode: str) -> None:
    shape = Shape(mode=mode, eos_one_in=12)  # type: ignore[arg-type]
    request = ask(random_prompts(1, seed=4)[0] * 2, beam=BeamSearch(width=32), n=32, max_tokens=3, logprobs=2)
    async with relay(shape) as cluster:
        answer = await cluster.answer(request)
        await cluster.idle()
        assert_one_prefill_and_one_transfer(cluster, request)
    (expected,) = solo([request], shape)
    assert len(expected.tokens) == 32
    assert answer.said == expected.said
    assert answer.logprobs == expected.logprobs


@pytest.mark.parametrize("mode", ["write", "read"])
async def test_a_search_that_continues_a_request_computes_its_suffix_only(mode: str) -> None:
    """On the worker that keeps the parent's KV: no prefill, no transfer, and the hypotheses of a search from scratch."""
    suffix = [5, 6, 7]
    async with continuing(Shape(mode=mode, eos_one_in=12, prefix_cache=False)) as cluster:  # type: ignore[arg-type]
        parent = await held(cluster, random_prompts(1, seed=7)[0] * 2, max_tokens=6)
        request = child_of(parent, suffix, beam=BeamSearch(width=8), n=8, max_tokens=5, logprobs=1)
        (prefill,), (decode,) = ([worker.engine.load() for worker in side] for side in (cluster.prefill, cluster.decode))
        stream = cluster.submit(request)
        answer = await collect(stream)
        assert stream.inherited is not None
        assert stream.inherited.num_tokens == len(parent.tokens) - 1
        after = cluster.decode[0].engine.load()
        assert after.prompt_tokens - decode.prompt_tokens == len(suffix) + 1  # and the last token, which had no KV yet
        assert (after.transfers.done, cluster.prefill[0].engine.load().prompt_tokens) == (1, prefill.prompt_tokens)
        (expected,) = solo([request], cluster.shape)
        assert len(expected.tokens) == 8
        assert (answer.said, answer.logprobs) == (expected.said, expected.logprobs)


async def test_searches_of_every_width_with_other_requests_on_a_small_pool() -> None:
    shape = Shape(num_blocks=(64, 48), block_sizes=(16, 8), max_model_len=96, eos_one_in=12)
    requests = []
    for index, prompt in enumerate(random_prompts(24, seed=5, longest=40)):
        width = 1 + index % 8
        beam = BeamSearch(width=width, early_stopping=(False, True, "never")[index % 3])  # type: ignore[arg-type]
        requests.append(ask(prompt, beam=beam, n=1 + width // 2, max_tokens=1 + index % 14))
        requests.append(ask(prompt, max_tokens=1 + index % 9))
    async with relay(shape) as cluster:
        answers = await cluster.answers(requests)
    for request, answer, expected in zip(requests, answers, solo(requests, shape), strict=True):
        assert answer.said == expected.said, request.params


@pytest.mark.long
async def test_a_real_model_gives_the_hypotheses_of_one_worker() -> None:
    """A checkpoint's KV, moved: 32 beams of 3 tokens."""
    folder = str(tiny_model("qwen3"))
    request = ask(
        random_prompts(1, seed=6, vocab=(3, VOCAB_SIZE))[0], beam=BeamSearch(width=32), n=32, max_tokens=3, logprobs=1
    )
    async with relay(Shape(checkpoint=folder)) as cluster:
        answer = await cluster.answer(request)
        await cluster.idle()
        assert_one_prefill_and_one_transfer(cluster, request)
    assert answer.said == whole(folder, request).said


def whole(folder: str, request: GenerateRequest) -> Answer:
    options = EngineOptions(max_model_len=256, kv_blocks=256, max_batch=32)
    model = ModelOptions(model=folder, device="cpu", dtype="float32", threads=1)
    runner = build_runner(model, options, tiny_model("qwen3"), read_environment(), Silent())
    assert EOS_TOKEN_ID in runner.eos_token_ids
    engine = Engine(
        options=options,
        runner=runner,
        worker_id=new_worker_id("whole"),
        eos_token_ids=runner.eos_token_ids,
        max_model_len=runner.max_model_len,
        vocab_size=runner.spec.vocab_size,
        cache_seed=runner.fingerprint,
    )
    (answer,) = run_alone(engine, [request])
    return answer
