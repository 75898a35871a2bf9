"""What an engine refuses at once, with an error that names the field."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvrelay.config import EngineOptions
from kvrelay.engine.interfaces import Adapters, LoadedAdapter, NoAdapters
from kvrelay.engine.request import begins_anew
from kvrelay.errors import InvalidRequestError, QueueFullError, UnavailableError
from kvrelay.ids import WorkerId
from kvrelay.media.placeholders import placeholder_ids
from kvrelay.native.hashing import tokens_below
from kvrelay.sampling import SamplingParams
from kvrelay.wire.serving import Submit


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelLimits:
    """What an engine has to know of its model."""

    eos_token_ids: frozenset[int]
    max_model_len: int
    vocab_size: int
    cache_seed: str

    def ends_of(self, params: SamplingParams) -> frozenset[int]:
        """The tokens that end a hypothesis of a beam search."""
        eos = frozenset() if params.ignore_eos else self.eos_token_ids
        return eos.union(params.stop_token_ids)

    def most_tokens(self, submit: Submit) -> int:
        """How long an output can become."""
        return min(submit.params.max_tokens, self.max_model_len - len(submit.prompt))

    def most_blocks(self, submit: Submit, block_size: int) -> int:
        """What a search holds if its beams share nothing but the full blocks of the prompt."""
        assert submit.params.beam is not None
        each = -(-(len(submit.prompt) + self.most_tokens(submit)) // block_size)
        shared = len(submit.prompt) // block_size
        return shared + submit.params.beam.width * (each - shared)


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    worker_id: WorkerId
    options: EngineOptions
    model: ModelLimits
    num_blocks: int
    hands_on: bool  # a prefill worker's
    takes_over: bool  # a decode worker's
    num_pinnable_blocks: int = 0  # of kept KV, while a request runs
    takes_images: bool = False  # of a model that sees
    adapters: Adapters = NoAdapters()

    def check(self, submit: Submit, *, num_waiting: int, draining: bool) -> None:
        """Raises the RequestError that answers a request which cannot be served."""
        check_taken(submit, draining=draining, num_waiting=num_waiting, max_queue=self.options.max_queue)
        check_transfer(submit, self.worker_id, hands_on=self.hands_on, takes_over=self.takes_over)
        self.adapter_of(submit)
        submit.params.validate()
        vocab_size, max_model_len = self.model.vocab_size, self.model.max_model_len
        text = self._without_images(submit) if submit.prompt and submit.images else submit.prompt
        check_prompt(submit.prompt, text, vocab_size=vocab_size, max_model_len=max_model_len)
        check_params(submit.params, vocab_size=vocab_size, max_batch=self.options.max_batch)
        check_resume(submit, vocab_size=vocab_size, max_model_len=max_model_len)
        self._check_beam(submit)
        self._check_continuation(submit)

    def adapter_of(self, submit: Submit) -> LoadedAdapter | None:
        """None for the base model."""
        if not submit.adapter:
            return None
        adapter = self.adapters.find(submit.adapter)
        if adapter is None:
            raise UnavailableError(f"worker {self.worker_id} does not have the LoRA adapter {submit.adapter}")
        return adapter

    def _without_images(self, submit: Submit) -> list[int]:
        """The prompt's text tokens. Images must be where the request says, one after the other, and stand for themselves."""
        if not self.takes_images:
            raise InvalidRequestError("this worker's model takes no images", param="images")
        text: list[int] = []
        end = 0
        for image in submit.images:
            if not end <= image.start < image.start + image.num_tokens <= len(submit.prompt):
                raise InvalidRequestError("images must be inside the prompt, in order, and apart", param="images")
            text += submit.prompt[end : image.start]
            end = image.start + image.num_tokens
            if submit.prompt[image.start : end] != placeholder_ids(image.digest, image.num_tokens):
                raise InvalidRequestError("the tokens of an image are not its placeholders", param="images")
        if end == len(submit.prompt):
            raise InvalidRequestError("the prompt must go on after its last image", param="images")
        return text + submit.prompt[end:]

    def _check_beam(self, submit: Submit) -> None:
        """A search must be able to reach its end when there is nothing else but kept KV."""
        beam = submit.params.beam
        if beam is None:
            return
        if any(resumed.tokens for resumed in submit.resume):
            raise InvalidRequestError("a beam search always starts anew", param="resume")
        if submit.keep is not None:
            raise InvalidRequestError("keep_kv cannot be combined with beam search", param="keep_kv")
        others = self.model.vocab_size - len(self.model.ends_of(submit.params))
        if beam.width > others:
            raise InvalidRequestError(
                f"beam_width must be at most {others}, the tokens that do not end a text", param="beam_width"
            )
        if (self.hands_on and submit.transfer is not None) or self.model.most_tokens(submit) == 1:
            return  # nothing but the prompt is computed
        if beam.width > self.options.max_batch:
            raise InvalidRequestError(
                f"beam_width must be at most {self.options.max_batch}, the size of a batch", param="beam_width"
            )
        needed = self.model.most_blocks(submit, self.options.block_size)
        available = self.num_blocks - self.num_pinnable_blocks
        if needed > available:
            raise InvalidRequestError(
                f"{beam.width} beams with prompt and output of up to {needed} KV blocks do not fit the {available} of"
                f" {self.num_blocks} that kept KV leaves: ask for fewer beams or fewer tokens",
                param="beam_width",
            )

    def _check_continuation(self, submit: Submit) -> None:
        keep = submit.keep
        if keep is not None and not 0.0 < keep.ttl_s < math.inf:
            raise InvalidRequestError(f"KV is kept for some seconds, more than 0, not {keep.ttl_s}", param="keep_kv")
        if keep is not None and len(keep.kept_ids) != submit.params.n:
            raise InvalidRequestError(f"{len(keep.kept_ids)} kept ids for n = {submit.params.n} samples", param="keep_kv")
        if submit.inherit is not None and submit.params.prompt_logprobs is not None:
            raise InvalidRequestError("a continuation does not compute its whole prompt", param="prompt_logprobs")
        if submit.inherit is not None and submit.transfer is not None:
            raise UnavailableError("a continuation runs where its KV is kept, and is not handed over")


