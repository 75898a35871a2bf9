"""What the dispatcher and the table of continuations have to tell each other in the life of one request."""

from __future__ import annotations

from kvrelay.errors import DeadlineError, RequestError
from kvrelay.router.continuations import Continuations
from kvrelay.router.peer import OpenRequest, Peer
from kvrelay.router.submission import KNOWS_CONTINUATION
from kvrelay.states import WorkerState
from kvrelay.wire.serving import Keep, LeaseNews, ReleaseLeases


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

    def keep(self, entry: OpenRequest, peer: Peer) -> Keep | None:
        """What the worker that generates is to keep. Samples that ended on one that was lost were kept there, if anywhere."""
        stream = entry.stream
        for sample, parent in enumerate(stream.parents):
            if entry.attempt and sample not in stream.running:
                self._table.refused(parent, "its worker was lost", "worker_lost")
                continue
            self._table.sent(parent, peer.id, peer.record.fingerprint)
            if parent.asked and peer.version < KNOWS_CONTINUATION:
                self._table.refused(parent, "its worker is of an older version", "old_worker")
        return entry.request.keep if entry.is_kept else None

    def news(self, peer: Peer, leases: list[LeaseNews]) -> None:
        """A lease that nobody can use, or that belongs to an attempt that was given up, is given back."""
        unwanted = []
        for news in leases:
            stays = peer.record.state is not WorkerState.DRAINING
            told = news if stays else LeaseNews(news.request_id, news.sample, news.lease_id, False, reason="its worker leaves")
            if not self._table.told(peer.id, told) or (news.kept and not stays):
                unwanted.append(news.lease_id)
        if unwanted:
            peer.link.send(ReleaseLeases(lease_ids=unwanted))

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
