"""Timelines of requests that other routers with the same workers served: a worker passes questions and answers on."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from kvrelay.discovery.base import Company
from kvrelay.ids import RouterId
from kvrelay.router.peer import Peer
from kvrelay.router.timelines import Timelines
from kvrelay.wire.timelines import AskTimelines, TimelineMessage, TimelineShown, TimelinesTold

_ANSWER_WITHIN_S = 1.0


@dataclass(slots=True)
class _Question:
    unanswered: set[RouterId]
    answered: asyncio.Future[None]
    found: list[TimelineShown] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class TimelineSearch:
    """Asks for one router, and answers what others ask it."""

    router_id: RouterId
    timelines: Timelines
    company: Company
    peers: Callable[[], Sequence[Peer]]
    _questions: dict[int, _Question] = field(default_factory=dict, init=False)
    _numbers: count[int] = field(default_factory=count, init=False)

    def __post_init__(self) -> None:
        self.timelines.router, self.timelines.ask_others = self.router_id, self.ask

    async def ask(self, owner: str, name: str, limit: int) -> list[TimelineShown]:
        """What all others have, or those that answer within a moment."""
        others = {router.id for router in self.company.routers} - {self.router_id}
        number = next(self._numbers)
        message = AskTimelines(asker=self.router_id, question=number, owner=owner, name=name, limit=limit)
        peers = list(self.peers())
        random.shuffle(peers)  # no worker passes all questions on
        if not others or not any(peer.send(message) for peer in peers):
            return []
        question = self._questions[number] = _Question(others, asyncio.get_running_loop().create_future())
        try:
            await asyncio.wait((question.answered,), timeout=_ANSWER_WITHIN_S)
        finally:
            del self._questions[number]
        return question.found

    def heard(self, peer: Peer, message: TimelineMessage) -> None:
        match message:
            case AskTimelines():
                found = self.timelines.about(message.owner, message.name, message.limit)
                told = TimelinesTold(asker=message.asker, question=message.question, router=self.router_id, timelines=found)
                peer.send(told)
            case TimelinesTold() if message.asker == self.router_id and message.question in self._questions:
                question = self._questions[message.question]
                question.found += message.timelines
                question.unanswered.discard(message.router)
                if not question.unanswered and not question.answered.done():
                    question.answered.set_result(None)
