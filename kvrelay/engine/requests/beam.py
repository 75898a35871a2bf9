"""Beam search: the `width` likeliest continuations of a prompt grow side by side; the best of those that ended are the result.

The semantics are those of transformers' `generate(num_beams=width, num_return_sequences=n, do_sample=False)`.

    begin     one sequence computes the prompt; its rows of the batch are those of the beams to come
    take      a pass names each beam's likeliest next tokens. When the last beam has its own, the search goes a step on: the
              extensions of all beams are ranked by their total logprob. Of the first `width`, those that end (by an
              end-of-text or stop token, or because they are long enough) become hypotheses, of which the best `width` are kept
              as mere tokens and scores. The first `width` that do not end are the next beams.
    follow    a beam that several of them continue is forked (they share its blocks; a beam that writes a shared block copies
              it), one that a single one continues goes on as it is, one without any gives its blocks back
    results   nothing is told before the end; then the best `n`, all at once

All beams of a search are part of the same steps, and of no other: in a step each of them computes one token, or none does.
Likewise they are swapped out together, every shared block once, and come back together. Where the host has no room, or a copy
takes too long, the search starts again from its prompt; it is deterministic, so its result is the same.

So a search is either all on the device or not at all, and two of them never wait for each other with half of their blocks each.
The first request in the scheduler's order gets its blocks, if need be from all behind it; admission has made sure that the pool
holds every search alone (`most_blocks`); hence the first always moves on, and in the end it is the next one's turn. A search
that comes back takes all its blocks at once, in the order of the scheduler's queue of swapped sequences, while no new request
is admitted. One that starts again is admitted again only where it could grow to its end, or where no other request runs: so it
is not thrown out by the same neighbour once more.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass

from kvrelay.engine.core import Core
from kvrelay.engine.request import Request, Sequence
from kvrelay.engine.requests.beam_limits import ends_of, most_blocks, most_tokens
from kvrelay.sampling import SamplingParams
from kvrelay.states import FinishReason
from kvrelay.wire.serving import BeamResult, FirstToken, Logprob, SequenceOutput, Submit, TokenLogprobs


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


class Beams:
    """What happens to sequences and their blocks when a search begins, goes on and ends."""

    def __init__(self, core: Core) -> None:
        self._kv = core.kv
        self._scheduler = core.scheduler
        self._keys = core.keys
        self._limits = core.limits

    def begin(self, request: Request, submit: Submit, *, hands_on: bool) -> None:
        """A worker that hands the prompt on needs no batch rows for the beams."""
        params = submit.params
        assert params.beam is not None
        ends = ends_of(params, self._limits.eos_token_ids)
        # Of one beam no more than `width` can be among the best `width`, nor go on; and there are as many again as can end it.
        count = max(params.beam.width + len(ends), params.logprobs or 0)
        group = request.search = BeamGroup(
            params,
            ends=ends,
            num_candidates=min(count, self._limits.vocab_size),
            most_tokens=most_tokens(submit, self._limits.max_model_len),
        )
        group.most_blocks = most_blocks(submit, self._limits.max_model_len, self._kv.block_size)
        if hands_on or most_tokens(submit, self._limits.max_model_len) == 1:
            group.num_batch_rows = 1
        request.num_unforked = group.num_batch_rows - 1

    def take(self, sequence: Sequence, candidates: list[Logprob]) -> bool:
        """What a pass says of a beam, or of the prompt. True if the search is over."""
        request = sequence.request
        group = _group(request)
        if not group.take(sequence, candidates):
            return False
        extensions = group.extend()
        if extensions:
            group.follow(extensions, self._descend(request, group, extensions))
        request.num_unforked = 0
        return not extensions

    def results(self, request: Request) -> Iterator[tuple[SequenceOutput, BeamResult]]:
        group, request_id = _group(request), request.request_id
        for sample, one in enumerate(group.finished[: request.params.n]):
            output = SequenceOutput(
                request_id,
                sample,
                0,
                one.tokens,
                one.finish,
                group.cached_tokens or 0,
                None if request.params.logprobs is None else one.logprobs,
            )
            yield output, BeamResult(request_id, sample, one.cumulative_logprob, one.score)

    def first_token(self, sequence: Sequence, candidates: list[Logprob]) -> FirstToken:
        """What a prefill worker hands on: the candidates, from which the decode worker begins the search."""
        token, logprob = candidates[0]
        return FirstToken(0, token, TokenLogprobs(logprob, candidates), sequence.cached_tokens)

    def arrived(self, request: Request, first_tokens: list[FirstToken]) -> list[Logprob] | None:
        """The candidates that a prefill worker named; None if they are not what a search can begin from."""
        if len(first_tokens) != 1 or first_tokens[0].logprobs is None:
            return None
        candidates = first_tokens[0].logprobs.top
        tokens = {token for token, _ in candidates if 0 <= token < self._limits.vocab_size}
        return candidates if len(tokens) == len(candidates) == _group(request).num_candidates else None

    def _descend(self, request: Request, group: BeamGroup, extensions: list[Extension]) -> list[Sequence]:
        """A sequence for each extension, still without its token."""
        parents = [beam.sequence for beam in group.beams]
        continued = {extension.parent for extension in extensions}
        for index, sequence in enumerate(parents):
            if index not in continued:
                self._scheduler.discard(sequence)
        taken = {sequence.sample for sequence in request.sequences}
        free_samples = iter([sample for sample in range(len(extensions)) if sample not in taken])
        sequences = []
        for extension in extensions:
            parent = parents[extension.parent]
            if extension.parent in continued:
                continued.discard(extension.parent)
                sequences.append(parent)
            else:
                sequences.append(self._fork(parent, next(free_samples)))
        return sequences

    def _fork(self, parent: Sequence, sample: int) -> Sequence:
        child = Sequence(next(self._keys), parent.request, sample, list(parent.tokens), parent.num_prompt_tokens)
        self._kv.fork(parent, child)
        self._scheduler.run_at_once(child)
        parent.request.sequences.append(child)
        return child


def _group(request: Request) -> BeamGroup:
    assert isinstance(request.search, BeamGroup), "not a beam search"
    return request.search
