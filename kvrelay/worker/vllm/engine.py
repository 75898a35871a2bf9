"""A core, as `worker.serving_engine.ServingEngine` asks of an engine.

    submit / abort / finish      between steps, by the worker
    step                         take the relay's news -> a step of the core -> tell what came of it
    drain                        takes nothing new; `drained` when the last request has ended

Every submitted request ends in exactly one way: each sample with a finish reason, or the whole with one Failure.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from kvrelay.engine.movers import Mover, NoRelay
from kvrelay.errors import RequestError, UnavailableError
from kvrelay.ids import KeptId, RequestId, WorkerId, trace_id_of
from kvrelay.log import Log
from kvrelay.states import FinishReason, Stage
from kvrelay.wire.registry import BlockCounts, WorkerLoad
from kvrelay.wire.serving import Encode, Finish, KeptInfo, SequenceOutput, StepOutputs, Submit
from kvrelay.worker.vllm.book import Book
from kvrelay.worker.vllm.requests import Limits, Open, Sample, opened
from kvrelay.worker.vllm.seam import CoreOutput

log = Log("engine")


class HandOver(Protocol):
    """What a role does with requests that begin or go on elsewhere."""

    @property
    def mover(self) -> Mover: ...

    def begin(self, open_: Open) -> None: ...

    def output(self, open_: Open, sample: Sample, output: CoreOutput) -> bool:
        """Whether it was a first token that is handed on: then that was told."""

    def abort(self, request_id: RequestId) -> None: ...

    def cut(self, open_: Open) -> None: ...

    def poll(self) -> None: ...

    def make_room(self) -> None:
        """The core has work, and no blocks for it."""

    @property
    def num_waiting(self) -> int: ...

    @property
    def num_transferring(self) -> int: ...

    @property
    def num_blocked(self) -> int: ...

    @property
    def holds_blocks(self) -> bool: ...

    def counts(self) -> tuple[int, int, int]: ...


class NoHandOver:
    """Of a whole worker."""

    mover: Mover = NoRelay()
    num_waiting = num_transferring = num_blocked = 0
    holds_blocks = False

    def begin(self, _open: Open) -> None:
        raise AssertionError("admission refuses every hand-over")

    def output(self, _open: Open, _sample: Sample, _output: CoreOutput) -> bool:
        return False

    def abort(self, _request_id: RequestId) -> None:
        pass

    def cut(self, _open: Open) -> None:
        pass

    def poll(self) -> None:
        pass

    def make_room(self) -> None:
        pass

    def counts(self) -> tuple[int, int, int]:
        return 0, 0, 0


class CoreEngine:
    """One thread calls it."""

    def __init__(self, book: Book, limits: Limits, hand_over: HandOver) -> None:
        self.book = book
        self.core = book.core
        self._limits = limits
        self._hand_over = hand_over
        self._draining = False
        self._stalled = False  # the last step could do nothing, and nothing has changed since
        self._num_steps = 0

    # Between steps

    def submit(self, submit: Submit) -> None:
        """Never raises: a request that cannot be served is answered by a Failure with the next step's outputs."""
        if submit.request_id in self.book.opens:
            log.warning("request submitted twice, ignored", request=submit.request_id, trace=trace_id_of(submit.trace))
            return
        self._stalled = False
        try:
            self._limits.check(submit, num_waiting=self._num_waiting, draining=self._draining)
        except RequestError as error:
            self.book.outbox.fail(submit.request_id, error)
            return
        open_ = self.book.opens[submit.request_id] = opened(submit)
        if submit.transfer is not None:
            self._hand_over.begin(open_)
            return
        for sample in open_.going:
            self.book.run(open_, sample)

    def encode(self, encode: Encode) -> None:
        """A mistake of the router."""
        error = UnavailableError(f"worker {self._limits.worker_id} makes no embeddings for others")
        self.book.outbox.fail(encode.request_id, error)

    def abort(self, request_ids: Iterable[RequestId]) -> None:
        self._stalled = False
        for request_id in request_ids:
            open_ = self.book.opens.get(request_id)
            for number in [] if open_ is None else self.book.drop(open_):
                self.book.outbox.outputs.append(SequenceOutput(request_id, number, 0, [], FinishReason.ABORT))
            self._hand_over.abort(request_id)

    def finish(self, finish: Finish) -> None:
        """The router found the end of a sample, which may have ended or run a few tokens further meanwhile."""
        self._stalled = False
        open_ = self.book.opens.get(finish.request_id)
        sample = None if open_ is None else open_.samples.get(finish.sample)
        if open_ is None or sample is None or not sample.is_open:
            return
        if len(open_.going) == 1:
            self._hand_over.cut(open_)
        self.book.stop(open_, sample)

    def release_kept(self, kept_ids: Iterable[KeptId]) -> None:
        """Nothing is ever kept here."""

    def find_kept(self, _handle: str, _owner: str) -> list[KeptInfo]:
        return []

    def drain(self) -> None:
        self._draining = True

    def peer_lost(self, worker_id: WorkerId) -> None:
        self._hand_over.mover.peer_lost(worker_id)

    @property
    def drained(self) -> bool:
        return self._draining and not self.book.opens and not self._hand_over.holds_blocks and not self.has_work

    @property
    def has_work(self) -> bool:
        """Whether `step` would do or say anything."""
        if self.book.outbox or self._hand_over.mover.has_news:
            return True
        return len(self.book.sequences) > self._hand_over.num_blocked and not self._stalled

    def load(self) -> WorkerLoad:
        counts, mover, outbox = self.core.counts(), self._hand_over.mover, self.book.outbox
        reserved, sending, quarantined = self._hand_over.counts()
        held = counts.total - counts.free - counts.cached
        return WorkerLoad(
            running=counts.running,
            waiting=self._num_waiting,
            transferring=self._hand_over.num_transferring,
            blocks=BlockCounts(
                total=counts.total,
                free=counts.free,
                cached=counts.cached,
                in_use=max(0, held - reserved - sending - quarantined),
                reserved=reserved,
                sending=sending,
                quarantined=quarantined,
            ),
            transfers=mover.counts(),
            mapping=mover.mapping(),
            prompt_tokens=outbox.num_prompt_tokens,
            cached_tokens=outbox.num_cached_tokens,
            output_tokens=outbox.num_output_tokens,
            preemptions=counts.preemptions,
            steps=self._num_steps,
            connections=mover.num_links,
        )

    @property
    def _num_waiting(self) -> int:
        return max(0, self.core.counts().waiting - self._hand_over.num_blocked) + self._hand_over.num_waiting

    def close(self) -> None:
        self._hand_over.mover.close()
        self.core.close()

    # The loop

    def step(self) -> StepOutputs:
        if self._hand_over.mover.has_news:
            self._stalled = False
            self._hand_over.poll()
        if len(self.book.sequences) > self._hand_over.num_blocked:
            outputs, computed = self.core.step()
            self._num_steps += computed
            self._stalled = not computed
            for output in outputs:
                self._take(output)
            if self._stalled and len(self.book.sequences) > self._hand_over.num_blocked:
                self._hand_over.make_room()
        return self._take_outputs()

    def _take(self, output: CoreOutput) -> None:
        open_, sample = self.book.sequences.get(output.id, (None, None))
        if open_ is None or sample is None:
            return  # aborted meanwhile
        if output.finish is FinishReason.ERROR:
            self.book.errored(open_)
            self._hand_over.abort(open_.id)
            return
        if self._hand_over.output(open_, sample, output):
            return
        told = self.book.take_prompt_logprobs(open_, output)
        if output.tokens and sample.num_output == len(sample.forced):
            self._begin(open_, sample, output)
        self.book.tell(open_, sample, output.tokens, output.finish, output.logprobs, told)
        if output.finish is not None:
            self.book.end(open_, sample)

    def _begin(self, open_: Open, sample: Sample, output: CoreOutput) -> None:
        """Its first tokens here. What a peer computed is not counted as ours."""
        open_.stages.enter(Stage.DECODE)
        if open_.submit.transfer is None:
            self.book.computed(open_, sample, output)

    def _take_outputs(self) -> StepOutputs:
        outbox = self.book.outbox
        message = StepOutputs(
            worker_id=self._limits.worker_id, step=self._num_steps, load=self.load(), outputs=outbox.outputs, news=outbox.news
        )
        outbox.clear()
        return message
