"""LoRA adapters of a cluster: which there are, and an operator's orders to load and unload them on every worker.

An order goes to all workers that compute, and ends when each has answered. One that fails anywhere is taken back everywhere, so
that a name means the same adapter on all of them or on none. A worker that joins later has the adapters of its own options.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvrelay.errors import ConflictError, InvalidRequestError, NotFoundError, RequestError, UnavailableError
from kvrelay.ids import WorkerId
from kvrelay.log import Log
from kvrelay.router.backend import AdapterChange
from kvrelay.router.peer import Peer
from kvrelay.states import Role
from kvrelay.wire.adapters import AdaptersTold, LoadAdapter, UnloadAdapter
from kvrelay.wire.registry import Adapter

_ANSWER_WITHIN_S = 120.0  # large adapters on slow disks

log = Log("router")


def adapters_of(peers: Iterable[Peer]) -> dict[str, Adapter]:
    """By name. Of two workers that have different ones of a name, the first decides: the other gets no requests for it."""
    found: dict[str, Adapter] = {}
    for peer in peers:
        if peer.record.role in (Role.WHOLE, Role.DECODE):
            for adapter in peer.record.adapters:
                found.setdefault(adapter.name, adapter)
    return found


@dataclass(slots=True, eq=False)
class _Order:
    unanswered: set[WorkerId]
    ended: asyncio.Future[None]
    errors: dict[WorkerId, str] = field(default_factory=dict)

    def answered_by(self, worker_id: WorkerId, error: str) -> None:
        if worker_id in self.unanswered:
            self.unanswered.discard(worker_id)
            if error:
                self.errors[worker_id] = error
        if not self.unanswered and not self.ended.done():
            self.ended.set_result(None)


class AdapterOrders:
    """`peers` are those that can be used now."""

    def __init__(self, peers: Callable[[], Sequence[Peer]]) -> None:
        self._peers = peers
        self._orders: dict[str, _Order] = {}
        self._one_by_one = asyncio.Lock()

    async def load(self, name: str, path: str, *, in_place: bool) -> AdapterChange:
        async with self._one_by_one:
            known = name in adapters_of(self._peers())
            if known and not in_place:
                raise ConflictError(f"the LoRA adapter {name!r} is loaded already; load_inplace replaces it", param="lora_name")
            asked, order = await self._give(lambda order: LoadAdapter(order=order, name=name, path=path))
            if order.errors and not known:
                await self._give(lambda order: UnloadAdapter(order=order, name=name))
            _check(order, f"the LoRA adapter {name!r} was not loaded")
            return AdapterChange(name=name, workers=asked)

    async def unload(self, name: str) -> AdapterChange:
        async with self._one_by_one:
            if name not in adapters_of(self._peers()):
                raise NotFoundError(f"there is no LoRA adapter {name[:200]!r}", param="lora_name", code="adapter_not_found")
            asked, order = await self._give(lambda order: UnloadAdapter(order=order, name=name))
            _check(order, f"the LoRA adapter {name!r} was not unloaded everywhere")
            return AdapterChange(name=name, workers=asked)

    async def _give(self, message: Callable[[str], LoadAdapter | UnloadAdapter]) -> tuple[list[WorkerId], _Order]:
        name = uuid.uuid4().hex
        asked = [peer.id for peer in self._peers() if peer.record.role is not Role.ENCODE and peer.send(message(name))]
        if not asked:
            raise UnavailableError("no worker can be reached", code="no_worker")
        order = self._orders[name] = _Order(set(asked), asyncio.get_running_loop().create_future())
        await asyncio.wait((order.ended,), timeout=_ANSWER_WITHIN_S)
        del self._orders[name]
        for worker_id in list(order.unanswered):
            order.answered_by(worker_id, f"no answer within {_ANSWER_WITHIN_S:g} s")
        return asked, order

    def told(self, peer: Peer, told: AdaptersTold) -> None:
        log.info("adapters of a worker", worker=peer.id, adapters=",".join(adapter.name for adapter in told.adapters))
        order = self._orders.get(told.order)
        if order is not None:
            order.answered_by(peer.id, told.error)

    def lost(self, peer: Peer) -> None:
        """A worker that is gone does not count: another that comes in its place is another worker."""
        for order in self._orders.values():
            order.answered_by(peer.id, "")


def _check(order: _Order, what: str) -> None:
    if order.errors:
        worker_id, reason = next(iter(order.errors.items()))
        error: type[RequestError] = UnavailableError if reason.startswith("no answer") else InvalidRequestError
        raise error(f"{what}: worker {worker_id}: {reason}", param="lora_path")
