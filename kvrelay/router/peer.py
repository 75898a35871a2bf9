"""A worker as this router sees it: the connection to it, what is known of it, and the legs of requests that it has.

    connected -> Hello -> Welcome: open -> Submit, Abort, Finish, Ping ... StepOutputs -> disconnected or Refused -> Hello again

What a worker knew of this router before a break is gone: it aborts our requests when we say Hello again. So a break ends
every request on the connection, and one that opens carries none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

import msgspec

from kvrelay.discovery.breaker import Breaker
from kvrelay.errors import ProtocolError
from kvrelay.ids import RequestId, RouterId, WorkerId
from kvrelay.router.outside import Outside
from kvrelay.router.policy import FOREIGN_REQUEST_TOKENS
from kvrelay.router.rebalance import WorkerSight
from kvrelay.router.shown import WorkerShown, describe
from kvrelay.router.stream import RequestStream
from kvrelay.states import FinishReason, WorkerState
from kvrelay.wire import PROTOCOL_VERSION, check_version
from kvrelay.wire.adapters import AdaptersTold
from kvrelay.wire.registry import WorkerLoad, WorkerRecord
from kvrelay.wire.serving import (
    Abort,
    Finish,
    Forgotten,
    Hello,
    KeptTold,
    Ping,
    Refused,
    StepOutputs,
    ToRouter,
    ToWorker,
    Welcome,
)
from kvrelay.wire.timelines import AboutTimelines, AskTimelines, TimelinesTold

HOST_KINDS = ("total", "free", "cached", "in_use")  # of blocks on the host
_PING = Ping()


def difference(record: WorkerRecord, first: WorkerRecord) -> str:
    """Why the two are not used together; empty if one can replace the other."""
    if record.kv_dtype != first.kv_dtype:
        return f"its --kv-dtype is {record.kv_dtype}, that of {first.id} is {first.kv_dtype}"
    if record.fingerprint != first.fingerprint:
        return f"it serves another model, or with another engine or layout, than {first.id}"
    return ""


def sight_of(record: WorkerRecord) -> WorkerSight:
    """For the policy that changes roles, as the registry knows the worker."""
    is_ready = record.state is WorkerState.READY
    return WorkerSight(id=record.id, role=record.role, is_ready=is_ready, max_batch=record.max_batch, load=record.load)


@dataclass(slots=True, eq=False)
class Leg:
    """One worker's part of a request, by the id that the request has there."""

    peer: Peer
    request_id: RequestId
    stream: RequestStream
    num_tokens: int  # what the policy counts for it
    has_output: bool = False

    @property
    def is_open(self) -> bool:
        """Until the worker has given its terminal answer, or is not asked for one any more."""
        return self.request_id in self.peer.open

    def abort(self) -> None:
        self.peer.send(Abort(request_ids=[self.request_id]))

    def finish(self, sample: int, keep_tokens: int, reason: FinishReason) -> None:
        """A normal end of one sample after `keep_tokens` tokens, which the worker has not found itself."""
        self.peer.send(Finish(request_id=self.request_id, sample=sample, keep_tokens=keep_tokens, reason=reason))


@dataclass(frozen=True, kw_only=True, slots=True)
class Listeners:
    """Who is told what of a worker, without anything in between. None of these may raise."""

    opened: Callable[[Peer], None]
    broken: Callable[[Peer, str], None]  # only after `opened`, once per opening
    outputs: Callable[[Peer, StepOutputs], None]
    told: Callable[[Peer, KeptTold], None]
    adapters: Callable[[Peer, AdaptersTold], None]
    forgotten: Callable[[Forgotten], None]
    timelines: Callable[[Peer, AboutTimelines], None]
    malformed: Callable[[Peer, str], None]


