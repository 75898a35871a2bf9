"""Sends each request to its workers and brings their outputs back.

    submit -> plan -> Submit to one worker, or to two at once -> StepOutputs ... -> the stream is finished, failed or aborted

A request has a leg on every worker it was sent to, each under an id of its own. It is in `_open`, and its legs are in their
peers' `open`, from submit to the end, and nowhere afterwards: what a worker still says of it then is dropped. This is the hot
path of the router: no task, future or copy per output.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from kvrelay.errors import InvalidRequestError, QueueFullError, RequestError, UnavailableError, request_error
from kvrelay.ids import RequestId, new_request_id, new_transfer_id
from kvrelay.log import Log
from kvrelay.metrics import Metrics
from kvrelay.router.backend import GenerateRequest
from kvrelay.router.peer import Leg, OpenRequest, Peer
from kvrelay.router.plan import Mode, Plan, Planner, PolicyName
from kvrelay.router.policy import CompletionRate, tokens_of
from kvrelay.router.stream import RequestStream
from kvrelay.states import FinishReason, Role
from kvrelay.wire.serving import Abort, Finish, StepOutputs, Submit, TransferInfo

log = Log("router")


class Dispatcher:
    """Owns the table of open requests. The router tells it which peers may be used."""

    def __init__(self, policy: PolicyName, metrics: Metrics, *, mode: Mode = "write", local_prefill_tokens: int = 0) -> None:
        self._planner = Planner(policy, local_prefill_tokens)
        self._mode: Mode = mode
        self._metrics = metrics
        self._open: dict[RequestId, OpenRequest] = {}
        self._rate = CompletionRate()
        self.usable: list[Peer] = []

    def use(self, peers: list[Peer]) -> None:
        self.usable = peers
        self._planner.use(peers)

    @property
    def ready(self) -> bool:
        return self._planner.ready

    @property
    def num_open(self) -> int:
        return len(self._open)

    def submit(self, request: GenerateRequest, excuse: str) -> RequestStream:
        """`excuse` says why there is no usable peer, if there is none."""
        plan = self._plan(request, excuse)
        transfer = self._transfer(plan)
        legs = tuple(Leg(peer, new_request_id()) for peer in plan.peers)
        stream = RequestStream(
            legs[-1].request_id,
            request.params.n,
            self,
            prefill=_prefill_name(plan),
            decode=plan.decode.id,
            transfer_id=None if transfer is None else transfer.transfer_id,
        )
        for leg in legs:
            if not leg.peer.link.send(_submit_message(leg.request_id, request, transfer)):
                self._metrics.rejected.labels("unavailable").inc()
                _abort(legs)
                raise UnavailableError(f"worker {leg.peer.id} cannot be reached")
        entry = OpenRequest(request, stream, legs, tokens_of(request))
        self._open[stream.request_id] = entry
        for leg in legs:
            leg.peer.add(leg, entry)
        self._metrics.dispatched.inc()
        return stream

    def outputs(self, peer: Peer, message: StepOutputs) -> None:
        """Everything one engine step of a worker made."""
        table = peer.open
        for output in message.outputs:
            entry = table.get(output.request_id)
            if entry is not None:
                entry.stream.deliver(output)
        for failure in message.failures:
            entry = table.get(failure.request_id)
            if entry is not None:
                self._leg_failed(entry, peer, request_error(failure.kind, failure.message, failure.param))
        for request_id in message.handed_over:
            entry = table.get(request_id)
            if entry is not None:
                self._leg_ended(entry, peer)

    def lost(self, peer: Peer, reason: str) -> None:
        """The worker is gone, or has forgotten us: none of its requests gets another output from it."""
        entries = list(peer.open.values())
        if entries:
            log.warning("requests lost their worker", worker=peer.id, requests=len(entries), reason=reason)
        for entry in entries:
            self._settle_lost(entry, peer, reason)

    def fail_all(self, reason: str) -> None:
        for entry in list(self._open.values()):
            _abort(entry.legs)
            entry.stream.fail(UnavailableError(reason))

    def _settle_lost(self, entry: OpenRequest, peer: Peer, reason: str) -> None:
        """Decides what becomes of a request one of whose workers is gone. A decode worker notices for itself that its prefill
        worker has died, and computes the prompt; without the one that generates, the request fails."""
        self._leg_ended(entry, peer)
        if entry.legs[-1].peer is peer:
            _abort(leg for leg in entry.legs if leg.peer is not peer)
            entry.stream.fail(UnavailableError(f"the worker serving this request was lost: {reason}", code="worker_lost"))

    def _leg_ended(self, entry: OpenRequest, peer: Peer) -> None:
        for leg in entry.legs:
            if leg.peer is peer:
                peer.remove(leg, entry)

    def _leg_failed(self, entry: OpenRequest, peer: Peer, error: RequestError) -> None:
        """A prefill worker that cannot go on is no loss: its decode worker hears of it and computes the prompt. What the client
        did wrong, or was too much, ends the request everywhere."""
        if entry.legs[-1].peer is not peer and not isinstance(error, InvalidRequestError | QueueFullError):
            self._leg_ended(entry, peer)
            return
        _abort(leg for leg in entry.legs if leg.peer is not peer)
        entry.stream.fail(error)

    def _plan(self, request: GenerateRequest, excuse: str) -> Plan:
        if not self._planner.ready:
            self._metrics.rejected.labels("unavailable").inc()
            raise UnavailableError(excuse, code="no_worker")
        try:
            return self._planner.plan(request)
        except QueueFullError as error:
            self._metrics.rejected.labels("queue_full").inc()
            retry_after_s = self._rate.retry_after_s(len(self._open), time.monotonic())
            message = f"{error.message}: {len(self._open)} requests are in flight"
            raise QueueFullError(message, retry_after_s=retry_after_s) from error

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

    # What streams ask for (StreamOwner)

    def stream_finished(self, stream: RequestStream) -> None:
        entry = self._open.pop(stream.request_id)
        for leg in entry.legs:
            leg.peer.remove(leg, entry)
        self._rate.completed(time.monotonic())
        if len(entry.legs) > 1 and not stream.aborted:
            # Usually the decode worker made the last token and is done. If it was the prefill worker, or a stop string in the
            # first token, the decode worker need not begin.
            _abort(entry.legs[-1:])

    def send_finish(self, stream: RequestStream, sample: int, keep_tokens: int, reason: FinishReason) -> None:
        leg = self._open[stream.request_id].legs[-1]
        leg.peer.link.send(Finish(request_id=leg.request_id, sample=sample, keep_tokens=keep_tokens, reason=reason))

    def send_abort(self, stream: RequestStream) -> None:
        _abort(self._open[stream.request_id].legs)


def _abort(legs: Iterable[Leg]) -> None:
    for leg in legs:
        leg.peer.link.send(Abort(request_ids=[leg.request_id]))


def _prefill_name(plan: Plan) -> str:
    if plan.prefill is not None:
        return plan.prefill.id
    return "local" if plan.decode.record.role is Role.DECODE else plan.decode.id


def _submit_message(request_id: RequestId, request: GenerateRequest, transfer: TransferInfo | None) -> Submit:
    return Submit(
        request_id=request_id,
        external_id=request.external_id,
        prompt=request.prompt if isinstance(request.prompt, list) else list(request.prompt),
        params=request.params,
        priority=request.priority,
        cache_salt=request.cache_salt,
        trace=dict(request.trace),
        transfer=transfer,
    )


def excuse(peers: Iterable[Peer]) -> str:
    """Why none of these peers can take a request."""
    listed = list(peers)
    problems = [f"{peer.id}: {peer.problem}" for peer in listed if peer.problem]
    if problems:
        return f"no worker can take requests ({'; '.join(problems)})"
    return "no decode worker is up" if listed else "no worker has registered yet"
