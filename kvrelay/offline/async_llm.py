"""The offline API on an event loop (`llm.py` tells what it is)."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any

from kvrelay.errors import ConfigError, EngineClosedError, InternalError
from kvrelay.offline.base import Base, KeepKV, ParentName, Prompt, find_origin
from kvrelay.offline.generation import Generation
from kvrelay.offline.outputs import Job, RequestOutput, prepare
from kvrelay.sampling import SamplingParams


class AsyncLLM(Base):
    """Generates streams on an event loop. Make it inside a running loop; every call comes from that loop."""

    def __init__(self, model: str = "smollm2", *, progress: bool = True, **options: Any) -> None:
        """As `LLM`."""
        asyncio.get_running_loop()
        super().__init__(model, options, progress=progress)
        self._running: dict[str, Generation] = {}

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        best_of: int | None = None,
        priority: int = 0,
        keep_kv: KeepKV = None,
        lora: str | None = None,
        trace_headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Everything generated so far, each time there is more, until `finished`. Leaving the loop early aborts.

        With `keep_kv` the last outputs have a `continuation`. What was left early can be continued from by its `request_id`.
        """
        self._check_open()
        name = self._new_name(request_id)
        ttl_s, adapter = self._keep_ttl_s(keep_kv), self._adapter(lora)
        job = prepare(self.tokenizer, prompt, params or SamplingParams(), best_of, ttl_s, adapter=adapter)
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
        origin = await self._service.ask(find_origin(self._service.backend, parent))
        job = self._child_job(origin, suffix, token_ids, params or SamplingParams(), ttl_s)
        async with contextlib.aclosing(self._generate(name, job, priority, trace_headers)) as outputs:
            async for output in outputs:
                yield output

    def abort(self, request_id: str) -> None:
        """Ends a request by the id given to `generate`; its stream ends with the finish reason `abort`. Unknown: no error."""
        generation = self._running.get(request_id)
        if generation is not None:
            self._service.tell(generation.close)

    def _new_name(self, request_id: str | None) -> str:
        name = request_id or f"cmpl-{uuid.uuid4()}"
        if name in self._running:
            raise ConfigError(f"a request with the id {name!r} is running already")
        return name

    async def _generate(
        self, name: str, job: Job, priority: int, trace_headers: Mapping[str, str] | None
    ) -> AsyncGenerator[RequestOutput, None]:
        generation = Generation(
            self._service, self.tokenizer, name, job, priority, external_id=name, trace=dict(trace_headers or {})
        )
        self._running[name] = generation
        try:
            finished = False
            while not finished:
                output = await self._service.ask(generation.next())
                finished = output.finished
                yield output
        except EngineClosedError as error:  # in the middle of it
            raise InternalError(str(error)) from error
        finally:
            del self._running[name]
            self._service.tell(generation.close)
