"""The engine of one worker: takes requests, plans steps, has them computed, and says what came of it.

    submit / abort / finish      between steps, by the worker
    step                         schedule -> launch -> collect -> commit; returns everything new as one message
    drain                        takes nothing new; `drained` when the last request has ended

Every submitted request ends in exactly one way: each sample with a finish reason, or the whole with one Failure.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count as counter

from kvrelay.config import EngineOptions
from kvrelay.engine import invariants
from kvrelay.engine.finish import finish_reason
from kvrelay.engine.interfaces import Row, RowResult, Runner, StepPlan, StepResult
from kvrelay.engine.kv_cache import KVCache
from kvrelay.engine.request import Request, Sequence
from kvrelay.engine.scheduler import Scheduler
from kvrelay.errors import InternalError, InvalidRequestError, QueueFullError, RequestError, UnavailableError
from kvrelay.ids import RequestId, WorkerId
from kvrelay.log import Log
from kvrelay.states import FinishReason, RequestState
from kvrelay.wire.registry import WorkerLoad
from kvrelay.wire.serving import Failure, Finish, SequenceOutput, StepOutputs, Submit

log = Log("engine")


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
    ) -> None:
        self.options = options
        self.kv = KVCache(
            num_blocks=runner.num_blocks,
            block_size=options.block_size,
            prefix_cache=options.prefix_cache,
            cache_seed=cache_seed,
        )
        assert self.kv.blocks_for(max_model_len) <= runner.num_blocks, "the pool cannot hold one longest request"
        self.scheduler = Scheduler(options, self.kv)
        self.requests: dict[RequestId, Request] = {}
        self._runner = runner
        self._worker_id = worker_id
        self._eos_token_ids = eos_token_ids
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._keys = counter()
        self._arrivals = counter()
        self._outputs: list[SequenceOutput] = []
        self._failures: list[Failure] = []
        self._released: list[int] = []
        self._draining = False
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
        try:
            self._admit(submit)
        except RequestError as error:
            self._failures.append(Failure(submit.request_id, error.kind, error.message, error.param))
            return
        request = Request(submit, next(self._arrivals))
        self.requests[submit.request_id] = request
        sequence = Sequence(next(self._keys), request, 0, list(submit.prompt), len(submit.prompt))
        request.sequences.append(sequence)
        self.scheduler.add(sequence)

    def abort(self, request_ids: Iterable[RequestId]) -> None:
        """Ends each sample that still runs. Unknown and finished requests are no error: an abort may come late."""
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is None:
                continue
            for sample in self._drop(request):
                self._outputs.append(SequenceOutput(request_id, sample, 0, [], FinishReason.ABORT))

    def finish(self, finish: Finish) -> None:
        """The router found the end of a sample. The sequence may have ended or run a few tokens further meanwhile."""
        request = self.requests.get(finish.request_id)
        if request is None:
            return
        for sequence in request.sequences:
            if sequence.sample == finish.sample and sequence.state is not RequestState.FINISHED:
                self._end(sequence, finish.reason)
        self._forget_if_finished(request)

    def drain(self) -> None:
        self._draining = True

    @property
    def drained(self) -> bool:
        return self._draining and not self.has_work

    @property
    def has_work(self) -> bool:
        """Whether `step` would do or say anything."""
        return bool(self.requests or self._outputs or self._failures or self._released)

    def load(self) -> WorkerLoad:
        return WorkerLoad(
            running=len(self.scheduler.running),
            waiting=self.scheduler.num_waiting,
            blocks=self.kv.pool.counts(),
            prompt_tokens=self._num_prompt_tokens,
            cached_tokens=self._num_cached_tokens,
            output_tokens=self._num_output_tokens,
            preemptions=self.scheduler.num_preemptions,
            steps=self._num_steps,
        )

    def close(self) -> None:
        self._runner.close()

    # The loop

    def step(self) -> StepOutputs:
        plan = self.scheduler.schedule()
        plan.released, self._released = self._released, []
        if plan.rows or plan.released:
            self._runner.launch(plan)
            self._commit(plan, self._runner.collect())
            self._num_steps += 1
        if self.options.check_invariants:
            invariants.check(self)
        return self._take_outputs()

    def _commit(self, plan: StepPlan, result: StepResult) -> None:
        for row, answer in zip(plan.rows, result.rows, strict=True):
            sequence = row.sequence
            assert isinstance(sequence, Sequence)
            if answer.failure is not None:
                self._fail(sequence.request, InvalidRequestError(answer.failure, param="response_format"))
            elif sequence.state is RequestState.RUNNING:  # not when a sibling's failure ended it
                self._commit_row(row, sequence, answer)

    def _commit_row(self, row: Row, sequence: Sequence, answer: RowResult) -> None:
        self.kv.computed(sequence, row.count)
        self._num_prompt_tokens += max(0, min(row.start + row.count, sequence.num_prompt_tokens) - row.start)
        if answer.prompt_logprobs is not None and sequence.request.prompt_logprobs is not None:
            sequence.request.prompt_logprobs.extend(answer.prompt_logprobs)
        if row.samples == 0:
            return
        samples = [sequence, *self._fork(sequence)]
        for index, (sample, token) in enumerate(zip(samples, answer.tokens, strict=True)):
            self._append(sample, token, answer, index)
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
            self.scheduler.add_fork(child)
            request.sequences.append(child)
            children.append(child)
        request.num_unforked = 0
        return children

    def _append(self, sequence: Sequence, token: int, answer: RowResult, index: int) -> None:
        position = sequence.num_output_tokens
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
                None if answer.logprobs is None else [answer.logprobs[index]],
                sequence.request.prompt_logprobs if first else None,
            )
        )
        if reason is not None:
            self._end(sequence, reason)

    # Endings

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        self.scheduler.remove(sequence)
        sequence.finish_reason = reason
        self._released.append(sequence.key)

    def _forget_if_finished(self, request: Request) -> None:
        if request.finished:
            self.requests.pop(request.request_id, None)

    def _drop(self, request: Request) -> list[int]:
        """Ends all of a request at once; returns the samples that had not ended before."""
        open_sequences = [s for s in request.sequences if s.state is not RequestState.FINISHED]
        samples = [s.sample for s in open_sequences] + list(range(1, 1 + request.num_unforked))
        for sequence in open_sequences:
            self._end(sequence, FinishReason.ABORT)
        del self.requests[request.request_id]
        return samples

    def _fail(self, request: Request, error: RequestError) -> None:
        if request.request_id in self.requests:
            self._drop(request)
            self._failures.append(Failure(request.request_id, error.kind, error.message, error.param))

    def fail_all(self, message: str) -> StepOutputs:
        """After an error that nobody foresaw: every request ends in a Failure, and the blocks come back."""
        for request in list(self.requests.values()):
            self._fail(request, InternalError(message))
        return self._take_outputs()

    def _take_outputs(self) -> StepOutputs:
        outputs, self._outputs = self._outputs, []
        failures, self._failures = self._failures, []
        return StepOutputs(
            worker_id=self._worker_id, step=self._num_steps, load=self.load(), outputs=outputs, failures=failures
        )

    def _admit(self, submit: Submit) -> None:
        prompt, params = submit.prompt, submit.params
        if self._draining:
            raise UnavailableError("the worker is draining and takes no new requests")
        if self.scheduler.num_waiting >= self.options.max_queue:
            raise QueueFullError(f"the worker's queue is full ({self.options.max_queue} requests wait)")
        params.validate()
        if not prompt:
            raise InvalidRequestError("the prompt is empty", param="prompt")
        if min(prompt) < 0 or max(prompt) >= self._vocab_size:
            raise InvalidRequestError(f"token ids must be from 0 to {self._vocab_size - 1}", param="prompt")
        if len(prompt) >= self._max_model_len:
            raise InvalidRequestError(
                f"the prompt has {len(prompt)} tokens; with at least one new token that is more than the limit of"
                f" {self._max_model_len}",
                param="prompt",
            )
        if params.n > self.options.max_batch:
            raise InvalidRequestError(f"n must be at most {self.options.max_batch}, the size of a batch", param="n")
        outside = [t for t in (*params.stop_token_ids, *params.logit_bias) if not 0 <= t < self._vocab_size]
        if outside:
            name = "stop_token_ids" if outside[0] in params.stop_token_ids else "logit_bias"
            raise InvalidRequestError(f"token ids must be from 0 to {self._vocab_size - 1}, not {outside[0]}", param=name)
