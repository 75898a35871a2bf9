"""Sends each request to its workers and brings their outputs back, also when workers are lost on the way.

    submit -> plan -> Submit to one worker, or to two at once -> StepOutputs ... -> the stream is finished, failed or aborted
                 ^                                                   |
                 +-- a worker was lost, or could not go on: again, --+
                     with the tokens that the client has seen

A request is in `open`, and the legs of its attempt are in their peers' `open`, from submit to the end, and nowhere afterwards:
what a worker still says of it then is dropped. Sending it again (failover.py decides whether) is another attempt with new legs.
This is the hot path of the router: a peer hands each StepOutputs to `outputs`, which hands each output to its stream; no task,
future or copy per output.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import assert_never

from kvrelay.errors import (
    DeadlineError,
    InternalError,
    InvalidRequestError,
    QueueFullError,
    RequestError,
    UnavailableError,
)
from kvrelay.events.eviction_sync import EvictionSync
from kvrelay.ids import RequestId, new_request_id
from kvrelay.log import Log
from kvrelay.metrics import Metrics
from kvrelay.router.attempt import Attempt, Mode, OpenRequest, Plan, check_model, holder_of, timeline_of
from kvrelay.router.backend import GenerateRequest
from kvrelay.router.continuations import Continuations
from kvrelay.router.failover import Estranged, RetryRules, Stranded, Verdict, as_told, judge, num_setbacks
from kvrelay.router.kept import Keeping
from kvrelay.router.peer import Leg, Peer
from kvrelay.router.plan import Planner
from kvrelay.router.policy import CompletionRate
from kvrelay.router.stream import RequestStream
from kvrelay.router.timelines import Timelines
from kvrelay.states import FinishReason, Role
from kvrelay.wire.serving import COMES_FIRST, BeamResult, Failure, HandedOver, Inherited, KeptNews, LegTimes, News, StepOutputs

log = Log("router")

_NO_ENCODER = "no encode worker is up, and the request has images"
_NO_ADAPTER = "no worker has the LoRA adapter of the request yet"


class Dispatcher:
    """Owns the table of open requests. The router tells it which peers may be used."""

    def __init__(
        self,
        planner: Planner,
        metrics: Metrics,
        continuations: Continuations,
        sync: EvictionSync,
        *,
        mode: Mode = "write",
        rules: RetryRules | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._planner = planner
        self._sync = sync
        self._mode: Mode = mode
        self._rules = rules or RetryRules()
        self._metrics = metrics
        self._keeping = Keeping(continuations)
        self.timelines = Timelines(metrics, clock=clock)
        self.open: dict[RequestId, OpenRequest] = {}
        self.stranded = Stranded(self._rules, self._retry, self._is_starting)
        self._estranged = Estranged(clock, on_avoided=metrics.hand_overs_avoided.inc)
        self._rate = CompletionRate()
        self.usable: list[Peer] = []
        self._starting: frozenset[Role] = frozenset()

    def use(self, peers: list[Peer], starting: frozenset[Role] = frozenset()) -> None:
        """And the roles of workers that are starting."""
        self.usable = peers
        self._starting = starting
        self._planner.use(peers)
        self.stranded.try_now()

    def submit(self, request: GenerateRequest, excuse: str, *, may_wait: bool) -> RequestStream:
        """`excuse` says why there is no usable peer, if there is none. `may_wait`: for one that starts, as a request that lost
        its worker does."""
        stream = RequestStream(new_request_id(), request.params.n, self)
        entry = OpenRequest(request, stream, timeline=timeline_of(request, stream))
        has_to_wait = may_wait and self._rules.start_wait_s > 0.0 and self._is_starting(entry)
        plan = None if has_to_wait else self._first_plan(entry, excuse)
        self.timelines.begin(entry.timeline, request.arrived)
        self._keeping.begin(entry)
        try:
            if plan is not None:
                self._send_first(entry, plan, excuse)
        except RequestError as error:
            self.timelines.refused(entry.timeline)
            self._keeping.abandon(entry, error)
            raise
        self.open[stream.request_id] = entry
        if plan is None:
            missing = _NO_ENCODER if Role.ENCODE in self._planner.lacking(request) else _NO_ADAPTER
            self.stranded.add(entry, UnavailableError(excuse or missing, code="no_worker"))
        if request.timeout_s is not None:
            entry.deadline = asyncio.get_running_loop().call_later(request.timeout_s, self._expired, entry)
        self._metrics.dispatched.inc()
        return stream

    def outputs(self, peer: Peer, message: StepOutputs) -> None:
        """Everything one engine step of a worker made."""
        table = peer.open
        for news in message.news:
            if isinstance(news, COMES_FIRST):
                self._told(peer, news)
        for output in message.outputs:
            leg = table.get(output.request_id)
            if leg is not None:
                leg.has_output = True
                leg.stream.deliver(output)
        for news in message.news:
            if not isinstance(news, COMES_FIRST):
                self._told(peer, news)

    def _told(self, peer: Peer, news: News) -> None:
        if isinstance(news, KeptNews):  # of a request that has ended, mostly
            self._keeping.news(peer, news)
        elif isinstance(news, LegTimes):
            self.timelines.told(peer.id, peer.record.role, news)
        elif (leg := peer.open.get(news.request_id)) is not None:
            match news:
                case BeamResult():
                    leg.stream.beams[news.sample] = news
                case Inherited():
                    leg.stream.inherited = news
                case Failure():
                    self._leg_failed(leg, news.error())
                case HandedOver():
                    peer.breaker.succeeded()
                    peer.remove(leg)
                case _:
                    assert_never(news)

    def came_back(self, peer: Peer) -> None:
        """Its connection is open, again or for the first time: what happened before does not count."""
        peer.forgive()
        self._estranged.forgive(peer.id)

    def lost(self, peer: Peer, reason: str) -> None:
        """The worker is gone, or has forgotten us: none of its requests gets another output from it."""
        legs = list(peer.open.values())
        if legs:
            log.warning("requests lost their worker", worker=peer.id, requests=len(legs), reason=reason)
        for leg in legs:
            entry, attempt = self._attempt_of(leg)
            peer.remove(leg)
            if leg is attempt.legs.decode:
                self._again(entry, UnavailableError(f"worker {peer.id} was lost: {reason}", code="worker_lost"), "lost")
            # Without its prefill worker, the decode worker has everything, or soon says that the hand-over failed.

    def fail_all(self, reason: str) -> None:
        for entry in list(self.open.values()):
            for leg in entry.legs:
                leg.abort()
            entry.stream.fail(UnavailableError(reason))
        self.stranded.close()

    # Sending

    def _plan(self, entry: OpenRequest) -> Plan:
        """Raises QueueFullError, UnavailableError or InvalidRequestError."""
        request, avoid, is_first = entry.request, frozenset(entry.avoid), not entry.num_attempts
        holder = holder_of(request, self.usable, avoid) if is_first else None
        if holder is not None:
            return Plan(holder)
        plan = self._estranged.mend(self._planner.plan(request, avoid, again=not is_first))
        if is_first:
            check_model(request, plan)
        elif plan.prefill is not None and (entry.has_diverged or plan.prefill.id in avoid):
            plan = Plan(plan.decode)  # which computes the prompt itself
        return plan if not request.images else self._planner.with_encoders(plan, request, avoid, trust_caches=is_first)

    def _is_starting(self, entry: OpenRequest) -> bool:
        """Whether a worker is starting that the request lacks. Prefill workers are none: others compute prompts too."""
        return bool(self._starting) and not self._starting.isdisjoint(self._planner.lacking(entry.request))

    def _first_plan(self, entry: OpenRequest, excuse: str) -> Plan:
        if not self._planner.ready:
            self._metrics.rejected.labels("unavailable").inc()
            raise UnavailableError(excuse, code="no_worker")
        try:
            return self._plan(entry)
        except UnavailableError:
            self._metrics.rejected.labels("unavailable").inc()
            raise
        except QueueFullError as error:
            self._metrics.rejected.labels("queue_full").inc()
            retry_after_s = self._rate.retry_after_s(len(self.open), self._clock())
            message = f"{error.message}: {len(self.open)} requests are in flight"
            raise QueueFullError(message, retry_after_s=retry_after_s) from error

    def _send_first(self, entry: OpenRequest, plan: Plan, excuse: str) -> None:
        while (unreachable := self._send(entry, plan)) is not None:
            entry.avoid.add(unreachable.id)
            plan = self._first_plan(entry, excuse)
            if any(peer.id in entry.avoid for peer in plan.peers):
                self._metrics.rejected.labels("unavailable").inc()
                raise UnavailableError(f"worker {unreachable.id} cannot be reached")

    def _send(self, entry: OpenRequest, plan: Plan) -> Peer | None:
        """Begins an attempt. Returns the first worker that cannot be reached; then there is no attempt."""
        attempt, sent_at = Attempt(entry, plan, self._mode), self._clock()
        unreachable = attempt.send(entry, self._keeping.keep(entry, attempt.legs.decode))
        if unreachable is not None:
            return unreachable
        entry.attempt = attempt
        stream = entry.stream
        self.timelines.sent(entry.timeline, attempt.legs.names, entry.num_attempts, sent_at)
        stream.prefill, stream.decode = plan.prefill_name, plan.decode.id
        stream.data_parallel_rank = plan.decode.record.data_parallel_rank
        stream.transfer_id = None if attempt.transfer is None else attempt.transfer.transfer_id
        if entry.request.images:
            stream.encode = plan.encode_name
        if plan.prefill is None and plan.decode.record.role is Role.DECODE:
            self._metrics.local_prefills.inc()
        tell = self._sync.on_request_sent_again if entry.num_attempts else self._sync.on_request_started
        tell(entry.request.external_id, [peer.id for peer in plan.peers if peer.record.events_address])
        return None

    # Sending again

    def _attempt_of(self, leg: Leg) -> tuple[OpenRequest, Attempt]:
        """Of a leg that is open: so are its request and its attempt."""
        entry = self.open[leg.stream.request_id]
        assert entry.attempt is not None
        return entry, entry.attempt

    def _leg_failed(self, leg: Leg, error: RequestError) -> None:
        entry, attempt = self._attempt_of(leg)
        verdict = judge(
            error,
            is_decode=leg is attempt.legs.decode,
            is_generating=attempt.is_generating,
            num_internal_errors=entry.num_internal_errors,
        )
        if verdict is Verdict.CLIENT:
            leg.peer.breaker.abandoned()
        else:
            self._estranged.blame(entry, attempt.plan, leg.peer, error)
        leg.peer.remove(leg)
        match verdict:
            case Verdict.IGNORE:
                pass
            case Verdict.RETRY:
                entry.num_internal_errors += isinstance(error, InternalError)
                self._again(entry, error, error.kind)
            case Verdict.CLIENT | Verdict.FINAL:
                self._drop_attempt(entry)
                entry.stream.fail(error)

    def _again(self, entry: OpenRequest, error: RequestError, reason: str) -> None:
        """The request goes to other workers, or waits for one, or ends with `error` if it has tried often enough."""
        self._drop_attempt(entry)
        if entry.stream.done:
            return
        entry.num_attempts += 1
        entry.num_setbacks = num_setbacks(entry, error)
        if entry.num_setbacks > self._rules.max_retries:
            entry.stream.fail(as_told(error))
            return
        self._metrics.failovers.labels(reason).inc()
        self.timelines.again(entry.timeline, error.message)
        self._keeping.again(entry)
        log.info("sending a request again", request=entry.stream.request_id, attempt=entry.num_attempts, reason=error.message)
        if not self._retry(entry):
            if isinstance(error, InternalError):  # no other worker could try it, so this one's word is final
                entry.stream.fail(error)
            else:
                entry.avoid.clear()  # while it waits, the workers that failed it may recover
                self.stranded.add(entry, error)

    def _retry(self, entry: OpenRequest) -> bool:
        """False if no worker can take it now that has not failed it before."""
        for _ in range(len(self.usable)):
            try:
                plan = self._plan(entry)
            except (QueueFullError, UnavailableError):
                return False
            except InvalidRequestError as error:
                if not entry.num_attempts:  # it has waited for the worker that can tell
                    entry.stream.fail(error)
                return not entry.num_attempts
            if plan.decode.id in entry.avoid or any(share.peer.id in entry.avoid for share in plan.encode):
                return False
            unreachable = self._send(entry, plan)
            if unreachable is None:
                return True
            entry.avoid.add(unreachable.id)
        return False

    def _drop_attempt(self, entry: OpenRequest) -> None:
        for leg in entry.legs:
            if leg.is_open:
                leg.abort()
                leg.peer.remove(leg)
        entry.attempt = None

    def _expired(self, entry: OpenRequest) -> None:
        self._metrics.deadlines.inc()
        self._keeping.cut(entry)
        entry.stream.fail(DeadlineError("the request took longer than it was given", param="timeout", code="deadline"))

    # What streams ask for (StreamOwner)

    def stream_finished(self, stream: RequestStream) -> None:
        entry = self.open.pop(stream.request_id)
        if entry.deadline is not None:
            entry.deadline.cancel()
        self.timelines.ended(entry.timeline, stream)
        self._keeping.ended(entry)
        self._sync.on_request_ended(entry.request.external_id)
        if entry.attempt is None:
            self.stranded.discard(entry)
            return
        legs = entry.attempt.legs
        if legs.decode.has_output and not stream.aborted and not stream.failed:
            legs.decode.peer.breaker.succeeded()
        else:
            legs.decode.peer.breaker.abandoned()
        for leg in legs.encode:
            if leg.is_open:
                leg.abort()
        for leg in legs:
            leg.peer.remove(leg)
        self._rate.completed(self._clock())
        if not legs.is_one and not stream.aborted and not entry.is_kept and (stream.failed or not legs.decode.has_output):
            # The prefill worker made the last token, or a stop string was in the first: the decode worker need not begin.
            legs.decode.abort()

    def send_finish(self, stream: RequestStream, sample: int, keep_tokens: int, reason: FinishReason) -> None:
        entry = self.open.get(stream.request_id)
        if entry is None:
            self._keeping.cut_late(stream.parents[sample], sample, keep_tokens, self.usable)
        elif entry.attempt is not None:
            entry.attempt.legs.decode.finish(sample, keep_tokens, reason)

    def send_abort(self, stream: RequestStream) -> None:
        self._keeping.cut(self.open[stream.request_id])
