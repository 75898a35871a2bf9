"""The thread behind an LLM: requests that wait for room, failures, ends in the middle, and Ctrl-C."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from patience import PATIENCE_S, until
from test_llm import PROMPTS, SMALL, assert_empty, greedy, last, tokens, until_empty
from tiny_models import tiny_model

from kvrelay.config import read_environment
from kvrelay.engine.engine import Engine
from kvrelay.errors import ConfigError, EngineClosedError, InternalError, NotFoundError
from kvrelay.offline.llm import LLM, AsyncLLM
from kvrelay.offline.options import split_options
from kvrelay.offline.service import Service, open_engine
from kvrelay.progress import Silent
from kvrelay.states import FinishReason
from kvrelay.wire.serving import StepOutputs
from kvrelay.worker.whole import build_engine


@pytest.fixture(scope="module")
def folder() -> str:
    return str(tiny_model("llama"))


@pytest.fixture
def llm(folder: str) -> Iterator[LLM]:
    with LLM(folder, **SMALL) as llm:
        yield llm
        assert_empty(llm)


def failing_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    original = engine.step
    steps = iter([lambda: (_ for _ in ()).throw(ValueError("no such tensor"))])

    def step() -> StepOutputs:
        return next(steps, original)()

    monkeypatch.setattr(engine, "step", step)


def test_an_engine_that_fails_ends_its_requests_and_goes_on(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tokens(llm.generate(PROMPTS, greedy()))
    failing_once(llm.engine, monkeypatch)
    with pytest.raises(InternalError, match="the engine failed: no such tensor"):
        llm.generate(PROMPTS, greedy())
    assert tokens(llm.generate(PROMPTS, greedy())) == expected


def test_a_queue_of_one_is_enough_for_many(folder: str) -> None:
    with LLM(folder, **SMALL, max_queue=1) as llm:
        outputs = llm.generate(PROMPTS * 3, greedy(3, n=2))
        assert tokens(outputs) == tokens(outputs[:4]) * 3
        assert_empty(llm)


def test_ctrl_c_ends_a_call_and_leaves_nothing_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the main thread: the wait for the result is what is interrupted, with the work under way. What the call leaves is
    looked at when the service's thread has done with it, which the interrupted caller does not wait for."""
    expected = tokens(llm.generate(PROMPTS, greedy()))
    begin, over = llm._service._begin, threading.Event()

    async def watched(work: Any) -> None:
        try:
            await work
        finally:
            over.set()

    def interrupted(work: Any) -> Any:
        future = begin(watched(work))

        class Interrupted:
            cancel = future.cancel

            def result(self) -> None:
                until(lambda: llm.engine.has_work)
                raise KeyboardInterrupt

        return Interrupted()

    with monkeypatch.context() as patch:
        patch.setattr(llm._service, "_begin", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS * 50, greedy(60), keep_kv=True)
    assert over.wait(PATIENCE_S)
    assert not llm._service._streams
    assert_empty(llm)
    assert tokens(llm.generate(PROMPTS, greedy())) == expected


def test_closing_from_another_thread_ends_a_call_with_an_error(folder: str) -> None:
    llm = LLM(folder, **SMALL)
    threading.Timer(0.3, llm.close).start()
    with pytest.raises(InternalError, match="closed"):
        llm.generate(PROMPTS * 100, greedy(100))
    llm.close()


def test_one_that_is_dropped_ends_its_thread(folder: str) -> None:
    llm = LLM(folder, **SMALL)
    llm.generate(PROMPTS, greedy(2))
    thread, gone = llm._service._thread, weakref.ref(llm)
    del llm
    gc.collect()
    assert gone() is None
    assert not thread.is_alive()


def test_a_backend_that_cannot_be_opened_says_why(folder: str) -> None:
    with pytest.raises(ConfigError, match="/nowhere"):
        LLM(folder, progress=False, whole=1, cluster_key="/nowhere")
    assert not [thread for thread in threading.enumerate() if thread.name == "kvrelay-llm"]


def test_a_model_in_this_process_has_no_workers(folder: str) -> None:
    options = split_options(folder, {name: value for name, value in SMALL.items() if name != "progress"})
    _, engine = build_engine(options.model, options.engine, read_environment(), Silent())
    service = Service(open_engine(engine, options), max_open=2)
    try:
        shown = service.describe()
        assert (shown["ready"], shown["in_flight"], shown["workers"]) == (True, 0, [])
        with pytest.raises(NotFoundError, match="no workers"):
            service.backend.drain("decode-1")
    finally:
        service.close()
    with pytest.raises(EngineClosedError):
        service.describe()


async def test_a_request_that_waits_for_room_can_be_aborted_left_and_closed(folder: str) -> None:
    llm = AsyncLLM(folder, **SMALL, max_queue=1)
    try:
        busy = llm.generate(PROMPTS[0], greedy(100))
        await anext(busy)
        waiting = {
            name: asyncio.create_task(last(llm.generate(PROMPTS[1], greedy(), request_id=name, keep_kv=True))) for name in "ab"
        }
        await asyncio.sleep(0.05)
        llm.abort("a")
        aborted = (await waiting["a"]).outputs[0]
        assert (aborted.token_ids, aborted.finish_reason) == ([], FinishReason.ABORT)
        assert aborted.continuation is not None
        assert (aborted.continuation.kept, aborted.continuation.reason) == (False, "it was aborted before it began")
        waiting["b"].cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting["b"]
        await busy.aclose()  # type: ignore[attr-defined]
        assert (await last(llm.generate(PROMPTS[1], greedy(3)))).finished
        await asyncio.to_thread(until_empty, llm)
        await asyncio.to_thread(until, lambda: not llm._service._streams)

        again = llm.generate(PROMPTS[0], greedy(100))
        await anext(again)
        stuck = asyncio.create_task(last(llm.generate(PROMPTS[1], greedy())))
        await asyncio.sleep(0.05)
    finally:
        llm.close()
    with pytest.raises(InternalError, match="closed"):
        await stuck
    with pytest.raises(InternalError, match="closed"):
        await anext(again)


async def test_streams_that_nobody_reads_make_room_for_others(folder: str) -> None:
    llm = AsyncLLM(folder, **SMALL, max_queue=2)
    try:
        streams = [llm.generate(PROMPTS[0], greedy(6)) for _ in range(8)]
        firsts = [await anext(stream) for stream in streams]
        assert all(first.outputs[0].token_ids for first in firsts)
        assert [(await last(stream)).finished for stream in streams] == [True] * 8
    finally:
        llm.close()


async def test_cancelling_a_reader_aborts_its_request(folder: str) -> None:
    llm = AsyncLLM(folder, **SMALL)
    try:
        reader = asyncio.create_task(last(llm.generate(PROMPTS[0], greedy(100), request_id="x")))
        while "x" not in llm._running:
            await asyncio.sleep(0)
        await asyncio.sleep(0.02)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        await asyncio.to_thread(until_empty, llm)
        assert not llm._running
    finally:
        llm.close()
