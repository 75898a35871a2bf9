"""Router and worker processes of one machine: what `kvrelay serve` puts behind HTTP and the offline API behind a thread.

    worker_roles(options)            which workers there are to be
    WorkerSettings(...).commands()   the command line of each
    open_router(...)                 a router, and the address at which they register
    until_ready(...)                 every worker is usable
    local_cluster(...)               all of this, and its end

If this process dies, its workers see that and end too (worker/launcher.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvrelay.config import (
    CardOptions,
    ClusterOptions,
    EngineOptions,
    ModelOptions,
    RouterOptions,
    TransferOptions,
    WorkerOptions,
    read_environment,
)
from kvrelay.discovery.base import router_record
from kvrelay.discovery.choose import open_membership, registry_kind
from kvrelay.errors import ConfigError
from kvrelay.ids import new_router_id
from kvrelay.launch.cards import Place, place
from kvrelay.launch.supervise import Supervisor, first_of, worker_command
from kvrelay.metrics import Metrics
from kvrelay.options import RoleOptions, check_roles, to_flags
from kvrelay.planes.cluster_key import key_file, load_key
from kvrelay.planes.curve import keyed
from kvrelay.router.failover import RetryRules
from kvrelay.router.rebalance import Rebalancer, Rules
from kvrelay.router.role_changes import RoleChanges
from kvrelay.router.router import OpenSync, Router
from kvrelay.router.spans import SpanExport
from kvrelay.states import Role

FREE_LOCAL_PORT = "tcp://127.0.0.1:*"


def worker_roles(cluster: ClusterOptions) -> list[Role]:
    """One entry per worker to start. Without any count, one prefill and one decode worker."""
    counts = {Role.PREFILL: cluster.prefill, Role.DECODE: cluster.decode, Role.WHOLE: cluster.whole}
    encoders = [Role.ENCODE] * cluster.encode
    roles = [role for role, count in counts.items() for _ in range(count)]
    if registry_kind(cluster) == "static":
        if roles or encoders:
            raise ConfigError(
                "workers started here must be able to register: --prefill, --decode, --whole and --encode need --registry"
                " embedded or etcd://HOST:PORT"
            )
        return []
    if cluster.prefill and not cluster.decode:
        raise ConfigError("--prefill needs --decode: decode workers take over what prefill workers compute")
    if cluster.whole and (cluster.prefill or cluster.decode):
        raise ConfigError("--whole cannot be mixed with --prefill and --decode")
    return encoders + (roles or [Role.PREFILL, Role.DECODE])


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSettings:
    """What all workers of this machine are told. `model.model` is a folder, so that no worker fetches it again."""

    model: ModelOptions
    engine: EngineOptions
    transfer: TransferOptions
    registration_s: float
    cluster_key: str = ""  # its file
    flags: Sequence[str] = ()  # how they show themselves, such as --progress=plain
    per_role: Mapping[Role, RoleOptions] = field(default_factory=dict)  # instead of `model` and `engine`
    cards: Sequence[str] = ("",)  # of `launch.cards.visible_cards`
    card_options: CardOptions = field(default_factory=CardOptions)
    mps: Mapping[str, str] = field(default_factory=dict)  # variables by which a worker finds it

    def of_role(self, role: Role) -> RoleOptions:
        return self.per_role.get(role) or RoleOptions(model=self.model, engine=self.engine)

    def commands(self, roles: Sequence[Role], registry_address: str) -> list[list[str]]:
        share = max(1, len(os.sched_getaffinity(0)) // max(1, len(roles)))
        places = place([(role, self.of_role(role).model) for role in roles], self.cards, self.card_options, self.mps)
        ranks = [list(roles[:number]).count(role) for number, role in enumerate(roles)]
        return [
            [*where.prefix(), *worker_command(self._flags(role, rank, registry_address, share, where))]
            for role, rank, where in zip(roles, ranks, places, strict=True)
        ]

    def _flags(self, role: Role, rank: int, registry_address: str, share: int, where: Place) -> list[str]:
        """`rank` is the worker's number in its role, `share` the number of threads of a worker that was not given one."""
        options = self.of_role(role)
        model = msgspec.structs.replace(
            options.model,
            model=self.model.model,
            threads=options.model.threads or share,
            gpu_memory=where.gpu_memory,
        )
        place = WorkerOptions(
            role=role.value,
            registry=registry_address,
            registration_s=self.registration_s,
            cluster_key=self.cluster_key,
            data_parallel_rank=rank,
        )
        return [*to_flags(model), *to_flags(options.engine), *to_flags(self.transfer), *self.flags, *to_flags(place)]


