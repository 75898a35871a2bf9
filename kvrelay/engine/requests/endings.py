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
from kvrelay.errors import RequestError
from kvrelay.ids import RequestId
from kvrelay.states import FinishReason, FreeReason, RequestState


class Endings:
    """Owns the requests that have not ended. Each of them ends here, once."""

    def __init__(self, core: Core) -> None:
        self.requests = core.requests
        self.released: list[int] = []  # keys of sequences that the runner has not been told to forget yet
        self._kv = core.kv
        self._scheduler = core.scheduler
        self._kept = core.kept
        self._outbox = core.outbox
        self._incoming = core.incoming
        self._outgoing = core.outgoing
        self._images = core.images
        self._handing_on: dict[RequestId, tuple[str, list[bytes]]] = {}  # client's id and hashes of prompts that ended here

    def end(self, sequence: Sequence, reason: FinishReason) -> None:
        self._kept.ended(sequence)
        if sequence.request_id in self._incoming:
            self._incoming.abort(sequence)
        else:
            if sequence.request_id in self._outgoing:
                self._outgoing.abort(sequence)
            self._scheduler.remove(sequence)
        sequence.finish_reason = reason
        self.released.append(sequence.key)

    def end_cut(self, request: Request) -> None:
        """While its samples were not forked yet, the prompt was needed for the others."""
        for sequence in request.sequences if request.cut else ():
            if sequence.sample in request.cut and sequence.state is not RequestState.FINISHED:
                self.end(sequence, request.cut[sequence.sample])

    def settle(self, request: Request) -> None:
        if request.finished and self.requests.pop(request.request_id, None) is not None:
            self._forget(request, FreeReason.FINISHED)

    def drop(self, request: Request, reason: FreeReason) -> list[int]:
        """Returns the samples that had not ended before."""
        open_sequences = [s for s in request.sequences if s.state is not RequestState.FINISHED]
        samples = [s.sample for s in open_sequences] + list(range(1, 1 + request.num_unforked))
        if request.search is not None:
            samples = list(range(request.params.n))
        for sequence in open_sequences:
            self.end(sequence, FinishReason.ABORT)
        del self.requests[request.request_id]
        self._forget(request, reason)
        return samples

    def fail(self, request: Request, error: RequestError) -> None:
        if request.request_id in self.requests:
            self._kept.refuse(request.request_id, f"the request failed: {error.message}")
            self.drop(request, FreeReason.FAILED)
            self._outbox.fail(request.request_id, error)

    def hand_on(self, sequence: Sequence) -> None:
        """Its prompt is computed, and the request goes on elsewhere. `handed_on` says when its KV is there."""
        request = sequence.request
        self._scheduler.remove(sequence)
        self.released.append(sequence.key)
        del self.requests[sequence.request_id]
        self._end_images(request)
        if self._kv.recorder.is_heard:
            self._handing_on[sequence.request_id] = (request.external_id, self._findable(request))

    def handed_on(self, request_id: RequestId, reason: FreeReason) -> None:
        """Or will not be: routers that follow the cache learn that it is over here."""
        handing_on = self._handing_on.pop(request_id, None)
        if handing_on is not None:
            external_id, hashes = handing_on
            self._kv.recorder.freed(external_id, reason, [digest for digest in hashes if self._kv.is_findable(digest)])

    def _forget(self, request: Request, reason: FreeReason) -> None:
        self._kept.forget(request.request_id)
        self._end_images(request)
        if self._kv.recorder.is_heard:
            self._kv.recorder.freed(request.external_id, reason, self._findable(request))

    def _end_images(self, request: Request) -> None:
        if request.images:
            self._images.end(request.request_id)

    def _findable(self, request: Request) -> list[bytes]:
        """Hashes of the request's full blocks that the prefix cache has."""
        hashes = dict.fromkeys(digest for sequence in request.sequences for digest in sequence.hashes)
        return [digest for digest in hashes if self._kv.is_findable(digest)]
