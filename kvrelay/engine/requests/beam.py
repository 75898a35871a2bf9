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

from collections.abc import Iterator

from kvrelay.engine.core import Core
from kvrelay.engine.request import BeamGroup, Extension, Request, Sequence
from kvrelay.wire.serving import BeamResult, FirstToken, Logprob, SequenceOutput, Submit, TokenLogprobs


class Beams:
    """What happens to sequences and their blocks when a search begins, goes on and ends."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._model = core.limits.model

    def begin(self, request: Request, submit: Submit, *, hands_on: bool) -> None:
        """A worker that hands the prompt on needs no batch rows for the beams."""
        params = submit.params
        assert params.beam is not None
        ends, longest = self._model.ends_of(params), self._model.most_tokens(submit)
        # Of one beam no more than `width` can be among the best `width`, nor go on; and there are as many again as can end it.
        count = max(params.beam.width + len(ends), params.logprobs or 0)
        group = request.search = BeamGroup(
            params, ends=ends, num_candidates=min(count, self._model.vocab_size), most_tokens=longest
        )
        group.most_blocks = self._model.most_blocks(submit, self._core.kv.block_size)
        if hands_on or longest == 1:
            group.num_batch_rows = 1
        request.num_unforked = group.num_batch_rows - 1

    def take(self, sequence: Sequence, candidates: list[Logprob]) -> bool:
        """What a pass says of a beam, or of the prompt. True if the search is over."""
        request = sequence.request
        group = request.group
        if not group.take(sequence, candidates):
            return False
        extensions = group.extend()
        if extensions:
            group.follow(extensions, self._descend(request, group, extensions))
        request.num_unforked = 0
        return not extensions

    def results(self, request: Request) -> Iterator[tuple[SequenceOutput, BeamResult]]:
        group, request_id = request.group, request.request_id
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
        tokens = {token for token, _ in candidates if 0 <= token < self._model.vocab_size}
        return candidates if len(tokens) == len(candidates) == request.group.num_candidates else None

    def _descend(self, request: Request, group: BeamGroup, extensions: list[Extension]) -> list[Sequence]:
        """A sequence for each extension, still without its token."""
        parents = [beam.sequence for beam in group.beams]
        continued = {extension.parent for extension in extensions}
        for index, sequence in enumerate(parents):
            if index not in continued:
                self._core.scheduler.discard(sequence)
        taken = {sequence.sample for sequence in request.sequences}
        free_samples = iter([sample for sample in range(len(extensions)) if sample not in taken])
        sequences = []
        for extension in extensions:
            parent = parents[extension.parent]
            if extension.parent in continued:
                continued.discard(extension.parent)
                sequences.append(parent)
            else:
                sequences.append(self._core.fork(parent, next(free_samples)))
        return sequences
