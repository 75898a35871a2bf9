"""The offline API: a model without a server.

    llm = LLM("smollm2")
    for output in llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=8)):
        print(output.outputs[0].text)

`LLM` computes in the calling thread. `AsyncLLM` computes in a thread of its own and gives asynchronous streams. With counts of
workers, as in `LLM("smollm2", prefill=1, decode=1)`, both start worker processes and relay through them as `kvrelay serve`
does; this process then computes nothing and does not load PyTorch. `close()`, or the end of the process, ends the workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from kvrelay.cluster import LocalCluster
from kvrelay.engine.engine import Engine
from kvrelay.errors import ConfigError, EngineClosedError, InternalError, request_error
from kvrelay.ids import RequestId, new_request_id
from kvrelay.offline import ClusterQueue, EngineHere, EngineThread, Message, Turns, open_cluster, open_engine, split_options
from kvrelay.outputs import Answers, Assembly, RequestOutput, prepare
from kvrelay.progress import Progress, Silent
from kvrelay.router.stream import RequestStream
from kvrelay.sampling import SamplingParams
from kvrelay.states import FinishReason
from kvrelay.text.tokenizer import Tokenizer
from kvrelay.wire.serving import Abort, Finish, Submit

Prompt = str | list[int]


class _Base:
    """Options are those of `kvrelay serve`, with underscores: LLM("smollm2", max_model_len=1024)."""

    tokenizer: Tokenizer
    relay: LocalCluster | None = None  # the worker processes, if there are any
    _engine: Engine | None = None
    _closed = False

    @property
    def engine(self) -> Engine:
        """Of a model in this process."""
        if self._engine is None:
            raise ConfigError("the engines of this model are in worker processes")
        return self._engine

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError(f"this {type(self).__name__} is closed")


class LLM(_Base):
    """Generates for lists of prompts. One call at a time."""

    def __init__(self, model: str = "smollm2", *, progress: bool = True, **options: Any) -> None:
        """Returns when the model is loaded. With worker processes it raises WorkerDiedError if one of them cannot start."""
        chosen = split_options(model, options)
        self._progress = _progress(progress)
        self._turns: Turns
        if not chosen.relay:
            self.tokenizer, self._engine = open_engine(chosen, self._progress)
            self._turns = EngineHere(self._engine)
            return
        self._turns = answers = ClusterQueue()
        self.tokenizer, self.relay = open_cluster(chosen, self._progress, answers.put, shown=progress)
        answers.cluster = self.relay
        weakref.finalize(self, self.relay.close)  # an LLM that is dropped leaves no process either

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
        self._check_open()
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
        except BaseException:  # also Ctrl-C: the next call must not meet what is left of this one
            self._abandon(assemblies)
            raise
        finally:
            shown.done()
        self._turns.settle()
        return [assembly.output() for assembly in assemblies.values()]

    def chat(self, messages: Sequence[dict[str, Any]], params: SamplingParams | None = None, **settings: Any) -> RequestOutput:
        """The model's answer to a conversation."""
        text = self.tokenizer.render_chat(messages)
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        return self.generate([tokens], params, **settings)[0]

    def close(self) -> None:
        """May be called twice."""
        if not self._closed:
            self._closed = True
            self._turns.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _run(self, assemblies: Mapping[RequestId, Assembly], priority: int, progress: Progress) -> None:
        waiting = list(assemblies.items())[::-1]
        open_requests = 0
        while waiting or open_requests:
            while waiting and self._turns.has_room:
                request_id, assembly = waiting.pop()
                self._turns.send(_submit(request_id, f"{request_id}", assembly, priority, {}))
                open_requests += 1
            ended = self._take(assemblies, self._turns.next())
            open_requests -= ended
            progress.advance(ended)

    def _take(self, assemblies: Mapping[RequestId, Assembly], answers: Answers) -> int:
        """Returns how many requests ended."""
        for failure in answers.failures:
            if failure.request_id in assemblies:
                raise request_error(failure.kind, failure.message, failure.param)
        num_ended = 0
        for output in answers.outputs:
            assembly = assemblies.get(output.request_id)
            if assembly is None or assembly.finished:
                continue  # of a call that was given up, or a sample that ran a little further than its stop string
            finish = assembly.take(output)
            if finish is not None:
                self._turns.send(finish)
            num_ended += assembly.finished
        return num_ended

    def _abandon(self, assemblies: Mapping[RequestId, Assembly]) -> None:
        with contextlib.suppress(EngineClosedError):  # worker processes that are gone hold nothing
            self._turns.send(Abort(request_ids=list(assemblies)))
            self._turns.settle()


class AsyncLLM(_Base):
    """Generates streams on an event loop. Make it inside a running loop; every call comes from that loop."""

    def __init__(self, model: str = "smollm2", *, progress: bool = True, **options: Any) -> None:
        """As `LLM`."""
        chosen = split_options(model, options)
        shown = _progress(progress)
        self._loop = asyncio.get_running_loop()
        self._streams: dict[RequestId, RequestStream] = {}
        self._external: dict[str, RequestStream] = {}
        self._service: EngineThread | LocalCluster
        if chosen.relay:
            self.tokenizer, self.relay = open_cluster(chosen, shown, self._hand_over, shown=progress)
            self._service = self.relay
        else:
            self.tokenizer, self._engine = open_engine(chosen, shown)
            self._service = EngineThread(self._engine, self._hand_over)

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
        self._check_open()
        name = request_id or f"cmpl-{uuid.uuid4()}"
        if name in self._external:
            raise ConfigError(f"a request with the id {name!r} is running already")
        job = prepare(self.tokenizer, prompt, params or SamplingParams(), best_of)
        internal = new_request_id()
        assembly = Assembly(self.tokenizer, name, internal, job)
        self._service.send(_submit(internal, name, assembly, priority, dict(trace_headers or {})))
        stream = RequestStream(internal, job.params.n, self, prefill="local", decode="local")
        self._streams[internal] = self._external[name] = stream
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
            self._tell(Abort(request_ids=[stream.request_id]))

    def close(self) -> None:
        """Ends what still runs with an error, then the engine's thread, or the worker processes. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._service.close()
        for stream in list(self._streams.values()):
            stream.fail(InternalError("the engine was closed"))

    # StreamOwner

    def stream_finished(self, stream: RequestStream) -> None:
        self._streams.pop(stream.request_id, None)

    def send_finish(self, stream: RequestStream, sample: int, keep_tokens: int, reason: FinishReason) -> None:
        self._tell(Finish(request_id=stream.request_id, sample=sample, keep_tokens=keep_tokens, reason=reason))

    def send_abort(self, stream: RequestStream) -> None:
        self._tell(Abort(request_ids=[stream.request_id]))

    def _tell(self, message: Message) -> None:
        with contextlib.suppress(EngineClosedError):  # then there is nothing left that could be ended
            self._service.send(message)

    # Answers, from the thread of whoever serves to ours

    def _hand_over(self, answers: Answers) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._deliver, answers)

    def _deliver(self, answers: Answers) -> None:
        for output in answers.outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.deliver(output)
        for failure in answers.failures:
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
