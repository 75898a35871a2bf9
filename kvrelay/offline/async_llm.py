"""The offline API on an event loop (`llm.py` tells what it is). The engine computes in a thread, or in worker processes."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any

from kvrelay.errors import ConfigError, EngineClosedError, InternalError, RequestError
from kvrelay.ids import RequestId, new_request_id
from kvrelay.launch.cluster import LocalCluster
from kvrelay.offline.backends import EngineThread, Message, open_cluster, open_engine, split_options
from kvrelay.offline.base import Base, KeepKV, Prompt, origin_of, shown_progress, submit_of, take_words
from kvrelay.offline.outputs import Answers, Assembly, Job, RequestOutput, prepare
from kvrelay.offline.parents import OfflineParent, ParentName
from kvrelay.router.stream import RequestStream
from kvrelay.sampling import SamplingParams
from kvrelay.states import FinishReason
from kvrelay.wire.serving import Abort, Failure, Finish, KeptNews, ReleaseKept, of_kind


class AsyncLLM(Base):
    """Generates streams on an event loop. Make it inside a running loop; every call comes from that loop."""

    def __init__(self, model: str = "smollm2", *, progress: bool = True, **options: Any) -> None:
        """As `LLM`."""
        chosen = split_options(model, options)
        super().__init__(chosen)
        shown = shown_progress(progress)
        self._loop = asyncio.get_running_loop()
        self._streams: dict[RequestId, RequestStream] = {}
        self._external: dict[str, RequestStream] = {}
        self._assemblies: dict[RequestId, Assembly] = {}
        self._heard: dict[RequestId, asyncio.Event] = {}  # of those whose KV is to be kept
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
        keep_kv: KeepKV = None,
        trace_headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Everything generated so far, each time there is more, until `finished`. Leaving the loop early aborts.

        With `keep_kv` the last outputs have a `continuation`. What was left early can be continued from by its `request_id`.
        """
        self._check_open()
        name = self._new_name(request_id)
        job = prepare(self.tokenizer, prompt, params or SamplingParams(), best_of, self._keep_ttl_s(keep_kv))
        async with contextlib.aclosing(self._generate(name, job, priority, trace_headers)) as outputs:
            async for output in outputs:
                yield output

    async def generate_continuation(
        self,
        parent: ParentName,
        suffix: str = "",
        params: SamplingParams | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        request_id: str | None = None,
        priority: int = 0,
        keep_kv: KeepKV = None,
        trace_headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """As `LLM.generate_continuation`, for one parent. One that still runs is waited for; its `request_id` names it too."""
        self._check_open()
        name, ttl_s = self._new_name(request_id), self._keep_ttl_s(keep_kv)
        found = self._parents.find(parent)
        if isinstance(found, OfflineParent):
            await self._until_ended(found)
            self._check_open()
            found = self._parents.find(found.kept_id)  # raises if it has failed
        job = self._child_job(origin_of(found), suffix, token_ids, params or SamplingParams(), ttl_s)
        async with contextlib.aclosing(self._generate(name, job, priority, trace_headers)) as outputs:
            async for output in outputs:
                yield output

    def release(self, parent: ParentName) -> None:
        """As `LLM.release`."""
        self._check_open()
        kept_id = self._parents.lease_of(parent)
        self._tell(ReleaseKept(kept_ids=[kept_id]))
        self._parents.forget(kept_id, "it was released")

    def _new_name(self, request_id: str | None) -> str:
        name = request_id or f"cmpl-{uuid.uuid4()}"
        if name in self._external:
            raise ConfigError(f"a request with the id {name!r} is running already")
        return name

    async def _until_ended(self, parent: OfflineParent) -> None:
        if parent.tokens is None:
            ended = asyncio.Event()
            parent.waiting.append(ended.set)
            await ended.wait()

    async def _generate(
        self, name: str, job: Job, priority: int, trace_headers: Mapping[str, str] | None
    ) -> AsyncGenerator[RequestOutput, None]:
        internal, heard = new_request_id(), asyncio.Event()
        assembly = Assembly(self.tokenizer, name, internal, job)
        self._service.send(submit_of(internal, name, assembly, priority, dict(trace_headers or {})))
        self._assemblies[internal] = assembly
        if job.keep is not None:
            self._heard[internal] = heard
            self._parents.begun(name, job.keep.kept_ids)
        stream = RequestStream(internal, job.params.n, self, prefill="local", decode="local")
        self._streams[internal] = self._external[name] = stream
        try:
            while outputs := await stream.next():
                for output in outputs:
                    finish = assembly.take(output)
                    if finish is not None:
                        stream.finish(finish.sample, finish.keep_tokens, finish.reason)
                if not assembly.ended or assembly.finished:
                    yield assembly.output()
            if job.keep is not None and not assembly.finished:
                await heard.wait()
                yield assembly.output()
        except RequestError as error:
            for kept_id, _ in assembly.kept_tokens():
                self._parents.forget(kept_id, f"it failed: {error.message}")
            raise
        finally:
            stream.abort()
            self._external.pop(name, None)
            for kept_id, tokens in assembly.kept_tokens():
                self._parents.ended(kept_id, tokens)
            if assembly.heard_all or stream.failed:
                self._forget(internal)

    def _forget(self, request_id: RequestId) -> None:
        self._assemblies.pop(request_id, None)
        self._heard.pop(request_id, None)

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
        for heard in self._heard.values():  # nothing will be
            heard.set()

    # StreamOwner

    def stream_finished(self, stream: RequestStream) -> None:
        self._streams.pop(stream.request_id, None)

    def send_finish(self, stream: RequestStream, sample: int, keep_tokens: int, reason: FinishReason) -> None:
        self._tell(Finish(request_id=stream.request_id, sample=sample, keep_tokens=keep_tokens, reason=reason))

    def send_abort(self, stream: RequestStream) -> None:
        assembly = self._assemblies[stream.request_id]
        if assembly.job.keep is None:
            self._tell(Abort(request_ids=[stream.request_id]))
            return
        for sample, num_tokens in assembly.open_samples():  # what is kept is what was seen
            self.send_finish(stream, sample, num_tokens, FinishReason.ABORT)

    def _tell(self, message: Message) -> None:
        with contextlib.suppress(EngineClosedError):  # then there is nothing left that could be ended
            self._service.send(message)

    # Answers, from the thread of whoever serves to ours

    def _hand_over(self, answers: Answers) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._deliver, answers)

    def _deliver(self, answers: Answers) -> None:
        take_words(self._assemblies, answers)
        kept = of_kind(KeptNews, answers.news)
        unwanted = [news.kept_id for news in kept if not self._parents.told(news) and news.kept]
        if unwanted:
            self._tell(ReleaseKept(kept_ids=unwanted))
        for output in answers.outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.deliver(output)
        for failure in of_kind(Failure, answers.news):
            stream = self._streams.get(failure.request_id)
            if stream is not None:
                stream.fail(failure.error())
        for request_id in {news.request_id for news in kept if news.request_id in self._heard}:
            if self._assemblies[request_id].heard_all:
                self._heard[request_id].set()
                if request_id not in self._streams:
                    self._forget(request_id)
