"""From prompts to steps: submits the prompts of a request, and turns the tokens of all their samples into text as they arrive.

    Generation(...)          submits every prompt; raises QueueFullError, UnavailableError
    await next()             the steps that are there, at least one; [] when every sample has ended
    close()                  aborts what still runs; does nothing if all has ended. Must always be called

If one prompt fails, the whole request fails. When the client leaves, all its prompts are aborted at once and `next` raises
ClientGoneError.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import msgspec

from kvrelay.errors import InternalError, UnavailableError
from kvrelay.frontend.answer.continuation import as_extra, continued, provenance, shown
from kvrelay.frontend.answer.merge import Merge
from kvrelay.frontend.answer.types import Continuation, Provenance
from kvrelay.frontend.http.auth import owner_of
from kvrelay.frontend.http.call import Call, Header, Watch
from kvrelay.frontend.http.errors import ClientGoneError
from kvrelay.frontend.prompt.work import Origin, Work
from kvrelay.frontend.service import Service
from kvrelay.ids import new_kept_id, read_trace, trace_from
from kvrelay.router.backend import GenerateRequest
from kvrelay.router.parent import Parent
from kvrelay.router.stream import RequestStream
from kvrelay.states import FinishReason
from kvrelay.text.detokenizer import Detokenizer
from kvrelay.wire.serving import Keep, SequenceOutput, TokenLogprobs

_SETTLE_S = 2.0  # how long the end of an answer waits for workers to confirm what is kept


@dataclasses.dataclass(slots=True, eq=False)
class Sample:
    """One of the n samples of a prompt."""

    prompt: int
    number: int  # among the samples of that prompt
    index: int  # among all samples of the request
    stream: RequestStream  # of that prompt
    detokenizer: Detokenizer
    finish: FinishReason | None = None  # set with its last step
    stop_token: int | None = None  # of the client's, if it ended the sample
    total_logprob: float = 0.0

    @property
    def num_tokens(self) -> int:
        return self.detokenizer.num_tokens

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or the stop token that ended the sample; None if it ended otherwise."""
        return self.stop_token if self.detokenizer.stopped is None else self.detokenizer.stopped

    @property
    def parent(self) -> Parent:
        """This sample, as continuations see it."""
        return self.stream.parents[self.number]


class Step(msgspec.Struct, eq=False, gc=False):
    """One token of one sample, and the text that it completes."""

    sample: Sample
    token: int | None  # None if the step only ends the sample
    text: str
    logprobs: TokenLogprobs | None
    finish: FinishReason | None


