"""How requests end: by a finish reason for each sample, by an abort, by a failure, or by going on elsewhere.

end       one sequence: its KV may be kept, its blocks come back, the runner forgets it
end_cut   the samples whose end the router has found
settle    a request whose last sample has ended is forgotten, and its end told to routers that follow the cache
drop      all of a request at once
fail      the same, with the one Failure that answers it
"""

from __future__ import annotations

from kvrelay.engine.core import Core
from kvrelay.engine.request import Request, Sequence
from kvrelay.engine.requests.stages import Stages
from kvrelay.errors import RequestError
from kvrelay.ids import RequestId
from kvrelay.log import Log
from kvrelay.states import FinishReason, FreeReason, RequestState, Stage
from kvrelay.wire.events import Freed

log = Log("engine")


class Endings:
    """Owns the requests that have not ended. Each of them ends here, once."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.released: list[int] = []  # keys of sequences that the runner has not been told to forget yet
        self._handing_on: dict[RequestId, Request] = {}  # prompts that ended here, and are on their way

    def end(self, sequence: Sequence, reason: FinishReason) -> None:
        self._core.kept.ended(sequence)
        if sequence.request_id in self._core.incoming:
            self._core.incoming.abort(sequence)
        else:
            if sequence.request_id in self._core.outgoing:
                self._core.outgoing.abort(sequence)
            self._core.scheduler.remove(sequence)
        sequence.finish_reason = reason
        self.released.append(sequence.key)

    def end_cut(self, request: Request) -> None:
        """While its samples were not forked yet, the prompt was needed for the others."""
        for sequence in request.sequences if request.cut else ():
            if sequence.sample in request.cut and sequence.state is not RequestState.FINISHED:
                self.end(sequence, request.cut[sequence.sample])

    def settle(self, request: Request) -> None:
        if request.finished and self._core.requests.pop(request.request_id, None) is not None:
            self._forget(request, FreeReason.FINISHED)

    def drop(self, request: Request, reason: FreeReason) -> list[int]:
        """Returns the samples that had not ended before."""
        open_sequences = [s for s in request.sequences if s.state is not RequestState.FINISHED]
        samples = [s.sample for s in open_sequences] + list(range(1, 1 + request.num_unforked))
        if request.search is not None:
            samples = list(range(request.params.n))
        for sequence in open_sequences:
            self.end(sequence, FinishReason.ABORT)
        del self._core.requests[request.request_id]
        self._forget(request, reason)
        return samples

    def fail(self, request: Request, error: RequestError) -> None:
        if request.request_id in self._core.requests:
            self._core.kept.refuse(request.request_id, f"the request failed: {error.message}")
            self.drop(request, FreeReason.FAILED)
            self._core.outbox.fail(request.request_id, error)

    def hand_on(self, sequence: Sequence) -> None:
        """Its prompt is computed, and the request goes on elsewhere. `handed_on` says when its KV is there."""
        request = sequence.request
        self._core.scheduler.remove(sequence)
        self.released.append(sequence.key)
        del self._core.requests[sequence.request_id]
        self._end_images(request)
        request.stages.enter(Stage.HAND_OVER)
        self._handing_on[sequence.request_id] = request

    def stages_again(self, request_id: RequestId) -> Stages | None:
        """Of a prompt that was set aside and is to be computed again: it goes on where it was."""
        request = self._handing_on.pop(request_id, None)
        return None if request is None else request.stages

    def handed_on(self, request_id: RequestId, reason: FreeReason, sent_bytes: int = 0) -> None:
        """Or will not be: routers that follow the cache learn that it is over here."""
        request = self._handing_on.pop(request_id, None)
        if request is None:
            return
        if reason is FreeReason.HANDED_OVER:
            log.info(
                "KV handed over",
                request=request_id, transfer=request.transfer_id, tokens=len(request.sequences[0].tokens),
                bytes=sent_bytes, ms=round(1000 * request.stages.seconds_in(Stage.HAND_OVER), 1), trace=request.trace_id,
            )  # fmt: skip
        self._tell_over(request, reason)

    def _forget(self, request: Request, reason: FreeReason) -> None:
        self._core.kept.forget(request.request_id)
        self._end_images(request)
        self._tell_over(request, reason)

    def _end_images(self, request: Request) -> None:
        if request.images:
            request.resumed_s = self._core.images.end(request.request_id)

    def _tell_over(self, request: Request, reason: FreeReason) -> None:
        """Routers hear how long it took; those that follow the cache, which of its full blocks that still has."""
        self._core.outbox.news.append(request.stages.times(request.request_id, request.resumed_s))
        kv = self._core.kv
        if kv.recorder.is_heard:
            kv.recorder.lived(Freed(request=request.external_id, reason=reason, hashes=kv.findable(_hashes(request))))
        request.sequences = []  # most requests then leave no circle for the collector


def _hashes(request: Request) -> list[bytes]:
    """Of the full blocks of all its samples, each once."""
    if len(request.sequences) == 1:
        return request.sequences[0].hashes
    return list(dict.fromkeys(digest for sequence in request.sequences for digest in sequence.hashes))
