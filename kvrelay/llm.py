"""The offline API: a model in this process, without a server.

    llm = LLM("smollm2")
    for output in llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=8)):
        print(output.outputs[0].text)

`LLM` computes in the calling thread. `AsyncLLM` computes in a thread of its own and gives asynchronous streams.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import msgspec

from kvrelay.config import EngineOptions, ModelOptions, read_environment
from kvrelay.engine.engine import Engine
from kvrelay.errors import ConfigError, EngineClosedError, InternalError, request_error
from kvrelay.ids import RequestId, new_request_id
from kvrelay.log import Log
from kvrelay.outputs import Assembly, RequestOutput, prepare
from kvrelay.progress import Progress, Silent
from kvrelay.router.stream import RequestStream
from kvrelay.sampling import SamplingParams
from kvrelay.states import FinishReason
from kvrelay.wire.serving import Abort, Finish, StepOutputs, Submit
from kvrelay.worker.whole import build_engine

log = Log("llm")

Prompt = str | list[int]


class _Base:
    """Loads the model. Options are those of `kvrelay serve`, with underscores: LLM("smollm2", max_model_len=1024)."""

    def __init__(self, model: str = "smollm2", *, progress: bool = True, **options: Any) -> None:
        model_options, engine_options = _split(model, options)
        self._progress = _progress(progress)
        self.tokenizer, self._engine = build_engine(model_options, engine_options, read_environment(), self._progress)

    @property
    def engine(self) -> Engine:
        return self._engine


class LLM(_Base):
    """Generates for lists of prompts."""

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        best_of: int | None = None,
        priority: int = 0,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """One output per prompt, in their order. Prompts are texts or lists of token ids; a single one may stand alone.

        A seed of 0, the default, draws a new one for each prompt that is sampled. The first prompt that cannot be served
        raises, and nothing of the others is left behind.
        """
        batch = _as_batch(prompts)
        settings = _as_params(params, len(batch))
        jobs = [prepare(self.tokenizer, prompt, sampling, best_of) for prompt, sampling in zip(batch, settings, strict=True)]
        assemblies: dict[RequestId, Assembly] = {}
        for index, job in enumerate(jobs):
            request_id = new_request_id()
            assemblies[request_id] = Assembly(self.tokenizer, f"offline-{index}", request_id, job)
        shown = self._progress if progress is None else _progress(progress)
        shown.start("generating", len(jobs), unit="prompts")
        try:
            self._run(assemblies, priority, shown)
        finally:
            self._engine.abort(list(assemblies))
            while self._engine.has_work:
                self._engine.step()
            shown.done()
        return [assembly.output() for assembly in assemblies.values()]

    def chat(self, messages: Sequence[dict[str, Any]], params: SamplingParams | None = None, **settings: Any) -> RequestOutput:
        """The model's answer to a conversation."""
        text = self.tokenizer.render_chat(messages)
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        return self.generate([tokens], params, **settings)[0]

    def close(self) -> None:
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _run(self, assemblies: Mapping[RequestId, Assembly], priority: int, progress: Progress) -> None:
        waiting = list(assemblies.items())[::-1]
        open_requests = 0
        while waiting or open_requests:
            while waiting and self._engine.scheduler.num_waiting < self._engine.options.max_queue:
                request_id, assembly = waiting.pop()
                self._engine.submit(_submit(request_id, f"{request_id}", assembly, priority, {}))
                open_requests += 1
            step = self._engine.step()
            for failure in step.failures:
                raise request_error(failure.kind, failure.message, failure.param)
            for output in step.outputs:
                assembly = assemblies[output.request_id]
                was_finished = assembly.finished
                finish = assembly.take(output)
                if finish is not None:
                    self._engine.finish(finish)
                if assembly.finished and not was_finished:
                    open_requests -= 1
                    progress.advance(1)


