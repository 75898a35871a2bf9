"""The registry of a simulation: every router hears at once who joins, changes and leaves, and knows the other routers."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.discovery.base import Loss, OnChanged, OnJoined, OnLeft, router_record
from kvrelay.ids import RouterId, WorkerId
from kvrelay.wire.registry import WorkerRecord


class Registry:
    """`num_told` counts what each router has been told."""

    def __init__(self, router_ids: Sequence[RouterId]) -> None:
        self.routers = [router_record(router_id, may_lead=True) for router_id in router_ids]
        self._memberships: list[SimulatedMembership] = []
        self.num_told = 0

    def membership(self) -> SimulatedMembership:
        """Of another router."""
        self._memberships.append(SimulatedMembership())
        return self._memberships[-1]

    def joined(self, record: WorkerRecord) -> None:
        self.num_told += 1
        for membership in self._memberships:
            membership.on_joined(record)

    def changed(self, record: WorkerRecord) -> None:
        self.num_told += 1
        for membership in self._memberships:
            membership.on_changed(record)

    def left(self, worker_id: WorkerId, loss: Loss) -> None:
        self.num_told += 1
        for membership in self._memberships:
            membership.on_left(worker_id, loss)

    # The routers' company

    @property
    def is_shared(self) -> bool:
        return len(self.routers) > 1

    @property
    def leader(self) -> RouterId:
        return self.routers[0].id

    def close(self) -> None:
        pass


class SimulatedMembership:
    address = ""
    on_joined: OnJoined
    on_changed: OnChanged
    on_left: OnLeft

    def start(self, on_joined: OnJoined, on_changed: OnChanged, on_left: OnLeft) -> None:
        self.on_joined, self.on_changed, self.on_left = on_joined, on_changed, on_left

    def close(self) -> None:
        pass
