"""What the router and its workers say to each other about kept KV, around the table of continuations.

Keeping      in the life of one request: the worker that generates is asked to keep its KV, and says whether it does
KeptSearch   for a request that another router served: every worker is asked for its KV, and for what it remembers of it
share        for other routers: workers remember what a router knows of a request that has ended
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvrelay.errors import DeadlineError, RequestError
from kvrelay.ids import WorkerId
from kvrelay.log import Log
from kvrelay.router.attempt import OpenRequest
from kvrelay.router.continuations import Continuations
from kvrelay.router.parent import Parent
from kvrelay.router.peer import Leg, Peer
from kvrelay.states import FinishReason, Role, WorkerState
from kvrelay.wire.serving import (
    AskKept,
    Finish,
    Keep,
    KeptInfo,
    KeptNews,
    KeptTold,
    ParentInfo,
    ReleaseKept,
    Remember,
)

log = Log("router")
_ANSWER_WITHIN_S = 1.0


class Keeping:
    """Holds nothing of its own."""

    def __init__(self, continuations: Continuations) -> None:
        self._table = continuations

    def begin(self, entry: OpenRequest) -> None:
        entry.stream.parents = self._table.begun(entry.request.as_parents())

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
        """What the worker of the decode leg is to keep. Samples that ended on one that was lost were kept there, if at all."""
        stream, peer = entry.stream, leg.peer
        for sample, parent in enumerate(stream.parents):
            if entry.num_attempts and sample not in stream.running:
                self._table.refused(parent, "its worker was lost", "worker_lost")
            else:
                self._table.sent(parent, peer.id, peer.record.fingerprint, leg.request_id)
        return entry.request.keep if entry.is_kept else None

    def news(self, peer: Peer, news: KeptNews) -> None:
        """KV that no request can inherit, or that belongs to an attempt that was given up, is released."""
        stays = peer.record.state is not WorkerState.DRAINING
        told = news if stays else KeptNews(news.request_id, news.sample, news.kept_id, False, reason="its worker leaves")
        if not self._table.told(peer.id, told) or (news.kept and not stays):
            peer.send(ReleaseKept(kept_ids=[news.kept_id]))

    def cut(self, entry: OpenRequest) -> None:
        """The client does not want the rest. What was to be kept ends where the client saw it end; if the client saw none of
        it, and the prompt is still on its way from another worker, it is not worth the way."""
        stream, attempt = entry.stream, entry.attempt
        is_early = attempt is not None and not attempt.legs.is_one and not stream.has_tokens
        if not entry.is_kept or is_early:
            for parent in stream.parents:
                if parent.asked:
                    self._table.refused(parent, "it was given up before it had begun", "abort")
            for leg in entry.legs:
                leg.abort()
        elif attempt is not None:
            for sample in stream.running:
                attempt.legs.decode.finish(sample, len(stream.tokens(sample)), FinishReason.ABORT)

    def cut_late(self, parent: Parent, sample: int, keep_tokens: int, peers: Iterable[Peer]) -> None:
        """Its client saw less of it than its worker made, which had ended it by itself."""
        self._table.cut(parent, keep_tokens)
        if parent.request_id is None or not (parent.asked or parent.kept):
            return
        message = Finish(request_id=parent.request_id, sample=sample, keep_tokens=keep_tokens, reason=FinishReason.STOP)
        for peer in peers:
            if peer.id == parent.worker_id:
                peer.send(message)

    def ended(self, entry: OpenRequest) -> None:
        """A request that took too long has its tokens, as one whose client left; one that failed has none to continue from."""
        stream = entry.stream
        failed = stream.error is not None and not isinstance(stream.error, DeadlineError)
        for sample, parent in enumerate(stream.parents):
            if failed and sample in stream.running:
                self._table.failed(parent, str(stream.error))
                continue
            if parent.asked and entry.attempt is None:
                self._table.refused(parent, "its worker was lost", "worker_lost")
            self._table.ended(parent, entry.request.prompt, stream.tokens(sample))


@dataclass(slots=True)
class _Question:
    unanswered: set[WorkerId]
    answered: asyncio.Future[None]
    kept: list[tuple[Peer, KeptInfo]] = field(default_factory=list)
    known: list[ParentInfo] = field(default_factory=list)

    def answered_by(self, worker_id: WorkerId) -> None:
        self.unanswered.discard(worker_id)
        if not self.unanswered and not self.answered.done():
            self.answered.set_result(None)


@dataclass(slots=True, eq=False)
class KeptSearch:
    """`continuations` adopts what is found."""

    continuations: Continuations
    peers: Callable[[], Iterable[Peer]]
    _questions: dict[tuple[str, str], _Question] = field(default_factory=dict, init=False)

    async def ask(self, handle: str, owner: str) -> None:
        """Returns when all workers have answered, or a moment later; at once, if it is known here. Equal questions at the same
        time are asked once."""
        if not self.continuations.is_unheard_of(handle, owner):
            return
        question = self._questions.get((handle, owner))
        if question is None:
            message = AskKept(handle=handle, owner=owner)
            asked = {peer.id for peer in _holders(self.peers()) if peer.send(message)}
            if not asked:
                return
            question = _Question(asked, asyncio.get_running_loop().create_future())
            self._questions[handle, owner] = question
        await asyncio.wait((question.answered,), timeout=_ANSWER_WITHIN_S)
        if self._questions.pop((handle, owner), None) is not None:
            self._adopt(question)

    def _adopt(self, question: _Question) -> None:
        """Kept KV first: what is remembered of it has more names for it."""
        for peer, kept in question.kept:
            self.continuations.adopt(peer.id, peer.record.fingerprint, [kept])
        for info in question.known:
            try:
                known = Parent.of_known(info)
            except ValueError as error:
                log.seldom("what a worker remembered cannot be read", request=info.external_id, reason=error)
                continue
            self.continuations.adopt_known(known, info.forget_at - time.time())

    def told(self, peer: Peer, told: KeptTold) -> None:
        question = self._questions.get((told.handle, told.owner))
        if question is None:  # it was not asked, or is not waited for any more
            return
        question.kept += [(peer, kept) for kept in told.kept if kept.owner == told.owner]
        question.known += [known for known in told.known if known.owner == told.owner]
        question.answered_by(peer.id)

    def lost(self, peer: Peer) -> None:
        for question in self._questions.values():
            question.answered_by(peer.id)


def share(parent: Parent, peers: Iterable[Peer], now: float) -> None:
    """Has an ended request remembered for other routers: by the worker that generated it, and by another one in case the
    first is lost. `now` is the clock of `Continuations`."""
    holders = sorted(_holders(peers), key=lambda peer: (peer.id != parent.worker_id, peer.id))
    if not holders:
        return
    others = holders[1:]
    chosen = [holders[0], *([others[sum(parent.external_id.encode()) % len(others)]] if others else [])]
    message = Remember(parent=parent.info(time.time() + parent.forget_at - now if parent.record else 0.0))
    for peer in chosen:
        peer.send(message)


def _holders(peers: Iterable[Peer]) -> list[Peer]:
    return [peer for peer in peers if peer.record.role is not Role.ENCODE]
