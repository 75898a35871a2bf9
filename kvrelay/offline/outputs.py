"""What the offline API gives back, and how it is put together from the outputs of a stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from kvrelay.errors import InvalidRequestError
from kvrelay.ids import new_kept_id
from kvrelay.router.parent import Parent
from kvrelay.router.stream import RequestStream
from kvrelay.sampling import SamplingParams
from kvrelay.states import FinishReason
from kvrelay.text.detokenizer import Detokenizer
from kvrelay.text.tokenizer import Tokenizer
from kvrelay.wire.serving import BeamResult, Keep, SequenceOutput, TokenLogprobs


class Continuation(msgspec.Struct, frozen=True, kw_only=True):
    """How to continue from a sample that was to be kept. Its handle is good as long as its tokens are known, kept or not."""

    handle: str
    kept: bool  # its KV is, until then
    expires_at: float | None = None  # as of time.time()
    reason: str = ""  # why it is not kept


class Continued(msgspec.Struct, frozen=True, kw_only=True):
    """Where the KV of a child's prompt came from."""

    of: str
    source: Literal["lease", "prefix_cache", "prefill"]
    inherited_tokens: int  # of kept KV
    computed_tokens: int


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    of: str
    tokens: list[int]
    parent: Parent | None  # None: all that is known of it are these tokens
    adapter: str = ""


