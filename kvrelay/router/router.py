"""The router: knows the workers, links to each, and serves requests through them (`Backend`).

    registry: joined  -> a Peer, which connects -> Welcome -> usable; one that is starting has no address yet
    registry: changed -> state and load
    registry: left, or the connection broke -> its requests go elsewhere (`Dispatcher.lost`)

Everything runs on one event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Protocol

from kvrelay.discovery.base import Alone, Company, Loss, Membership, router_record
from kvrelay.errors import NotFoundError, ProtocolError
from kvrelay.events.eviction_sync import EvictionSync
from kvrelay.ids import RouterId, WorkerId, new_router_id, number_of
from kvrelay.log import Log
from kvrelay.metrics import Metrics
from kvrelay.router.adapters import AdapterOrders
from kvrelay.router.attempt import Mode
from kvrelay.router.backend import AdapterChange, DrainOrder, GenerateRequest
from kvrelay.router.collector import WorkerCollector
from kvrelay.router.continuations import Continuations
from kvrelay.router.dispatch import Dispatcher
from kvrelay.router.drain import order_drain
from kvrelay.router.event_feed import EventFeed, NoFeed
from kvrelay.router.failover import RetryRules
from kvrelay.router.kept import KeptSearch, share
from kvrelay.router.outside import Outside
from kvrelay.router.parent import Parent
from kvrelay.router.peer import Listeners, Peer, difference, sight_of
from kvrelay.router.plan import Planner
from kvrelay.router.policy import PolicyName
from kvrelay.router.prefix_index import PrefixIndex
from kvrelay.router.rebalance import WorkerSight
from kvrelay.router.shown import ClusterShown, describe
from kvrelay.router.stream import RequestStream
from kvrelay.router.timeline_search import TimelineSearch
from kvrelay.states import Role, WorkerState
from kvrelay.wire.registry import Adapter, WorkerRecord
from kvrelay.wire.serving import Forget, Forgotten, PeerLost, ReleaseKept

log = Log("router")


class OpenSync(Protocol):
    """Makes the eviction sync, if there is a context index to be told."""

    def __call__(self, *, is_held: Callable[[bytes], bool]) -> EvictionSync: ...


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
        registration_s: float = 4.0,
        model: str = "",
        router_id: RouterId | None = None,
        rules: RetryRules | None = None,
        sync: OpenSync | None = None,
        continuation_cache: int = 1024,
        max_kept_per_key: int = 64,
        max_stored: int = 1024,
        stored_s: float = 3600.0,
        company: Company | None = None,
        outside: Outside | None = None,
    ) -> None:
        """`company` are the routers with the same workers: they are to know what this one served. None: it is alone."""
        self._outside = outside = outside or Outside()
        self.router_id = router_id or new_router_id()
        self._membership = membership
        self._metrics = metrics
        self._registration_s, self._model = registration_s, model
        self._peers: dict[WorkerId, Peer] = {}
        self._starting: dict[WorkerId, WorkerRecord] = {}  # until they are open, or have left
        self._max_model_len = 0
        index = PrefixIndex() if policy == "prefix_aware" or sync is not None else None
        self._sync = EvictionSync() if sync is None or index is None else sync(is_held=index.holds)
        self._feed = NoFeed() if index is None else EventFeed(index, metrics, self._sync, outside)
        used_index, first_turn = index if policy == "prefix_aware" else None, number_of(self.router_id)
        self._planner = Planner(policy, local_prefill_tokens, metrics, used_index, first_turn=first_turn)
        self.continuations = Continuations(
            metrics,
            capacity=continuation_cache,
            max_kept_per_owner=max_kept_per_key,
            max_stored=max_stored,
            stored_s=stored_s,
            clock=outside.clock,
        )
        self._dispatcher = Dispatcher(
            self._planner, metrics, self.continuations, self._sync, mode=mode, rules=rules, clock=outside.clock
        )
        self.timelines = self._dispatcher.timelines
        self._company = company or Alone(router_record(self.router_id))
        self.continuations.on_known = self._on_known
        self._search = KeptSearch(self.continuations, lambda: self._dispatcher.usable)
        self._orders = AdapterOrders(lambda: self._dispatcher.usable, self._refresh)
        self._listeners = Listeners(
            opened=self._on_opened,
            broken=self._on_broken,
            outputs=self._dispatcher.outputs,
            told=self._search.told,
            adapters=self._orders.told,
            forgotten=self._on_forgotten,
            timelines=TimelineSearch(self.router_id, self.timelines, self._company, lambda: self._dispatcher.usable).heard,
            malformed=self._on_malformed,
        )
        self._ticker: asyncio.TimerHandle | None = None
        self.on_tick: Callable[[], None] = lambda: None
        self._changed = asyncio.Event()
        metrics.registry.register(WorkerCollector(self._peers.values))

    def start(self) -> None:
        self._membership.start(self._on_joined, self._on_changed, self._on_left)
        self._planner.share_with(self._company.routers, self.router_id)
        self._schedule_tick()

    def close(self) -> None:
        """Open requests fail; nothing is heard of the workers any more."""
        self._dispatcher.fail_all("the server is shutting down")
        self.timelines.close()
        self._sync.close()
        if self._ticker is not None:
            self._ticker.cancel()
        self._membership.close()
        self._company.close()
        self._feed.close()
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()
        self._starting.clear()
        self._refresh()

    # Backend

    @property
    def ready(self) -> bool:
        return self._planner.ready

    @property
    def max_model_len(self) -> int:
        """Of the workers that are up, or were up last; 0 if none has ever been."""
        return self._max_model_len

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        return self._orders.known

    async def load_adapter(self, name: str, path: str, *, in_place: bool) -> AdapterChange:
        return await self._orders.load(name, path, in_place=in_place)

    async def unload_adapter(self, name: str) -> AdapterChange:
        return await self._orders.unload(name)

    def submit(self, request: GenerateRequest) -> RequestStream:
        return self._dispatcher.submit(request, "" if self.ready else self._excuse(), may_wait=self.max_model_len > 0)

    async def find_parent(self, handle: str, owner: str, *, wait_s: float) -> Parent:
        await self._search.ask(handle, owner)
        parent = self.continuations.find(handle, owner)
        await self.continuations.until_ended(parent, handle, wait_s)
        return parent

    async def find_parents(self, handle: str, owner: str) -> list[Parent]:
        await self._search.ask(handle, owner)
        return self.continuations.find_all(handle, owner)

    async def delete_parents(self, handle: str, owner: str) -> None:
        await self.find_parents(handle, owner)
        for parent in self.continuations.delete(handle, owner):
            peer = None if parent.worker_id is None else self._peers.get(parent.worker_id)
            if peer is not None and parent.kept_id is not None:
                peer.send(ReleaseKept(kept_ids=[parent.kept_id]))
        if self._company.is_shared:
            for peer in self._dispatcher.usable:
                peer.send(Forget(handle=handle, owner=owner))

    def cluster(self) -> ClusterShown:
        return {
            "router": self.router_id,
            "routers": [{"id": router.id, "host": router.host, "pid": router.pid} for router in self._company.routers],
            "model": self._model,
            "ready": self.ready,
            "in_flight": len(self._dispatcher.open),
            "stranded": len(self._dispatcher.stranded),
            "workers": [peer.describe() for peer in self._peers.values()]
            + [describe(record, record.load, record.state) for record in self._unreached()],
        }

    def drain(self, worker_id: str, role: Role | None = None) -> DrainOrder:
        """Tells a worker to finish and leave; with a role, to come back in it. Raises as `order_drain`."""
        order = order_drain(self._peers, worker_id, role, self._starting)
        log.info("worker told to drain", worker=order.worker, next_role=role)
        self.continuations.lost(order.worker, "its worker leaves")
        self._refresh()
        return order

    def _unreached(self) -> list[WorkerRecord]:
        """Workers that are starting and have no address yet."""
        return [record for record in self._starting.values() if record.id not in self._peers]

    def sights(self) -> list[WorkerSight]:
        return [peer.sight for peer in self._peers.values()] + [sight_of(record) for record in self._unreached()]

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
        if record.state is WorkerState.STARTING:
            log.info("worker starts", worker=record.id, pid=record.pid)
            self._starting[record.id] = record
            self._refresh()
            return
        try:
            peer = Peer(
                record,
                self._listeners,
                router_id=self.router_id,
                silence_s=self._registration_s,
                outside=self._outside,
            )
        except ProtocolError as error:
            self._metrics.malformed.labels("registry").inc()
            log.seldom("a worker gave no usable address", worker=record.id, reason=error)
            return
        self._peers[record.id] = peer
        self._feed.joined(record)
        self._metrics.worker_joined(record.role.value)
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
            if record.state is WorkerState.DRAINING:
                self.continuations.lost(record.id, "its worker leaves")
            self._refresh()

    def _on_left(self, worker_id: WorkerId, loss: Loss) -> None:
        peer = self._peers.get(worker_id)
        was_starting = self._starting.pop(worker_id, None) is not None
        if peer is None:
            if was_starting:
                log.info("worker left before it was ready", worker=worker_id, reason=loss.value)
                self._refresh()
            return
        peer.drain()
        self._peers.pop(worker_id, None)
        peer.close()
        self._feed.left(worker_id)
        self.timelines.lost(worker_id)
        self._metrics.worker_losses.labels(peer.record.role.value, loss.value).inc()
        log.info("worker left", worker=worker_id, reason=loss.value)
        self._refresh()
        self._search.lost(peer)
        self._orders.left(peer)
        self.continuations.lost(worker_id, "its worker left" if loss is Loss.LEFT else "its worker was lost")
        if loss is Loss.LEFT:
            self._dispatcher.lost(peer, "it left")
        else:
            self._settle(peer, "it did not renew its registration in time")

    # What the connections say

    def _on_opened(self, peer: Peer) -> None:
        log.info("worker ready", worker=peer.id)
        self._starting.pop(peer.id, None)
        self._dispatcher.came_back(peer)
        self._refresh()
        self._orders.opened(peer)

    def _on_broken(self, peer: Peer, reason: str) -> None:
        self._metrics.worker_losses.labels(peer.record.role.value, "broken").inc()
        log.warning("the connection to a worker broke", worker=peer.id, reason=reason)
        self._refresh()
        self._search.lost(peer)
        self._orders.lost(peer)
        self.continuations.unheard(peer.id, "the connection to its worker broke")
        self._settle(peer, reason)

    def _on_forgotten(self, message: Forgotten) -> None:
        with contextlib.suppress(NotFoundError):
            self.continuations.delete(message.handle, message.owner)

    def _on_malformed(self, peer: Peer, reason: str) -> None:
        self._metrics.malformed.labels("serving").inc()
        log.seldom("malformed message of a worker", worker=peer.id, reason=reason)

    def _on_known(self, parent: Parent) -> None:
        if self._company.is_shared:
            share(parent, self._dispatcher.usable, self._outside.clock())

    def _settle(self, lost: Peer, reason: str) -> None:
        """Its requests go elsewhere; and the workers that exchange KV with it need not wait to find out."""
        for peer in self._peers.values():
            if peer is not lost:
                peer.send(PeerLost(worker_id=lost.id))
        self._dispatcher.lost(lost, reason)

    def _refresh(self) -> None:
        """Workers are used together only if one can replace the other: the oldest reachable one decides which model it is."""
        reachable = [peer for peer in self._peers.values() if peer.is_open]
        for peer in reachable:
            peer.refusal = difference(peer.record, reachable[0].record)
        usable = [peer for peer in reachable if peer.usable]
        lengths = [peer.record.max_model_len for peer in usable if peer.record.role is not Role.ENCODE]
        self._max_model_len = min(lengths, default=self._max_model_len)
        self._dispatcher.use(usable, self._orders.awaited.union(record.role for record in self._starting.values()))
        self._changed.set()

    def _schedule_tick(self) -> None:
        self._ticker = asyncio.get_running_loop().call_later(self._registration_s / 3, self._tick)

    def _tick(self) -> None:
        for peer in list(self._peers.values()):
            peer.tick()
        self.timelines.tick()
        self._planner.share_with(self._company.routers, self.router_id)
        self.on_tick()
        self._schedule_tick()

    def _excuse(self) -> str:
        """Why no worker can take a request."""
        problems = [f"{peer.id}: {peer.problem}" for peer in self._peers.values() if peer.problem]
        problems += [f"{record.id}: it is starting" for record in self._unreached()]
        if problems:
            return f"no worker can take requests ({'; '.join(problems)})"
        return "no decode worker is up" if self._peers else "no worker has registered yet"