class AsyncLLM(_Base):
    """Generates streams on an event loop. Make it inside a running loop; every call comes from that loop."""

    def __init__(self, model: str = "smollm2", *, progress: bool = True, **options: Any) -> None:
        super().__init__(model, progress=progress, **options)
        self._loop = asyncio.get_running_loop()
        self._inbox: queue.SimpleQueue[Submit | Abort | Finish | None] = queue.SimpleQueue()
        self._streams: dict[RequestId, RequestStream] = {}
        self._external: dict[str, RequestStream] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="kvrelay-engine", daemon=True)
        self._thread.start()

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        best_of: int | None = None,
        priority: int = 0,
        trace_headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Everything generated so far, each time there is more, until `finished`. Leaving the loop early aborts."""
        if self._closed:
            raise EngineClosedError("this AsyncLLM is closed")
        name = request_id or f"cmpl-{uuid.uuid4()}"
        if name in self._external:
            raise ConfigError(f"a request with the id {name!r} is running already")
        job = prepare(self.tokenizer, prompt, params or SamplingParams(), best_of)
        internal = new_request_id()
        assembly = Assembly(self.tokenizer, name, internal, job)
        stream = RequestStream(internal, job.params.n, self, prefill="local", decode="local")
        self._streams[internal] = self._external[name] = stream
        self._inbox.put(_submit(internal, name, assembly, priority, dict(trace_headers or {})))
        try:
            while outputs := await stream.next():
                for output in outputs:
                    finish = assembly.take(output)
                    if finish is not None:
                        stream.finish(finish.sample, finish.keep_tokens, finish.reason)
                yield assembly.output()
        finally:
            stream.abort()
            self._external.pop(name, None)

    def abort(self, request_id: str) -> None:
        """Ends a request by the id given to `generate`; its stream ends with the finish reason `abort`. Unknown: no error."""
        stream = self._external.get(request_id)
        if stream is not None and not stream.done:
            self._inbox.put(Abort(request_ids=[stream.request_id]))

    def close(self) -> None:
        """Ends what still runs with an error, and the engine's thread."""
        if self._closed:
            return
        self._closed = True
        self._inbox.put(None)
        self._thread.join()
        for stream in list(self._streams.values()):
            stream.fail(InternalError("the engine was closed"))
        self._engine.close()

    # StreamOwner

    def stream_finished(self, stream: RequestStream) -> None:
        self._streams.pop(stream.request_id, None)

    def send_finish(self, stream: RequestStream, sample: int, keep_tokens: int, reason: FinishReason) -> None:
        self._inbox.put(Finish(request_id=stream.request_id, sample=sample, keep_tokens=keep_tokens, reason=reason))

    def send_abort(self, stream: RequestStream) -> None:
        self._inbox.put(Abort(request_ids=[stream.request_id]))

    # The engine's thread

    def _work(self) -> None:
        engine = self._engine
        while self._take_messages(block=not engine.has_work):
            try:
                step = engine.step()
            except Exception as error:  # the thread's main: every open request gets an answer
                log.exception("the engine failed")
                step = engine.fail_all(f"the engine failed: {error}")
            if step.outputs or step.failures:
                self._loop.call_soon_threadsafe(self._deliver, step)

    def _take_messages(self, *, block: bool) -> bool:
        """Hands everything that arrived to the engine. False when it is time to end."""
        while True:
            try:
                message = self._inbox.get(block=block)
            except queue.Empty:
                return True
            block = False
            match message:
                case None:
                    return False
                case Submit():
                    self._engine.submit(message)
                case Abort():
                    self._engine.abort(message.request_ids)
                case Finish():
                    self._engine.finish(message)

    def _deliver(self, step: StepOutputs) -> None:
        for output in step.outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.deliver(output)
        for failure in step.failures:
            stream = self._streams.get(failure.request_id)
            if stream is not None:
                stream.fail(request_error(failure.kind, failure.message, failure.param))


def _submit(request_id: RequestId, external_id: str, assembly: Assembly, priority: int, trace: dict[str, str]) -> Submit:
    return Submit(
        request_id=request_id,
        external_id=external_id,
        prompt=assembly.job.tokens,
        params=assembly.job.params,
        priority=priority,
        trace=trace,
    )


def _split(model: str, options: dict[str, Any]) -> tuple[ModelOptions, EngineOptions]:
    groups: tuple[type[ModelOptions], type[EngineOptions]] = (ModelOptions, EngineOptions)
    names = [{field.name for field in msgspec.structs.fields(group)} for group in groups]
    unknown = set(options) - names[0] - names[1]
    if unknown:
        raise ConfigError(f"unknown option {sorted(unknown)[0]!r}; there are {', '.join(sorted(names[0] | names[1]))}")
    values = {"model": model, **options}
    try:
        model_options = msgspec.convert({k: v for k, v in values.items() if k in names[0]}, ModelOptions)
        engine_options = msgspec.convert({k: v for k, v in values.items() if k in names[1]}, EngineOptions)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error)) from error
    return model_options, engine_options


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    batch = list(prompts)
    if batch and isinstance(batch[0], int):
        return [batch]  # type: ignore[list-item]
    return batch  # type: ignore[return-value]


def _as_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise ConfigError(f"{count} prompts but {len(params)} SamplingParams")
    return list(params)


def _progress(shown: bool) -> Progress:
    if not shown:
        return Silent()
    from kvrelay.console import ConsoleProgress

    return ConsoleProgress()