class Peer:
    """Joins what the registry says (record), what the worker says (load) and what we sent (open legs)."""

    def __init__(
        self,
        record: WorkerRecord,
        listeners: Listeners,
        *,
        router_id: RouterId,
        silence_s: float,
        outside: Outside | None = None,
    ) -> None:
        """Raises ProtocolError for an address that is none."""
        self.id: WorkerId = record.id
        self.record = record
        self.load = record.load
        self.open: dict[RequestId, Leg] = {}
        self.has_room = True
        self.num_tokens_in_flight = 0
        self.num_foreign_requests = 0  # on the worker, but not ours: other routers send it work too
        self.load_tokens = 0  # what the policy goes by
        self.refusal = ""  # why this router will not use the worker, however ready it is
        self.adapter_failures: dict[str, str] = {}  # of LoRA adapters that it was to load when it came, by name
        self._outside = outside or Outside()
        self.breaker = Breaker(self._outside.clock)
        self._listeners = listeners
        self._closed_because = "connecting"  # empty while the connection is open
        self._was_open = False
        self._capacity = record.max_batch + record.max_queue
        self._hello = Hello(version=PROTOCOL_VERSION, router_id=router_id, silence_s=silence_s)
        self._line = self._outside.open_line(record, self, router_id=router_id, silence_s=silence_s)

    # What can be done with it

    @property
    def is_open(self) -> bool:
        return not self._closed_because

    @property
    def state(self) -> WorkerState:
        """The registry's word, unless we cannot reach the worker."""
        if self.is_open:
            return self.record.state
        return WorkerState.GONE if self._was_open else WorkerState.STARTING

    @property
    def usable(self) -> bool:
        return self.is_open and not self.refusal and self.record.state == WorkerState.READY

    @property
    def problem(self) -> str:
        """Why the worker gets no requests; empty if it may."""
        if self._closed_because or self.refusal:
            return self._closed_because or self.refusal
        return "" if self.record.state == WorkerState.READY else f"it is {self.record.state.value}"

    def send(self, message: ToWorker) -> bool:
        """False: the connection is not open, or the worker does not keep up."""
        return not self._closed_because and self._line.send(message)

    def tick(self) -> None:
        """Shows the worker that we live, or says Hello (again). To be called several times in each `silence_s`."""
        self._line.send(self._hello if self._closed_because else _PING)

    def drain(self) -> None:
        """What the worker said last counts, though another socket was quicker to say that it left."""
        self._line.drain()

    def close(self) -> None:
        """Silent: no listener is told."""
        self._closed_because = "closed"
        self._line.close()

    # What is known of it

    def update(self, record: WorkerRecord) -> None:
        """News from the registry. Its load and adapters may be older than what the worker itself told us: of two loads after
        the same step the worker's own counts, so that no counter falls."""
        self.record = msgspec.structs.replace(record, adapters=self.record.adapters) if self.is_open else record
        if record.load.steps > self.load.steps or (record.load.steps == self.load.steps and not self.is_open):
            self._take_load(record.load)

    def _take_load(self, load: WorkerLoad) -> None:
        self.load = load
        self.num_foreign_requests = max(0, load.running + load.waiting + load.transferring + load.swapped - len(self.open))
        self._reckon()

    def add(self, leg: Leg) -> None:
        self.breaker.sent()
        self.open[leg.request_id] = leg
        self.num_tokens_in_flight += leg.num_tokens
        self._reckon()

    def remove(self, leg: Leg) -> None:
        """Harmless if the leg has ended before."""
        if self.open.pop(leg.request_id, None) is not None:
            self.num_tokens_in_flight -= leg.num_tokens
            self._reckon()

    def _reckon(self) -> None:
        """Whenever it changes, not whenever it is asked for: a planner asks every worker for every request."""
        self.has_room = len(self.open) < self._capacity
        self.load_tokens = self.num_tokens_in_flight + FOREIGN_REQUEST_TOKENS * self.num_foreign_requests

    @property
    def sight(self) -> WorkerSight:
        return msgspec.structs.replace(sight_of(self.record), load=self.load, is_ready=self.usable)

    def describe(self) -> WorkerShown:
        """Its entry in GET /cluster."""
        described = describe(self.record, self.load, self.state)
        described["in_flight"], described["breaker"] = len(self.open), self.breaker.state.value
        if self.problem:
            described["problem"] = self.problem
        if self.adapter_failures:
            described["adapter_failures"] = dict(self.adapter_failures)
        return described

    def forgive(self) -> None:
        """What happened before does not count any more."""
        self.breaker = Breaker(self._outside.clock)

    # What its line says (LineOwner)

    def line_up(self) -> None:
        self.tick()

    def line_down(self) -> None:
        self._break("the connection to the worker broke")

    def malformed(self, reason: str) -> None:
        self._listeners.malformed(self, reason)

    def _break(self, reason: str) -> None:
        was_open, self._closed_because = self.is_open, reason
        if was_open:
            self._listeners.broken(self, reason)

    def heard(self, message: ToRouter) -> None:
        match message:
            case StepOutputs():
                self._on_outputs(message)
            case KeptTold():
                self._listeners.told(self, message)
            case AdaptersTold():
                self.record = msgspec.structs.replace(self.record, adapters=message.adapters)
                self._listeners.adapters(self, message)
            case Forgotten():
                self._listeners.forgotten(message)
            case AskTimelines() | TimelinesTold():
                self._listeners.timelines(self, message)
            case Welcome():
                self._on_welcome(message)
            case Refused():
                self._break(f"the worker refused this router: {message.reason}")
            case _:
                assert_never(message)

    def _on_outputs(self, message: StepOutputs) -> None:
        if message.worker_id != self.id:
            self._listeners.malformed(self, f"outputs of {message.worker_id} on the connection to {self.id}")
        elif not self._closed_because:
            self._take_load(message.load)
            self._listeners.outputs(self, message)

    def _on_welcome(self, message: Welcome) -> None:
        try:
            check_version("the worker", message.version)
        except ProtocolError as error:
            self._break(str(error))
            return
        if message.worker.id != self.id:
            self._break(f"{message.worker.id} answers where {self.id} was")
        elif self._closed_because:
            self.update(message.worker)
            self._closed_because = ""
            self._was_open = True
            self._listeners.opened(self)
