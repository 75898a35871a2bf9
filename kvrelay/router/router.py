"""The router: knows the workers, links to each, and serves requests through them (`Backend`).

    registry: joined  -> a Peer with a link -> Welcome -> usable
    registry: changed -> state and load
    registry: left, or the link broke -> its requests are settled (`Dispatcher.lost`)

Everything runs on one event loop's thread.
"""

from __future__ import annotations

import asyncio
from typing import Any

from kvrelay.discovery.base import Loss, Membership
from kvrelay.errors import ProtocolError
from kvrelay.ids import RouterId, WorkerId, new_router_id
from kvrelay.log import Log
from kvrelay.metrics import Metrics
from kvrelay.router.backend import GenerateRequest
from kvrelay.router.collector import WorkerCollector
from kvrelay.router.dispatch import Dispatcher, excuse
from kvrelay.router.peer import Peer
from kvrelay.router.plan import Mode, PolicyName
from kvrelay.router.stream import RequestStream
from kvrelay.wire.registry import WorkerRecord
from kvrelay.wire.serving import StepOutputs

log = Log("router")


class Router:
    """Holds the peers. `start` on a running loop, `close` on the same."""

    def __init__(
        self,
        *,
        membership: Membership,
        metrics: Metrics,
        policy: PolicyName = "least_loaded",
        mode: Mode = "write",
        local_prefill_tokens: int = 0,
        lease_s: float = 4.0,
        model: str = "",
        router_id: RouterId | None = None,
    ) -> None:
        self.router_id = router_id or new_router_id()
        self._membership = membership
        self._metrics = metrics
        self._lease_s = lease_s
        self._model = model
        self._peers: dict[WorkerId, Peer] = {}
        self._dispatcher = Dispatcher(policy, metrics, mode=mode, local_prefill_tokens=local_prefill_tokens)
        self._ticker: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()
        metrics.registry.register(WorkerCollector(self._peers.values))

    def start(self) -> None:
        self._membership.start(self._on_joined, self._on_changed, self._on_left)
        self._schedule_tick()

    def close(self) -> None:
        """Open requests fail; nothing is heard of the workers any more."""
        self._dispatcher.fail_all("the server is shutting down")
        if self._ticker is not None:
            self._ticker.cancel()
        self._membership.close()
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()
        self._refresh()

    # Backend

    @property
    def ready(self) -> bool:
        return self._dispatcher.ready

    @property
    def max_model_len(self) -> int:
        return min((peer.record.max_model_len for peer in self._dispatcher.usable), default=0)

    def submit(self, request: GenerateRequest) -> RequestStream:
        return self._dispatcher.submit(request, "" if self.ready else excuse(self._peers.values()))

    def cluster(self) -> dict[str, Any]:
        return {
            "router": self.router_id,
            "model": self._model,
            "ready": self.ready,
            "in_flight": self._dispatcher.num_open,
            "workers": [peer.describe() for peer in self._peers.values()],
        }

    # For the launcher

    @property
    def num_usable(self) -> int:
        return len(self._dispatcher.usable)

    async def until_usable(self, count: int) -> None:
        """Returns when at least so many workers can take requests."""
        while self.num_usable < count:
            self._changed.clear()
            await self._changed.wait()

    # What the registry says

    def _on_joined(self, record: WorkerRecord) -> None:
        try:
            peer = Peer(record, self, router_id=self.router_id, lease_s=self._lease_s)
        except ProtocolError as error:
            self._metrics.malformed.labels("registry").inc()
            log.warning("a worker gave no usable address", worker=record.id, reason=error)
            return
        self._peers[record.id] = peer
        self._metrics.worker_joins.labels(record.role.value).inc()
        log.info("worker joined", worker=record.id, address=record.serving_address, pid=record.pid)

    def _on_changed(self, record: WorkerRecord) -> None:
        peer = self._peers.get(record.id)
        if peer is None:
            self._on_joined(record)
            return
        before = peer.record.state
        peer.update(record)
        if record.state != before:
            log.info("worker changed", worker=record.id, state=record.state.value)
            self._refresh()

    def _on_left(self, worker_id: WorkerId, loss: Loss) -> None:
        peer = self._peers.pop(worker_id, None)
        if peer is None:
            return
        peer.close()
        self._metrics.worker_losses.labels(peer.record.role.value, loss.value).inc()
        log.info("worker left", worker=worker_id, reason=loss.value)
        self._refresh()
        self._dispatcher.lost(peer, "it left" if loss is Loss.LEFT else "it was silent for longer than its lease")

    # What the links say (PeerOwner)

    def peer_opened(self, peer: Peer) -> None:
        log.info("worker ready", worker=peer.id)
        self._refresh()

    def peer_broken(self, peer: Peer, reason: str) -> None:
        self._metrics.worker_losses.labels(peer.record.role.value, "broken").inc()
        log.warning("link to a worker broke", worker=peer.id, reason=reason)
        self._refresh()
        self._dispatcher.lost(peer, reason)

    def peer_outputs(self, peer: Peer, outputs: StepOutputs) -> None:
        self._dispatcher.outputs(peer, outputs)

    def peer_malformed(self, peer: Peer, reason: str) -> None:
        self._metrics.malformed.labels("serving").inc()
        log.warning("malformed message of a worker", worker=peer.id, reason=reason)

    def _refresh(self) -> None:
        """Workers are used together only if one can replace the other: the oldest reachable one decides which model it is."""
        reachable = [peer for peer in self._peers.values() if peer.link.is_open]
        for peer in reachable:
            same = peer.record.fingerprint == reachable[0].record.fingerprint
            peer.refusal = "" if same else f"it serves another model or layout than {reachable[0].id}"
        self._dispatcher.use([peer for peer in reachable if peer.usable])
        self._changed.set()

    def _schedule_tick(self) -> None:
        self._ticker = asyncio.get_running_loop().call_later(self._lease_s / 3, self._tick)

    def _tick(self) -> None:
        for peer in list(self._peers.values()):
            peer.link.tick()
        self._schedule_tick()
