"""Looks for a lease that another router asked for: every worker that could hold it is asked, and given a moment to answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvrelay.ids import WorkerId
from kvrelay.router.continuations import Continuations
from kvrelay.router.peer import Peer
from kvrelay.states import Role
from kvrelay.wire.serving import AskKept, KeptTold

_ANSWER_WITHIN_S = 1.0


@dataclass(slots=True)
class _Question:
    unanswered: set[WorkerId]
    answered: asyncio.Future[None]


class LeaseSearch:
    """What is found, `continuations` adopts."""

    def __init__(self, continuations: Continuations, peers: Callable[[], Iterable[Peer]]) -> None:
        self._continuations = continuations
        self._peers = peers
        self._questions: dict[tuple[str, str], _Question] = {}

    async def ask(self, handle: str, owner: str) -> None:
        """Returns when all have answered, or late ones are not waited for any longer. Who asks the same joins."""
        question = self._questions.get((handle, owner))
        if question is None:
            message = AskKept(handle=handle, owner=owner)
            holders = [peer for peer in self._peers() if peer.record.role in (Role.DECODE, Role.WHOLE)]
            asked = {peer.id for peer in holders if peer.link.send(message)}
            if not asked:
                return
            question = _Question(asked, asyncio.get_running_loop().create_future())
            self._questions[handle, owner] = question
        await asyncio.wait((question.answered,), timeout=_ANSWER_WITHIN_S)
        self._questions.pop((handle, owner), None)

    def told(self, peer: Peer, told: KeptTold) -> None:
        question = self._questions.get((told.handle, told.owner))
        if question is None:  # nobody asked, or nobody waits any more
            return
        mine = [lease for lease in told.kept if lease.owner == told.owner]
        self._continuations.adopt(peer.id, peer.record.fingerprint, mine)
        self._answered(question, peer.id)

    def lost(self, peer: Peer) -> None:
        for question in self._questions.values():
            self._answered(question, peer.id)

    @staticmethod
    def _answered(question: _Question, worker_id: WorkerId) -> None:
        question.unanswered.discard(worker_id)
        if not question.unanswered and not question.answered.done():
            question.answered.set_result(None)