# What holds for every engine


def check_taken(submit: Submit, *, draining: bool, num_waiting: int, max_queue: int) -> None:
    if draining:
        raise UnavailableError("the worker is draining and takes no new requests")
    if num_waiting >= max_queue and submit.attempt == 0:
        raise QueueFullError(f"the worker's queue is full ({max_queue} requests wait)")


def check_transfer(submit: Submit, worker_id: WorkerId, *, hands_on: bool, takes_over: bool) -> None:
    """What fails here is a mistake of the router."""
    transfer = submit.transfer
    if transfer is None:
        if hands_on and submit.params.max_tokens > 1:
            raise UnavailableError("a prefill worker hands on every request of more than one token, and was not told where")
        return
    meant_for = transfer.producer if hands_on else transfer.consumer
    if meant_for != worker_id or not (hands_on or takes_over):
        raise UnavailableError(f"transfer {transfer.transfer_id} is not for worker {worker_id}")


def check_prompt(prompt: list[int], text: list[int], *, vocab_size: int, max_model_len: int) -> None:
    """`text` is what of the prompt stands for text."""
    if not prompt:
        raise InvalidRequestError("the prompt is empty", param="prompt")
    if not tokens_below(text, vocab_size):
        raise InvalidRequestError(f"token ids must be from 0 to {vocab_size - 1}", param="prompt")
    if len(prompt) >= max_model_len:
        raise InvalidRequestError(
            f"the prompt has {len(prompt)} tokens; with at least one new token that is more than the limit of {max_model_len}",
            param="prompt",
        )


def check_params(params: SamplingParams, *, vocab_size: int, max_batch: int) -> None:
    if params.n > max_batch:
        raise InvalidRequestError(f"n must be at most {max_batch}, the size of a batch", param="n")
    named = {
        "stop_token_ids": params.stop_token_ids,
        "logit_bias": list(params.logit_bias),
        "allowed_token_ids": params.allowed_token_ids,
        "logprob_token_ids": params.logprob_token_ids,
        "bad_words": [token for word in params.bad_tokens for token in word],
    }
    for name, tokens in named.items():
        outside = [token for token in tokens if not 0 <= token < vocab_size]
        if outside:
            raise InvalidRequestError(f"token ids must be from 0 to {vocab_size - 1}, not {outside[0]}", param=name)


def check_resume(submit: Submit, *, vocab_size: int, max_model_len: int) -> None:
    params = submit.params
    samples = [resumed.sample for resumed in submit.resume]
    if len(set(samples)) < len(samples) or not all(0 <= sample < params.n for sample in samples):
        raise InvalidRequestError(f"resume must name samples from 0 to {params.n - 1}, each once", param="resume")
    if not all(tokens_below(resumed.tokens, vocab_size) for resumed in submit.resume):
        raise InvalidRequestError(f"token ids must be from 0 to {vocab_size - 1}", param="resume")
    longest = max((len(resumed.tokens) for resumed in submit.resume), default=0)
    if longest >= params.max_tokens or len(submit.prompt) + longest >= max_model_len:
        raise InvalidRequestError(f"a sample of {longest} tokens has no token to come", param="resume")
    if submit.transfer is not None and len(samples) > 1 and not begins_anew(submit):
        raise UnavailableError("samples that go on at different tokens cannot be handed over together")