class CompletionOutput(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None  # None while it is being generated
    stop: str | None = None  # the stop string that ended it
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None  # of beam search, as the next
    score: float | None = None
    continuation: Continuation | None = None  # with keep_kv, once it has ended


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt and its samples, so far or for good."""

    request_id: str
    prompt: str | None  # None if it was given as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    continued: Continued | None = None  # of a child
    adapter: str = ""  # the digest of its LoRA adapter; empty: the base model's


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt ready for an engine. `params.n` samples are generated; the best `num_returned` are given back."""

    prompt: str | None
    tokens: list[int]
    params: SamplingParams
    num_returned: int
    keep_logprobs: bool  # whether the caller asked for them; choosing the best needs them anyway
    keep: Keep | None = None
    origin: Origin | None = None
    adapter: str = ""  # the digest of a LoRA adapter; empty: the base model


def prepare(
    tokenizer: Tokenizer,
    prompt: str | list[int],
    params: SamplingParams,
    best_of: int | None,
    keep_ttl_s: float | None = None,
    origin: Origin | None = None,
    adapter: str = "",
) -> Job:
    """Tokenises, checks, and draws a seed where none was given. After an origin comes its suffix, as tokens."""
    params.check_types()
    if params.bad_words:
        params = msgspec.structs.replace(params, bad_tokens=tokenizer.bad_tokens(params.bad_words))
    tokens = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    wanted, keep_logprobs = params.n, params.logprobs is not None
    if best_of is not None:
        if best_of < wanted:
            raise InvalidRequestError(f"best_of must be at least n ({wanted}), not {best_of}", param="best_of")
        params = msgspec.structs.replace(params, n=best_of, logprobs=params.logprobs or 0)
    if params.seed == 0 and not params.greedy:
        params = msgspec.structs.replace(params, seed=secrets.randbits(63))
    params.validate()
    if keep_ttl_s is not None:
        _check_keep(params, wanted)
    return Job(
        prompt=prompt if isinstance(prompt, str) else None,
        tokens=tokens,
        params=params,
        num_returned=wanted,
        keep_logprobs=keep_logprobs,
        keep=None if keep_ttl_s is None else Keep([new_kept_id() for _ in range(params.n)], keep_ttl_s),
        origin=origin,
        adapter=adapter if origin is None else origin.adapter,
    )


def _check_keep(params: SamplingParams, num_returned: int) -> None:
    if params.beam is not None:
        raise InvalidRequestError("keep_kv cannot be combined with beam search", param="keep_kv")
    if params.n > num_returned:
        raise InvalidRequestError("keep_kv cannot be combined with best_of above n", param="keep_kv")


class _Sample:
    def __init__(self, tokenizer: Tokenizer, job: Job) -> None:
        self.detokenizer = Detokenizer(tokenizer, job.params, job.tokens)
        self.pieces: list[str] = []
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish: FinishReason | None = None
        self.beam: BeamResult | None = None
        self.continuation: Continuation | None = None

    def take(self, output: SequenceOutput) -> bool:
        """True if a stop string ended the sample before its worker knew."""
        for index, token in enumerate(output.tokens):
            last = index == len(output.tokens) - 1
            silent = last and output.finish is FinishReason.STOP
            self.tokens.append(token)
            if output.logprobs is not None:
                self.logprobs.append(output.logprobs[index])
            self.pieces.append(self.detokenizer.push_silent() if silent else self.detokenizer.push(token))
            if self.detokenizer.stopped is not None:
                self.finish = FinishReason.STOP
                return not (last and output.finish is not None)
        if output.finish is not None:
            self.end(output.finish)
        return False

    def end(self, finish: FinishReason) -> None:
        self.pieces.append(self.detokenizer.flush())
        self.finish = finish if self.detokenizer.stopped is None else FinishReason.STOP

    @property
    def mean_logprob(self) -> float:
        return sum(entry.logprob for entry in self.logprobs) / max(1, len(self.logprobs))


class Assembly:
    def __init__(self, tokenizer: Tokenizer, shown_id: str, job: Job) -> None:
        self._job = job
        self._shown_id = shown_id
        self._samples = [_Sample(tokenizer, job) for _ in range(job.params.n)]
        self._cached_tokens = 0
        self._inherited_tokens = 0
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._settled = job.keep is None

    @property
    def ended(self) -> bool:
        """There will be no more tokens."""
        return all(sample.finish is not None for sample in self._samples)

    def take(self, output: SequenceOutput, stream: RequestStream) -> int | None:
        """How many tokens the sample keeps, if a stop string ended it before its worker knew."""
        sample = self._samples[output.sample]
        if sample.finish is not None:
            return None
        self._cached_tokens = max(self._cached_tokens, output.cached_tokens)
        self._prompt_logprobs = output.prompt_logprobs or self._prompt_logprobs
        self._inherited_tokens = 0 if stream.inherited is None else stream.inherited.num_tokens
        sample.beam = stream.beams.get(output.sample)
        return sample.detokenizer.num_tokens if sample.take(output) else None

    def abort(self) -> None:
        """What has no end yet ends here."""
        for sample in self._samples:
            if sample.finish is None:
                sample.end(FinishReason.ABORT)

    def settle(self, parents: Sequence[Parent], remaining_s: Callable[[Parent], float]) -> None:
        """It is known which samples' KV is kept. Without parents, the request never came to a worker."""
        self._settled = True
        for place, kept_id in enumerate([] if self._job.keep is None else self._job.keep.kept_ids):
            kept, reason = False, "it was aborted before it began"
            if parents:
                kept, reason = parents[place].kept, parents[place].reason
            self._samples[place].continuation = Continuation(
                handle=kept_id,
                kept=kept,
                expires_at=time.time() + remaining_s(parents[place]) if kept else None,
                reason="" if kept else reason or "its worker does not say so",
            )

    def output(self) -> RequestOutput:
        samples = self._samples
        if len(samples) > self._job.num_returned:
            samples = sorted(samples, key=lambda sample: sample.mean_logprob, reverse=True)[: self._job.num_returned]
        return RequestOutput(
            request_id=self._shown_id,
            prompt=self._job.prompt,
            prompt_token_ids=self._job.tokens,
            outputs=[self._completion(index, sample) for index, sample in enumerate(samples)],
            finished=self.ended and self._settled,
            cached_tokens=self._cached_tokens,
            prompt_logprobs=self._prompt_logprobs,
            continued=None if self._job.origin is None else self._continued(self._job.origin),
            adapter=self._job.adapter,
        )

    def _continued(self, origin: Origin) -> Continued:
        known = max(self._inherited_tokens, self._cached_tokens)
        return Continued(
            of=origin.of,
            source="lease" if self._inherited_tokens else "prefix_cache" if known else "prefill",
            inherited_tokens=self._inherited_tokens,
            computed_tokens=len(self._job.tokens) - known,
        )

    def _completion(self, index: int, sample: _Sample) -> CompletionOutput:
        return CompletionOutput(
            index=index,
            text="".join(sample.pieces),
            token_ids=list(sample.tokens),
            finish_reason=sample.finish,
            stop=sample.detokenizer.stopped,
            logprobs=list(sample.logprobs) if self._job.keep_logprobs else None,
            cumulative_logprob=None if sample.beam is None else sample.beam.cumulative_logprob,
            score=None if sample.beam is None else sample.beam.score,
            continuation=sample.continuation,
        )
