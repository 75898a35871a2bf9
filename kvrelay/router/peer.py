"""A worker as this router sees it, and the requests that this router has on it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from kvrelay.ids import RequestId, RouterId, WorkerId
from kvrelay.router.backend import GenerateRequest
from kvrelay.router.breaker import Breaker
from kvrelay.router.link import WorkerLink
from kvrelay.router.policy import FOREIGN_REQUEST_TOKENS
from kvrelay.router.stream import RequestStream
from kvrelay.states import WorkerState
from kvrelay.wire import PROTOCOL_VERSION
from kvrelay.wire.registry import ImageCounts, WorkerLoad, WorkerRecord
from kvrelay.wire.serving import Image, KeptTold, StepOutputs


@dataclass(frozen=True, slots=True)
class Leg:
    """A request on one worker, by the id it has there."""

    peer: Peer
    request_id: RequestId
    num_tokens: int  # what the policy counts for it


@dataclass(frozen=True, slots=True)
class EncodeShare:
    """What one encode worker is asked for."""

    peer: Peer
    images: list[Image]  # each digest once, with data

    @property
    def num_tokens(self) -> int:
        return sum(image.num_tokens for image in self.images)

    def has(self, digest: str | None) -> bool:
        return any(image.digest == digest for image in self.images)


@dataclass(slots=True)
class OpenRequest:
    """A request that was sent and has not ended. It keeps all that is needed to send it again. The last leg generates."""

    request: GenerateRequest
    stream: RequestStream
    legs: tuple[Leg, ...] = ()  # empty while it waits for a worker
    encode: tuple[EncodeShare, ...] = ()  # whom its images were sent to, the last time
    generating: bool = False  # the last leg has given an output, so it needs nobody else any more
    attempt: int = 0  # how often it was sent before
    num_setbacks: int = 0  # how often because somebody failed it
    num_tokens_then: int = 0  # that it had when it was last sent again
    num_internal_errors: int = 0
    avoid: set[WorkerId] = field(default_factory=set)  # workers that failed it
    deadline: asyncio.TimerHandle | None = None

    @property
    def is_kept(self) -> bool:
        """Whether its worker was told to keep its KV."""
        return any(parent.asked for parent in self.stream.parents)


class PeerOwner(Protocol):
    def peer_opened(self, peer: Peer) -> None: ...

    def peer_broken(self, peer: Peer, reason: str) -> None: ...

    def peer_outputs(self, peer: Peer, outputs: StepOutputs) -> None: ...

    def peer_told(self, peer: Peer, told: KeptTold) -> None: ...

    def peer_malformed(self, peer: Peer, reason: str) -> None: ...


class Peer:
    """Joins what the registry says (record), what the worker says (load) and what we sent (open requests)."""

    def __init__(self, record: WorkerRecord, owner: PeerOwner, *, router_id: RouterId, registration_s: float) -> None:
        self.id: WorkerId = record.id
        self.record = record
        self.load = record.load
        self.open: dict[RequestId, OpenRequest] = {}
        self.has_room = True
        self.num_tokens_in_flight = 0
        self.num_foreign_requests = 0  # on the worker, but not ours: other routers send it work too
        self.load_tokens = 0  # what the policy goes by
        self.refusal = ""  # why this router will not use the worker, however ready it is
        self.breaker = Breaker()
        self._owner = owner
        self._was_open = False
        self._capacity = record.max_batch + record.max_queue
        self.link = WorkerLink(record, self, router_id=router_id, registration_s=registration_s)

    @property
    def state(self) -> WorkerState:
        """The registry's word, unless we cannot reach the worker."""
        if self.link.is_open:
            return self.record.state
        return WorkerState.GONE if self._was_open else WorkerState.STARTING

    @property
    def usable(self) -> bool:
        return self.link.is_open and not self.refusal and self.record.state == WorkerState.READY

    @property
    def version(self) -> int:
        """Of the protocol that is spoken with it."""
        return min(self.record.version, PROTOCOL_VERSION)

    @property
    def problem(self) -> str:
        """Why the worker gets no requests; empty if it may."""
        if self.link.problem or self.refusal:
            return self.link.problem or self.refusal
        return "" if self.record.state == WorkerState.READY else f"it is {self.record.state.value}"

    def update(self, record: WorkerRecord) -> None:
        """News from the registry. Its load may be older than what the worker itself told us."""
        self.record = record
        if record.load.steps >= self.load.steps:
            self._take_load(record.load)

    def _take_load(self, load: WorkerLoad) -> None:
        self.load = load
        self.num_foreign_requests = max(0, load.running + load.waiting + load.transferring + load.swapped - len(self.open))
        self._reckon()

    def add(self, leg: Leg, entry: OpenRequest) -> None:
        self.breaker.sent()
        self.open[leg.request_id] = entry
        self.num_tokens_in_flight += leg.num_tokens
        self._reckon()

    def remove(self, leg: Leg, entry: OpenRequest) -> None:
        """Harmless if the leg has ended before."""
        if self.open.pop(leg.request_id, None) is not None:
            self.num_tokens_in_flight -= leg.num_tokens
            self._reckon()

    def _reckon(self) -> None:
        """Whenever it changes, not whenever it is asked for: a planner asks every worker for every request."""
        self.has_room = len(self.open) < self._capacity
        self.load_tokens = self.num_tokens_in_flight + FOREIGN_REQUEST_TOKENS * self.num_foreign_requests

    def close(self) -> None:
        self.link.close()

    def describe(self) -> dict[str, Any]:
        """Its entry in GET /cluster."""
        record, load = self.record, self.load
        described = {
            "id": record.id,
            "role": record.role.value,
            "state": self.state.value,
            "host": record.host,
            "pid": record.pid,
            "running": load.running,
            "waiting": load.waiting,
            "transferring": load.transferring,
            "swapped": load.swapped,
            "blocks": msgspec.to_builtins(load.blocks),
            "transfers": msgspec.to_builtins(load.transfers),
            "images": msgspec.to_builtins(load.images or ImageCounts()),
            "address": record.serving_address,
            "events_address": record.events_address,
            "replay_address": record.replay_address,
            "in_flight": len(self.open),
            "steps": load.steps,
            "preemptions": load.preemptions,
            "connections": load.connections,
            "leases": load.kept,
            "inherited_tokens": load.inherited_tokens,
            "breaker": self.breaker.state.value,
        }
        if self.problem:
            described["problem"] = self.problem
        return described

    # What the link says

    def link_opened(self, record: WorkerRecord) -> None:
        self._was_open = True
        self.update(record)
        self._owner.peer_opened(self)

    def link_broken(self, reason: str) -> None:
        self._owner.peer_broken(self, reason)

    def link_outputs(self, outputs: StepOutputs) -> None:
        self._take_load(outputs.load)
        self._owner.peer_outputs(self, outputs)

    def link_told(self, told: KeptTold) -> None:
        self._owner.peer_told(self, told)

    def link_malformed(self, reason: str) -> None:
        self._owner.peer_malformed(self, reason)
