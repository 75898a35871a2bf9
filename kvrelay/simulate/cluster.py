"""Routers and their workers, joined by lines that cost no time: who is alive, who dies, who comes back.

Each of `SimulatedCluster.routers` is a `Router` like any other. What one orders (drain, a change of role) is carried out here
as a worker would: it finishes what it has, leaves, and comes back in the other role as a new worker.
"""

from __future__ import annotations

import random

import msgspec

from kvrelay.config import EngineOptions
from kvrelay.discovery.base import Loss
from kvrelay.events.subscriber import EventOwner
from kvrelay.ids import RouterId, WorkerId
from kvrelay.metrics import Metrics
from kvrelay.router.attempt import Mode
from kvrelay.router.outside import Line, LineOwner, Outside, Subscription
from kvrelay.router.peer import Peer
from kvrelay.router.policy import PolicyName
from kvrelay.router.rebalance import Rebalancer, Rules
from kvrelay.router.role_changes import RoleChanges
from kvrelay.router.router import Router
from kvrelay.simulate.audience import OnOutputs
from kvrelay.simulate.costs import Costs
from kvrelay.simulate.engines import FINGERPRINT
from kvrelay.simulate.host import Host, sharing_of
from kvrelay.simulate.loop import VirtualLoop
from kvrelay.simulate.registry import Registry
from kvrelay.simulate.relay import Network
from kvrelay.simulate.worker import SimulatedWorker
from kvrelay.states import Role, WorkerState
from kvrelay.wire import PROTOCOL_VERSION
from kvrelay.wire.registry import WorkerRecord
from kvrelay.wire.serving import Ping, ToWorker

_ADDRESS = "simulated"


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """What a cluster consists of."""

    prefill: int = 1
    decode: int = 1
    whole: int = 0
    encode: int = 0
    routers: int = 1
    takes_images: bool = False
    policy: PolicyName = "prefix_aware"
    mode: Mode = "write"
    local_prefill_tokens: int = 64
    engine: EngineOptions = EngineOptions()
    num_blocks: int = 8192  # of each worker
    max_model_len: int = 16_384
    registration_s: float = 4.0
    restart_s: float = 20.0  # from the end of a worker's process to its first request
    rebalance: Rules | None = None  # workers change their roles by these
    cores: int = 0  # of the one host that all workers share; 0: each has its own

    @property
    def counts(self) -> dict[Role, int]:
        return {Role.ENCODE: self.encode, Role.PREFILL: self.prefill, Role.DECODE: self.decode, Role.WHOLE: self.whole}


