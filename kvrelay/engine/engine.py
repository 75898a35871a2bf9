"""The engine of one worker: takes requests, plans steps, has them computed, and says what came of it.

    submit / abort / finish      between steps, by the worker
    step                         take news -> schedule -> launch -> collect -> commit; everything new as one message
    drain                        takes nothing new; `drained` when the last request has ended

Every submitted request ends in exactly one way: each sample with a finish reason, or the whole with one Failure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as List
from itertools import count as counter

from kvrelay.config import EngineOptions
from kvrelay.engine import invariants
from kvrelay.engine.admission import Limits
from kvrelay.engine.beam import Beams
from kvrelay.engine.continuation import Leases
from kvrelay.engine.finish import finish_reason
from kvrelay.engine.incoming import Incoming
from kvrelay.engine.interfaces import Row, RowResult, Runner, StepPlan, StepResult
from kvrelay.engine.kv_cache import KVCache
from kvrelay.engine.movers import Arrival, Consumer, Producer
from kvrelay.engine.outgoing import Outgoing
from kvrelay.engine.pictures import Pictures
from kvrelay.engine.request import Request, Sequence, first_sequences
from kvrelay.engine.scheduler import Scheduler
from kvrelay.engine.swap import Swap
from kvrelay.errors import HandOverError, InternalError, InvalidRequestError, RequestError, UnavailableError
from kvrelay.ids import LeaseId, RequestId, WorkerId
from kvrelay.log import Log
from kvrelay.states import FinishReason, FreeReason, RequestState
from kvrelay.wire.registry import HostCounts, MappingCounts, TransferCounts, WorkerLoad
from kvrelay.wire.serving import (
    BeamResult,
    Encode,
    Failure,
    Finish,
    FirstToken,
    LeaseInfo,
    Logprob,
    SequenceOutput,
    StepOutputs,
    Submit,
    TokenLogprobs,
)

log = Log("engine")

_COPY_WAIT_S = 0.002  # how long a step that has nothing to compute waits for a copy to end


class Engine:
    """Joins scheduler, KV cache and runner. One thread calls it."""

    def __init__(
        self,
        *,
        options: EngineOptions,
        runner: Runner,
        worker_id: WorkerId,
        eos_token_ids: frozenset[int],
        max_model_len: int,
        vocab_size: int,
        cache_seed: str,
        producer: Producer | None = None,
        consumer: Consumer | None = None,
        pictures: Pictures | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.options = options
        self.kv = KVCache(
            num_blocks=runner.num_blocks,
            block_size=options.block_size,
            prefix_cache=options.prefix_cache,
            cache_seed=cache_seed,
        )
        assert self.kv.blocks_for(max_model_len) <= runner.num_blocks, "the pool cannot hold one longest request"
        self.outgoing = None if producer is None else Outgoing(producer, self.kv)
        self.incoming = None if consumer is None else Incoming(consumer, self.kv)
        self._relay = self.incoming if self.outgoing is None else self.outgoing
        self.swap = Swap(self.kv, runner, clock=clock, timeout_s=options.swap_timeout_s) if runner.num_host_blocks else None
        self._keys = counter()
        lease_share = int(options.lease_share * runner.num_blocks)
        lease_most = runner.num_blocks - self.kv.blocks_for(max_model_len)
        self.leases = Leases(
            self.kv,
            self.swap,
            clock=clock,
            keys=self._keys,
            share=lease_share,
            most=lease_most,
            verify=options.check_invariants,
        )
        self.pictures = pictures
        self.scheduler = Scheduler(options, self.kv, self.leases, self.incoming, self.outgoing, self.swap, pictures)
        if self.outgoing is not None:
            runner.on_layer(self.outgoing.layer_done)
        self.requests: dict[RequestId, Request] = {}
        self._runner = runner
        self._worker_id = worker_id
        self._limits = Limits(
            worker_id=worker_id,
            max_queue=options.max_queue,
            max_batch=options.max_batch,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
            num_blocks=runner.num_blocks,
            block_size=options.block_size,
            hands_on=producer is not None,
            takes_over=consumer is not None,
            takes_images=pictures is not None,
            num_pinnable_blocks=min(lease_share, lease_most),
        )
        self._eos_token_ids = eos_token_ids
        self._max_model_len = max_model_len
        self._arrivals = counter()
        self._beams = Beams(
            self.kv,
            self.scheduler,
            self._keys,
            eos_token_ids=eos_token_ids,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
        )
        self._outputs: list[SequenceOutput] = []
        self._beam_results: list[BeamResult] = []
        self._failures: list[Failure] = []
        self._handed_over: list[RequestId] = []
        self._released: list[int] = []
        self._handing_on: dict[RequestId, tuple[str, list[bytes]]] = {}  # client's id and hashes of prompts that ended here
        self._draining = False
        self._stalled = False  # the last step could do nothing, and nothing has changed since
        self._num_steps = 0
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0
        self._num_output_tokens = 0

    # What the worker calls between steps

    def submit(self, submit: Submit) -> None:
        """Never raises: a request that cannot be served is answered by a Failure with the next step's outputs."""
        if submit.request_id in self.requests:
            log.warning("request submitted twice, second one ignored", request=submit.request_id)
            return
        self._end_leases()
        try:
            self._limits.check(submit, num_waiting=self._num_waiting, draining=self._draining)
            self.leases.check(submit)
        except RequestError as error:
            self._failures.append(Failure(submit.request_id, error.kind, error.message, error.param))
            return
        request = self._enqueue(submit)
        if self.outgoing is not None and submit.transfer is not None:
            self.outgoing.expect(submit, len(request.sequences[0].tokens))
            return  # whoever takes it over keeps it
        self.leases.expect(submit)
        self.leases.inherit(submit, request.sequences)
        if self.outgoing is not None:
            self.leases.refuse(submit.request_id, "a prefill worker keeps no KV")
        elif submit.params.beam is not None:
            self.leases.refuse(submit.request_id, "the KV of a beam search is not kept")

    def encode(self, encode: Encode) -> None:
        """Only a router that is confused asks this of a worker that computes prompts or generates."""
        error = UnavailableError(f"worker {self._worker_id} makes no embeddings for others")
        self._failures.append(Failure(encode.request_id, error.kind, error.message))

    def _enqueue(self, submit: Submit) -> Request:
        request = Request(submit, next(self._arrivals))
        request.sequences = first_sequences(submit, request, self._keys)
        if submit.params.beam is not None:
            self._beams.begin(request, submit, hands_on=self.outgoing is not None and submit.transfer is not None)
        self.requests[submit.request_id] = request
        for sequence in request.sequences:
            if self.incoming is not None and submit.transfer is not None:
                self.incoming.expect(sequence, submit.transfer)
            else:
                self.scheduler.add(sequence)
        if submit.images:
            self._expect_pictures(request, submit)
        self._stalled = False
        return request

    def _expect_pictures(self, request: Request, submit: Submit) -> None:
        assert self.pictures is not None, "a worker without pictures refuses them"
        taken_over = request.request_id in self.incoming if self.incoming is not None else False
        # A lease has the KV of all its pictures; should it be gone, they are asked for when they are met.
        num_cached_tokens = len(submit.prompt) if submit.inherit else self.kv.num_cached_tokens(request.sequences[0])
        self.pictures.expect(request, submit.embeddings, num_cached_tokens=num_cached_tokens, computes_prompt=not taken_over)

    def abort(self, request_ids: Iterable[RequestId]) -> None:
        """Ends each sample that still runs. Unknown and finished requests are no error: an abort may come late."""
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is not None:
                for sample in self._drop(request, FreeReason.ABORTED):
                    self._outputs.append(SequenceOutput(request_id, sample, 0, [], FinishReason.ABORT))
            elif self.outgoing is not None:
                self.outgoing.abort_finished(request_id)
                self._tell_handed_on(request_id, FreeReason.ABORTED)

    def finish(self, finish: Finish) -> None:
        """The router found the end of a sample. The sequence may have ended or run a few tokens further meanwhile."""
        self.leases.seen(finish)
        request = self.requests.get(finish.request_id)
        if request is None:
            return
        request.cut[finish.sample] = finish.reason
        if self.incoming is not None and finish.request_id in self.incoming and self.leases.is_due(finish.request_id):
            return  # it ends when its KV is here, since that is to be kept
        if len(request.cut) == request.params.n or request.group is not None:
            self._drop(request, FreeReason.FINISHED)
        elif not request.num_unforked:
            self._end_cut(request)
            self._forget_if_finished(request)

    def release_leases(self, lease_ids: Iterable[LeaseId]) -> None:
        """Nobody will continue from these any more. Unknown ones are no error: they may have ended."""
        self.leases.release(lease_ids)
        self._stalled = False

    def find_leases(self, handle: str, owner: str) -> list[LeaseInfo]:
        """By a lease's id, or by the id under which a client knows the parent."""
        self._end_leases()
        return self.leases.find(handle, owner)

    def drain(self) -> None:
        self._draining = True

    def peer_lost(self, worker_id: WorkerId) -> None:
        """Another worker is gone, says somebody who may be wrong: transfers with it fail at once."""
        if self._relay is not None:
            self._relay.peer_lost(worker_id)
        if self.pictures is not None:
            self.pictures.peer_lost(worker_id)

    @property
    def drained(self) -> bool:
        """Nothing is left to do or to hand over."""
        handing_over = self.outgoing is not None and bool(self.outgoing.held)
        return self._draining and not self.requests and not handing_over and not self.has_work

    @property
    def has_work(self) -> bool:
        """Whether `step` would do or say anything."""
        if self._outputs or self._failures or self._handed_over or self._released:
            return True
        if len(self.scheduler.running) > self.scheduler.num_held_up:
            return True
        if self.pictures is not None and self.pictures.has_news:
            return True
        if self.leases.has_news or self._is_saving_leases:
            return True
        if self.outgoing is not None and self.outgoing.has_news:
            return True
        if self.incoming is not None and self.incoming.has_news:
            return True
        if self.scheduler.loading:
            return True
        if self.swap is not None and self.swap.copies and (self.scheduler.swapped or self._num_waiting):
            return True  # somebody may wait for the blocks that a copy holds
        return (self.scheduler.num_waiting > 0 or bool(self.scheduler.swapped)) and not self._stalled

    def load(self) -> WorkerLoad:
        self._end_leases()
        return WorkerLoad(
            running=len(self.scheduler.running),
            waiting=self._num_waiting,
            transferring=self._num_transferring,
            swapped=len(self.scheduler.swapped),
            blocks=self.kv.pool.counts(),
            host=HostCounts() if self.swap is None else self.swap.counts(),
            transfers=TransferCounts() if self._relay is None else self._relay.counts(),
            mapping=MappingCounts() if self._relay is None else self._relay.mapping(),
            prompt_tokens=self._num_prompt_tokens,
            cached_tokens=self._num_cached_tokens,
            output_tokens=self._num_output_tokens,
            preemptions=self.scheduler.num_preemptions,
            steps=self._num_steps,
            connections=0 if self._relay is None else self._relay.num_links,
            leases=len(self.leases),
            inherited_tokens=self.leases.num_inherited_tokens,
            pictures=None if self.pictures is None else self.pictures.counts(),
        )

    def _end_leases(self) -> None:
        """Those whose time is over, also when there is nothing to do: whoever asks for anything finds them gone."""
        if self.leases.expire():
            self._stalled = False

    @property
    def _is_saving_leases(self) -> bool:
        """Then the blocks come back when somebody looks. A worker that is to end does not wait for that."""
        return self.swap is not None and self.swap.is_saving_leases and not self._draining

    @property
    def _num_waiting(self) -> int:
        return self.scheduler.num_waiting + (0 if self.incoming is None else self.incoming.num_waiting)

    @property
    def _num_transferring(self) -> int:
        """Sequences whose blocks are being filled, by a peer or from the host."""
        return len(self.scheduler.loading) + (0 if self.incoming is None else len(self.incoming.transferring))

    def close(self) -> None:
        for side in (self.outgoing, self.incoming, self.pictures):
            if side is not None:
                side.close()
        self._runner.close()

    # The loop

    def step(self) -> StepOutputs:
        self._take_news()
        plan = self.scheduler.schedule()
        plan.released, self._released = self._released + self.scheduler.discarded, []
        self.scheduler.discarded.clear()
        if plan.rows or plan.released:
            self._commit(plan, self._run(plan))
            self._num_steps += 1
        self.leases.end_step()
        self._stalled = not plan.rows
        if self.swap is not None:
            self.swap.spill()
        if self._stalled and self.scheduler.starved and self.outgoing is not None:
            self.outgoing.park_one()
        if self.options.check_invariants:
            invariants.check(self)
        return self._take_outputs()

    def _run(self, plan: StepPlan) -> StepResult:
        if self.outgoing is None:
            self._runner.launch(plan)
            return self._runner.collect()
        self.outgoing.begin_step(plan)
        self._runner.launch(plan)
        result = self._runner.collect()
        self.outgoing.end_step()
        return result

    def _commit(self, plan: StepPlan, result: StepResult) -> None:
        decodes = self.outgoing is None
        for row, answer in zip(plan.rows, result.rows, strict=True):
            sequence = row.sequence
            assert isinstance(sequence, Sequence)
            if answer.failure is not None:
                self._fail(sequence.request, _failure(answer.failure))
            elif sequence.state is not RequestState.RUNNING:  # a sibling's failure ended it
                continue
            elif (
                decodes
                and row.count == row.samples == 1
                and answer.logprobs is None
                and row.start >= sequence.num_prompt_tokens
            ):
                self._commit_decode(sequence, answer.tokens[0])
            else:
                self._commit_row(row, sequence, answer)

    def _commit_decode(self, sequence: Sequence, token: int) -> None:
        """`_commit_row` for by far the most rows: one token of the output was computed, and gives the next."""
        tokens = sequence.tokens
        self.kv.computed(sequence, 1)
        position = len(tokens) - sequence.num_prompt_tokens
        tokens.append(token)
        self._num_output_tokens += 1
        reason = finish_reason(sequence, self._eos_token_ids, self._max_model_len)
        self._outputs.append(
            SequenceOutput(sequence.request_id, sequence.sample, position, [token], reason, sequence.cached_tokens)
        )
        if reason is not None:
            self._end(sequence, reason)
            self._forget_if_finished(sequence.request)

    def _commit_row(self, row: Row, sequence: Sequence, answer: RowResult) -> None:
        self.kv.computed(sequence, row.count)
        if row.start < sequence.num_prompt_tokens:
            self._num_prompt_tokens += min(row.start + row.count, sequence.num_prompt_tokens) - row.start
            if sequence.request.images and self.pictures is not None:
                self.pictures.computed(sequence)
        if answer.prompt_logprobs is not None and sequence.request.prompt_logprobs is not None:
            sequence.request.prompt_logprobs.extend(answer.prompt_logprobs)
        if answer.candidates is not None:
            self._take_candidates(sequence, answer.candidates)
            return
        if row.samples == 0:
            return
        if row.samples == 1 and self.outgoing is None:  # the usual case
            self._append(sequence, answer.tokens[0], None if answer.logprobs is None else answer.logprobs[0])
            if sequence.finish_reason is not None:
                self._forget_if_finished(sequence.request)
            return
        logprobs: List[TokenLogprobs | None] = answer.logprobs or [None] * row.samples
        if self.outgoing is not None and sequence.request_id in self.outgoing:
            told = sequence.request.prompt_logprobs
            self._hand_on(
                sequence,
                [
                    FirstToken(sample, token, entry, sequence.cached_tokens, told if sample == 0 else None)
                    for sample, (token, entry) in enumerate(zip(answer.tokens, logprobs, strict=True), start=sequence.sample)
                ],
            )
            return
        samples = [sequence, *self._fork(sequence)]
        for sample, token, entry in zip(samples, answer.tokens, logprobs, strict=True):
            self._append(sample, token, entry)
        self._end_cut(sequence.request)
        self._forget_if_finished(sequence.request)

    def _fork(self, parent: Sequence) -> list[Sequence]:
        """The samples that begin where the prompt ends."""
        request = parent.request
        children: list[Sequence] = []
        if parent.sample != 0:
            return children
        for sample in range(1, 1 + request.num_unforked):
            child = Sequence(next(self._keys), request, sample, list(parent.tokens), parent.num_prompt_tokens)
            self.kv.fork(parent, child)
            self.scheduler.run_at_once(child)
            request.sequences.append(child)
            children.append(child)
        request.num_unforked = 0
        return children

    def _take_candidates(self, sequence: Sequence, candidates: list[Logprob]) -> None:
        """Of one beam of a search. Its results are told when it is over, all at once."""
        if self.outgoing is not None and sequence.request_id in self.outgoing:
            self._hand_on(sequence, [self._beams.first_token(sequence, candidates)])
            return
        if not self._beams.take(sequence, candidates):
            return
        request = sequence.request
        for output, result in self._beams.results(request):
            self._outputs.append(output)
            self._beam_results.append(result)
            self._num_output_tokens += len(output.tokens)
            self._num_cached_tokens += output.cached_tokens if output.sample == 0 else 0
        for beam in request.sequences:
            self._end(beam, FinishReason.STOP)
        self._forget_if_finished(request)

    def _append(self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None) -> None:
        position = len(sequence.tokens) - sequence.num_prompt_tokens
        sequence.tokens.append(token)
        self._num_output_tokens += 1
        reason = finish_reason(sequence, self._eos_token_ids, self._max_model_len)
        first = position == 0 and sequence.sample == 0
        if first:
            self._num_cached_tokens += sequence.cached_tokens
        self._outputs.append(
            SequenceOutput(
                sequence.request_id,
                sequence.sample,
                position,
                [token],
                reason,
                sequence.cached_tokens,
                None if logprobs is None else [logprobs],
                sequence.request.prompt_logprobs if first else None,
            )
        )
        if reason is not None:
            self._end(sequence, reason)

    # Hand-over

    def _hand_on(self, sequence: Sequence, first_tokens: list[FirstToken]) -> None:
        """The prompt is computed: its first tokens are told at once (not a search's), and its KV goes to the peer, where the
        samples go on."""
        assert self.outgoing is not None
        request = sequence.request
        if self.outgoing.finished(sequence, first_tokens):
            self._num_cached_tokens += sequence.cached_tokens
            if request.group is None:
                self._num_output_tokens += len(first_tokens)
                self._outputs.extend(self._first_output(sequence, first) for first in first_tokens)
        self.scheduler.remove(sequence)
        self._released.append(sequence.key)
        del self.requests[sequence.request_id]
        self._end_pictures(request)
        if self.kv.recorder is not None:
            self._handing_on[sequence.request_id] = (request.external_id, self._findable(request))

    def _first_output(self, sequence: Sequence, first: FirstToken) -> SequenceOutput:
        position = sequence.num_output_tokens
        sequence.tokens.append(first.token)
        reason = finish_reason(sequence, self._eos_token_ids, self._max_model_len)
        sequence.tokens.pop()
        logprobs = None if first.logprobs is None else [first.logprobs]
        return SequenceOutput(
            sequence.request_id,
            first.sample,
            position,
            [first.token],
            reason,
            first.cached_tokens,
            logprobs,
            first.prompt_logprobs,
        )

    def _take_news(self) -> None:
        """What the transfer layer did since the last step, and which copies ended."""
        self._end_leases()
        if self.swap is not None:
            idle = self._stalled and (self.requests or self._is_saving_leases)
            self.scheduler.take_copied(_COPY_WAIT_S if idle else 0.0)
        if self.outgoing is not None and self.outgoing.has_news:
            restarts, ended = self.outgoing.poll()
            self._stalled = False
            for submit in restarts:
                self._enqueue(submit)
            for request_id, reason in ended:
                self._handed_on(request_id, reason)
        if self.incoming is not None and self.incoming.has_news:
            self._stalled = False
            for sequence, arrival in self.incoming.poll():
                self._arrived(sequence, arrival)
        if self.pictures is not None and self.pictures.has_news:
            self._stalled = False
            for request, error in self.pictures.poll():
                log.warning("a picture will not come", request=request.request_id, reason=error)
                self._fail(request, error)
            self.scheduler.recall()

    def _handed_on(self, request_id: RequestId, reason: str) -> None:
        """A hand-over ended. Usually the prompt was finished long ago; if not, there is nobody to compute it for."""
        request = self.requests.get(request_id)
        if request is None:
            self._handed_over.append(request_id)
            self._tell_handed_on(request_id, FreeReason.FAILED if reason else FreeReason.HANDED_OVER)
            return
        self._fail(request, UnavailableError(f"the hand-over to the decode worker failed: {reason or 'not wanted any more'}"))

    def _arrived(self, sequence: Sequence, arrival: Arrival) -> None:
        """If it failed, somebody has to compute the prompt after all. Who is best at that, the router knows."""
        if arrival.error:
            log.warning("hand-over failed", request=sequence.request_id, reason=arrival.error)
            self._fail(sequence.request, HandOverError(f"the hand-over from the prefill worker failed: {arrival.error}"))
            return
        self.scheduler.run_at_once(sequence)
        if sequence.request.group is not None:
            self._search_arrived(sequence, arrival.first_tokens)
            return
        first_tokens = {one.sample: one for one in arrival.first_tokens if 0 <= one.token < self._limits.vocab_size}
        if not all(sequence.sample + index in first_tokens for index in range(sequence.num_slots)):
            self._fail(sequence.request, HandOverError("the prefill worker did not name the first token of every sample"))
            return
        origin = first_tokens[sequence.sample]
        sequence.cached_tokens = origin.cached_tokens
        sequence.request.prompt_logprobs = origin.prompt_logprobs
        for sample in [sequence, *self._fork(sequence)]:
            first = first_tokens[sample.sample]
            self._append(sample, first.token, first.logprobs)
        self._end_cut(sequence.request)
        self._forget_if_finished(sequence.request)

    def _search_arrived(self, sequence: Sequence, first_tokens: list[FirstToken]) -> None:
        candidates = self._beams.arrived(sequence.request, first_tokens)
        if candidates is None:
            self._fail(sequence.request, HandOverError("the prefill worker did not name the candidates of a beam search"))
            return
        sequence.cached_tokens = first_tokens[0].cached_tokens
        self._take_candidates(sequence, candidates)

    # Endings

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        self.leases.ended(sequence)
        if self.incoming is not None and sequence.request_id in self.incoming:
            self.incoming.abort(sequence)
        else:
            if self.outgoing is not None and sequence.request_id in self.outgoing:
                self.outgoing.abort(sequence)
            self.scheduler.remove(sequence)
        sequence.finish_reason = reason
        self._released.append(sequence.key)
        self._stalled = False

    def _end_cut(self, request: Request) -> None:
        """The samples whose end the router has found. While they were not forked yet, the prompt was needed for the others."""
        for sequence in request.sequences if request.cut else ():
            if sequence.sample in request.cut and sequence.state is not RequestState.FINISHED:
                self._end(sequence, request.cut[sequence.sample])

    def _forget_if_finished(self, request: Request) -> None:
        if request.finished and self.requests.pop(request.request_id, None) is not None:
            self.leases.forget(request.request_id)
            self._end_pictures(request)
            self._tell_freed(request, FreeReason.FINISHED)

    def _drop(self, request: Request, reason: FreeReason) -> list[int]:
        """Ends all of a request at once; returns the samples that had not ended before."""
        open_sequences = [s for s in request.sequences if s.state is not RequestState.FINISHED]
        samples = [s.sample for s in open_sequences] + list(range(1, 1 + request.num_unforked))
        if request.group is not None:
            samples = list(range(request.params.n))
        for sequence in open_sequences:
            self._end(sequence, FinishReason.ABORT)
        del self.requests[request.request_id]
        self.leases.forget(request.request_id)
        self._end_pictures(request)
        self._tell_freed(request, reason)
        return samples

    def _end_pictures(self, request: Request) -> None:
        if request.images and self.pictures is not None:
            self.pictures.end(request.request_id)

    def _tell_freed(self, request: Request, reason: FreeReason) -> None:
        """The end of a request here."""
        if self.kv.recorder is not None:
            self.kv.recorder.freed(request.external_id, reason, self._findable(request))

    def _tell_handed_on(self, request_id: RequestId, reason: FreeReason) -> None:
        """The end here of a request that goes on elsewhere, or was to: its prompt ended a while ago."""
        handing_on = self._handing_on.pop(request_id, None)
        if handing_on is not None and self.kv.recorder is not None:
            external_id, hashes = handing_on
            self.kv.recorder.freed(external_id, reason, [digest for digest in hashes if self.kv.is_findable(digest)])

    def _findable(self, request: Request) -> list[bytes]:
        """Hashes of the request's full blocks that the prefix cache has."""
        hashes = dict.fromkeys(digest for sequence in request.sequences for digest in sequence.hashes)
        return [digest for digest in hashes if self.kv.is_findable(digest)]

    def _fail(self, request: Request, error: RequestError) -> None:
        if request.request_id in self.requests:
            self.leases.refuse(request.request_id, f"the request failed: {error.message}")
            self._drop(request, FreeReason.FAILED)
            self._failures.append(Failure(request.request_id, error.kind, error.message, error.param))

    def fail_all(self, message: str) -> StepOutputs:
        """After an error that nobody foresaw: every request ends in a Failure, and the blocks come back."""
        for request in list(self.requests.values()):
            self._fail(request, InternalError(message))
        return self._take_outputs()

    def _take_outputs(self) -> StepOutputs:
        outputs, self._outputs = self._outputs, []
        failures, self._failures = self._failures, []
        handed_over, self._handed_over = self._handed_over, []
        beams, self._beam_results = self._beam_results, []
        leases, inherited = self.leases.take_news()
        return StepOutputs(
            worker_id=self._worker_id,
            step=self._num_steps,
            load=self.load(),
            outputs=outputs,
            failures=failures,
            handed_over=handed_over,
            beams=beams,
            leases=leases,
            inherited=inherited,
        )


def _failure(message: str) -> RequestError:
    """What a runner says of one row: a grammar that is the client's mistake, or a computation that went wrong."""
    if message.startswith("response_format"):
        return InvalidRequestError(message, param="response_format")
    return InternalError(message)
