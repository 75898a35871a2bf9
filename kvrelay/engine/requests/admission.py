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
        if draining:
            raise UnavailableError("the worker is draining and takes no new requests")
        if num_waiting >= self.options.max_queue and submit.attempt == 0:
            raise QueueFullError(f"the worker's queue is full ({self.options.max_queue} requests wait)")
        self._check_role(submit)
        self.adapter_of(submit)
        submit.params.validate()
        self._check_prompt(submit)
        self._check_params(submit)
        self._check_resume(submit)
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

    def _check_prompt(self, submit: Submit) -> None:
        prompt = submit.prompt
        if not prompt:
            raise InvalidRequestError("the prompt is empty", param="prompt")
        text = self._without_images(submit) if submit.images else prompt
        if not tokens_below(text, self.model.vocab_size):
            raise InvalidRequestError(f"token ids must be from 0 to {self.model.vocab_size - 1}", param="prompt")
        if len(prompt) >= self.model.max_model_len:
            raise InvalidRequestError(
                f"the prompt has {len(prompt)} tokens; with at least one new token that is more than the limit of"
                f" {self.model.max_model_len}",
                param="prompt",
            )

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

    def _check_params(self, submit: Submit) -> None:
        params = submit.params
        if params.n > self.options.max_batch:
            raise InvalidRequestError(f"n must be at most {self.options.max_batch}, the size of a batch", param="n")
        named = {
            "stop_token_ids": params.stop_token_ids,
            "logit_bias": list(params.logit_bias),
            "allowed_token_ids": params.allowed_token_ids,
            "logprob_token_ids": params.logprob_token_ids,
            "bad_words": [token for word in params.bad_tokens for token in word],
        }
        for name, tokens in named.items():
            outside = [token for token in tokens if not 0 <= token < self.model.vocab_size]
            if outside:
                raise InvalidRequestError(
                    f"token ids must be from 0 to {self.model.vocab_size - 1}, not {outside[0]}", param=name
                )

    def _check_resume(self, submit: Submit) -> None:
        params = submit.params
        samples = [resumed.sample for resumed in submit.resume]
        if len(set(samples)) < len(samples) or not all(0 <= sample < params.n for sample in samples):
            raise InvalidRequestError(f"resume must name samples from 0 to {params.n - 1}, each once", param="resume")
        longest = 0
        for resumed in submit.resume:
            if not all(0 <= token < self.model.vocab_size for token in resumed.tokens):
                raise InvalidRequestError(f"token ids must be from 0 to {self.model.vocab_size - 1}", param="resume")
            longest = max(longest, len(resumed.tokens))
        if longest >= params.max_tokens or len(submit.prompt) + longest >= self.model.max_model_len:
            raise InvalidRequestError(f"a sample of {longest} tokens has no token to come", param="resume")
        if submit.transfer is not None and len(samples) > 1 and not begins_anew(submit):
            raise UnavailableError("samples that go on at different tokens cannot be handed over together")

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

    def _check_role(self, submit: Submit) -> None:
        """What fails here is a mistake of the router."""
        transfer = submit.transfer
        if transfer is None:
            if self.hands_on and submit.params.max_tokens > 1:
                raise UnavailableError("a prefill worker hands on every request of more than one token, and was not told where")
            return
        meant_for = transfer.producer if self.hands_on else transfer.consumer
        if meant_for != self.worker_id or not (self.hands_on or self.takes_over):
            raise UnavailableError(f"transfer {transfer.transfer_id} is not for worker {self.worker_id}")