class SimulatedCluster:
    """`on_outputs` is asked to hand a worker's outputs to its peer, so that it sees them come."""

    def __init__(self, layout: Layout, costs: Costs, loop: VirtualLoop, on_outputs: OnOutputs) -> None:
        self.layout = layout
        self.loop = loop
        slower = sharing_of(costs, layout.cores)
        self._host = None if slower is None else Host(loop, slower)
        self.network = Network(loop, costs, self._host)
        self._on_outputs = on_outputs
        self._options = msgspec.structs.replace(
            layout.engine.for_device("cuda"), kv_events=layout.policy == "prefix_aware", swap_blocks=0
        )
        self.workers: dict[WorkerId, SimulatedWorker] = {}
        self.gone: list[SimulatedWorker] = []
        self._numbers = dict.fromkeys(Role, 0)
        self.num_role_changes = 0
        router_ids = [RouterId(f"router-{random.Random(number).getrandbits(48):012x}") for number in range(layout.routers)]
        self.registry = Registry(router_ids)
        self._metrics = [Metrics() for _ in router_ids]
        self.routers = [self._router(*each) for each in zip(router_ids, self._metrics, strict=True)]

    def _router(self, router_id: RouterId, metrics: Metrics) -> Router:
        layout = self.layout
        router = Router(
            membership=self.registry.membership(),
            metrics=metrics,
            policy=layout.policy,
            mode=layout.mode,
            local_prefill_tokens=layout.local_prefill_tokens,
            registration_s=layout.registration_s,
            router_id=router_id,
            company=self.registry,
            outside=Outside(open_line=self._open_line, subscribe=self._subscribe, clock=self.loop.time),
        )
        if layout.rebalance is not None:
            router.on_tick = RoleChanges(
                Rebalancer(layout.rebalance),
                router_id=router_id,
                company=self.registry,
                sights=router.sights,
                drain=router.drain,
                metrics=metrics,
                mode="on",
                clock=self.loop.time,
            ).tick
        return router

    def start(self) -> None:
        for router in self.routers:
            router.start()
        for role, count in self.layout.counts.items():
            for _ in range(count):
                self.add(role)

    def add(self, role: Role) -> SimulatedWorker:
        return self._up(self._record(role))

    def _start(self, role: Role) -> None:
        """A process: the registry knows of it before it can take requests."""
        record = self._record(role)
        self.registry.joined(msgspec.structs.replace(record, state=WorkerState.STARTING))
        self.loop.at(self.loop.now + self.layout.restart_s, self._up, record)

    def _record(self, role: Role) -> WorkerRecord:
        self._numbers[role] += 1
        events_address = _ADDRESS if self._options.kv_events and role is not Role.ENCODE else ""
        return WorkerRecord(
            id=WorkerId(f"{role.value}-{self._numbers[role]:012x}"),
            role=role,
            state=WorkerState.READY,
            host=_ADDRESS,
            pid=0,
            model=_ADDRESS,
            max_batch=self._options.max_batch,
            max_queue=self._options.max_queue,
            version=PROTOCOL_VERSION,
            serving_address=_ADDRESS,
            fingerprint=FINGERPRINT,
            max_model_len=self.layout.max_model_len,
            signal_address=_ADDRESS,
            events_address=events_address,
            replay_address=events_address,
            block_size=self._options.block_size,
        )

    def _up(self, record: WorkerRecord) -> SimulatedWorker:
        worker = self.workers[record.id] = SimulatedWorker(
            record,
            self._options,
            self.network,
            self._host,
            num_blocks=self.layout.num_blocks,
            takes_images=self.layout.takes_images,
            on_outputs=self._on_outputs,
            on_draining=self._tell,
            on_drained=self._drained,
        )
        self.registry.changed(record)
        self._renew_soon(worker)
        return worker

    def _renew_soon(self, worker: SimulatedWorker) -> None:
        self.loop.at(self.loop.now + self.layout.registration_s / 3, self._renew, worker)

    def _renew(self, worker: SimulatedWorker) -> None:
        """As a real worker does: it is how a router learns what others have sent there."""
        if worker.is_alive:
            self._tell(worker)
            self._renew_soon(worker)

    def _tell(self, worker: SimulatedWorker) -> None:
        self.registry.changed(msgspec.structs.replace(worker.record, load=worker.audience.load, state=worker.state))

    def kill(self, worker: SimulatedWorker, *, comes_back: bool = True) -> None:
        """As by SIGKILL: its connections break at once; its registration ends later; its supervisor starts another."""
        if not worker.is_alive:
            return
        worker.die()
        worker.check()
        for peer in list(worker.audience.peers.values()):
            peer.line_down()
        self.loop.at(self.loop.now + self.layout.registration_s, self.registry.left, worker.record.id, Loss.EXPIRED)
        self._forget(worker, worker.record.role if comes_back else None)

    def _drained(self, worker: SimulatedWorker) -> None:
        worker.check_idle()
        worker.die()
        self.registry.left(worker.record.id, Loss.LEFT)
        self.num_role_changes += worker.next_role is not None
        self._forget(worker, worker.next_role)

    def _forget(self, worker: SimulatedWorker, next_role: Role | None) -> None:
        del self.workers[worker.record.id]
        self.gone.append(worker)
        if next_role is not None:
            self._start(next_role)

    @property
    def index_bytes(self) -> float:
        """Of what a router knows of the workers' caches."""
        sizes = [metrics.registry.get_sample_value("kvrelay_prefix_index_bytes") or 0.0 for metrics in self._metrics]
        return sum(sizes) / len(sizes)

    @property
    def is_idle(self) -> bool:
        workers = self.workers.values()
        return not self.network.num_on_the_way and all(worker.is_idle and not worker.num_transfers for worker in workers)

    @property
    def computes_nothing(self) -> bool:
        return all(worker.is_idle for worker in self.workers.values())

    def check_idle(self) -> None:
        """The leak check: every block of every worker that lives is back, and no image is held. Of those that drained it was
        checked when they left; those that were killed took along what requests held, and nothing else."""
        for worker in self.workers.values():
            worker.check_idle()

    # What a router has of the outside

    def _open_line(self, record: WorkerRecord, owner: LineOwner, *, router_id: RouterId, silence_s: float) -> Line:
        assert isinstance(owner, Peer)
        worker = self.workers[record.id]
        worker.audience.peers[router_id.encode()] = owner
        self.loop.at(self.loop.now, owner.line_up)
        return _Line(self.loop, worker, router_id.encode())

    def _subscribe(self, worker_id: WorkerId, events_address: str, replay_address: str, owner: EventOwner) -> Subscription:
        worker = self.workers[worker_id]
        worker.audience.listeners.append(owner)
        return _Subscribed(worker, owner)


class _Line:
    """`identity` is the router's. What it sends arrives at once, but not while it is still at it: it takes no time for it."""

    def __init__(self, loop: VirtualLoop, worker: SimulatedWorker, identity: bytes) -> None:
        self._loop = loop
        self._worker = worker
        self._identity = identity

    def send(self, message: ToWorker) -> bool:
        if self._worker.is_alive and not isinstance(message, Ping):
            self._loop.at(self._loop.now, self._worker.receive, self._identity, message)
        return self._worker.is_alive

    def drain(self) -> None:
        pass

    def close(self) -> None:
        del self._worker.audience.peers[self._identity]


class _Subscribed:
    def __init__(self, worker: SimulatedWorker, owner: EventOwner) -> None:
        self._worker = worker
        self._owner = owner

    def close(self) -> None:
        self._worker.audience.listeners.remove(self._owner)