def open_router(
    options: RouterOptions,
    cluster: ClusterOptions,
    metrics: Metrics,
    served_name: str,
    *,
    default_listen: str,
    sync: OpenSync | None = None,
) -> tuple[Router, str]:
    """A router with its registry, and the address at which workers register. On the loop that will run it."""
    router_id = new_router_id()
    record = router_record(router_id, may_lead=options.rebalance == "on")
    membership, company = open_membership(cluster, record, metrics, default_listen)
    metrics.router_info.labels(router_id, record.host, str(record.pid)).set(1)
    router = Router(
        membership=membership,
        metrics=metrics,
        policy=options.policy,
        mode=options.mode,
        local_prefill_tokens=options.local_prefill_tokens,
        registration_s=cluster.registration_s,
        model=served_name,
        router_id=router_id,
        rules=RetryRules(max_retries=options.max_retries, wait_s=options.failover_wait_s, start_wait_s=options.start_wait_s),
        sync=sync,
        continuation_cache=options.continuation_cache,
        max_kept_per_key=options.max_kept_per_key,
        max_stored=options.max_stored_responses,
        stored_s=options.stored_response_s,
        company=company,
    )
    rules = Rules(patience_s=options.rebalance_patience_s, pause_s=options.rebalance_pause_s)
    router.on_tick = RoleChanges(
        Rebalancer(rules),
        router_id=router_id,
        company=company,
        sights=router.sights,
        drain=router.drain,
        metrics=metrics,
        mode=options.rebalance,
    ).tick
    if options.otlp_endpoint:
        spans = SpanExport(options.otlp_endpoint, metrics)
        router.timelines.on_settled, router.timelines.on_close = spans.offer, spans.close
    return router, membership.address


async def until_ready(
    router: Router, supervisor: Supervisor, num_workers: int, stopped: asyncio.Future[Any] | None = None
) -> None:
    """Returns when every worker is usable, or `stopped` is done. Raises WorkerDiedError."""
    usable = asyncio.create_task(router.until_usable(num_workers))
    try:
        await first_of([usable] if stopped is None else [usable, stopped], supervisor)
    finally:
        usable.cancel()
    supervisor.all_ready()


@contextlib.asynccontextmanager
async def local_cluster(
    workers: WorkerSettings, options: RouterOptions, cluster: ClusterOptions
) -> AsyncIterator[tuple[Router, Supervisor]]:
    """A router and workers of this process's own. Inside, every worker is usable; afterwards no process of theirs is left.

    Raises ConfigError, and WorkerDiedError with the reason of a worker that cannot start.
    """
    roles = worker_roles(cluster)
    check_roles({role: workers.of_role(role) for role in roles})
    with keyed(load_key(key_file(workers.cluster_key, read_environment()))):
        router, address = open_router(options, cluster, Metrics(), workers.model.model, default_listen=FREE_LOCAL_PORT)
        supervisor = Supervisor(workers.commands(roles, address))
        router.start()
        try:
            supervisor.start()
            await until_ready(router, supervisor, len(roles))
            yield router, supervisor
        finally:
            await supervisor.stop()  # before the router: a worker that leaves wants an answer of the registry
            router.close()
