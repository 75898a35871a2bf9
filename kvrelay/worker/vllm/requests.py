"""Requests as a core sees them: one sequence a sample. And what this engine refuses, by name."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvrelay.engine.requests.admission import check_params, check_prompt, check_resume, check_taken, check_transfer
from kvrelay.engine.requests.stages import Stages
from kvrelay.errors import InvalidRequestError
from kvrelay.ids import RequestId, WorkerId
from kvrelay.sampling import SamplingParams
from kvrelay.states import FinishReason, Role
from kvrelay.wire.serving import Resumed, Submit, TokenLogprobs
from kvrelay.worker.vllm.seam import Core, CoreRequest


@dataclass(slots=True, eq=False)
class Sample:
    """One of a request, as far as it has come."""

    number: int
    forced: list[int]  # output that another worker made before
    num_output: int  # tokens told or taken over so far
    is_open: bool = True
    sequence_id: str = ""  # in the core; empty while it has none
    cached_tokens: int = 0


@dataclass(slots=True, eq=False)
class Open:
    """A request that has not ended here."""

    submit: Submit
    stages: Stages
    samples: dict[int, Sample]
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=lambda: [None])

    @property
    def id(self) -> RequestId:
        return self.submit.request_id

    @property
    def params(self) -> SamplingParams:
        return self.submit.params

    @property
    def going(self) -> list[Sample]:
        return [sample for sample in self.samples.values() if sample.is_open]

    @property
    def common(self) -> list[int]:
        """The tokens that are handed over: the prompt, and the output so far of a sample that is resumed alone."""
        return self.submit.prompt + next(iter(self.samples.values())).forced

    def sequence(self, sample: Sample, *, most: int | None = None, ahead: int = 0) -> CoreRequest:
        """What is to come of a sample: only so many tokens of it (`most`), and those behind the next ones (`ahead`)."""
        params, num_output = self.params, sample.num_output + ahead
        return CoreRequest(
            id=f"{self.id}/{sample.number}",
            prompt=self.submit.prompt,
            forced=list(sample.forced),
            params=params,
            max_tokens=params.max_tokens if most is None else min(params.max_tokens, len(sample.forced) + most),
            seed=seed_of(params.seed, sample.number, num_output),
            priority=self.submit.priority,
            cache_salt=self.submit.cache_salt,
            prompt_logprobs=params.prompt_logprobs if sample.number == 0 and not num_output else None,
        )

    def finish_reason(self, count: int, token: int, core: Core) -> FinishReason | None:
        """Whether this token, the `count`th of its output, ends a sample: for tokens that come from a peer, or go to one."""
        params = self.params
        if count >= params.min_tokens:
            if token in core.eos_token_ids and not params.ignore_eos:
                return FinishReason.STOP
            if token in params.stop_token_ids:
                return FinishReason.STOP
        is_long = len(self.submit.prompt) + count >= core.max_model_len
        return FinishReason.LENGTH if is_long or count >= params.max_tokens else None


def opened(submit: Submit) -> Open:
    resumed = submit.resume or [Resumed(number, []) for number in range(submit.params.n)]
    samples = {one.sample: Sample(one.sample, list(one.tokens), len(one.tokens)) for one in resumed}
    return Open(submit, Stages(), samples)


def seed_of(seed: int, sample: int, position: int) -> int:
    """Of a sample that begins or goes on at this position. vLLM draws one stream of random numbers from a seed: what goes on
    elsewhere must not repeat those that were used."""
    packed = struct.pack("<qqq", seed, sample, position)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Raises the error that answers a request which cannot be served."""

    worker_id: WorkerId
    role: Role
    max_queue: int
    max_batch: int
    core: Core

    def check(self, submit: Submit, *, num_waiting: int, draining: bool) -> None:
        check_taken(submit, draining=draining, num_waiting=num_waiting, max_queue=self.max_queue)
        hands_on, takes_over = self.role is Role.PREFILL, self.role is Role.DECODE
        check_transfer(submit, self.worker_id, hands_on=hands_on, takes_over=takes_over)
        for name in _refused(submit):
            raise InvalidRequestError(f"{name}: workers with --engine vllm do not have it (docs/vllm.md)", param=name)
        vocab_size, max_model_len = self.core.vocab_size, self.core.max_model_len
        check_prompt(submit.prompt, submit.prompt, vocab_size=vocab_size, max_model_len=max_model_len)
        check_params(submit.params, vocab_size=vocab_size, max_batch=self.max_batch)
        check_resume(submit, vocab_size=vocab_size, max_model_len=max_model_len)


def _refused(submit: Submit) -> Iterator[str]:
    """Fields that this engine does not serve."""
    given = {
        "beam_width": submit.params.beam is not None,
        "keep_kv": submit.keep is not None,
        "continuation_of": submit.inherit is not None,
        "images": bool(submit.images),
        "model": bool(submit.adapter),
        "logprob_token_ids": bool(submit.params.logprob_token_ids),
    }
    return (name for name, is_given in given.items() if is_given)
