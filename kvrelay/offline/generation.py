"""One request of an LLM, on the loop of its service: from the wait for room to its last output."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

from kvrelay.errors import InternalError, NotFoundError
from kvrelay.ids import new_request_id
from kvrelay.offline.outputs import Assembly, Job, RequestOutput
from kvrelay.offline.service import Service
from kvrelay.router.backend import GenerateRequest
from kvrelay.router.stream import RequestStream
from kvrelay.states import FinishReason
from kvrelay.text.tokenizer import Tokenizer

_NEWS_S = 30.0  # after the last token it is known by then whether the KV is kept


class Generation:
    """Reads its stream only when it is asked to, so that what was read is what its caller has seen."""

    def __init__(
        self,
        service: Service,
        tokenizer: Tokenizer,
        shown_id: str,
        job: Job,
        priority: int,
        *,
        external_id: str = "",
        trace: Mapping[str, str] | None = None,
    ) -> None:
        self._service = service
        self._job = job
        self._assembly = Assembly(tokenizer, shown_id, job)
        self._request = GenerateRequest(
            external_id=external_id or new_request_id(),
            prompt=job.tokens,
            params=job.params,
            priority=priority,
            trace=trace or {},
            adapter=job.adapter,
            keep=job.keep,
            parent=None if job.origin is None else job.origin.parent,
        )
        self._submitted: asyncio.Task[RequestStream] | None = None

    async def to_end(self) -> RequestOutput:
        try:
            while await self._read():
                pass
            return self._assembly.output()
        finally:
            self.close()

    async def next(self) -> RequestOutput:
        """Everything generated so far, once there is more; at last with `finished`."""
        await self._read()
        return self._assembly.output()

    def close(self) -> None:
        """The rest is not wanted: the next output, if it is asked for, is the last one. Harmless when the request is over."""
        if self._submitted is not None and not self._submitted.cancel():
            stream = self._stream()
            if stream is not None:
                stream.abort()
                self._service.left(stream)

    async def forget(self) -> None:
        """Its caller gets no handles, so no KV is kept for it."""
        for kept_id in [] if self._job.keep is None else self._job.keep.kept_ids:
            with contextlib.suppress(NotFoundError):
                await self._service.backend.delete_parents(kept_id, "")

    async def _read(self) -> bool:
        """Takes what is new. False: that was all."""
        if self._submitted is None:
            self._submitted = asyncio.create_task(self._service.submit(self._request))
        await asyncio.wait([self._submitted])
        stream = None if self._submitted.cancelled() else self._submitted.result()
        outputs = [] if stream is None else await stream.next()
        for output in outputs:
            assert stream is not None
            keep_tokens = self._assembly.take(output, stream)
            if keep_tokens is not None:
                stream.finish(output.sample, keep_tokens, FinishReason.STOP)
        if outputs and not self._assembly.ended:
            return True
        if not self._assembly.ended:
            if self._service.reason:
                raise InternalError(self._service.reason)
            self._assembly.abort()
        if stream is not None and self._job.keep is not None:
            await self._service.backend.continuations.until_settled(stream.parents, _NEWS_S)
        self._assembly.settle([] if stream is None else stream.parents, self._service.backend.continuations.remaining_s)
        return False

    def _stream(self) -> RequestStream | None:
        """None: it never came to the backend."""
        submitted = self._submitted
        if submitted is None or not submitted.done() or submitted.cancelled() or submitted.exception() is not None:
            return None
        return submitted.result()
