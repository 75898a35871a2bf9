"""Continuation and beam search without a server: an engine in this process, and worker processes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from test_llm import RELAY, SMALL, assert_empty, greedy
from tiny_models import tiny_model

from kvrelay.errors import InvalidRequestError, NotFoundError
from kvrelay.offline.llm import LLM, AsyncLLM
from kvrelay.offline.outputs import CompletionOutput, RequestOutput
from kvrelay.sampling import BeamSearch, SamplingParams
from kvrelay.states import FinishReason
from kvrelay.wire.serving import Submit

PROMPT = "The quick brown fox jumps over the lazy dog. What is the capital of France?"
SUFFIX = " def main"


@pytest.fixture(scope="module")
def folder() -> str:
    return str(tiny_model("llama"))


@pytest.fixture(scope="module")
def alone(folder: str) -> Iterator[LLM]:
    with LLM(folder, **SMALL, check_invariants=True) as llm:
        yield llm


@pytest.fixture(scope="module")
def relayed(folder: str) -> Iterator[LLM]:
    with LLM(folder, **RELAY) as llm:
        yield llm


@pytest.fixture(params=["alone", pytest.param("relayed", marks=pytest.mark.long)])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    """Whatever a test keeps, it has to release."""
    chosen: LLM = request.getfixturevalue(request.param)
    yield chosen
    assert_empty(chosen)


def from_scratch(llm: LLM, tokens: list[int], max_tokens: int = 6) -> list[int]:
    return llm.generate(tokens, greedy(max_tokens))[0].outputs[0].token_ids


def think(llm: LLM, max_tokens: int = 9, **settings: Any) -> RequestOutput:
    return llm.generate(PROMPT, greedy(max_tokens, **settings), keep_kv=True)[0]


def all_tokens(output: RequestOutput) -> list[int]:
    return [*output.prompt_token_ids, *output.outputs[0].token_ids]


# LLM


def test_a_child_computes_its_suffix_and_one_token(llm: LLM) -> None:
    parent = think(llm)
    kept = parent.outputs[0].continuation
    assert kept is not None
    assert kept.kept
    assert kept.expires_at is not None
    assert 0 < kept.expires_at - time.time() <= 61
    suffix = llm.tokenizer.encode(SUFFIX, add_special_tokens=False)
    for named in (parent, parent.outputs[0], kept.handle):
        child = llm.generate_continuation(named, SUFFIX, greedy(6))
        assert child.prompt_token_ids == [*all_tokens(parent), *suffix]
        assert child.continued is not None
        assert (child.continued.of, child.continued.source) == (kept.handle, "lease")
        assert child.continued.inherited_tokens == len(all_tokens(parent)) - 1
        assert child.continued.computed_tokens == len(suffix) + 1
        assert child.outputs[0].token_ids == from_scratch(llm, child.prompt_token_ids)
    llm.release(parent)


def test_token_ids_are_a_suffix_too_and_so_is_nothing(llm: LLM) -> None:
    parent = think(llm)
    for suffix in ([7, 8, 9], []):
        child = llm.generate_continuation(parent, token_ids=suffix, params=greedy(6))
        assert child.prompt_token_ids == [*all_tokens(parent), *suffix]
        assert child.continued is not None
        assert child.continued.computed_tokens == len(suffix) + 1
        assert child.outputs[0].token_ids == from_scratch(llm, child.prompt_token_ids)
    llm.release(parent)


def test_chains_and_families(llm: LLM) -> None:
    """A child of a child, and several children at once."""
    parent = think(llm)
    child = llm.generate_continuation(parent, SUFFIX, greedy(6), keep_kv=30)
    grandchildren = llm.generate_continuation([child, child, child], token_ids=[5], params=greedy(6))
    for grandchild in grandchildren:
        assert grandchild.continued is not None
        assert grandchild.continued.computed_tokens == 2
        assert grandchild.outputs[0].token_ids == from_scratch(llm, [*all_tokens(child), 5])
    llm.release(parent)
    llm.release(child)


def test_a_parent_cut_by_a_stop_string_ends_where_it_was_seen_to_end(llm: LLM) -> None:
    stop = llm.generate(PROMPT, greedy(9))[0].outputs[0].text[3:5]
    parent = think(llm, stop=[stop])
    assert parent.outputs[0].finish_reason is FinishReason.STOP
    child = llm.generate_continuation(parent, token_ids=[5], params=greedy(6))
    assert child.continued is not None
    assert child.continued.source == "lease"
    assert child.outputs[0].token_ids == from_scratch(llm, [*all_tokens(parent), 5])
    llm.release(parent)


def test_each_sample_is_a_parent(llm: LLM) -> None:
    settings = SamplingParams(temperature=1.5, seed=3, n=2, max_tokens=5, ignore_eos=True)
    parent = llm.generate(PROMPT, settings, keep_kv=True)[0]
    for sample in parent.outputs:
        child = llm.generate_continuation(sample, token_ids=[5], params=greedy(4))
        assert child.prompt_token_ids == [*parent.prompt_token_ids, *sample.token_ids, 5]
        assert child.continued is not None
        assert child.continued.source == "lease"
    with pytest.raises(InvalidRequestError, match="2 outputs"):
        llm.generate_continuation(parent, SUFFIX)
    for sample in parent.outputs:
        llm.release(sample)


def test_what_was_released_is_gone_but_its_output_is_not(llm: LLM) -> None:
    parent = think(llm)
    sample = parent.outputs[0]
    llm.release(sample)
    for again in (lambda: llm.release(sample), lambda: llm.generate_continuation(sample, SUFFIX)):
        with pytest.raises(NotFoundError, match="it was deleted") as caught:
            again()
        assert caught.value.code == "continuation_not_found"
    child = llm.generate_continuation(parent, SUFFIX, greedy(6))  # brings all its tokens along
    assert child.continued is not None
    assert child.continued.source == "prefix_cache"
    assert child.outputs[0].token_ids == from_scratch(llm, child.prompt_token_ids)


def test_what_was_not_to_be_kept_can_be_continued_from_all_the_same(llm: LLM) -> None:
    parent = llm.generate(PROMPT, greedy(9))[0]
    assert parent.outputs[0].continuation is None
    child = llm.generate_continuation(parent, SUFFIX, greedy(6))
    assert child.continued is not None
    assert (child.continued.source, child.continued.inherited_tokens) == ("prefix_cache", 0)
    assert child.continued.computed_tokens == len(child.prompt_token_ids) - child.cached_tokens
    with pytest.raises(InvalidRequestError, match="generate with keep_kv"):
        llm.generate_continuation(parent.outputs[0], SUFFIX)


def test_wrong_calls_are_refused(alone: LLM) -> None:
    parent = alone.generate(PROMPT, greedy(3))[0]
    for keep_kv in (0, -1, 4000, float("nan")):
        with pytest.raises(InvalidRequestError) as caught:
            alone.generate(PROMPT, greedy(3), keep_kv=keep_kv)
        assert caught.value.param == "keep_kv"
    with pytest.raises(InvalidRequestError, match="best_of"):
        alone.generate(PROMPT, SamplingParams(max_tokens=2), best_of=2, keep_kv=True)
    with pytest.raises(InvalidRequestError, match="exclude each other"):
        alone.generate_continuation(parent, SUFFIX, token_ids=[1])
    with pytest.raises(NotFoundError, match="nothing is known of it"):
        alone.generate_continuation("kv-unknown")
    assert_empty(alone)


def test_a_call_that_fails_keeps_nothing(alone: LLM) -> None:
    with pytest.raises(InvalidRequestError):
        alone.generate([PROMPT, [1] * 200], greedy(4), keep_kv=True)
    assert_empty(alone)


def test_a_pool_full_of_leases_says_so(folder: str) -> None:
    with LLM(folder, **{**SMALL, "kv_blocks": 10, "kept_kv_share": 0.1}) as llm:
        kept = think(llm).outputs[0].continuation
        assert kept is not None
        assert not kept.kept
        assert kept.reason
        child = llm.generate_continuation(kept.handle, SUFFIX, greedy(6))  # its tokens are known nevertheless
        assert child.continued is not None
        assert child.continued.source == "prefix_cache"


# Beam search


def test_beams_come_with_their_scores(llm: LLM) -> None:
    found = llm.beam_search(PROMPT, 4, 5, length_penalty=0.5, ignore_eos=True, logprobs=0)[0]
    assert len(found.outputs) == 4
    scores = [output.score for output in found.outputs]
    assert scores == sorted(scores, key=lambda score: -(score or 0.0))
    for output in found.outputs:
        assert output.cumulative_logprob is not None
        assert output.score == pytest.approx(output.cumulative_logprob / 5**0.5, abs=1e-4)
        assert output.cumulative_logprob == pytest.approx(sum(one.logprob for one in output.logprobs or ()), abs=1e-4)
    two = llm.generate(PROMPT, greedy(5, n=2, beam=BeamSearch(width=4, length_penalty=0.5)))[0]
    assert [output.token_ids for output in two.outputs] == [output.token_ids for output in found.outputs[:2]]


def test_a_search_may_begin_with_a_continuation(llm: LLM) -> None:
    parent = think(llm)
    params = greedy(3, n=4, beam=BeamSearch(width=4))
    child = llm.generate_continuation(parent, SUFFIX, params)
    assert child.continued is not None
    assert child.continued.source == "lease"
    expected = llm.generate(child.prompt_token_ids, params)[0]
    assert [output.token_ids for output in child.outputs] == [output.token_ids for output in expected.outputs]
    llm.release(parent)
    with pytest.raises(InvalidRequestError, match="beam search") as caught:
        llm.generate(PROMPT, params, keep_kv=True)
    assert caught.value.param == "keep_kv"


# AsyncLLM


async def last(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    return [output async for output in stream][-1]


@pytest.mark.parametrize("settings", [SMALL, pytest.param(RELAY, marks=pytest.mark.long)], ids=["alone", "relayed"])
def test_streams_can_be_continued_from(folder: str, settings: dict[str, Any]) -> None:
    async def main() -> None:
        llm = AsyncLLM(folder, **settings)
        try:
            parent = await last(llm.generate(PROMPT, greedy(9), keep_kv=True, request_id="first"))
            assert parent.finished
            assert parent.outputs[0].continuation is not None
            assert parent.outputs[0].continuation.kept
            children = await asyncio.gather(
                *(last(llm.generate_continuation(name, SUFFIX, greedy(6))) for name in ("first", parent, parent.outputs[0]))
            )
            plain = await last(llm.generate(children[0].prompt_token_ids, greedy(6)))
            for child in children:
                assert child.continued is not None
                assert child.continued.source == "lease"
                assert child.outputs[0].token_ids == plain.outputs[0].token_ids
            llm.release("first")
            await _left_early(llm)
            await _while_running(llm)
            assert not llm._running  # nothing is left of any request
            if llm.relay is not None:
                await asyncio.to_thread(assert_empty, llm)
        finally:
            llm.close()
        if llm.relay is None:
            assert_empty(llm)

    asyncio.run(main())


async def _left_early(llm: AsyncLLM) -> None:
    """What its reader has seen is what is kept."""
    stream = llm.generate(PROMPT, greedy(60), keep_kv=True, request_id="left")
    seen = await anext(stream)
    await stream.aclose()
    child = await last(llm.generate_continuation("left", SUFFIX, greedy(6)))
    suffix = llm.tokenizer.encode(SUFFIX, add_special_tokens=False)
    assert child.prompt_token_ids == [*all_tokens(seen), *suffix]
    plain = await last(llm.generate(child.prompt_token_ids, greedy(6)))
    assert child.outputs[0].token_ids == plain.outputs[0].token_ids
    llm.release("left")


async def _while_running(llm: AsyncLLM) -> None:
    """A child waits for its parent's end."""
    stream = llm.generate(PROMPT, greedy(30), keep_kv=True, request_id="running")
    await anext(stream)
    child = asyncio.create_task(last(llm.generate_continuation("running", SUFFIX, greedy(6))))
    await asyncio.sleep(0)
    parent = await last(stream)
    assert (await child).prompt_token_ids[: len(all_tokens(parent))] == all_tokens(parent)
    llm.release("running")


