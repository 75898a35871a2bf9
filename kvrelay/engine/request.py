"""What the engine knows of its work.

A `Request` is what was submitted: one prompt, `params.n` samples. A `Sequence` is what is scheduled: one prompt with one
growing output. A request begins as one sequence; when its prompt is computed the others are forked from it, sharing its
blocks. A request that another worker began goes on as one sequence per sample that has not ended, each with its output so far:
as if all of them had been preempted here.

A beam search (`engine/requests/beam.py`) begins as one sequence, too. Its other sequences are the beams that are alive: their
number is the search's, not `params.n`, and which of them will be results is known only at the end.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvrelay.engine.interfaces import LoadedAdapter
from kvrelay.engine.requests.stages import Stages
from kvrelay.ids import RequestId, trace_id_of
from kvrelay.sampling import SamplingParams
from kvrelay.states import KV_EDGES, REQUEST_EDGES, FinishReason, KVState, RequestState, advance
from kvrelay.wire.serving import Image, Logprob, Resumed, Submit, TokenLogprobs


class Request:
    """The part that all samples of a request share."""

    def __init__(
        self, submit: Submit, arrival: int, stages: Stages | None = None, adapter: LoadedAdapter | None = None
    ) -> None:
        self.request_id: RequestId = submit.request_id
        self.external_id = submit.external_id  # what the client knows it by
        self.trace_id = trace_id_of(submit.trace)
        self.transfer_id = None if submit.transfer is None else submit.transfer.transfer_id  # of its hand-over
        self.stages = stages or Stages()
        self.params: SamplingParams = submit.params
        self.priority = submit.priority
        self.cache_salt = submit.cache_salt
        self.adapter = adapter  # None: the base model's
        self.adapter_digest = submit.adapter
        self.images = submit.images
        self.resumed_s = 0.0  # how long its images took that came in several rounds
        self.arrival = arrival  # order of submission; never changes, so a preempted request keeps its place
        self.num_unforked = submit.params.n - 1 if begins_anew(submit) else 0  # samples that do not exist yet
        tells_prompt = submit.params.prompt_logprobs is not None and (not submit.resume or Resumed(0, []) in submit.resume)
        self.prompt_logprobs: list[TokenLogprobs | None] | None = [None] if tells_prompt else None  # as far as computed
        self.cut: dict[int, FinishReason] = {}  # samples that the router ended, perhaps before they were forked
        self.sequences: list[Sequence] = []
        self.search: BeamGroup | None = None  # of a beam search

    @property
    def group(self) -> BeamGroup:
        assert self.search is not None, "not a beam search"
        return self.search

    @property
    def finished(self) -> bool:
        return self.num_unforked == 0 and all(s.state is RequestState.FINISHED for s in self.sequences)


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample. Its tokens before `num_computed` have KV in its blocks."""

    key: int
    request: Request
    sample: int
    tokens: list[int]
    num_prompt_tokens: int
    request_id: RequestId = field(init=False)
    params: SamplingParams = field(init=False)
    order: tuple[int, int, int] = field(init=False)  # who goes first, and last who is preempted
    block_table: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)  # of the full blocks among `tokens`, as far as they were needed
    num_computed: int = 0
    cached_tokens: int = 0  # prompt tokens that the prefix cache gave when the sequence first ran
    state: RequestState = RequestState.WAITING
    kv_state: KVState = KVState.FREED
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        request = self.request
        self.request_id, self.params = request.request_id, request.params
        self.order = (request.priority, request.arrival, self.sample)

    def become(self, state: RequestState) -> None:
        self.state = advance(REQUEST_EDGES, self.state, state)
        siblings = self.request.sequences
        if siblings and siblings[0] is self:
            num_new = self.num_uncomputed
            self.request.stages.follow(state, has_prompt=num_new == 0 or (num_new == 1 and self.num_output_tokens > 0))

    def kv_become(self, state: KVState) -> None:
        self.kv_state = advance(KV_EDGES, self.kv_state, state)

    @property
    def images(self) -> list[Image]:
        return self.request.images

    @property
    def adapter(self) -> LoadedAdapter | None:
        return self.request.adapter

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


@dataclass(slots=True)
class Beam:
    """A continuation that grows."""

    sequence: Sequence
    cumulative_logprob: float
    logprobs: list[TokenLogprobs]  # of its output tokens, where they are asked for


