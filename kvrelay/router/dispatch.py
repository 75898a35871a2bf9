"""Sends each request to a worker and brings its outputs back.

    submit -> choose a peer -> Submit -> StepOutputs ... -> the stream is finished, failed or aborted -> forgotten

A request is in `_open` (and in its peer's `open`) from submit to its end, and nowhere afterwards: what a worker still says of
it then is dropped. This is the hot path of the router: no task, future or copy per output.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Literal

from kvrelay.errors import QueueFullError, UnavailableError, request_error
from kvrelay.ids import RequestId, new_request_id
from kvrelay.log import Log
from kvrelay.metrics import Metrics
from kvrelay.router.backend import GenerateRequest
from kvrelay.router.peer import OpenRequest, Peer
from kvrelay.router.policy import CompletionRate, Policy, tokens_of
from kvrelay.router.stream import RequestStream
from kvrelay.states import FinishReason
from kvrelay.wire.serving import Abort, Finish, StepOutputs, Submit

log = Log("router")


class Dispatcher:
    """Owns the table of open requests. The router tells it which peers may be used."""

    def __init__(self, policy: Literal["round_robin", "least_loaded"], metrics: Metrics) -> None:
        self.usable: list[Peer] = []
        self._policy = Policy(policy)
        self._metrics = metrics
        self._open: dict[RequestId, OpenRequest] = {}
        self._rate = CompletionRate()

    @property
    def num_open(self) -> int:
        return len(self._open)

    def submit(self, request: GenerateRequest, excuse: str) -> RequestStream:
        """`excuse` says why there is no usable peer, if there is none."""
        peer = self._choose(excuse)
        stream = RequestStream(new_request_id(), request.params.n, self, prefill=peer.id, decode=peer.id)
        if not peer.link.send(_submit_message(stream.request_id, request)):
            self._metrics.rejected.labels("unavailable").inc()
            raise UnavailableError(f"worker {peer.id} cannot be reached")
        entry = OpenRequest(request, stream, peer, tokens_of(request))
        self._open[stream.request_id] = entry
        peer.add(entry)
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
                entry.stream.fail(request_error(failure.kind, failure.message, failure.param))

    def lost(self, peer: Peer, reason: str) -> None:
        """The worker is gone, or has forgotten us: none of its requests gets another output from it."""
        entries = list(peer.open.values())
        if entries:
            log.warning("requests lost their worker", worker=peer.id, requests=len(entries), reason=reason)
        for entry in entries:
            self._settle_lost(entry, reason)

    def fail_all(self, reason: str) -> None:
        for entry in list(self._open.values()):
            entry.peer.link.send(Abort(request_ids=[entry.stream.request_id]))
            entry.stream.fail(UnavailableError(reason))

    def _settle_lost(self, entry: OpenRequest, reason: str) -> None:
        """Decides what becomes of one request whose worker is gone: today it fails; failover resubmits it here."""
        entry.stream.fail(UnavailableError(f"the worker serving this request was lost: {reason}", code="worker_lost"))

    def _choose(self, excuse: str) -> Peer:
        if not self.usable:
            self._metrics.rejected.labels("unavailable").inc()
            raise UnavailableError(excuse, code="no_worker")
        candidates = [peer for peer in self.usable if peer.has_room]
        if not candidates:
            self._metrics.rejected.labels("queue_full").inc()
            retry_after_s = self._rate.retry_after_s(len(self._open), time.monotonic())
            raise QueueFullError(f"the queue is full: {len(self._open)} requests are in flight", retry_after_s=retry_after_s)
        return self._policy.choose(candidates)

    # What streams ask for (StreamOwner)

    def stream_finished(self, stream: RequestStream) -> None:
        entry = self._open.pop(stream.request_id)
        entry.peer.remove(entry)
        self._rate.completed(time.monotonic())

    def send_finish(self, stream: RequestStream, sample: int, keep_tokens: int, reason: FinishReason) -> None:
        message = Finish(request_id=stream.request_id, sample=sample, keep_tokens=keep_tokens, reason=reason)
        self._open[stream.request_id].peer.link.send(message)

    def send_abort(self, stream: RequestStream) -> None:
        self._open[stream.request_id].peer.link.send(Abort(request_ids=[stream.request_id]))


def _submit_message(request_id: RequestId, request: GenerateRequest) -> Submit:
    return Submit(
        request_id=request_id,
        external_id=request.external_id,
        prompt=request.prompt if isinstance(request.prompt, list) else list(request.prompt),
        params=request.params,
        priority=request.priority,
        cache_salt=request.cache_salt,
        trace=dict(request.trace),
    )


def excuse(peers: Iterable[Peer]) -> str:
    """Why none of these peers can take a request."""
    problems = [f"{peer.id}: {peer.problem}" for peer in peers]
    return f"no worker can take requests ({'; '.join(problems)})" if problems else "no worker has registered yet"
