"""The engine of one worker: takes requests, plans steps, has them computed, and says what came of it.

    submit / abort / finish      between steps, by the worker
    step                         take news -> schedule -> launch -> collect -> commit; everything new as one message. Where only
                                 decoding is to be done, the next step is launched before this one is collected (`ahead.py`)
    drain                        takes nothing new; `drained` when the last request has ended

Every submitted request ends in exactly one way: each sample with a finish reason, or the whole with one Failure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from itertools import count as counter

from kvrelay.config import EngineOptions
from kvrelay.engine import invariants
from kvrelay.engine.admission import Limits
from kvrelay.engine.ahead import RunAhead, still_running
from kvrelay.engine.beam import Beams
from kvrelay.engine.commit import Commit
from kvrelay.engine.continuation import Leases
from kvrelay.engine.endings import Endings
from kvrelay.engine.images import Images
from kvrelay.engine.incoming import Incoming
from kvrelay.engine.interfaces import Runner, StepPlan, StepResult
from kvrelay.engine.kv_cache import KVCache
from kvrelay.engine.movers import Consumer, Producer
from kvrelay.engine.outbox import Outbox
from kvrelay.engine.outgoing import Outgoing
from kvrelay.engine.request import Request, first_sequences
from kvrelay.engine.scheduler import Scheduler
from kvrelay.engine.swap import Swap
from kvrelay.errors import InternalError, RequestError, UnavailableError
from kvrelay.ids import KeptId, RequestId, WorkerId
from kvrelay.log import Log
from kvrelay.states import FinishReason, FreeReason
from kvrelay.wire.registry import HostCounts, MappingCounts, TransferCounts, WorkerLoad
from kvrelay.wire.serving import (
    Encode,
    Finish,
    KeptInfo,
    SequenceOutput,
    StepOutputs,
    Submit,
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
        images: Images | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.options = options = options.for_device("cpu")  # a card's budgets are chosen before
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
        kept_kv_share = int(options.kept_kv_share * runner.num_blocks)
        lease_most = runner.num_blocks - self.kv.blocks_for(max_model_len)
        self.leases = Leases(
            self.kv,
            self.swap,
            clock=clock,
            keys=self._keys,
            share=kept_kv_share,
            most=lease_most,
            verify=options.check_invariants,
        )
        self.images = images
        self.scheduler = Scheduler(options, self.kv, self.leases, self.incoming, self.outgoing, self.swap, images)
        if self.outgoing is not None:
            runner.on_layer(self.outgoing.layer_done)
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
            takes_images=images is not None,
            num_pinnable_blocks=min(kept_kv_share, lease_most),
        )
        self._arrivals = counter()
        self._beams = Beams(
            self.kv,
            self.scheduler,
            self._keys,
            eos_token_ids=eos_token_ids,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
        )
        self._outbox = Outbox()
        self._endings = Endings(
            self.kv,
            self.scheduler,
            self.leases,
            self._outbox,
            incoming=self.incoming,
            outgoing=self.outgoing,
            images=images,
        )
        self._commit = Commit(
            self.kv,
            self.scheduler,
            self._beams,
            self._endings,
            self._outbox,
            outgoing=self.outgoing,
            images=images,
            keys=self._keys,
            eos_token_ids=eos_token_ids,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
        )
        self._ahead = RunAhead(self.scheduler, self.kv, self.incoming, runner, max_model_len=max_model_len)
        self._draining = False
        self._stalled = False  # the last step could do nothing, and nothing has changed since
        self._num_steps = 0

    @property
    def requests(self) -> dict[RequestId, Request]:
        """Those that have not ended."""
        return self._endings.requests

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
            self._outbox.fail(submit.request_id, error)
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
        self._outbox.fail(encode.request_id, error)

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
            self._expect_images(request, submit)
        self._stalled = False
        return request

    def _expect_images(self, request: Request, submit: Submit) -> None:
        assert self.images is not None, "a worker without images refuses them"
        taken_over = request.request_id in self.incoming if self.incoming is not None else False
        # A lease has the KV of all its images; should it be gone, they are asked for when they are met.
        num_cached_tokens = len(submit.prompt) if submit.inherit else self.kv.num_cached_tokens(request.sequences[0])
        self.images.expect(request, submit.embeddings, num_cached_tokens=num_cached_tokens, computes_prompt=not taken_over)

    def abort(self, request_ids: Iterable[RequestId]) -> None:
        """Ends each sample that still runs. Unknown and finished requests are no error: an abort may come late."""
        self._stalled = False
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is not None:
                for sample in self._endings.drop(request, FreeReason.ABORTED):
                    self._outbox.outputs.append(SequenceOutput(request_id, sample, 0, [], FinishReason.ABORT))
            elif self.outgoing is not None:
                self.outgoing.abort_finished(request_id)
                self._endings.handed_on(request_id, FreeReason.ABORTED)

    def finish(self, finish: Finish) -> None:
        """The router found the end of a sample. The sequence may have ended or run a few tokens further meanwhile."""
        self._stalled = False
        self.leases.seen(finish)
        request = self.requests.get(finish.request_id)
        if request is None:
            return
        request.cut[finish.sample] = finish.reason
        if self.incoming is not None and finish.request_id in self.incoming and self.leases.is_due(finish.request_id):
            return  # it ends when its KV is here, since that is to be kept
        if len(request.cut) == request.params.n or request.group is not None:
            self._endings.drop(request, FreeReason.FINISHED)
        elif not request.num_unforked:
            self._endings.end_cut(request)
            self._endings.settle(request)

    def release_leases(self, kept_ids: Iterable[KeptId]) -> None:
        """Nobody will continue from these any more. Unknown ones are no error: they may have ended."""
        self.leases.release(kept_ids)
        self._stalled = False

    def find_leases(self, handle: str, owner: str) -> list[KeptInfo]:
        """By a lease's id, or by the id under which a client knows the parent."""
        self._end_leases()
        return self.leases.find(handle, owner)

    def drain(self) -> None:
        self._draining = True

    def peer_lost(self, worker_id: WorkerId) -> None:
        """Another worker is gone, says somebody who may be wrong: transfers with it fail at once."""
        if self._relay is not None:
            self._relay.peer_lost(worker_id)
        if self.images is not None:
            self.images.peer_lost(worker_id)

    @property
    def drained(self) -> bool:
        """Nothing is left to do or to hand over."""
        handing_over = self.outgoing is not None and bool(self.outgoing.held)
        return self._draining and not self.requests and not handing_over and not self.has_work

    @property
    def has_work(self) -> bool:
        """Whether `step` would do or say anything."""
        if self._outbox or self._endings.released or self._ahead.plan is not None:
            return True
        if len(self.scheduler.running) > self.scheduler.num_held_up:
            return True
        if self.images is not None and self.images.has_news:
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
            prompt_tokens=self._outbox.num_prompt_tokens,
            cached_tokens=self._outbox.num_cached_tokens,
            output_tokens=self._outbox.num_output_tokens,
            preemptions=self.scheduler.num_preemptions,
            steps=self._num_steps,
            connections=0 if self._relay is None else self._relay.num_links,
            leases=len(self.leases),
            inherited_tokens=self.leases.num_inherited_tokens,
            images=None if self.images is None else self.images.counts(),
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
        for side in (self.outgoing, self.incoming, self.images):
            if side is not None:
                side.close()
        self._runner.close()

    # The loop

    def step(self) -> StepOutputs:
        self._take_news()
        plan = self._ahead.take()
        if plan is not None:
            self._finish_ahead(plan)
        else:
            plan = self.scheduler.schedule()
            plan.released = self._take_released()
            if plan.rows or plan.released:
                self._commit.rows(plan, self._run(plan))
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
            self._run_ahead(plan)
            return self._runner.collect()
        self.outgoing.begin_step(plan)
        self._runner.launch(plan)
        result = self._runner.collect()
        self.outgoing.end_step()
        return result

    def _run_ahead(self, plan: StepPlan) -> None:
        """The step after `plan` is launched, too, if all that it lacks is the tokens of `plan`."""
        if self._ahead.launch_after(plan, self._endings.released):
            self._endings.released = []

    def _finish_ahead(self, plan: StepPlan) -> None:
        self._run_ahead(plan)
        result, runs = self._runner.collect(), still_running(plan)
        plan.rows = [row for row, is_running in zip(plan.rows, runs, strict=True) if is_running]
        self._commit.rows(plan, StepResult([row for row, is_running in zip(result.rows, runs, strict=True) if is_running]))
        self._num_steps += 1

    def _take_released(self) -> list[int]:
        """Keys of sequences that the runner shall forget."""
        released, self._endings.released = self._endings.released + self.scheduler.discarded, []
        self.scheduler.discarded.clear()
        return released

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
                self._commit.arrived(sequence, arrival)
        if self.images is not None and self.images.has_news:
            self._stalled = False
            for request, error in self.images.poll():
                log.warning("an image will not come", request=request.request_id, reason=error)
                self._endings.fail(request, error)
            self.scheduler.recall()

    def _handed_on(self, request_id: RequestId, reason: str) -> None:
        """A hand-over ended. Usually the prompt was finished long ago; if not, there is nobody to compute it for."""
        request = self.requests.get(request_id)
        if request is None:
            self._outbox.handed_over.append(request_id)
            self._endings.handed_on(request_id, FreeReason.FAILED if reason else FreeReason.HANDED_OVER)
            return
        self._endings.fail(
            request, UnavailableError(f"the hand-over to the decode worker failed: {reason or 'not wanted any more'}")
        )

    def fail_all(self, message: str) -> StepOutputs:
        """After an error that nobody foresaw: every request ends in a Failure, and the blocks come back."""
        if self._ahead.take() is not None:
            self._runner.collect()
        for request in list(self.requests.values()):
            self._endings.fail(request, InternalError(message))
        return self._take_outputs()

    def _take_outputs(self) -> StepOutputs:
        outbox = self._outbox
        leases, inherited = self.leases.take_news()
        message = StepOutputs(
            worker_id=self._worker_id,
            step=self._num_steps,
            load=self.load(),
            outputs=outbox.outputs,
            failures=outbox.failures,
            handed_over=outbox.handed_over,
            beams=outbox.beams,
            leases=leases,
            inherited=inherited,
        )
        outbox.clear()
        return message
