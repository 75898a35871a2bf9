"""What the offline API gives back, and how it is put together from an engine's outputs."""

from __future__ import annotations

import secrets

import msgspec

from kvrelay.errors import InvalidRequestError
from kvrelay.ids import RequestId
from kvrelay.sampling import SamplingParams
from kvrelay.states import FinishReason
from kvrelay.text.detokenizer import Detokenizer
from kvrelay.text.tokenizer import Tokenizer
from kvrelay.wire.serving import Failure, Finish, SequenceOutput, TokenLogprobs


class Answers(msgspec.Struct, frozen=True, kw_only=True):
    """What whoever serves requests has to say of them, in the engine's words."""

    outputs: list[SequenceOutput] = []
    failures: list[Failure] = []


class CompletionOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One sample."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None  # None while it is being generated
    stop: str | None = None  # the stop string that ended it
    logprobs: list[TokenLogprobs] | None = None


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt and its samples, so far or for good."""

    request_id: str
    prompt: str | None  # None if it was given as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt ready for an engine. `params.n` samples are generated; the best `num_returned` are given back."""

    prompt: str | None
    tokens: list[int]
    params: SamplingParams
    num_returned: int
    keep_logprobs: bool  # whether the caller asked for them; choosing the best needs them anyway


def prepare(tokenizer: Tokenizer, prompt: str | list[int], params: SamplingParams, best_of: int | None) -> Job:
    """Tokenises, checks, and draws a seed where none was given."""
    tokens = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    wanted, keep_logprobs = params.n, params.logprobs is not None
    if best_of is not None:
        if best_of < wanted:
            raise InvalidRequestError(f"best_of must be at least n ({wanted}), not {best_of}", param="best_of")
        params = msgspec.structs.replace(params, n=best_of, logprobs=params.logprobs or 0)
    if params.seed == 0 and not params.greedy:
        params = msgspec.structs.replace(params, seed=secrets.randbits(63))
    params.validate()
    return Job(
        prompt=prompt if isinstance(prompt, str) else None,
        tokens=tokens,
        params=params,
        num_returned=wanted,
        keep_logprobs=keep_logprobs,
    )


class _Sample:
    """One sample as it grows."""

    def __init__(self, tokenizer: Tokenizer, job: Job) -> None:
        self.detokenizer = Detokenizer(tokenizer, job.params, job.tokens)
        self.pieces: list[str] = []
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish: FinishReason | None = None

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
            self.finish = output.finish
            self.pieces.append(self.detokenizer.flush())
            if self.detokenizer.stopped is not None:
                self.finish = FinishReason.STOP
        return False

    @property
    def mean_logprob(self) -> float:
        return sum(entry.logprob for entry in self.logprobs) / max(1, len(self.logprobs))


class Assembly:
    """Puts a request's outputs together."""

    def __init__(self, tokenizer: Tokenizer, external_id: str, request_id: RequestId, job: Job) -> None:
        self.job = job
        self._external_id = external_id
        self._request_id = request_id
        self._samples = [_Sample(tokenizer, job) for _ in range(job.params.n)]
        self._cached_tokens = 0
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def finished(self) -> bool:
        return all(sample.finish is not None for sample in self._samples)

    def take(self, output: SequenceOutput) -> Finish | None:
        """Returns what to tell the engine when a stop string ended the sample."""
        sample = self._samples[output.sample]
        if sample.finish is not None:
            return None
        self._cached_tokens = max(self._cached_tokens, output.cached_tokens)
        self._prompt_logprobs = output.prompt_logprobs or self._prompt_logprobs
        if not sample.take(output):
            return None
        return Finish(
            request_id=self._request_id,
            sample=output.sample,
            keep_tokens=sample.detokenizer.num_tokens,
            reason=FinishReason.STOP,
        )

    def output(self) -> RequestOutput:
        samples = self._samples
        if len(samples) > self.job.num_returned:
            samples = sorted(samples, key=lambda sample: sample.mean_logprob, reverse=True)[: self.job.num_returned]
        return RequestOutput(
            request_id=self._external_id,
            prompt=self.job.prompt,
            prompt_token_ids=self.job.tokens,
            outputs=[self._completion(index, sample) for index, sample in enumerate(samples)],
            finished=self.finished,
            cached_tokens=self._cached_tokens,
            prompt_logprobs=self._prompt_logprobs,
        )

    def _completion(self, index: int, sample: _Sample) -> CompletionOutput:
        return CompletionOutput(
            index=index,
            text="".join(sample.pieces),
            token_ids=list(sample.tokens),
            finish_reason=sample.finish,
            stop=sample.detokenizer.stopped,
            logprobs=list(sample.logprobs) if self.job.keep_logprobs else None,
        )
