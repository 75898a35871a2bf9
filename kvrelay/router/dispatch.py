"""Sends each request to its workers and brings their outputs back, also when workers are lost on the way.

    submit -> plan -> Submit to one worker, or to two at once -> StepOutputs ... -> the stream is finished, failed or aborted
                 ^                                                   |
                 +-- a worker was lost, or could not go on: again, --+
                     with the tokens that the client has seen

A request has a leg on every worker it was sent to, each under an id of its own. It is in `_open`, and its legs are in their
peers' `open`, from submit to the end, and nowhere afterwards: what a worker still says of it then is dropped. Sending it
again (failover.py decides whether) gives it new legs. This is the hot path of the router: no task, future or copy per output.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Protocol, assert_never

from kvrelay.discovery.breaker import Breaker
from kvrelay.errors import (
    DeadlineError,
    HandOverError,
    InternalError,
    InvalidRequestError,
    MissingEmbeddingError,
    QueueFullError,
    RequestError,
    UnavailableError,
)
from kvrelay.ids import RequestId, WorkerId, new_request_id, new_transfer_id
from kvrelay.log import Log
from kvrelay.metrics import Metrics
from kvrelay.router.backend import GenerateRequest
from kvrelay.router.continuations import Continuations
from kvrelay.router.encoders import ImageMessages, encode_name, open_encode_legs
from kvrelay.router.failover import Estranged, RetryRules, Stranded, Verdict, as_told, is_setback, judge
from kvrelay.router.keeping import Keeping
from kvrelay.router.peer import Leg, OpenRequest, Peer
from kvrelay.router.plan import Mode, Plan, Planner
from kvrelay.router.policy import CompletionRate, tokens_of
from kvrelay.router.stream import RequestStream
from kvrelay.router.submission import (
    abort,
    check_model,
    holder_of,
    inherited,
    submit_message,
)
from kvrelay.states import FinishReason, Role
from kvrelay.wire.serving import (
    COMES_FIRST,
    BeamResult,
    Failure,
    Finish,
    HandedOver,
    Inherited,
    KeptNews,
    News,
    Resumed,
    StepOutputs,
    TransferInfo,
)

log = Log("router")


class RequestFollower(Protocol):
    """Wants to know where requests are, by the ids their clients know. Must not raise."""

    def on_request_started(self, request_id: str, workers: Iterable[WorkerId]) -> None:
        """Sent to these workers, of which the events are heard."""

    def on_request_sent_again(self, request_id: str, workers: Iterable[WorkerId]) -> None: ...

    def on_request_finished(self, request_id: str) -> None: ...

    def on_request_aborted(self, request_id: str) -> None: ...


class Dispatcher:
    """Owns the table of open requests. The router tells it which peers may be used."""

    def __init__(
        self,
        planner: Planner,
        metrics: Metrics,
        continuations: Continuations,
        *,
        mode: Mode = "write",
        rules: RetryRules | None = None,
        follower: RequestFollower | None = None,
    ) -> None:
        self._planner = planner
        self._follower = follower
        self._mode: Mode = mode
        self._rules = rules or RetryRules()
        self._metrics = metrics
        self._keeping = Keeping(continuations)
        self._open: dict[RequestId, OpenRequest] = {}
        self._stranded = Stranded(self._rules.wait_s, self._retry, self._give_up)
        self._estranged = Estranged()
        self._rate = CompletionRate()
        self.usable: list[Peer] = []

    def use(self, peers: list[Peer]) -> None:
        self.usable = peers
        self._planner.use(peers)
        self._stranded.try_now()

    @property
    def ready(self) -> bool:
        return self._planner.ready

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def num_stranded(self) -> int:
        return len(self._stranded)

    def submit(self, request: GenerateRequest, excuse: str) -> RequestStream:
        """`excuse` says why there is no usable peer, if there is none."""
        plan = self._first_plan(request, excuse)
        stream = RequestStream(new_request_id(), request.params.n, self, prefill=_prefill_name(plan), decode=plan.decode.id)
        entry = OpenRequest(request, stream)
        self._keeping.begin(entry)
        try:
            self._launch_first(entry, plan, excuse)
        except RequestError as error:
            self._keeping.abandon(entry, error)
            raise
        self._open[stream.request_id] = entry
        if request.timeout_s is not None:
            entry.deadline = asyncio.get_running_loop().call_later(request.timeout_s, self._expired, entry)
        self._metrics.dispatched.inc()
        return stream

    def _launch_first(self, entry: OpenRequest, plan: Plan, excuse: str) -> None:
        while (unreachable := self._launch(entry, plan)) is not None:
            entry.avoid.add(unreachable.id)
            plan = self._first_plan(entry.request, excuse, frozenset(entry.avoid))
            if any(peer.id in entry.avoid for peer in plan.peers):
                self._metrics.rejected.labels("unavailable").inc()
                raise UnavailableError(f"worker {unreachable.id} cannot be reached")

    def outputs(self, peer: Peer, message: StepOutputs) -> None:
        """Everything one engine step of a worker made."""
        table = peer.open
        for news in message.news:
            if isinstance(news, COMES_FIRST):
                self._told(peer, news)
        for output in message.outputs:
            entry = table.get(output.request_id)
            if entry is not None:
                if not entry.generating and entry.legs[-1].peer is peer:
                    entry.generating = True
                entry.stream.deliver(output)
        for news in message.news:
            if not isinstance(news, COMES_FIRST):
                self._told(peer, news)

    def _told(self, peer: Peer, news: News) -> None:
        if isinstance(news, KeptNews):  # of a request that has ended, mostly
            self._keeping.news(peer, news)
            return
        entry = peer.open.get(news.request_id)
        if entry is None:
            return
        match news:
            case BeamResult():
                entry.stream.beams[news.sample] = news
            case Inherited():
                entry.stream.inherited = news
            case Failure():
                self._leg_failed(entry, peer, news.error())
            case HandedOver():
                peer.breaker.succeeded()
                self._leg_ended(entry, peer)
            case _:
                assert_never(news)

    def came_back(self, peer: Peer) -> None:
        """Its link is open, again or for the first time: what happened before does not count."""
        peer.breaker = Breaker()
        self._estranged.forgive(peer.id)

    def lost(self, peer: Peer, reason: str) -> None:
        """The worker is gone, or has forgotten us: none of its requests gets another output from it."""
        entries = list(peer.open.values())
        if entries:
            log.warning("requests lost their worker", worker=peer.id, requests=len(entries), reason=reason)
        for entry in entries:
            is_last = entry.legs[-1].peer is peer
            self._leg_ended(entry, peer)
            if is_last:
                self._again(entry, UnavailableError(f"worker {peer.id} was lost: {reason}", code="worker_lost"), "lost")
            # Without its prefill worker, the decode worker has everything, or soon says that the hand-over failed.

    def fail_all(self, reason: str) -> None:
        for entry in list(self._open.values()):
            abort(entry.legs)
            entry.stream.fail(UnavailableError(reason))
        self._stranded.close()

    # Sending

    def _launch(self, entry: OpenRequest, plan: Plan) -> Peer | None:
        """Sends the request to the peers of the plan. Returns the first that cannot be reached; then none of them has it."""
        transfer = self._transfer(plan)
        first_id = entry.stream.request_id if entry.attempt == 0 else new_request_id()
        last = Leg(plan.decode, first_id, tokens_of(entry.request))
        legs = (last,) if plan.prefill is None else (Leg(plan.prefill, new_request_id(), plan.prefill_tokens), last)
        images = ImageMessages(plan.encode, plan.computing) if entry.request.images else None
        if plan.encode:
            legs = (*(Leg(share.peer, new_request_id(), share.num_tokens) for share in plan.encode), *legs)
        resume = self._resume(entry)
        keep, inherit = self._keeping.keep(entry, last), inherited(entry, plan)
        for leg in legs:
            kept = keep if leg is last else None  # the worker that generates keeps it
            submit = submit_message(leg.request_id, entry, transfer, resume, keep=kept, inherit=inherit)
            if not leg.peer.link.send(submit if images is None else images.message_for(leg.peer, submit)):
                abort(legs)
                return leg.peer
        entry.legs, entry.encode, entry.generating = legs, plan.encode, False
        for leg in legs:
            leg.peer.add(leg, entry)
        stream = entry.stream
        stream.prefill, stream.decode = _prefill_name(plan), plan.decode.id
        stream.transfer_id = None if transfer is None else transfer.transfer_id
        if images is not None:
            stream.encode = encode_name(plan.encode, plan.computing)
        if plan.prefill is None and plan.decode.record.role is Role.DECODE:
            self._metrics.local_prefills.inc()
        if self._follower is not None:
            tell = self._follower.on_request_sent_again if entry.attempt else self._follower.on_request_started
            tell(entry.request.external_id, [leg.peer.id for leg in legs if leg.peer.record.events_address])
        return None

    def _resume(self, entry: OpenRequest) -> list[Resumed]:
        if entry.attempt == 0:
            return []
        resume = entry.stream.resume()
        return resume if len(resume) < entry.request.params.n or any(sample.tokens for sample in resume) else []

    def _transfer(self, plan: Plan) -> TransferInfo | None:
        if plan.prefill is None:
            return None
        return TransferInfo(
            transfer_id=new_transfer_id(),
            mode=self._mode,
            producer=plan.prefill.id,
            consumer=plan.decode.id,
            signal_address=plan.prefill.record.signal_address,
        )

    def _first_plan(self, request: GenerateRequest, excuse: str, avoid: frozenset[str] = frozenset()) -> Plan:
        if not self._planner.ready:
            self._metrics.rejected.labels("unavailable").inc()
            raise UnavailableError(excuse, code="no_worker")
        holder = None if request.parent is None else holder_of(request, self.usable, avoid)
        if holder is not None:
            return Plan(holder)
        try:
            plan = self._estranged.mend(self._planner.plan(request, avoid))
            check_model(request, plan)
            return plan if not request.images else self._planner.with_encoders(plan, request, avoid, trust_caches=True)
        except UnavailableError:
            self._metrics.rejected.labels("unavailable").inc()
            raise
        except QueueFullError as error:
            self._metrics.rejected.labels("queue_full").inc()
            retry_after_s = self._rate.retry_after_s(len(self._open), time.monotonic())
            message = f"{error.message}: {len(self._open)} requests are in flight"
            raise QueueFullError(message, retry_after_s=retry_after_s) from error

    # Sending again

    def _leg_ended(self, entry: OpenRequest, peer: Peer) -> None:
        for leg in entry.legs:
            if leg.peer is peer:
                peer.remove(leg, entry)

    def _leg_failed(self, entry: OpenRequest, peer: Peer, error: RequestError) -> None:
        is_last = entry.legs[-1].peer is peer
        verdict = judge(error, is_last=is_last, generating=entry.generating, num_internal_errors=entry.num_internal_errors)
        if verdict is Verdict.CLIENT:
            peer.breaker.abandoned()
        else:
            self._blame(entry, peer, error)
        self._leg_ended(entry, peer)
        if verdict is Verdict.IGNORE:
            return
        if verdict is Verdict.RETRY:
            entry.num_internal_errors += isinstance(error, InternalError)
            self._again(entry, error, error.kind)
        else:
            self._drop_legs(entry)
            entry.stream.fail(error)

    def _blame(self, entry: OpenRequest, peer: Peer, error: RequestError) -> None:
        """A hand-over that failed is its producer's fault, as far as anybody can tell. So is an embedding that did not come;
        that one is gone where it once was is nobody's."""
        blamed = [peer]
        if isinstance(error, MissingEmbeddingError):
            blamed = [share.peer for share in entry.encode if share.has(error.digest)]
        elif len(entry.legs) > 1 and isinstance(error, HandOverError):
            blamed = [entry.legs[-2].peer]
            if error.by_producer:  # the two do reach each other; what ailed it, it says itself
                entry.avoid.add(blamed[0].id)
                return
            self._estranged.add(blamed[0], peer)
        for each in blamed:
            each.breaker.failed()
            entry.avoid.add(each.id)

    def _again(self, entry: OpenRequest, error: RequestError, reason: str) -> None:
        """The request goes to other workers, or waits for one, or ends with `error` if it has tried often enough."""
        self._drop_legs(entry)
        if entry.stream.done:
            return
        entry.attempt += 1
        entry.num_setbacks += is_setback(entry, error)
        if entry.num_setbacks > self._rules.max_retries:
            entry.stream.fail(as_told(error))
            return
        self._metrics.failovers.labels(reason).inc()
        self._keeping.again(entry)
        log.info("sending a request again", request=entry.stream.request_id, attempt=entry.attempt, reason=error.message)
        if not self._retry(entry):
            if isinstance(error, InternalError):  # nobody else could try it, and this one's word is final
                entry.stream.fail(error)
            else:
                entry.avoid.clear()  # while it waits, whoever failed it may have recovered
                self._stranded.add(entry, error)

    def _retry(self, entry: OpenRequest) -> bool:
        """False if nobody can take it now who has not failed it before."""
        for _ in range(len(self.usable)):
            avoid = frozenset(entry.avoid)
            try:
                plan = self._planner.plan(entry.request, avoid)
                plan = self._one_leg_if_needed(entry, plan)
                if entry.request.images:
                    plan = self._planner.with_encoders(plan, entry.request, avoid, trust_caches=False)
            except (QueueFullError, UnavailableError, InvalidRequestError):
                return False
            if plan.decode.id in avoid or any(share.peer.id in avoid for share in plan.encode):
                return False
            unreachable = self._launch(entry, plan)
            if unreachable is None:
                return True
            entry.avoid.add(unreachable.id)
        return False

    def _one_leg_if_needed(self, entry: OpenRequest, plan: Plan) -> Plan:
        """Samples that have come to different places, and prompts whose only prefill worker has failed, are computed by the
        worker that generates."""
        plan = self._estranged.mend(plan)
        if plan.prefill is None:
            return plan
        has_tokens = entry.request.params.n > 1 and any(sample.tokens for sample in entry.stream.resume())
        return Plan(plan.decode) if has_tokens or plan.prefill.id in entry.avoid else plan

    def _give_up(self, entry: OpenRequest, error: RequestError) -> None:
        waited = f"and no other worker came up within {self._rules.wait_s:g} s"
        entry.stream.fail(UnavailableError(f"{error.message}; {waited}", code=error.code))

    def _drop_legs(self, entry: OpenRequest) -> None:
        for leg in entry.legs:
            if leg.request_id in leg.peer.open:
                abort((leg,))
                leg.peer.remove(leg, entry)
        entry.legs = ()

    def _expired(self, entry: OpenRequest) -> None:
        self._metrics.deadlines.inc()
        self._keeping.cut(entry)
        entry.stream.fail(DeadlineError("the request took longer than it was given", param="timeout", code="deadline"))

    # What streams ask for (StreamOwner)

    def stream_finished(self, stream: RequestStream) -> None:
        entry = self._open.pop(stream.request_id)
        if entry.deadline is not None:
            entry.deadline.cancel()
        self._keeping.ended(entry)
        if self._follower is not None:
            tell = self._follower.on_request_aborted if stream.aborted else self._follower.on_request_finished
            tell(entry.request.external_id)
        if not entry.legs:
            self._stranded.discard(entry)
            return
        self._tell_breaker(entry)
        if entry.request.images:
            abort(open_encode_legs(entry.legs))
        for leg in entry.legs:
            leg.peer.remove(leg, entry)
        self._rate.completed(time.monotonic())
        if len(entry.legs) > 1 and not stream.aborted and not entry.is_kept:
            # Usually the decode worker made the last token and is done. If it was the prefill worker, or a stop string in the
            # first token, the decode worker need not begin.
            abort(entry.legs[-1:])

    def send_finish(self, stream: RequestStream, sample: int, keep_tokens: int, reason: FinishReason) -> None:
        entry = self._open.get(stream.request_id)
        if entry is None:
            self._keeping.cut_late(stream.parents[sample], sample, keep_tokens, self.usable)
            return
        for leg in entry.legs[-1:]:
            leg.peer.link.send(Finish(request_id=leg.request_id, sample=sample, keep_tokens=keep_tokens, reason=reason))

    def send_abort(self, stream: RequestStream) -> None:
        self._keeping.cut(self._open[stream.request_id])

    def _tell_breaker(self, entry: OpenRequest) -> None:
        breaker = entry.legs[-1].peer.breaker
        if entry.generating and not entry.stream.aborted and not entry.stream.failed:
            breaker.succeeded()
        else:
            breaker.abandoned()


def _prefill_name(plan: Plan) -> str:
    if plan.prefill is not None:
        return plan.prefill.id
    return "local" if plan.decode.record.role is Role.DECODE else plan.decode.id


def excuse(peers: Iterable[Peer]) -> str:
    """Why none of these peers can take a request."""
    listed = list(peers)
    problems = [f"{peer.id}: {peer.problem}" for peer in listed if peer.problem]
    if problems:
        return f"no worker can take requests ({'; '.join(problems)})"
    return "no decode worker is up" if listed else "no worker has registered yet"
