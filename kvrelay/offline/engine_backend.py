"""One engine in this process as a `Backend`: what the router is where there are worker processes.

    submit -> engine.submit -> engine.step, again and again: outputs to their streams, news to these and to continuations

Everything runs on one event loop's thread. A step blocks it; between two steps the readers of the streams have their turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import assert_never

from kvrelay.engine.engine import Engine
from kvrelay.errors import ConflictError, NotFoundError, QueueFullError
from kvrelay.ids import RequestId, WorkerId, new_request_id
from kvrelay.log import Log
from kvrelay.metrics import Metrics
from kvrelay.router.backend import AdapterChange, DrainOrder, GenerateRequest
from kvrelay.router.continuations import Continuations
from kvrelay.router.parent import Parent
from kvrelay.router.shown import ClusterShown
from kvrelay.router.stream import RequestStream
from kvrelay.router.timelines import Timelines
from kvrelay.states import FinishReason, HandleState, Role
from kvrelay.wire.registry import Adapter
from kvrelay.wire.serving import (
    COMES_FIRST,
    BeamResult,
    Failure,
    Finish,
    HandedOver,
    Inherited,
    KeptNews,
    LegTimes,
    News,
    StepOutputs,
    Submit,
)

log = Log("llm")

_HERE = WorkerId("whole-here")


class EngineBackend:
    """Drives the engine while it has work. Made and ended by `service.open_engine`."""

    def __init__(self, engine: Engine, continuation_cache: int, max_kept: int) -> None:
        self.ready = True
        self.max_model_len = engine.core.options.max_model_len  # 0: the model's own limit
        self.continuations = Continuations(Metrics(), capacity=continuation_cache, max_kept_per_owner=max_kept)
        self.timelines = Timelines(Metrics())  # none are written: there is one process
        self._engine = engine
        self._open: dict[RequestId, tuple[GenerateRequest, RequestStream]] = {}
        self._has_work = asyncio.Event()

    async def drive(self) -> None:
        """Until it is cancelled."""
        while True:
            while not self._engine.has_work:
                self._has_work.clear()
                await self._has_work.wait()
            self._deliver(self._step())
            await asyncio.sleep(0)

    async def until_idle(self) -> None:
        """Nothing of any request that has ended is left in the engine; or the engine is closed."""
        while self.ready and self._engine.serves:
            await asyncio.sleep(0)

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        return {adapter.name: adapter for adapter in self._engine.core.limits.adapters.records()}

    async def load_adapter(self, name: str, path: str, *, in_place: bool) -> AdapterChange:
        adapters = self._engine.core.limits.adapters
        if name in self.adapters and not in_place:
            raise ConflictError(f"the LoRA adapter {name!r} is loaded already", param="lora_name")
        adapters.add(name, path, await asyncio.to_thread(adapters.read, path))
        return AdapterChange(name=name, workers=[_HERE])

    async def unload_adapter(self, name: str) -> AdapterChange:
        if not self._engine.core.limits.adapters.unload(name):
            raise NotFoundError(f"there is no LoRA adapter {name!r}", param="lora_name", code="adapter_not_found")
        return AdapterChange(name=name, workers=[_HERE])

    def submit(self, request: GenerateRequest) -> RequestStream:
        assert request.timeout_s is None, "requests of the offline API have no deadline"
        if self._engine.scheduler.queue.num_waiting >= self._engine.core.options.max_queue:
            raise QueueFullError(f"{self._engine.scheduler.queue.num_waiting} requests wait already")
        stream = RequestStream(new_request_id(), request.params.n, self, prefill=_HERE, decode=_HERE)
        stream.parents = self.continuations.begun(request.as_parents())
        for parent in stream.parents:
            self.continuations.sent(parent, _HERE, request_id=stream.request_id)
        self._open[stream.request_id] = request, stream
        origin = request.parent
        self._engine.submit(
            Submit(
                request_id=stream.request_id,
                external_id=request.external_id,
                prompt=list(request.prompt),
                params=request.params,
                priority=request.priority,
                cache_salt=request.cache_salt,
                adapter=request.adapter,
                trace=dict(request.trace),
                keep=request.keep,
                inherit=origin.kept_id if origin is not None and origin.state is HandleState.HELD else None,
                images=list(request.images),
            )
        )
        self._wake()
        return stream

    async def find_parent(self, handle: str, owner: str, *, wait_s: float) -> Parent:
        parent = self.continuations.find(handle, owner)
        await self.continuations.until_ended(parent, handle, wait_s)
        return parent

    async def find_parents(self, handle: str, owner: str) -> list[Parent]:
        return self.continuations.find_all(handle, owner)

    async def delete_parents(self, handle: str, owner: str) -> None:
        held = self.continuations.delete(handle, owner)
        self._engine.release_kept([parent.kept_id for parent in held if parent.kept_id is not None])
        self._wake()

    def cluster(self) -> ClusterShown:
        num_open = len(self._open)
        return ClusterShown(router="", routers=[], model="", ready=self.ready, in_flight=num_open, stranded=0, workers=[])

    def drain(self, worker_id: str, role: Role | None = None) -> DrainOrder:
        raise NotFoundError("a model in this process has no workers", param="worker", code="worker_not_found")

    # StreamOwner

    def stream_finished(self, stream: RequestStream) -> None:
        request, _ = self._open.pop(stream.request_id)
        for sample, parent in enumerate(stream.parents):
            if stream.error is not None and sample in stream.running:
                self.continuations.failed(parent, stream.error.message)
            else:
                self.continuations.ended(parent, request.prompt, stream.tokens(sample))

    def send_finish(self, stream: RequestStream, sample: int, keep_tokens: int, reason: FinishReason) -> None:
        if stream.request_id not in self._open:  # it had ended further on
            self.continuations.cut(stream.parents[sample], keep_tokens)
        self._engine.finish(Finish(request_id=stream.request_id, sample=sample, keep_tokens=keep_tokens, reason=reason))
        self._wake()

    def send_abort(self, stream: RequestStream) -> None:
        """What was to be kept ends where its reader saw it end."""
        request, _ = self._open[stream.request_id]
        if request.keep is None:
            self._engine.abort([stream.request_id])
        else:
            for sample in stream.running:
                self.send_finish(stream, sample, len(stream.tokens(sample)), FinishReason.ABORT)
        self._wake()

    # The engine

    def _wake(self) -> None:
        self._has_work.set()

    def _step(self) -> StepOutputs:
        try:
            return self._engine.step()
        except Exception as error:  # the border to the runner's libraries: every open request gets an answer
            log.exception("the engine failed")
            return self._engine.fail_all(f"the engine failed: {error}")

    def _deliver(self, step: StepOutputs) -> None:
        for news in step.news:
            if isinstance(news, COMES_FIRST):
                self._told(news)
        for output in step.outputs:
            if output.request_id in self._open:
                self._open[output.request_id][1].deliver(output)
        for news in step.news:
            if not isinstance(news, COMES_FIRST):
                self._told(news)

    def _told(self, news: News) -> None:
        if isinstance(news, KeptNews):  # of a request that has ended, mostly
            if not self.continuations.told(_HERE, news):
                self._engine.release_kept([news.kept_id])
            return
        if news.request_id not in self._open:
            return
        _, stream = self._open[news.request_id]
        match news:
            case BeamResult():
                stream.beams[news.sample] = news
            case Inherited():
                stream.inherited = news
            case Failure():
                stream.fail(news.error())
            case LegTimes():
                pass
            case HandedOver():
                raise AssertionError("only engines of prefill and encode workers hand requests over")
            case _:
                assert_never(news)