def test_an_aborted_stream_can_be_continued_from(folder: str) -> None:
    async def main() -> None:
        llm = AsyncLLM(folder, **SMALL)
        try:
            stream = llm.generate(PROMPT, greedy(60), keep_kv=True, request_id="cut")
            await anext(stream)
            llm.abort("cut")
            parent = await last(stream)
            assert parent.outputs[0].finish_reason is FinishReason.ABORT
            assert parent.outputs[0].continuation is not None
            assert parent.outputs[0].continuation.kept
            child = await last(llm.generate_continuation(parent, token_ids=[5], params=greedy(4)))
            assert child.continued is not None
            assert child.continued.computed_tokens == 2
            llm.release("cut")
            with pytest.raises(NotFoundError, match="it was deleted"):
                await last(llm.generate_continuation("cut"))
            assert not llm._running  # nothing is left of any request
        finally:
            llm.close()
        assert_empty(llm)

    asyncio.run(main())


# What can be continued from (tests/router/test_continuations.py has the table itself)


def test_a_name_of_several_samples_is_no_name_and_what_is_not_kept_is_not_asked_for(folder: str) -> None:
    async def main() -> None:
        llm = AsyncLLM(folder, **{**SMALL, "kv_blocks": 10, "kept_kv_share": 0.1})
        submitted: list[Submit] = []
        original = llm.engine.submit
        llm.engine.submit = lambda submit: (submitted.append(submit), original(submit))  # type: ignore[method-assign,assignment]
        try:
            parent = await last(llm.generate([5, 6], greedy(2, n=2), keep_kv=True, request_id="two"))
            with pytest.raises(InvalidRequestError, match="'two' has 2 choices") as caught:
                await last(llm.generate_continuation("two"))
            assert caught.value.param == "parent"
            refused = await last(llm.generate(PROMPT, greedy(9), keep_kv=True))
            for sample in (*parent.outputs, *refused.outputs):
                assert sample.continuation is not None
                await last(llm.generate_continuation(sample, token_ids=[5], params=greedy(2)))
                assert (submitted[-1].inherit == sample.continuation.handle) == sample.continuation.kept
            assert not refused.outputs[0].continuation.kept  # type: ignore[union-attr]
        finally:
            llm.close()

    asyncio.run(main())


