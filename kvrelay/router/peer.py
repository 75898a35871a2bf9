"""A worker as this router sees it, and the requests that this router has on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from kvrelay.ids import RequestId, RouterId, WorkerId
from kvrelay.router.backend import GenerateRequest
from kvrelay.router.link import WorkerLink
from kvrelay.router.stream import RequestStream
from kvrelay.states import WorkerState
from kvrelay.wire.registry import WorkerRecord
from kvrelay.wire.serving import StepOutputs


@dataclass(frozen=True, slots=True)
class Leg:
    """A request on one worker, by the id it has there."""

    peer: Peer
    request_id: RequestId


@dataclass(slots=True)
class OpenRequest:
    """A request that was sent and has not ended. It keeps all that is needed to send it again. The last leg generates."""

    request: GenerateRequest
    stream: RequestStream
    legs: tuple[Leg, ...]
    num_tokens: int  # what the policy counts for it


class PeerOwner(Protocol):
    def peer_opened(self, peer: Peer) -> None: ...

    def peer_broken(self, peer: Peer, reason: str) -> None: ...

    def peer_outputs(self, peer: Peer, outputs: StepOutputs) -> None: ...

    def peer_malformed(self, peer: Peer, reason: str) -> None: ...


class Peer:
    """Joins what the registry says (record), what the worker says (load) and what we sent (open requests)."""

    def __init__(self, record: WorkerRecord, owner: PeerOwner, *, router_id: RouterId, lease_s: float) -> None:
        self.record = record
        self.load = record.load
        self.open: dict[RequestId, OpenRequest] = {}
        self.num_tokens_in_flight = 0
        self.refusal = ""  # why this router will not use the worker, however ready it is
        self._owner = owner
        self._was_open = False
        self._capacity = record.max_batch + record.max_queue
        self.link = WorkerLink(record, self, router_id=router_id, lease_s=lease_s)

    @property
    def id(self) -> WorkerId:
        return self.record.id

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
    def has_room(self) -> bool:
        return len(self.open) < self._capacity

    @property
    def num_foreign_requests(self) -> int:
        """On the worker, but not ours: other routers send it work too."""
        return max(0, self.load.running + self.load.waiting + self.load.transferring + self.load.swapped - len(self.open))

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
            self.load = record.load

    def add(self, leg: Leg, entry: OpenRequest) -> None:
        self.open[leg.request_id] = entry
        self.num_tokens_in_flight += entry.num_tokens

    def remove(self, leg: Leg, entry: OpenRequest) -> None:
        """Harmless if the leg has ended before."""
        if self.open.pop(leg.request_id, None) is not None:
            self.num_tokens_in_flight -= entry.num_tokens

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
            "address": record.serving_address,
            "in_flight": len(self.open),
            "steps": load.steps,
            "preemptions": load.preemptions,
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
        self.load = outputs.load
        self._owner.peer_outputs(self, outputs)

    def link_malformed(self, reason: str) -> None:
        self._owner.peer_malformed(self, reason)
