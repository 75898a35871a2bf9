"""A backend without workers, for tests and for measuring the front end alone. Its tokens are a function of the prompt.

Every tick gives each open sample one more token, as an engine's step does. What it generates for a prompt is `answer(prompt)`
(the prompt itself unless told otherwise) and then the end-of-text token; sample k begins k tokens later in the answer.
A beam search gets the same at once, and scores that fall from sample to sample.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from kvrelay.errors import ConflictError, NotFoundError, RequestError
from kvrelay.ids import KeptId, TransferId, WorkerId, new_request_id
from kvrelay.metrics import Metrics
from kvrelay.router.backend import AdapterChange, DrainOrder, GenerateRequest
from kvrelay.router.continuations import Continuations
from kvrelay.router.parent import Parent
from kvrelay.router.shown import ClusterShown
from kvrelay.router.stream import RequestStream
from kvrelay.router.timelines import Timelines
from kvrelay.states import FinishReason, HandleState, Role
from kvrelay.wire.registry import Adapter
from kvrelay.wire.serving import BeamResult, Inherited, KeptNews, SequenceOutput, TokenLogprobs

_WORKER = WorkerId("whole-fake")
Answer = Callable[[Sequence[int]], Sequence[int]]


class FakeBackend:
    """Satisfies `Backend`. `num_open` is 0 when nothing leaked."""

    def __init__(
        self,
        *,
        eos_token_id: int,
        vocab_size: int,
        answer: Answer = list,
        max_model_len: int = 4096,
        tick_s: float = 0.0,
    ) -> None:
        self.eos_token_id = eos_token_id
        self.vocab_size = vocab_size
        self.answer = answer
        self.tick_s = tick_s
        self.ready = True
        self.max_model_len = max_model_len
        self.adapters: dict[str, Adapter] = {}
        self.refuse: RequestError | None = None  # what the next submissions get
        self.fail_after: tuple[int, RequestError] | None = None  # so many tokens, then this error
        self.transfer_id: TransferId | None = None  # of the next submissions, as if two workers served them
        self.submitted: list[GenerateRequest] = []
        self.finished: list[tuple[int, int]] = []  # (sample, keep_tokens) of each stop string
        self.num_aborted = 0
        self.workers: dict[str, Role] = {}  # that can be drained
        self.drained: list[tuple[str, Role | None]] = []
        self.continuations = Continuations(Metrics())
        self.timelines = Timelines(Metrics())
        self.keeps: bool | None = True  # whether KV is kept that is to be kept; None: the worker never says
        self.released: list[KeptId] = []
        self._running: dict[RequestStream, _Running] = {}
        self._ticker: asyncio.Task[None] | None = None

    @property
    def num_open(self) -> int:
        return len(self._running)

    async def load_adapter(self, name: str, path: str, *, in_place: bool) -> AdapterChange:
        if name in self.adapters and not in_place:
            raise ConflictError(f"the LoRA adapter {name!r} is loaded already", param="lora_name")
        self.adapters[name] = Adapter(name=name, digest=f"digest of {path}", path=path)
        return AdapterChange(name=name, workers=[_WORKER])

    async def unload_adapter(self, name: str) -> AdapterChange:
        if self.adapters.pop(name, None) is None:
            raise NotFoundError(f"there is no LoRA adapter {name!r}", param="lora_name", code="adapter_not_found")
        return AdapterChange(name=name, workers=[_WORKER])

    def submit(self, request: GenerateRequest) -> RequestStream:
        if self.refuse is not None:
            raise self.refuse
        stream = RequestStream(
            new_request_id(),
            request.params.n,
            self,
            prefill="whole-fake",
            decode="whole-fake",
            transfer_id=self.transfer_id,
        )
        self._begin(request, stream)
        self.submitted.append(request)
        self._running[stream] = _Running(self, stream, request)
        if self._ticker is None or self._ticker.done():
            self._ticker = asyncio.get_running_loop().create_task(self._tick())
        return stream

    def _begin(self, request: GenerateRequest, stream: RequestStream) -> None:
        stream.parents = self.continuations.begun(request.as_parents())
        for parent in stream.parents:
            self.continuations.sent(parent, _WORKER, request_id=stream.request_id)
        if request.parent is not None and request.parent.state is HandleState.HELD:
            stream.inherited = Inherited(stream.request_id, len(request.parent.tokens) - 1)

    async def find_parent(self, handle: str, owner: str, *, wait_s: float) -> Parent:
        parent = self.continuations.find(handle, owner)
        await self.continuations.until_ended(parent, handle, wait_s)
        return parent

    async def find_parents(self, handle: str, owner: str) -> list[Parent]:
        return self.continuations.find_all(handle, owner)

    async def delete_parents(self, handle: str, owner: str) -> None:
        self.released += [parent.kept_id for parent in self.continuations.delete(handle, owner) if parent.kept_id]

    def cluster(self) -> ClusterShown:
        num_open = self.num_open
        return ClusterShown(router="", routers=[], model="", ready=self.ready, in_flight=num_open, stranded=0, workers=[])

    def drain(self, worker_id: str, role: Role | None = None) -> DrainOrder:
        known = self.workers.get(worker_id)
        if known is None:
            raise NotFoundError(f"there is no worker {worker_id[:200]!r}", param="worker", code="worker_not_found")
        self.drained.append((worker_id, role))
        return DrainOrder(worker=WorkerId(worker_id), role=known, next_role=role, warning="")

    # For the streams

    def stream_finished(self, stream: RequestStream) -> None:
        request = self._running.pop(stream).request
        for sample, parent in enumerate(stream.parents):
            if stream.error is not None and sample in stream.running:
                self.continuations.failed(parent, stream.error.message)
                continue
            self.continuations.ended(parent, request.prompt, stream.tokens(sample))
            if parent.asked and request.keep is not None and self.keeps is not None:
                news = KeptNews(
                    stream.request_id, sample, request.keep.kept_ids[sample], self.keeps, request.keep.ttl_s,
                    len(parent.tokens), 1, "" if self.keeps else "the pool is full",
                )  # fmt: skip
                self.continuations.told(_WORKER, news)

    def send_finish(self, stream: RequestStream, sample: int, keep_tokens: int, reason: FinishReason) -> None:
        self.finished.append((sample, keep_tokens))
        if stream not in self._running:
            self.continuations.cut(stream.parents[sample], keep_tokens)

    def send_abort(self, stream: RequestStream) -> None:
        self.num_aborted += 1

    async def _tick(self) -> None:
        while self._running:
            await asyncio.sleep(self.tick_s)
            for running in list(self._running.values()):
                running.step(self.fail_after)


class _Running:
    """One request on its way."""

    def __init__(self, backend: FakeBackend, stream: RequestStream, request: GenerateRequest) -> None:
        self._backend = backend
        self._stream = stream
        self.request = self._request = request
        self._answer = list(backend.answer(request.prompt))
        self._position = 0
        self._open = set(range(request.params.n))

    def step(self, fail_after: tuple[int, RequestError] | None) -> None:
        if fail_after is not None and self._position >= fail_after[0]:
            self._stream.fail(fail_after[1])
            return
        if self._request.params.beam is not None:
            self._search()
            return
        for sample in sorted(self._open):
            output = self._output(sample)
            if output.finish is not None:
                self._open.discard(sample)
            self._stream.deliver(output)
        self._position += 1

    def _search(self) -> None:
        """All results in one message, as of an engine."""
        results = []
        for sample in sorted(self._open):
            steps = [self._output(sample)]
            while steps[-1].finish is None:
                self._position += 1
                steps.append(self._output(sample))
            self._position = 0
            results.append((sample, steps))
        for sample, steps in results:
            total, count = -0.25 * (sample + 1), len(steps)
            self._stream.beams[sample] = BeamResult(self._stream.request_id, sample, total, total / count)
        for sample, steps in results:
            logprobs = [entry for step in steps for entry in step.logprobs or ()]
            tokens = [token for step in steps for token in step.tokens]
            cached_tokens, finish = steps[0].cached_tokens, steps[-1].finish
            shown = None if self._request.params.logprobs is None else logprobs
            self._stream.deliver(SequenceOutput(self._stream.request_id, sample, 0, tokens, finish, cached_tokens, shown))

    def _output(self, sample: int) -> SequenceOutput:
        params, prompt = self._request.params, self._request.prompt
        token = self._token(sample)
        first = self._position == 0
        return SequenceOutput(
            request_id=self._stream.request_id,
            sample=sample,
            position=self._position,
            tokens=[token],
            finish=self._finish(token),
            cached_tokens=self._cached_tokens() if first else 0,
            logprobs=None if params.logprobs is None else [self._logprobs(token, params.logprobs)],
            prompt_logprobs=None
            if params.prompt_logprobs is None or not first
            else [None, *(self._logprobs(token, params.prompt_logprobs) for token in prompt[1:])],
        )

    def _cached_tokens(self) -> int:
        if self._request.parent is None:
            return len(self._request.prompt) // 2
        return 0 if self._stream.inherited is None else self._stream.inherited.num_tokens

    def _token(self, sample: int) -> int:
        place = self._position + sample
        params = self._request.params
        if place >= len(self._answer):
            if not params.ignore_eos and self._position >= params.min_tokens:
                return self._backend.eos_token_id
            place %= max(len(self._answer), 1)
        return self._answer[place] if self._answer else 0

    def _finish(self, token: int) -> FinishReason | None:
        params, count = self._request.params, self._position + 1
        if count >= params.min_tokens:
            if token == self._backend.eos_token_id and not params.ignore_eos:
                return FinishReason.STOP
            if token in params.stop_token_ids:
                return FinishReason.STOP
        full = len(self._request.prompt) + count >= self._backend.max_model_len
        return FinishReason.LENGTH if count >= params.max_tokens or full else None

    def _logprobs(self, token: int, count: int) -> TokenLogprobs:
        """Made up, but falling, and with the token itself on top."""
        top = [((token + rank) % self._backend.vocab_size, -0.25 - rank) for rank in range(count)]
        return TokenLogprobs(-0.25, top, 1)