def test_those_that_ended_long_ago_are_forgotten_but_nothing_that_is_kept(folder: str) -> None:
    with LLM(folder, **SMALL, continuation_cache=2) as llm:
        held = think(llm)
        first, *_ = [llm.generate(PROMPT, greedy(2), keep_kv=0.01)[0] for _ in range(4)]
        time.sleep(0.05)
        llm.generate(PROMPT, greedy(2), keep_kv=0.01)
        for output in [llm.generate(PROMPT, greedy(2), keep_kv=0.01)[0] for _ in range(2)]:
            time.sleep(0.02)
            llm.generate_continuation(output.outputs[0], token_ids=[5], params=greedy(2))
        with pytest.raises(NotFoundError, match="it was forgotten"):
            llm.generate_continuation(first.outputs[0], SUFFIX)
        assert llm.generate_continuation(first, token_ids=[5], params=greedy(2)).finished  # brings its tokens along
        child = llm.generate_continuation(held.outputs[0], token_ids=[5], params=greedy(2))
        assert child.continued is not None
        assert child.continued.source == "lease"


def test_a_parent_that_failed_says_so(folder: str) -> None:
    async def main() -> None:
        llm = AsyncLLM(folder, **SMALL)
        try:
            with pytest.raises(InvalidRequestError, match="token ids must be"):
                await last(llm.generate([10**6], greedy(2), keep_kv=True, request_id="wrong"))
            with pytest.raises(NotFoundError, match="it failed: "):
                await last(llm.generate_continuation("wrong"))
        finally:
            llm.close()

    asyncio.run(main())


def test_an_output_is_all_that_is_needed(alone: LLM) -> None:
    """Also one that another LLM made."""
    sample = CompletionOutput(index=0, text="", token_ids=[3], finish_reason=FinishReason.LENGTH)
    output = RequestOutput(request_id="r", prompt=None, prompt_token_ids=[1, 2], outputs=[sample], finished=True)
    child = alone.generate_continuation(output, token_ids=[4], params=greedy(2))
    assert child.prompt_token_ids == [1, 2, 3, 4]
    assert child.continued is not None
    assert child.continued.of == "r"
    with pytest.raises(NotFoundError, match="its KV is not kept"):
        alone.release(output)