@dataclass(frozen=True, slots=True)
class Extension:
    """A beam and one more token."""

    parent: int  # among the group's beams
    token: int
    rank: int  # of the token among the parent's candidates
    cumulative_logprob: float


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A continuation that has ended. Holds no KV."""

    tokens: list[int]
    cumulative_logprob: float
    score: float
    finish: FinishReason
    logprobs: list[TokenLogprobs]


class BeamGroup:
    """The search of one request. Knows tokens and scores, nothing of blocks and queues."""

    def __init__(self, params: SamplingParams, *, ends: frozenset[int], num_candidates: int, most_tokens: int) -> None:
        assert params.beam is not None
        self.width = params.beam.width
        self.num_candidates = num_candidates  # asked for each beam
        self.num_batch_rows = self.width  # once it has begun
        self.most_blocks = 0  # it could ever hold
        self.beams: list[Beam] = []  # in falling order; none while the prompt is computed
        self.finished: list[Hypothesis] = []  # in falling order of score
        self.has_restarted = False
        self.cached_tokens: int | None = None  # of the prompt, when it was first computed
        self._params = params
        self._search = params.beam
        self._ends = ends
        self._most_tokens = most_tokens
        self._candidates: dict[int, list[Logprob]] = {}  # in this step, by the beam's key

    @property
    def has_begun(self) -> bool:
        return bool(self.beams)

    def take(self, sequence: Sequence, candidates: list[Logprob]) -> bool:
        """True if every beam has its candidates now."""
        if not self.beams:
            self.beams = [Beam(sequence, 0.0, [])]
            if self.cached_tokens is None:
                self.cached_tokens = sequence.cached_tokens
        self._candidates[sequence.key] = candidates
        return len(self._candidates) == len(self.beams)

    def extend(self) -> list[Extension]:
        """The beams of the next step, best first; none if the search is over."""
        length = self.beams[0].sequence.num_output_tokens + 1
        at_end = length >= self._most_tokens
        going: list[Extension] = []
        for rank, extension in enumerate(self._ranked(length)):
            if rank >= self.width and (at_end or len(going) == self.width):
                break
            is_end = extension.token in self._ends
            if not is_end and not at_end:
                going.append(extension)
            elif rank < self.width:
                self._finish(extension, length, FinishReason.STOP if is_end else FinishReason.LENGTH)
        self.finished.sort(key=lambda one: -one.score)
        del self.finished[self.width :]
        return [] if self._is_over(going, length) else going

    def follow(self, extensions: list[Extension], sequences: list[Sequence]) -> None:
        """The beams are these from now on; their tokens are appended."""
        beams = []
        for extension, sequence in zip(extensions, sequences, strict=True):
            sequence.tokens.append(extension.token)
            beams.append(Beam(sequence, extension.cumulative_logprob, self._logprobs_of(extension)))
        self.beams = beams
        self._candidates.clear()

    def start_again(self, sequence: Sequence, block_size: int) -> None:
        """From the prompt: the sequence is as it was at first."""
        del sequence.tokens[sequence.num_prompt_tokens :]
        del sequence.hashes[sequence.num_prompt_tokens // block_size :]
        self.beams, self.finished = [], []
        self._candidates.clear()
        self.has_restarted = True
        sequence.request.num_unforked = self.num_batch_rows - 1

    def _ranked(self, length: int) -> Iterator[Extension]:
        """Best first; of equal ones the earlier beam's, then the likelier, then that with the lower token."""
        too_short = length <= self._params.min_tokens
        dropped = self._ends if too_short else frozenset()
        for total, parent, rank, token in heapq.merge(
            *(self._extensions(index, beam, dropped) for index, beam in enumerate(self.beams))
        ):
            yield Extension(parent, token, rank, -total)

    def _extensions(self, index: int, beam: Beam, dropped: frozenset[int]) -> Iterator[tuple[float, int, int, int]]:
        for rank, (token, logprob) in enumerate(self._candidates[beam.sequence.key]):
            if token not in dropped:
                yield -(beam.cumulative_logprob + logprob), index, rank, token

    def _finish(self, extension: Extension, length: int, reason: FinishReason) -> None:
        sequence = self.beams[extension.parent].sequence
        tokens = [*sequence.tokens[sequence.num_prompt_tokens :], extension.token]
        score = self._score(extension.cumulative_logprob, length)
        self.finished.append(Hypothesis(tokens, extension.cumulative_logprob, score, reason, self._logprobs_of(extension)))

    def _score(self, cumulative_logprob: float, length: int) -> float:
        return cumulative_logprob / math.pow(length, self._search.length_penalty)

    def _is_over(self, going: list[Extension], length: int) -> bool:
        if not going:
            return True
        if len(self.finished) < self.width:
            return False
        if self._search.early_stopping is True:
            return True
        longest = self._search.early_stopping == "never" and self._search.length_penalty > 0.0
        best = self._score(going[0].cumulative_logprob, self._most_tokens if longest else length)
        return best <= self.finished[-1].score

    def _logprobs_of(self, extension: Extension) -> list[TokenLogprobs]:
        if self._params.logprobs is None:
            return []
        beam = self.beams[extension.parent]
        candidates = self._candidates[beam.sequence.key]
        return [*beam.logprobs, TokenLogprobs(candidates[extension.rank][1], candidates[: self._params.logprobs])]


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
