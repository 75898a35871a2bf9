"""What the engine knows of its work.

A `Request` is what was submitted: one prompt, `params.n` samples. A `Sequence` is what is scheduled: one prompt with one
growing output. A request begins as one sequence; when its prompt is computed the others are forked from it, sharing its
blocks. A request that another worker began goes on as one sequence per sample that has not ended, each with its output so far:
as if all of them had been preempted here.

A beam search (`engine/requests/beam.py`) begins as one sequence, too. Its other sequences are the beams that are alive: their
number is the search's, not `params.n`, and which of them will be results is known only at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from kvrelay.ids import RequestId
from kvrelay.sampling import SamplingParams
from kvrelay.states import KV_EDGES, REQUEST_EDGES, FinishReason, KVState, RequestState, advance
from kvrelay.wire.serving import Image, Resumed, Submit, TokenLogprobs


class Search(Protocol):
    """What the scheduler needs to know of a beam search."""

    @property
    def has_begun(self) -> bool:
        """Its prompt is computed: the request's sequences are its beams."""

    @property
    def num_candidates(self) -> int:
        """That a pass names for each beam."""

    @property
    def most_blocks(self) -> int:
        """That it could ever hold."""

    @property
    def has_restarted(self) -> bool: ...

    def start_again(self, sequence: Sequence, block_size: int) -> None:
        """From the prompt: the sequence is as it was at first."""


class Request:
    """The part that all samples of a request share."""

    __slots__ = (
        "arrival",
        "cache_salt",
        "cut",
        "external_id",
        "images",
        "num_unforked",
        "params",
        "priority",
        "prompt_logprobs",
        "request_id",
        "search",
        "sequences",
    )

    def __init__(self, submit: Submit, arrival: int) -> None:
        self.request_id: RequestId = submit.request_id
        self.external_id = submit.external_id  # what the client knows it by
        self.params: SamplingParams = submit.params
        self.priority = submit.priority
        self.cache_salt = submit.cache_salt
        self.images = submit.images
        self.arrival = arrival  # order of submission; never changes, so a preempted request keeps its place
        self.num_unforked = submit.params.n - 1 if begins_anew(submit) else 0  # samples that do not exist yet
        tells_prompt = submit.params.prompt_logprobs is not None and (not submit.resume or Resumed(0, []) in submit.resume)
        self.prompt_logprobs: list[TokenLogprobs | None] | None = [None] if tells_prompt else None  # as far as computed
        self.cut: dict[int, FinishReason] = {}  # samples that the router ended, perhaps before they were forked
        self.sequences: list[Sequence] = []
        self.search: Search | None = None  # of a beam search

    @property
    def finished(self) -> bool:
        return self.num_unforked == 0 and all(s.state is RequestState.FINISHED for s in self.sequences)


class Sequence:
    """One sample. Its tokens before `num_computed` have KV in its blocks."""

    __slots__ = (
        "block_table",
        "cached_tokens",
        "finish_reason",
        "hashes",
        "key",
        "kv_state",
        "num_computed",
        "num_prompt_tokens",
        "order",
        "params",
        "request",
        "request_id",
        "sample",
        "state",
        "tokens",
    )

    def __init__(self, key: int, request: Request, sample: int, tokens: list[int], num_prompt_tokens: int) -> None:
        self.key = key
        self.request = request
        self.request_id = request.request_id
        self.params = request.params
        self.sample = sample
        self.tokens = tokens
        self.num_prompt_tokens = num_prompt_tokens
        self.order = (request.priority, request.arrival, sample)  # who goes first, and last who is preempted
        self.block_table: list[int] = []
        self.hashes: list[bytes] = []  # of the full blocks among `tokens`, as far as they were needed
        self.num_computed = 0
        self.cached_tokens = 0  # prompt tokens that the prefix cache gave when the sequence first ran
        self.state = RequestState.WAITING
        self.kv_state = KVState.FREED
        self.finish_reason: FinishReason | None = None

    def become(self, state: RequestState) -> None:
        self.state = advance(REQUEST_EDGES, self.state, state)

    def kv_become(self, state: KVState) -> None:
        self.kv_state = advance(KV_EDGES, self.kv_state, state)

    @property
    def images(self) -> list[Image]:
        return self.request.images

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def together(self) -> list[Sequence]:
        """Those that run, are swapped and come back as one: the beams of a search that has begun; else itself alone."""
        search = self.request.search
        return [self] if search is None or not search.has_begun else self.request.sequences

    @property
    def num_batch_rows(self) -> int:
        """That this sequence takes or will take: itself and the samples to be forked from it."""
        return 1 + (self.request.num_unforked if self.sample == 0 else 0)

    @property
    def wants_prompt_logprobs(self) -> bool:
        collected = self.request.prompt_logprobs
        return collected is not None and self.sample == 0 and len(collected) < self.num_prompt_tokens


def begins_anew(submit: Submit) -> bool:
    """Whether no sample has a token yet and none has ended: then one sequence computes the prompt for all."""
    if not submit.resume or submit.params.beam is not None:
        return True
    return len(submit.resume) == submit.params.n and not any(resumed.tokens for resumed in submit.resume)


def first_sequences(submit: Submit, request: Request, keys: Iterator[int]) -> list[Sequence]:
    """Those a request begins with."""
    beginnings = [Resumed(0, [])] if begins_anew(submit) else sorted(submit.resume, key=lambda resumed: resumed.sample)
    prompt = submit.prompt
    return [Sequence(next(keys), request, one.sample, prompt + one.tokens, len(prompt)) for one in beginnings]
