"""The offline API: a model in this process, and the same model relayed through worker processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import psutil
import pytest
from patience import PATIENCE_S, until
from server import is_idle
from tiny_models import VOCAB_SIZE, tiny_model

from kvrelay.config import EngineOptions
from kvrelay.engine import invariants
from kvrelay.errors import ConfigError, EngineClosedError, InternalError, InvalidRequestError, RequestError, WorkerDiedError
from kvrelay.offline.llm import LLM, AsyncLLM
from kvrelay.offline.options import split_options
from kvrelay.offline.outputs import RequestOutput
from kvrelay.sampling import SamplingParams
from kvrelay.states import FinishReason

SMALL: dict[str, Any] = {"progress": False, "kv_blocks": 64, "max_batch": 4, "max_model_len": 128, "threads": 1}
RELAY: dict[str, Any] = {**SMALL, "prefill": 1, "decode": 1, "local_prefill_tokens": 0, "registration_s": 2.0, "max_queue": 8}
PROMPTS = [
    "The quick brown fox",
    "What is the capital of France?",
    "def main():",
    "The lazy dog jumps over the quick brown fox.",
]


def greedy(max_tokens: int = 8, **settings: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens, **settings)


def warm(**settings: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 2.0, "ignore_eos": True, "max_tokens": 12, **settings})


def tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


def assert_empty(llm: LLM | AsyncLLM) -> None:
    """The leak check, of either kind."""
    if llm.relay is None:
        invariants.check(llm.engine.core)
        assert not llm.engine.requests
        counts = llm.engine.kv.pool.counts()
        assert counts.free + counts.cached == counts.total
    else:
        deadline = time.monotonic() + PATIENCE_S
        while (seen := llm.relay.describe())["in_flight"] or not all(map(is_idle, seen["workers"])):
            assert time.monotonic() < deadline, f"not idle: {seen}"
            time.sleep(0.05)


@pytest.fixture(scope="module")
def folder() -> str:
    return str(tiny_model("llama"))


@pytest.fixture(scope="module")
def alone(folder: str) -> Iterator[LLM]:
    with LLM(folder, **SMALL) as llm:
        yield llm
        assert_empty(llm)


@pytest.fixture(scope="module")
def relayed(folder: str) -> Iterator[LLM]:
    with LLM(folder, **RELAY) as llm:
        yield llm
        assert_empty(llm)


@pytest.fixture(params=["alone", "relayed"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    chosen: LLM = request.getfixturevalue(request.param)
    yield chosen
    assert_empty(chosen)


# LLM, in this process and relayed


def test_prompts_are_answered_in_their_order(llm: LLM) -> None:
    outputs = llm.generate(PROMPTS, greedy())
    assert [output.prompt for output in outputs] == PROMPTS
    assert all(output.finished and len(output.outputs[0].token_ids) == 8 for output in outputs)
    assert tokens(outputs) == [tokens(llm.generate(prompt, greedy()))[0] for prompt in PROMPTS]
    ids = outputs[0].prompt_token_ids
    assert tokens(llm.generate(ids, greedy())) == tokens(outputs[:1])
    assert tokens(llm.generate([ids, PROMPTS[1]], greedy())) == tokens(outputs[:2])
    assert llm.generate([], greedy()) == []


def test_more_prompts_than_batch_and_queue_hold_are_all_answered(llm: LLM) -> None:
    outputs = llm.generate(PROMPTS * 6, greedy(3))
    assert tokens(outputs) == tokens(outputs[:4]) * 6


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    outputs = llm.generate(PROMPTS[:3], [greedy(1), greedy(2), greedy(5, logprobs=2)])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2, 5]
    assert [output.outputs[0].finish_reason for output in outputs] == [FinishReason.LENGTH] * 3
    assert outputs[0].outputs[0].logprobs is None
    logprobs = outputs[2].outputs[0].logprobs
    assert logprobs is not None
    assert [entry.top[0][0] for entry in logprobs] == outputs[2].outputs[0].token_ids
    with pytest.raises(ConfigError, match="3 prompts but 2 SamplingParams"):
        llm.generate(PROMPTS[:3], [greedy(), greedy()])


def test_a_stop_string_ends_a_sample_normally(llm: LLM) -> None:
    whole = llm.generate(PROMPTS[0], greedy(12))[0].outputs[0]
    stop = whole.text[4:6]
    cut = llm.generate(PROMPTS[0], greedy(12, stop=[stop]))[0].outputs[0]
    assert (cut.finish_reason, cut.stop) == (FinishReason.STOP, stop)
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert whole.token_ids[: len(cut.token_ids)] == cut.token_ids
    assert len(cut.token_ids) < 12


def test_one_stop_string_may_stand_alone(llm: LLM) -> None:
    stop = llm.generate(PROMPTS[0], greedy(12))[0].outputs[0].text[4:6]
    assert SamplingParams(stop=stop).stop == [stop]
    alone, listed = (llm.generate(PROMPTS[0], greedy(12, stop=given))[0].outputs[0] for given in (stop, [stop]))
    assert (alone.text, alone.stop) == (listed.text, stop)


def test_none_stands_for_no_limit_and_no_setting(llm: LLM) -> None:
    unset: dict[str, Any] = {"max_tokens": None, "stop": None, "stop_token_ids": None, "logit_bias": None, "seed": None}
    output = llm.generate(PROMPTS[0], SamplingParams(temperature=0.0, ignore_eos=True, **unset))[0]
    assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == SMALL["max_model_len"]
    assert output.outputs[0].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_tokens", "12"), ("temperature", "hot"), ("stop", [1]), ("stop_token_ids", ["a"]), ("n", 1.5), ("logprobs", True)],
)
def test_a_parameter_of_another_type_is_refused_by_name(alone: LLM, field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{field}") as refused:
        alone.generate(PROMPTS[0], SamplingParams(**{field: value}))
    assert refused.value.param == field


def test_bad_words_and_other_tokens_than_allowed_ones_are_not_written(llm: LLM) -> None:
    written = llm.generate(PROMPTS[0], greedy(12))[0].outputs[0].token_ids
    words = {token: llm.tokenizer.decode([token]) for token in written}
    alone = next(token for token, word in words.items() if llm.tokenizer.encode(word, add_special_tokens=False) == [token])
    assert alone not in llm.generate(PROMPTS[0], greedy(12, bad_words=[words[alone]]))[0].outputs[0].token_ids
    allowed = sorted({*written})[:2]
    assert {*llm.generate(PROMPTS[0], greedy(12, allowed_token_ids=allowed))[0].outputs[0].token_ids} <= {*allowed}


def test_samples_differ_and_their_seed_decides_them(llm: LLM) -> None:
    (first,) = tokens(llm.generate(PROMPTS[0], warm(n=3, seed=7)))
    assert len({tuple(sample) for sample in first}) == 3
    assert tokens(llm.generate(PROMPTS[0], warm(n=3, seed=7))) == [first]
    assert tokens(llm.generate([PROMPTS[1], PROMPTS[0]], warm(n=3, seed=7)))[1] == first
    assert tokens(llm.generate(PROMPTS[0], warm(n=3, seed=8))) != [first]
    unseeded = tokens(llm.generate([PROMPTS[0]] * 3, warm()))
    assert len({tuple(sample) for (sample,) in unseeded}) == 3


def test_best_of_gives_the_likeliest(llm: LLM) -> None:
    params = warm(n=4, seed=3, logprobs=0)
    (output,) = llm.generate(PROMPTS[0], params)
    means = {tuple(sample.token_ids): sum(e.logprob for e in sample.logprobs or []) for sample in output.outputs}
    ranked = sorted(means, key=lambda key: means[key], reverse=True)
    (best,) = llm.generate(PROMPTS[0], warm(n=2, seed=3), best_of=4)
    assert [tuple(sample.token_ids) for sample in best.outputs] == ranked[:2]
    assert [sample.index for sample in best.outputs] == [0, 1]
    assert best.outputs[0].logprobs is None
    with pytest.raises(InvalidRequestError, match="best_of must be at least n"):
        llm.generate(PROMPTS[0], warm(n=2), best_of=1)


def test_a_chat_is_rendered_by_the_models_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    answer = llm.chat(messages, greedy(4))
    text = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    assert answer.prompt_token_ids == llm.tokenizer.encode(text, add_special_tokens=False)
    assert tokens([answer]) == tokens(llm.generate(answer.prompt_token_ids, greedy(4)))


def test_several_conversations_are_answered_in_their_order(llm: LLM) -> None:
    conversations = [[{"role": "user", "content": text}] for text in PROMPTS[:3]]
    outputs = llm.chat(conversations, [greedy(2), greedy(3), greedy(4)])
    assert tokens(outputs) == tokens(
        [llm.chat(each, greedy(count)) for each, count in zip(conversations, (2, 3, 4), strict=True)]
    )
    assert llm.chat([list(conversations[0])], greedy(2))[0].outputs[0].token_ids == outputs[0].outputs[0].token_ids


def test_a_prompt_that_cannot_be_served_raises_and_leaves_nothing_behind(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="token ids must be from 0") as caught:
        llm.generate([*PROMPTS, [VOCAB_SIZE + 5]], greedy(30))
    assert caught.value.param == "prompt"
    assert_empty(llm)
    with pytest.raises(InvalidRequestError, match="more than the limit of 128"):
        llm.generate([[5] * 300], greedy())
    with pytest.raises(InvalidRequestError, match="temperature"):
        llm.generate(PROMPTS, SamplingParams(temperature=-1.0))
    assert len(llm.generate(PROMPTS, greedy())) == 4


def test_progress_counts_prompts(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(PROMPTS, greedy(2), progress=True)
    assert "generating" in capsys.readouterr().err
    llm.generate(PROMPTS, greedy(2))
    assert capsys.readouterr().err == ""


def test_a_cached_prompt_says_so(llm: LLM) -> None:
    prompt = list(range(10, 60))
    llm.generate(prompt, greedy(2))
    assert llm.generate(prompt, greedy(2))[0].cached_tokens >= 32


# The relay against this process


def test_the_relay_gives_the_same_tokens_as_one_process(alone: LLM, relayed: LLM) -> None:
    assert relayed.relay is not None
    prompts: list[str | list[int]] = [*PROMPTS, [5], list(range(3, 90)), list(range(3, 20)), list(range(40, 104))]
    cases = [
        greedy(12),
        greedy(6, logprobs=3),
        warm(n=2, seed=11),
        warm(seed=5, repetition_penalty=1.3, presence_penalty=0.5),
        greedy(1),
    ]
    for params in cases:
        expected, got = alone.generate(prompts, params), relayed.generate(prompts, params)
        assert tokens(got) == tokens(expected)
        texts = [[sample.text for sample in output.outputs] for output in expected]
        assert [[sample.text for sample in output.outputs] for output in got] == texts
    workers = {worker["role"]: worker for worker in relayed.relay.describe()["workers"]}
    assert set(workers) == {"prefill", "decode"}
    assert workers["decode"]["transfers"]["done"] > 0, "nothing was handed over"


# Ends


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_closed_llm_serves_nothing(folder: str) -> None:
    llm = LLM(folder, **SMALL)
    llm.close()
    llm.close()
    with pytest.raises(EngineClosedError, match="this LLM is closed"):
        llm.generate("a", greedy())


ENDS = {
    "exit": "assert 'torch' not in sys.modules",  # the model is the workers' business alone
    "drop": "del llm; gc.collect(); assert not psutil.Process().children()",
    "kill": "os.kill(os.getpid(), signal.SIGKILL)",
}


@pytest.mark.parametrize("end", [end if end == "kill" else pytest.param(end, marks=pytest.mark.long) for end in ENDS])
def test_no_worker_outlives_its_process(folder: str, end: str) -> None:
    script = f"""
        import gc, os, signal, sys
        import psutil
        from kvrelay import LLM, SamplingParams
        llm = LLM({folder!r}, **{RELAY!r})
        llm.generate("The quick", SamplingParams(max_tokens=2))
        print(*[worker["pid"] for worker in llm.relay.describe()["workers"]], flush=True)
        {ENDS[end]}
        """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert result.returncode == (-signal.SIGKILL if end == "kill" else 0), result.stderr
    pids = [int(pid) for pid in result.stdout.split()]
    assert len(pids) == 2
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids))


def test_a_worker_that_cannot_start_is_an_error_with_its_reason(folder: str) -> None:
    before = len(children())
    with pytest.raises(WorkerDiedError, match="--tp 64"):
        LLM(folder, **RELAY, tp=64)
    assert len(children()) == before


def test_a_lost_worker_is_replaced_and_closing_ends_them_all(folder: str) -> None:
    before = {process.pid for process in children()}
    llm = LLM(folder, **RELAY)
    assert llm.relay is not None
    with pytest.raises(ConfigError, match="in worker processes"):
        llm.engine  # noqa: B018
    expected = tokens(llm.generate(PROMPTS, greedy()))
    decode = next(worker for worker in llm.relay.describe()["workers"] if worker["role"] == "decode")
    os.kill(decode["pid"], signal.SIGKILL)
    with contextlib.suppress(RequestError):  # what was under way goes on elsewhere; what comes while nobody is up fails
        llm.generate(PROMPTS * 10, greedy(60))

    def serves_again() -> bool:
        with contextlib.suppress(RequestError):
            return tokens(llm.generate(PROMPTS, greedy())) == expected
        return False

    until(serves_again)
    assert_empty(llm)
    started = [process for process in children() if process.pid not in before]
    assert len(started) == 2
    llm.close()
    llm.close()
    assert all(map(gone, started))
    for call in (lambda: llm.generate("a", greedy()), llm.relay.describe):
        with pytest.raises(EngineClosedError):
            call()


# Options


def test_options_are_those_of_serve(folder: str) -> None:
    chosen = split_options("m", {"prefill": 1, "decode": 2, "mode": "read", "transfer": "shm", "block_size": 32})
    assert chosen.relay
    assert (chosen.cluster.decode, chosen.router.mode, chosen.engine.block_size) == (2, "read", 32)
    assert not split_options("m", {"prefill": 0, "decode": 0}).relay
    assert split_options("m", {}).engine == EngineOptions()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"max_bacth": 3}, "unknown option 'max_bacth'; there are attention, block_size"),
        ({"port": 8000}, "unknown option 'port'"),
        ({"mode": "read"}, "mode is about worker processes: give prefill=1, decode=1"),
        ({"transfer": "nixl"}, "transfer is about worker processes"),
        ({"max_batch": -1}, "max_batch"),
        ({"mode": "push", "prefill": 1, "decode": 1}, "mode"),
        ({"prefill": 1}, "prefill needs --decode"),
        ({"whole": 1, "decode": 1}, "--whole cannot be mixed"),
    ],
)
def test_a_wrong_option_is_refused_by_name(folder: str, options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        LLM(folder, **{"progress": False, **options})


# AsyncLLM


def until_empty(llm: AsyncLLM) -> None:
    if llm.relay is None:
        until(lambda: not llm.engine.has_work)
    assert_empty(llm)


@contextlib.asynccontextmanager
async def open_async(folder: str, **settings: Any) -> AsyncIterator[AsyncLLM]:
    llm = AsyncLLM(folder, **{**SMALL, **settings})
    try:
        yield llm
        await asyncio.to_thread(until_empty, llm)
    finally:
        llm.close()


async def last(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    outputs = [output async for output in stream]
    assert [output.finished for output in outputs[:-1]] == [False] * (len(outputs) - 1)
    return outputs[-1]


async def streams_grow_side_by_side(llm: AsyncLLM, alone: LLM) -> None:
    """To what a batch gives."""
    expected = alone.generate(PROMPTS, greedy(10))
    seen: list[RequestOutput] = [output async for output in llm.generate(PROMPTS[0], greedy(10), request_id="mine")]
    assert {output.request_id for output in seen} == {"mine"}
    lengths = [len(output.outputs[0].token_ids) for output in seen]
    assert lengths == sorted(set(lengths))
    assert len(lengths) > 1
    assert expected[0].outputs[0].text.startswith(seen[0].outputs[0].text)
    got = await asyncio.gather(*(last(llm.generate(prompt, greedy(10))) for prompt in PROMPTS))
    assert tokens(list(got)) == tokens(expected)
    assert got[0].outputs[0].text == expected[0].outputs[0].text
    many = await asyncio.gather(*(last(llm.generate(prompt, greedy(3))) for prompt in PROMPTS * 5))
    assert all(output.finished for output in many)


async def requests_end_by_stop_string_abort_and_leaving(llm: AsyncLLM, alone: LLM) -> None:
    whole = alone.generate(PROMPTS[0], greedy(20))[0].outputs[0].text
    stopped = await last(llm.generate(PROMPTS[0], greedy(20, stop=[whole[5:7]])))
    assert stopped.outputs[0].finish_reason is FinishReason.STOP
    assert stopped.outputs[0].text == whole[: whole.index(whole[5:7])]

    seen: list[RequestOutput] = []
    async for output in llm.generate(PROMPTS[0], greedy(100, n=2), request_id="long"):
        seen.append(output)
        if len(seen) == 2:
            llm.abort("long")
    assert [sample.finish_reason for sample in seen[-1].outputs] == [FinishReason.ABORT] * 2
    assert len(seen[-1].outputs[0].token_ids) < 100
    llm.abort("long")
    llm.abort("nobody")

    stream = llm.generate(PROMPTS[1], greedy(100), request_id="left")
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    assert (await last(llm.generate(PROMPTS[1], greedy(4), request_id="left"))).finished


async def an_id_names_one_stream_and_errors_leave_nothing(llm: AsyncLLM, alone: LLM) -> None:
    stream = llm.generate(PROMPTS[0], greedy(50), request_id="same")
    await anext(stream)
    with pytest.raises(ConfigError, match="'same' is running already"):
        await last(llm.generate(PROMPTS[1], greedy(), request_id="same"))
    assert (await last(stream)).finished
    with pytest.raises(InvalidRequestError, match="token ids must be"):
        await last(llm.generate([VOCAB_SIZE + 1], greedy(), request_id="same"))
    with pytest.raises(InvalidRequestError, match="best_of"):
        await last(llm.generate("a", greedy(n=2), best_of=1, request_id="same"))
    assert (await last(llm.generate("a", greedy(2), request_id="same"))).finished


async def closing_ends_open_streams_with_an_error(llm: AsyncLLM) -> None:
    stream = llm.generate(PROMPTS[0], greedy(100))
    await anext(stream)
    llm.close()
    with pytest.raises(InternalError, match="closed"):
        async for _ in stream:
            pass
    llm.close()
    with pytest.raises(EngineClosedError, match="this AsyncLLM is closed"):
        await anext(llm.generate("a", greedy()))


STREAMS = [
    streams_grow_side_by_side,
    requests_end_by_stop_string_abort_and_leaving,
    an_id_names_one_stream_and_errors_leave_nothing,
]


@pytest.mark.parametrize("behaviour", STREAMS, ids=lambda behaviour: behaviour.__name__)
async def test_streams_of_a_model_in_this_process(folder: str, behaviour: Callable[..., Any], alone: LLM) -> None:
    async with open_async(folder) as llm:
        await behaviour(llm, alone)


async def test_streams_of_a_model_in_worker_processes(folder: str, alone: LLM) -> None:
    """All in one test: starting workers takes seconds."""
    llm = AsyncLLM(folder, **RELAY)
    try:
        for behaviour in STREAMS:
            await behaviour(llm, alone)
            await asyncio.to_thread(until_empty, llm)
        await closing_ends_open_streams_with_an_error(llm)
    finally:
        llm.close()


async def test_closing_a_model_in_this_process(folder: str) -> None:
    await closing_ends_open_streams_with_an_error(AsyncLLM(folder, **SMALL))


async def test_priorities_trace_headers_and_best_of_reach_the_engine(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_async(folder, max_batch=2) as llm:
        submitted = []
        original = llm.engine.submit
        monkeypatch.setattr(llm.engine, "submit", lambda submit: (submitted.append(submit), original(submit)))
        order: list[str] = []

        async def run(name: str, priority: int) -> None:
            headers = {"traceparent": f"00-{name}"}
            await last(llm.generate(PROMPTS[0], greedy(40), request_id=name, priority=priority, trace_headers=headers))
            order.append(name)

        busy = [asyncio.create_task(run(name, 0)) for name in ("first", "second")]
        await asyncio.sleep(0)
        await asyncio.gather(run("late", 9), run("middle", 5), run("urgent", -5), *busy)
        assert [name for name in order if name in ("urgent", "middle", "late")] == ["urgent", "middle", "late"]
        assert {submit.external_id: submit.trace for submit in submitted}["late"] == {"traceparent": "00-late"}
        best = await last(llm.generate(PROMPTS[0], warm(seed=3), best_of=2))
        assert len(best.outputs) == 1
        assert submitted[-1].params.n == 2
