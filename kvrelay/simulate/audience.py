"""Whom a simulated worker tells what: each router the outputs of its own requests, all of them what its cache holds.

As in worker/serving.py: a router that has nothing of its own in a step is told nothing, and all are told the load once there is
nothing left to do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvrelay.events.subscriber import EventOwner
from kvrelay.router.peer import Peer
from kvrelay.wire import PROTOCOL_VERSION
from kvrelay.wire.events import CacheEvent, Freed, Removed, Stored
from kvrelay.wire.registry import WorkerLoad, WorkerRecord
from kvrelay.wire.serving import Hello, StepOutputs, Welcome
from kvrelay.worker.callers import Caller, Callers

OnOutputs = Callable[[Peer, StepOutputs, int, float], None]
"""A worker's outputs, for its peer: of so many steps, each so long. The last of them has just ended."""

_WITH_HASHES = (Stored, Removed, Freed)


class Audience:
    """`load` is what was told last."""

    def __init__(self, record: WorkerRecord, load: WorkerLoad, on_outputs: OnOutputs) -> None:
        self._worker_id = record.id
        self._on_outputs = on_outputs
        self.load = load
        self._load_untold = False
        self.peers: dict[bytes, Peer] = {}  # by the identities of their routers
        self.callers = Callers()
        self.listeners: list[EventOwner] = []
        self.num_told_blocks = 0  # by events: hashes of blocks
        self.listening_ns = 0  # of processor time that all routers took for events

    def welcome(self, identity: bytes, hello: Hello, record: WorkerRecord, now: float) -> None:
        self.callers.add(Caller(identity, hello.silence_s, now))
        self.peers[identity].heard(Welcome(version=PROTOCOL_VERSION, worker=record))

    def tell(self, outputs: StepOutputs, num_steps: int, step_s: float) -> None:
        touched = self.callers.deal(outputs)
        self.load, self._load_untold = outputs.load, len(touched) < len(self.callers)
        for router in touched:
            self._send(router, outputs.step, num_steps, step_s)

    def tell_load(self, load_now: Callable[[], WorkerLoad]) -> None:
        """Nothing is left to do."""
        if self._load_untold:
            self.load, self._load_untold = load_now(), False
            for router in self.callers:
                self._send(router, self.load.steps, 1, 0.0)

    def _send(self, router: Caller, step: int, num_steps: int, step_s: float) -> None:
        message = router.take(self._worker_id, step, self.load)
        if (peer := self.peers.get(router.identity)) is not None:
            self._on_outputs(peer, message, num_steps, step_s)

    def tell_events(self, events: Sequence[CacheEvent]) -> None:
        self.num_told_blocks += sum([len(event.hashes) for event in events if isinstance(event, _WITH_HASHES)])
        began_ns = time.thread_time_ns()
        for listener in self.listeners:
            for event in events:
                listener.happened(self._worker_id, event)
        self.listening_ns += time.thread_time_ns() - began_ns
