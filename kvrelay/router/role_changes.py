"""Shows what each role has to do, and carries out what the `Rebalancer` says (`--rebalance`): of several routers, the leader;
a dry run only tells of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Literal

from kvrelay.discovery.base import Company
from kvrelay.errors import RequestError
from kvrelay.ids import RouterId
from kvrelay.log import Log
from kvrelay.metrics import Metrics
from kvrelay.router.backend import DrainOrder
from kvrelay.router.rebalance import Move, Rebalancer, WorkerSight
from kvrelay.states import Role

log = Log("router")

RebalanceMode = Literal["off", "dry_run", "on"]


class RoleChanges:
    """`tick` is called every second or so. `drain` is the order that an operator gives too."""

    def __init__(
        self,
        rebalancer: Rebalancer,
        *,
        router_id: RouterId,
        company: Company,
        sights: Callable[[], Sequence[WorkerSight]],
        drain: Callable[[str, Role], DrainOrder],
        metrics: Metrics,
        mode: RebalanceMode,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rebalancer = rebalancer
        self._router_id = router_id
        self._company = company
        self._sights = sights
        self._drain = drain
        self._metrics = metrics
        self._mode = mode
        self._clock = clock

    def tick(self) -> None:
        """A router that does not lead observes too, so that it need not begin anew when it does."""
        moves = self._rebalancer.observe(self._sights(), self._clock())
        for role, pressure in self._rebalancer.pressures.items():
            self._metrics.role_pressure.labels(role.value).set(pressure)
        for move in moves:
            if self._mode == "dry_run":
                log.info("would change a worker's role", worker=move.worker, role=move.next_role.value, reason=move.reason)
            elif self._mode == "on" and self._company.leader == self._router_id:
                self._carry_out(move)

    def _carry_out(self, move: Move) -> None:
        try:
            self._drain(move.worker, move.next_role)
        except RequestError as error:  # it left meanwhile, or an operator was quicker
            log.info("could not change a worker's role", worker=move.worker, role=move.next_role.value, reason=error.message)
            return
        log.info("changing a worker's role", worker=move.worker, role=move.next_role.value, reason=move.reason)
        self._metrics.role_changes.labels(move.role.value, move.next_role.value).inc()
