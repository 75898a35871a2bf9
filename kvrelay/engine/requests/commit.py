"""What came of a step, and of hand-overs: sequences get their next tokens, fork, go on elsewhere, or end.

rows      a pass was computed: one answer for each of its rows
arrived   the KV of a prompt came from the worker that computed it, with the first token of every sample
"""

from __future__ import annotations

from collections.abc import Sequence as List

from kvrelay.engine.core import Core
from kvrelay.engine.interfaces import Row, RowFailure, RowResult, StepPlan, StepResult
from kvrelay.engine.movers import Arrival
from kvrelay.engine.request import Sequence
from kvrelay.engine.requests.beam import Beams
from kvrelay.engine.requests.endings import Endings
from kvrelay.errors import HandOverError, InternalError, InvalidRequestError, RequestError
from kvrelay.log import Log
from kvrelay.states import FinishReason, KVState, RequestState, Stage
from kvrelay.wire.serving import FirstToken, Logprob, SequenceOutput, TokenLogprobs

log = Log("engine")


class Commit:
    """Knows what a token means for its sequence. Decides nothing about who runs."""

    def __init__(self, core: Core, beams: Beams, endings: Endings) -> None:
        self._core = core
        self._kv = core.kv
        self._beams = beams
        self._endings = endings
        self._outbox = core.outbox
        self._outgoing = core.outgoing
        self._hands_on = core.limits.hands_on
        self._eos_token_ids = core.limits.model.eos_token_ids
        self._max_model_len = core.limits.model.max_model_len

    def rows(self, plan: StepPlan, result: StepResult) -> None:
        """By far the most of them decode: one token of the output was computed, and gives the next. What `_row` does for these
        is done here without a call, as far as nothing else happens."""
        outbox, kv, size, eos, longest = self._outbox, self._kv, self._kv.block_size, self._eos_token_ids, self._max_model_len
        decodes, running, active, num_decoded = not self._hands_on, RequestState.RUNNING, KVState.ACTIVE, 0
        for row, answer in zip(plan.rows, result.rows, strict=True):
            sequence = row.sequence
            assert isinstance(sequence, Sequence)
            if answer.failure is not None:
                self._endings.fail(sequence.request, _error_of(answer.failure))
                continue
            if sequence.state is not running:  # a sibling's failure ended it
                continue
            prompt = sequence.num_prompt_tokens
            if not (decodes and row.count == row.samples == 1 and answer.logprobs is None and row.start >= prompt):
                self._row(row, sequence, answer)
                continue
            computed = sequence.num_computed + 1
            if computed % size and sequence.kv_state is active:
                sequence.num_computed = computed
            else:
                kv.computed(sequence, 1)
            tokens, params, token, reason = sequence.tokens, sequence.params, answer.tokens[0], None
            tokens.append(token)
            length = len(tokens)
            count = length - prompt
            if count >= params.max_tokens or length >= longest or token in eos or params.stop_token_ids:
                reason = self._finish_reason(sequence)
            num_decoded += 1
            outbox.outputs.append(
                SequenceOutput(sequence.request_id, sequence.sample, count - 1, [token], reason, sequence.cached_tokens)
            )
            if reason is not None:
                self._endings.end(sequence, reason)
                self._endings.settle(sequence.request)
        outbox.num_output_tokens += num_decoded

    def _finish_reason(self, sequence: Sequence) -> FinishReason | None:
        """Whether its last token ends it, as far as a worker can tell. The router, which sees the text, finds stop strings."""
        params, tokens = sequence.params, sequence.tokens
        token, count = tokens[-1], len(tokens) - sequence.num_prompt_tokens
        if count >= params.min_tokens:
            if token in self._eos_token_ids and not params.ignore_eos:
                return FinishReason.STOP
            if params.stop_token_ids and token in params.stop_token_ids:
                return FinishReason.STOP
        if count >= params.max_tokens or len(tokens) >= self._max_model_len:
            return FinishReason.LENGTH
        return None

    def _row(self, row: Row, sequence: Sequence, answer: RowResult) -> None:
        self._kv.computed(sequence, row.count)
        if row.start < sequence.num_prompt_tokens:
            self._outbox.num_prompt_tokens += min(row.start + row.count, sequence.num_prompt_tokens) - row.start
            if sequence.request.images:
                self._core.images.computed(sequence)
        if answer.prompt_logprobs is not None and sequence.request.prompt_logprobs is not None:
            sequence.request.prompt_logprobs.extend(answer.prompt_logprobs)
        if answer.candidates is not None:
            self._take_candidates(sequence, answer.candidates)
            return
        if row.samples == 0:
            return
        if row.samples == 1 and not self._hands_on:  # the usual case
            sequence.request.stages.enter(Stage.DECODE)
            self._append(sequence, answer.tokens[0], None if answer.logprobs is None else answer.logprobs[0])
            if sequence.finish_reason is not None:
                self._endings.settle(sequence.request)
            return
        logprobs: List[TokenLogprobs | None] = answer.logprobs or [None] * row.samples
        if sequence.request_id in self._outgoing:
            told = sequence.request.prompt_logprobs
            self._hand_on(
                sequence,
                [
                    FirstToken(sample, token, entry, sequence.cached_tokens, told if sample == 0 else None)
                    for sample, (token, entry) in enumerate(zip(answer.tokens, logprobs, strict=True), start=sequence.sample)
                ],
            )
            return
        sequence.request.stages.enter(Stage.DECODE)
        samples = [sequence, *self._fork(sequence)]
        for sample, token, entry in zip(samples, answer.tokens, logprobs, strict=True):
            self._append(sample, token, entry)
        self._endings.end_cut(sequence.request)
        self._endings.settle(sequence.request)

    def _fork(self, parent: Sequence) -> list[Sequence]:
        """The samples that begin where the prompt ends."""
        request = parent.request
        if parent.sample != 0:
            return []
        children = [self._core.fork(parent, sample) for sample in range(1, 1 + request.num_unforked)]
        request.num_unforked = 0
        return children

    def _take_candidates(self, sequence: Sequence, candidates: list[Logprob]) -> None:
        """Of one beam of a search. Its results are told when it is over, all at once."""
        if sequence.request_id in self._outgoing:
            self._hand_on(sequence, [self._beams.first_token(sequence, candidates)])
            return
        sequence.request.stages.enter(Stage.DECODE)
        if not self._beams.take(sequence, candidates):
            return
        request = sequence.request
        for output, result in self._beams.results(request):
            self._outbox.outputs.append(output)
            self._outbox.news.append(result)
            self._outbox.num_output_tokens += len(output.tokens)
            self._outbox.num_cached_tokens += output.cached_tokens if output.sample == 0 else 0
        for beam in request.sequences:
            self._endings.end(beam, FinishReason.STOP)
        self._endings.settle(request)

    def _append(self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None) -> None:
        is_first = sequence.num_output_tokens == 0 and sequence.sample == 0
        if is_first:
            self._outbox.num_cached_tokens += sequence.cached_tokens
        sequence.tokens.append(token)
        reason = self._tell(sequence, sequence.sample, logprobs, sequence.request.prompt_logprobs if is_first else None)
        if reason is not None:
            self._endings.end(sequence, reason)

    def _tell(
        self,
        sequence: Sequence,
        sample: int,
        logprobs: TokenLogprobs | None,
        prompt_logprobs: list[TokenLogprobs | None] | None,
    ) -> FinishReason | None:
        """The sequence's last token is the sample's next."""
        position, token, reason = sequence.num_output_tokens - 1, sequence.tokens[-1], self._finish_reason(sequence)
        self._outbox.num_output_tokens += 1
        self._outbox.outputs.append(
            SequenceOutput(
                sequence.request_id,
                sample,
                position,
                [token],
                reason,
                sequence.cached_tokens,
                None if logprobs is None else [logprobs],
                prompt_logprobs,
            )
        )
        return reason

    def _hand_on(self, sequence: Sequence, first_tokens: list[FirstToken]) -> None:
        """The prompt is computed: its first tokens are told at once (not a search's), and its KV goes to the peer, where the
        samples go on."""
        request = sequence.request
        if self._outgoing.finished(sequence, first_tokens):
            self._outbox.num_cached_tokens += sequence.cached_tokens
            for first in first_tokens if request.search is None else ():
                sequence.tokens.append(first.token)
                self._tell(sequence, first.sample, first.logprobs, first.prompt_logprobs)
                sequence.tokens.pop()
        self._endings.hand_on(sequence)

    def arrived(self, sequence: Sequence, arrival: Arrival) -> None:
        """If it failed, the prompt has to be computed after all: the router decides where."""
        if arrival.error:
            request = sequence.request
            log.warning(
                "hand-over failed",
                request=request.request_id, transfer=request.transfer_id, reason=arrival.error, trace=request.trace_id,
            )  # fmt: skip
            reason = f"the hand-over from the prefill worker failed: {arrival.error}"
            self._endings.fail(sequence.request, HandOverError(reason, by_producer=arrival.by_producer))
            self._endings.released.append(sequence.key)  # the runner may expect it
            return
        self._core.scheduler.run_at_once(sequence)
        if sequence.request.search is not None:
            self._search_arrived(sequence, arrival.first_tokens)
            return
        first_tokens = {one.sample: one for one in arrival.first_tokens if 0 <= one.token < self._core.limits.model.vocab_size}
        if not all(sequence.sample + index in first_tokens for index in range(sequence.num_batch_rows)):
            self._endings.fail(sequence.request, HandOverError("the prefill worker did not name every sample's first token"))
            return
        origin = first_tokens[sequence.sample]
        sequence.cached_tokens = origin.cached_tokens
        sequence.request.prompt_logprobs = origin.prompt_logprobs
        for sample in [sequence, *self._fork(sequence)]:
            first = first_tokens[sample.sample]
            self._append(sample, first.token, first.logprobs)
        self._endings.end_cut(sequence.request)
        self._endings.settle(sequence.request)

    def _search_arrived(self, sequence: Sequence, first_tokens: list[FirstToken]) -> None:
        candidates = self._beams.arrived(sequence.request, first_tokens)
        if candidates is None:
            self._endings.fail(sequence.request, HandOverError("the prefill worker did not name the candidates of a search"))
            return
        sequence.cached_tokens = first_tokens[0].cached_tokens
        self._take_candidates(sequence, candidates)


def _error_of(failure: RowFailure) -> RequestError:
    if failure.param is not None:
        return InvalidRequestError(failure.message, param=failure.param)
    return InternalError(failure.message)