class Generation:
    """Of one HTTP request."""

    def __init__(self, service: Service, call: Call, work: Work) -> None:
        self._metrics = service.metrics
        self._continuations = service.backend.continuations
        self._settle_until = 0.0
        self._arrived = call.arrived
        self._last_step = 0.0
        self._gone = False
        self._sent_trace = call.trace()
        self._trace = trace_from(self._sent_trace, sampled=bool(service.options.otlp_endpoint))
        self._work = work
        self.prompt_tokens = sum(map(len, work.prompts))
        self.cached_tokens = [0] * len(work.prompts)
        self.prompt_logprobs: list[list[TokenLogprobs | None] | None] = [None] * len(work.prompts)
        self.samples: list[Sample] = []
        self._by_prompt: list[list[Sample]] = []
        self._hide_stop_token = not work.params[0].include_stop_str_in_output
        self._has_stops = bool(work.params[0].stop)
        self._stop_tokens = _stop_tokens(service, work)
        self._streams: list[RequestStream] = []
        try:
            self._submit(service, call)
        except BaseException:
            self._abort_streams()
            raise
        self._num_open = len(self.samples)
        self._merge = Merge(self._streams) if len(self._streams) > 1 else None
        self._watch = Watch(call, self._client_left)

    def _submit(self, service: Service, call: Call) -> None:
        work = self._work
        adapter = service.adapter_of(work.request.model)
        timeout_s = call.remaining_s(work.request.timeout, service.options.request_timeout_s)
        session, trace, owner = call.session(), self._trace, owner_of(call, service.options)
        parent = work.origin.parent if isinstance(work.origin, Origin) else None
        rank = call.data_parallel_rank(work.request.data_parallel_rank)
        if rank is None and parent is not None:
            rank = parent.data_parallel_rank
        for place, (prompt, params) in enumerate(zip(work.prompts, work.params, strict=True)):
            request = GenerateRequest(
                external_id=call.request_id,
                answer_id=call.id,
                first_choice=place * params.n,
                owner=owner,
                keep=Keep([new_kept_id() for _ in range(params.n)], work.keep_s, owner) if work.keep_s else None,
                is_stored=work.is_stored,
                parent=parent,
                prompt=prompt,
                params=params,
                priority=work.request.priority,
                cache_salt=work.request.cache_salt or "",
                adapter=adapter,
                data_parallel_rank=rank,
                session=session,
                trace=trace,
                parent_span_id=read_trace(self._sent_trace)[1],
                arrived=call.arrived,
                timeout_s=timeout_s,
                images=work.images,
            )
            stream = service.backend.submit(request)
            self._streams.append(stream)
            samples = [
                Sample(place, number, place * params.n + number, stream, Detokenizer(service.tokenizer, params, prompt))
                for number in range(params.n)
            ]
            self._by_prompt.append(samples)
            self.samples += samples

    def headers(self) -> list[Header]:
        """The workers that serve the request (its first prompt), the ids of what is kept, and what a continuation became."""
        stream = self._streams[0]
        headers = [
            (b"x-kvrelay-prefill", stream.prefill.encode()),
            (b"x-kvrelay-decode", stream.decode.encode()),
            (b"x-data-parallel-rank", str(stream.data_parallel_rank).encode()),
            (b"traceparent", self._trace["traceparent"].encode()),
        ]
        if stream.transfer_id is not None:
            headers.append((b"x-kvrelay-transfer-id", stream.transfer_id.encode()))
        if stream.encode:
            headers.append((b"x-kvrelay-encode", stream.encode.encode()))
        asked = [parent.name for stream in self._streams for parent in stream.parents if parent.asked or parent.kept]
        if asked:
            headers.append((b"x-kvrelay-continuation", ",".join(asked).encode()))
        if self._work.origin is not None:
            headers.append((b"x-kvrelay-continued", continued(self._work.origin).encode()))
        return headers

    @property
    def says_more(self) -> bool:
        """Whether the last chunk of each choice has more in it than OpenAI's."""
        return bool(self._work.keep_s) or self._work.origin is not None

    async def settle(self) -> None:
        """Waits, for a while, until workers have confirmed whether the KV of the choices that have ended is kept."""
        if not self._work.keep_s:
            return
        now = time.perf_counter()
        self._settle_until = self._settle_until or now + _SETTLE_S
        ended = [sample.parent for sample in self.samples if sample.finish is not None]
        await self._continuations.until_settled(ended, max(0.0, self._settle_until - now))

    def continuation(self, sample: Sample) -> Continuation | msgspec.UnsetType:
        return shown(self._continuations, sample.parent) if self._work.keep_s else msgspec.UNSET

    def provenance(self) -> Provenance | msgspec.UnsetType:
        origin = self._work.origin
        if origin is None:
            return msgspec.UNSET
        return provenance(origin, self._streams[0].inherited, self.prompt_tokens, sum(self.cached_tokens))

    def last_words(self, step: Step, choice: dict[str, Any]) -> bytes:
        """What the last chunk of a choice has beyond OpenAI's: in the choice, and beside it."""
        if step.finish is None or not self.says_more:
            return b""
        if self._work.keep_s:
            choice["continuation"] = self.continuation(step.sample)
        return as_extra(self.provenance())

    async def next(self) -> list[Step]:
        if self._num_open == 0:
            return []
        if self._merge is None:
            place, outputs = 0, await self._streams[0].next()
        else:
            place, outputs = await self._merge.next()
        if not outputs:
            raise ClientGoneError if self._gone else InternalError("a worker ended the request without an answer")
        steps: list[Step] = []
        for output in outputs:
            self._take(place, output, steps)
        self._observe()
        return steps

    def close(self) -> None:
        self._watch.cancel()
        if self._merge is not None:
            self._merge.close()
        self._abort_streams()
        metrics = self._metrics
        metrics.prompt_tokens.inc(self.prompt_tokens)
        metrics.output_tokens.inc(self.output_tokens)
        if cached := sum(self.cached_tokens):
            metrics.cached_tokens.inc(cached)
        origin = self.provenance()
        if not isinstance(origin, msgspec.UnsetType) and self._last_step:
            metrics.continuations.labels(origin.continuation.source).inc()
            metrics.inherited_tokens.inc(origin.continuation.inherited_tokens)

    @property
    def done(self) -> bool:
        """Every sample has ended with the steps handed out so far."""
        return self._num_open == 0

    def beam_scores(self, sample: Sample) -> tuple[float | msgspec.UnsetType, float | msgspec.UnsetType]:
        """cumulative_logprob and beam_score of a choice; unset without a beam search."""
        if self._work.params[sample.prompt].beam is None:
            return msgspec.UNSET, msgspec.UNSET
        beam = sample.stream.beams.get(sample.number)
        if beam is None:
            raise InternalError("a worker gave a result of a beam search without its score")
        return beam.cumulative_logprob, beam.score

    @property
    def output_tokens(self) -> int:
        return sum(sample.num_tokens for sample in self.samples)

    def _take(self, place: int, output: SequenceOutput, steps: list[Step]) -> None:
        sample = self._by_prompt[place][output.sample]
        if sample.finish is not None:  # a stop string ended it before the worker knew
            return
        if output.cached_tokens:
            self.cached_tokens[place] = output.cached_tokens
        if output.prompt_logprobs is not None:
            self.prompt_logprobs[place] = output.prompt_logprobs
        finish = output.finish
        if finish is FinishReason.ABORT or finish is FinishReason.ERROR:
            raise UnavailableError("the worker gave up the request", code="aborted_by_worker")
        logprobs, tokens = output.logprobs, output.tokens
        if finish is None and logprobs is None and len(tokens) == 1 and not self._has_stops:
            # By far the most common case, once per token: text and nothing else.
            steps.append(Step(sample, tokens[0], sample.detokenizer.push(tokens[0]), None, None))
            return
        last = len(tokens) - 1
        for position, token in enumerate(tokens):
            entry = None if logprobs is None else logprobs[position]
            ends = finish if position == last else None
            step = self._step(sample, token, entry, ends)
            steps.append(step)
            if step.finish is not None:
                return
        if finish is not None:  # it comes apart from the last token
            sample.finish = finish
            self._num_open -= 1
            steps.append(Step(sample, None, sample.detokenizer.flush(), None, finish))

    def _step(self, sample: Sample, token: int, entry: TokenLogprobs | None, finish: FinishReason | None) -> Step:
        detokenizer = sample.detokenizer
        if finish is FinishReason.STOP and token in self._stop_tokens:
            sample.stop_token = token
        if finish is FinishReason.STOP and self._hide_stop_token:
            text = detokenizer.push_silent()
        else:
            text = detokenizer.push(token)
        if entry is not None:
            sample.total_logprob += entry.logprob
        if detokenizer.stopped is not None:
            finish = FinishReason.STOP
            sample.stream.finish(sample.number, sample.num_tokens, finish)
        if finish is not None:
            text += detokenizer.flush()
            finish = finish if detokenizer.stopped is None else FinishReason.STOP
            sample.finish = finish
            self._num_open -= 1
        return Step(sample, token, text, entry, finish)

    def _observe(self) -> None:
        """One observation per wake-up, however many tokens it brought."""
        now = time.perf_counter()
        if self._last_step == 0.0:
            self._metrics.ttft_seconds.observe(now - self._arrived)
        else:
            self._metrics.inter_token_seconds.observe(now - self._last_step)
        self._last_step = now

    def _client_left(self) -> None:
        if self._num_open:
            self._gone = True
            self._metrics.aborted.inc()
            self._abort_streams()

    def _abort_streams(self) -> None:
        for stream in self._streams:
            stream.abort()


def _stop_tokens(service: Service, work: Work) -> frozenset[int]:
    """Those that the client named. The model's end of text ends an answer anyway, and is no reason of the client's."""
    params = work.params[0]
    return frozenset(params.stop_token_ids) - (frozenset() if params.ignore_eos else {service.tokenizer.eos_token_id})
