"""The engine of one worker: takes requests, plans steps, has them computed, and tells what came of it.

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
from kvrelay.engine.ahead import RunAhead, without_ended
from kvrelay.engine.core import build_core
from kvrelay.engine.interfaces import Adapters, NoAdapters, Runner, StepPlan, StepResult
from kvrelay.engine.movers import Consumer, Producer
from kvrelay.engine.request import Request, first_sequences
from kvrelay.engine.requests.admission import ModelLimits
from kvrelay.engine.requests.beam import Beams
from kvrelay.engine.requests.commit import Commit
from kvrelay.engine.requests.endings import Endings
from kvrelay.engine.requests.images import Images
from kvrelay.engine.requests.stages import Stages
from kvrelay.errors import InternalError, RequestError, UnavailableError
from kvrelay.ids import KeptId, RequestId, WorkerId, trace_id_of
from kvrelay.log import Log
from kvrelay.states import FinishReason, FreeReason, Stage
from kvrelay.wire.registry import WorkerLoad
from kvrelay.wire.serving import Encode, Finish, HandedOver, KeptInfo, SequenceOutput, StepOutputs, Submit

log = Log("engine")

_COPY_WAIT_S = 0.002  # how long a step that has nothing to compute waits for a copy to end


class Engine:
    """Joins scheduler, KV cache and runner, as `worker.serving_engine.ServingEngine` asks of it. One thread calls it."""

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
        adapters: Adapters | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        options = options.for_device("cpu")  # a card's budgets are chosen before
        model = ModelLimits(
            eos_token_ids=eos_token_ids, max_model_len=max_model_len, vocab_size=vocab_size, cache_seed=cache_seed
        )
        self.core = core = build_core(
            options, runner, model, worker_id,
            producer=producer, consumer=consumer, images=images, adapters=adapters or NoAdapters(), clock=clock,
        )  # fmt: skip
        self.kv = core.kv
        self.scheduler = core.scheduler
        self.requests = core.requests  # those that have not ended
        self._clock = clock
        self._runner = runner
        self._worker_id = worker_id
        self._beams = Beams(core)
        self._endings = Endings(core)
        self._commit = Commit(core, self._beams, self._endings)
        self._ahead = RunAhead(core, runner)
        self._arrivals = counter()
        self._draining = False
        self._stalled = False  # the last step could do nothing, and nothing has changed since
        self._num_steps = 0
        if core.limits.hands_on:
            runner.on_layer(core.outgoing.layer_done)

    # What the worker calls between steps

    def submit(self, submit: Submit) -> None:
        """Never raises: a request that cannot be served is answered by a Failure with the next step's outputs."""
        if submit.request_id in self.requests:
            log.warning("request submitted twice, ignored", request=submit.request_id, trace=trace_id_of(submit.trace))
            return
        self._expire_kept()
        try:
            self.core.limits.check(submit, num_waiting=self._num_waiting, draining=self._draining)
            self.core.kept.check(submit)
        except RequestError as error:
            self.core.outbox.fail(submit.request_id, error)
            return
        request = self._enqueue(submit)
        if self.core.limits.hands_on and submit.transfer is not None:
            self.core.outgoing.expect(submit, len(request.sequences[0].tokens))
            return  # the worker that takes it over keeps it
        self.core.kept.expect(submit)
        self.core.kept.inherit(submit, request.sequences)
        if self.core.limits.hands_on:
            self.core.kept.refuse(submit.request_id, "a prefill worker keeps no KV")
        elif submit.params.beam is not None:
            self.core.kept.refuse(submit.request_id, "the KV of a beam search is not kept")

    def encode(self, encode: Encode) -> None:
        """A mistake of the router: this worker computes prompts or generates."""
        self.core.outbox.fail(encode.request_id, UnavailableError(f"worker {self._worker_id} makes no embeddings for others"))

    def _enqueue(self, submit: Submit, stages: Stages | None = None) -> Request:
        """`stages`: those of a prompt that was computed before and is again."""
        takes_over = self.core.limits.takes_over and submit.transfer is not None
        first = Stage.RESERVE if takes_over else Stage.QUEUE
        adapter = self.core.limits.adapter_of(submit)
        request = Request(submit, next(self._arrivals), stages or Stages(first, self._clock), adapter)
        request.sequences = first_sequences(submit, request, self.core.keys)
        if submit.params.beam is not None:
            self._beams.begin(request, submit, hands_on=self.core.limits.hands_on and submit.transfer is not None)
        self.requests[submit.request_id] = request
        for sequence in request.sequences:
            if takes_over and submit.transfer is not None:
                self.core.incoming.expect(sequence, submit.transfer)
            else:
                self.scheduler.queue.add(sequence)
        if submit.images:
            self._expect_images(request, submit)
        self._stalled = False
        return request

    def _expect_images(self, request: Request, submit: Submit) -> None:
        taken_over = request.request_id in self.core.incoming
        # Kept KV covers all images of its tokens; should it be gone, they are asked for when they are met.
        num_cached_tokens = len(submit.prompt) if submit.inherit else self.kv.num_cached_tokens(request.sequences[0])
        self.core.images.expect(request, submit.embeddings, num_cached_tokens=num_cached_tokens, computes_prompt=not taken_over)

    def abort(self, request_ids: Iterable[RequestId]) -> None:
        """Ends each sample that still runs. Unknown and finished requests are no error: an abort may come late."""
        self._stalled = False
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is not None:
                for sample in self._endings.drop(request, FreeReason.ABORTED):
                    self.core.outbox.outputs.append(SequenceOutput(request_id, sample, 0, [], FinishReason.ABORT))
            else:
                self.core.outgoing.abort_finished(request_id)
                self._endings.handed_on(request_id, FreeReason.ABORTED)

    def finish(self, finish: Finish) -> None:
        """The router found the end of a sample. The sequence may have ended or run a few tokens further meanwhile."""
        self._stalled = False
        self.core.kept.seen(finish)
        request = self.requests.get(finish.request_id)
        if request is None:
            return
        request.cut[finish.sample] = finish.reason
        if finish.request_id in self.core.incoming and self.core.kept.is_due(finish.request_id):
            return  # it ends when its KV is here, since that is to be kept
        if len(request.cut) == request.params.n or request.search is not None:
            self._endings.drop(request, FreeReason.FINISHED)
        elif not request.num_unforked:
            self._endings.end_cut(request)
            self._endings.settle(request)

    def release_kept(self, kept_ids: Iterable[KeptId]) -> None:
        self.core.kept.release(kept_ids)
        self._stalled = False

    def find_kept(self, handle: str, owner: str) -> list[KeptInfo]:
        self._expire_kept()
        return self.core.kept.find(handle, owner)

    def drain(self) -> None:
        self._draining = True

    def peer_lost(self, worker_id: WorkerId) -> None:
        for part in (*self.core.movers, self.core.images):
            part.peer_lost(worker_id)

    @property
    def drained(self) -> bool:
        """Nothing is left to do or to hand over."""
        return self._draining and not self.requests and not self.core.outgoing.held and not self.has_work

    @property
    def has_work(self) -> bool:
        """Whether `step` would do or say anything. A worker that is to end leaves blocks where they are."""
        return self.serves or (self.core.swap.copies_in_background and not self._draining)

    @property
    def serves(self) -> bool:
        """Whether `step` would do or say anything for a request. Else it copies blocks in the background at most."""
        if self.core.outbox or self._endings.released or self._ahead.plan is not None or self.scheduler.loading:
            return True
        if len(self.scheduler.running) > self.scheduler.num_held_up:
            return True
        if self.core.images.has_news or self.core.outgoing.producer.has_news or self.core.incoming.consumer.has_news:
            return True
        if self.core.swap.copies and (self.scheduler.swapped or self._num_waiting):
            return True  # a sequence may wait for the blocks that a copy holds
        return (self.scheduler.queue.num_waiting > 0 or bool(self.scheduler.swapped)) and not self._stalled

    def load(self) -> WorkerLoad:
        self._expire_kept()
        mover = self.core.mover
        return WorkerLoad(
            running=len(self.scheduler.running),
            waiting=self._num_waiting,
            # From the host, from a peer, or to one: prompts that are computed and whose peer does not have everything yet.
            transferring=len(self.scheduler.loading) + len(self.core.incoming.transferring) + len(self.core.outgoing.held),
            swapped=len(self.scheduler.swapped),
            blocks=self.kv.pool.counts(),
            host=self.core.swap.counts(),
            transfers=mover.counts(),
            mapping=mover.mapping(),
            prompt_tokens=self.core.outbox.num_prompt_tokens,
            cached_tokens=self.core.outbox.num_cached_tokens,
            output_tokens=self.core.outbox.num_output_tokens,
            preemptions=self.scheduler.num_preemptions,
            steps=self._num_steps,
            connections=mover.num_links,
            kept=len(self.core.kept),
            inherited_tokens=self.core.kept.num_inherited_tokens,
            images=self.core.images.counts() if self.core.limits.takes_images else None,
        )

    def _expire_kept(self) -> None:
        """Kept KV whose time is over goes, also when there is nothing to do: every call finds it gone."""
        if self.core.kept.expire():
            self._stalled = False

    @property
    def _num_waiting(self) -> int:
        return self.scheduler.queue.num_waiting + len(self.core.incoming.waiting)

    def close(self) -> None:
        for part in (*self.core.movers, self.core.images):
            part.close()
        self._runner.close()

    # The loop

    def step(self) -> StepOutputs:
        self._take_news()
        ahead = self._ahead.take()
        plan = ahead or self._schedule()
        if plan.rows or plan.released:
            result = self._collect(plan)
            self._commit.rows(*(without_ended(plan, result) if ahead else (plan, result)))
            self._num_steps += 1
        else:
            self.core.swap.spill(at_rest=True)
        self.core.kept.end_step()
        if not (self.requests or self._draining or self._ahead.plan):
            self.core.kept.blocks.prefetch()
        self._stalled = not plan.rows
        if self._stalled and self.scheduler.starved:
            self.core.outgoing.set_one_aside()
        if self.core.options.check_invariants:
            invariants.check(self.core)
        return self.say()

    def _schedule(self) -> StepPlan:
        plan = self.scheduler.schedule()
        plan.released, self._endings.released = self._endings.released + self.scheduler.discarded, []
        self.scheduler.discarded.clear()
        if plan.rows or plan.released:
            self.core.outgoing.begin_step(plan)
            self._runner.launch(plan)
        return plan

    def _collect(self, plan: StepPlan) -> StepResult:
        """Of a plan under way. First, while a card computes, the step after it is launched where that can be, and cached blocks
        are saved to the host."""
        try:
            self._ahead.launch_after(plan, self._endings.released)
            self.core.swap.spill(at_rest=False)
        finally:
            result = self._runner.collect()
        self.core.outgoing.end_step()
        return result

    def _take_news(self) -> None:
        """What the transfer layer did since the last step, and which copies ended."""
        self._expire_kept()
        idle = self._stalled and (self.requests or self.core.swap.copies_in_background)
        self.scheduler.take_copied(_COPY_WAIT_S if idle else 0.0)
        if self.core.outgoing.producer.has_news:
            restarts, ended = self.core.outgoing.poll()
            self._stalled = False
            for submit in restarts:
                self._start_again(submit)
            for request_id, reason, sent_bytes in ended:
                self._handed_on(request_id, reason, sent_bytes)
        if self.core.incoming.consumer.has_news:
            self._stalled = False
            for sequence, arrival in self.core.incoming.poll():
                self._commit.arrived(sequence, arrival)
        if self.core.images.has_news:
            self._stalled = False
            for request, error in self.core.images.poll():
                log.warning("an image will not come", request=request.request_id, reason=error, trace=request.trace_id)
                self._endings.fail(request, error)
            self.scheduler.recall()

    def _start_again(self, submit: Submit) -> None:
        """A prompt that was set aside. Its adapter may have been unloaded meanwhile."""
        try:
            self._enqueue(submit, self._endings.stages_again(submit.request_id))
        except RequestError as error:
            self.core.outbox.fail(submit.request_id, error)

    def _handed_on(self, request_id: RequestId, reason: str, sent_bytes: int) -> None:
        """A hand-over ended. Usually the prompt was finished long ago; if not, it is not wanted any more."""
        request = self.requests.get(request_id)
        if request is None:
            self.core.outbox.news.append(HandedOver(request_id))
            self._endings.handed_on(request_id, FreeReason.FAILED if reason else FreeReason.HANDED_OVER, sent_bytes)
            return
        why = reason or "not wanted any more"
        self._endings.fail(request, UnavailableError(f"the hand-over to the decode worker failed: {why}"))

    def fail_all(self, message: str) -> StepOutputs:
        """After an unforeseen error: every request ends in a Failure, and the blocks come back."""
        if self._ahead.take() is not None:
            self._runner.collect()
        for request in list(self.requests.values()):
            self._endings.fail(request, InternalError(message))
        return self.say()

    def say(self) -> StepOutputs:
        outbox = self.core.outbox
        message = StepOutputs(
            worker_id=self._worker_id, step=self._num_steps, load=self.load(), outputs=outbox.outputs, news=outbox.news
        )
        outbox.clear()
        return message
