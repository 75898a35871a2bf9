"""What the dispatcher and the table of continuations have to tell each other in the life of one request."""

from __future__ import annotations

from collections.abc import Iterable

from kvrelay.errors import DeadlineError, RequestError
from kvrelay.router.continuations import Continuations
from kvrelay.router.parent import Parent
from kvrelay.router.peer import Leg, OpenRequest, Peer
from kvrelay.router.submission import abort
from kvrelay.states import FinishReason, WorkerState
from kvrelay.wire.serving import Finish, Keep, KeptNews, ReleaseKept


class Keeping:
    """Holds nothing of its own."""

    def __init__(self, continuations: Continuations) -> None:
        self._table = continuations

    def begin(self, entry: OpenRequest) -> None:
        entry.stream.parents = self._table.begun(entry.request)

    def abandon(self, entry: OpenRequest, error: RequestError) -> None:
        """It was never sent."""
        for parent in entry.stream.parents:
            self._table.failed(parent, error.message)

    def again(self, entry: OpenRequest) -> None:
        """It will be sent again. Before its first token, what it took of its own parent was for nothing."""
        stream = entry.stream
        if not stream.has_tokens:
            stream.inherited = None
        for sample in stream.running:
            self._table.given_up(stream.parents[sample])

    def keep(self, entry: OpenRequest, leg: Leg) -> Keep | None:
        """What the worker that generates is to keep. Samples that ended on one that was lost were kept there, if anywhere."""
        stream, peer = entry.stream, leg.peer
        for sample, parent in enumerate(stream.parents):
            if entry.attempt and sample not in stream.running:
                self._table.refused(parent, "its worker was lost", "worker_lost")
                continue
            self._table.sent(parent, peer.id, peer.record.fingerprint, leg.request_id)
        return entry.request.keep if entry.is_kept else None

    def news(self, peer: Peer, news: KeptNews) -> None:
        """Kept KV that no client can use, or that belongs to an attempt that was given up, is released."""
        stays = peer.record.state is not WorkerState.DRAINING
        told = news if stays else KeptNews(news.request_id, news.sample, news.kept_id, False, reason="its worker leaves")
        if not self._table.told(peer.id, told) or (news.kept and not stays):
            peer.link.send(ReleaseKept(kept_ids=[news.kept_id]))

    def cut(self, entry: OpenRequest) -> None:
        """Nobody wants the rest. What was to be kept ends where its client saw it end; if nobody saw any of it, and the prompt
        is still on its way from another worker, it is not worth the way."""
        stream = entry.stream
        if not entry.is_kept or (len(entry.legs) > 1 and not stream.has_tokens):
            for parent in stream.parents:
                if parent.asked:
                    self._table.refused(parent, "it was given up before it had begun", "abort")
            abort(entry.legs)
            return
        for leg in entry.legs[-1:]:
            for sample in stream.running:
                keep_tokens = len(stream.tokens(sample))
                leg.peer.link.send(
                    Finish(request_id=leg.request_id, sample=sample, keep_tokens=keep_tokens, reason=FinishReason.ABORT)
                )

    def cut_late(self, parent: Parent, sample: int, keep_tokens: int, peers: Iterable[Peer]) -> None:
        """Its client saw less of it than its worker made, which had ended it by itself."""
        self._table.cut(parent, keep_tokens)
        if parent.request_id is None or not (parent.asked or parent.kept):
            return
        message = Finish(request_id=parent.request_id, sample=sample, keep_tokens=keep_tokens, reason=FinishReason.STOP)
        for peer in peers:
            if peer.id == parent.worker_id:
                peer.link.send(message)

    def ended(self, entry: OpenRequest) -> None:
        """A request that took too long has its tokens, as one whose client left; one that failed has none to continue from."""
        stream = entry.stream
        failed = stream.error is not None and not isinstance(stream.error, DeadlineError)
        for sample, parent in enumerate(stream.parents):
            if failed and sample in stream.running:
                self._table.failed(parent, str(stream.error))
                continue
            if parent.asked and not entry.legs:
                self._table.refused(parent, "its worker was lost", "worker_lost")
            self._table.ended(parent, entry.request.prompt, stream.tokens(sample))
