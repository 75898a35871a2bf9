"""The routers that a worker serves: whose request is whose, and what each of them is still to be told.

A request is open from its Submit until each of its samples has ended. One that asked to keep its KV is awaited for longer:
until the engine has said of each sample whether it is kept, which may be after the last token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import assert_never

from kvrelay.ids import RequestId, WorkerId
from kvrelay.wire.registry import WorkerLoad
from kvrelay.wire.serving import (
    BeamResult,
    Failure,
    HandedOver,
    Inherited,
    KeptNews,
    LegTimes,
    News,
    SequenceOutput,
    StepOutputs,
    Submit,
)
from kvrelay.worker.recent import Recent

_REMEMBERED_KEPT = 4096
_REMEMBERED_ENDED = 1024


@dataclass(slots=True, eq=False)
class Caller:
    """A router that said Hello. `open` maps its requests to the samples that have not ended."""

    identity: bytes
    silence_s: float
    heard_at: float
    open: dict[RequestId, set[int]] = field(default_factory=dict)
    outputs: list[SequenceOutput] = field(default_factory=list)
    news: list[News] = field(default_factory=list)

    def take(self, worker_id: WorkerId, step: int, load: WorkerLoad) -> StepOutputs:
        """All that it has not been told."""
        message = StepOutputs(worker_id=worker_id, step=step, load=load, outputs=self.outputs, news=self.news)
        self.outputs, self.news = [], []
        return message


class Callers:
    """By the identities of their connections, and by their requests."""

    def __init__(self) -> None:
        self._routers: dict[bytes, Caller] = {}
        self._owners: dict[RequestId, Caller] = {}
        self._ended: dict[RequestId, Caller] = {}  # the last ones, of which it is to be told how long they took
        self._kept: Recent[RequestId] = Recent(_REMEMBERED_KEPT)
        self._awaited: dict[RequestId, tuple[Caller, set[int]]] = {}  # samples of which it is to be told whether they are kept

    def __len__(self) -> int:
        return len(self._routers)

    def __iter__(self) -> Iterator[Caller]:
        return iter(list(self._routers.values()))

    @property
    def num_open(self) -> int:
        return len(self._owners)

    def add(self, caller: Caller) -> None:
        self._routers[caller.identity] = caller

    def get(self, identity: bytes) -> Caller | None:
        return self._routers.get(identity)

    def forget(self, caller: Caller) -> None:
        """Its requests have been closed."""
        self._routers.pop(caller.identity, None)
        self._ended = {request_id: other for request_id, other in self._ended.items() if other is not caller}
        for request_id in [request_id for request_id, (awaiting, _) in self._awaited.items() if awaiting is caller]:
            del self._awaited[request_id]

    def knows(self, request_id: RequestId) -> bool:
        return request_id in self._owners

    def open_encode(self, caller: Caller, request_id: RequestId) -> None:
        """It has no samples: one word ends it."""
        caller.open[request_id] = {0}
        self._owners[request_id] = caller

    def open(self, caller: Caller, submit: Submit) -> None:
        samples = {one.sample for one in submit.resume} or set(range(submit.params.n))
        caller.open[submit.request_id] = samples
        self._owners[submit.request_id] = caller
        if submit.keep is not None:
            self._awaited[submit.request_id] = (caller, set(samples))
            self._kept.add(submit.request_id)

    def may_be_kept(self, request_id: RequestId) -> bool:
        """Also long after its end."""
        return request_id in self._kept

    def close(self, caller: Caller, request_ids: Iterable[RequestId]) -> None:
        """They have no more outputs. What becomes of their KV is still told."""
        for request_id in request_ids:
            del caller.open[request_id]
            del self._owners[request_id]
            self._ended[request_id] = caller
        while len(self._ended) > _REMEMBERED_ENDED:
            del self._ended[next(iter(self._ended))]

    def close_sample(self, caller: Caller, request_id: RequestId, sample: int) -> None:
        samples = caller.open[request_id]
        samples.discard(sample)
        if not samples:
            self.close(caller, (request_id,))

    def deal(self, step: StepOutputs) -> list[Caller]:
        """Gives each router what is its own, and returns those that have something to be told. What belongs to no
        router any more was aborted meanwhile."""
        touched: dict[bytes, Caller] = {}
        ended: list[tuple[Caller, RequestId]] = []
        for news in step.news:  # whose it is, is known until the outputs, with which a request may end
            caller = self._whose(news)
            if caller is not None:
                touched[caller.identity] = caller
                caller.news.append(news)
                if isinstance(news, Failure | HandedOver):
                    ended.append((caller, news.request_id))
        for output in step.outputs:
            caller = self._owners.get(output.request_id)
            if caller is not None:
                touched[caller.identity] = caller
                caller.outputs.append(output)
                if output.finish is not None:
                    self.close_sample(caller, output.request_id, output.sample)
        for caller, request_id in ended:
            if request_id in caller.open:
                self.close(caller, (request_id,))
        return list(touched.values())

    def _whose(self, news: News) -> Caller | None:
        match news:
            case Inherited() | BeamResult() | HandedOver():
                return self._owners.get(news.request_id)
            case Failure():
                self._awaited.pop(news.request_id, None)
                return self._owners.get(news.request_id)
            case LegTimes():
                return self._owners.get(news.request_id) or self._ended.pop(news.request_id, None)
            case KeptNews():
                caller, samples = self._awaited.get(news.request_id, (None, set()))
                samples.discard(news.sample)
                if not samples:
                    self._awaited.pop(news.request_id, None)
                return caller
            case _:
                assert_never(news)
