"""LoRA adapters of a cluster: which there are, and an operator's orders to load and unload them on every worker.

An order goes to all workers that compute, and ends when each has answered. One that fails anywhere is taken back everywhere, so
that a name means the same adapter on all of them or on none.

    a worker carried out an operator's order  ->  it tells all routers: that is what the name is to mean
    a worker comes, or comes back             ->  each router compares what it has with that, and orders the difference
    a router starts                           ->  it learns from the workers which adapters an operator has loaded

A worker that cannot load what it lacks is shown with the reason (GET /cluster), and gets no request for it.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
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
        if _generates(peer):
            for adapter in peer.record.adapters:
                found.setdefault(adapter.name, adapter)
    return found


def _generates(peer: Peer) -> bool:
    return peer.record.role in (Role.WHOLE, Role.DECODE)


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


@dataclass(frozen=True, slots=True)
class _CatchUp:
    """An order to a worker that has missed an operator's."""

    peer: Peer
    name: str


class AdapterOrders:
    """`peers` are those that can be used now; `on_awaited` hears that the roles in `awaited` may have changed."""

    def __init__(self, peers: Callable[[], Sequence[Peer]], on_awaited: Callable[[], None] = lambda: None) -> None:
        self._peers = peers
        self._on_awaited = on_awaited
        self._orders: dict[str, _Order] = {}
        self._one_by_one = asyncio.Lock()
        self._decided: dict[str, Adapter | None] = {}  # by an operator, of each name; None: unloaded
        self._seen: dict[WorkerId, dict[str, Adapter]] = {}
        self._catching_up: dict[str, _CatchUp] = {}  # by order
        self._last: Mapping[str, Adapter] = {}  # of the generating workers, when there was one

    @property
    def known(self) -> dict[str, Adapter]:
        """By name: what workers have, and what they are to have as soon as they are back."""
        decided = {name: adapter for name, adapter in self._decided.items() if adapter is not None}
        peers = self._peers()
        return {**({} if any(map(_generates, peers)) else self._last), **decided, **adapters_of(peers)}

    @property
    def awaited(self) -> frozenset[Role]:
        """Roles of workers that are loading what they have missed."""
        return frozenset(each.peer.record.role for each in self._catching_up.values())

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
            if name not in self.known:
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
        self._seen[peer.id] = has = {adapter.name: adapter for adapter in told.adapters}
        if told.decided and peer in self._peers():  # not of one that serves another model
            self._decided[told.decided] = has.get(told.decided)
            peer.adapter_failures.pop(told.decided, None)
        self._note()
        order = self._orders.get(told.order)
        if order is not None:
            order.answered_by(peer.id, told.error)
        caught_up = self._catching_up.pop(told.order, None)
        if caught_up is not None:
            if told.error:
                peer.adapter_failures[caught_up.name] = told.error
                log.warning("a worker lacks a LoRA adapter", worker=peer.id, name=caught_up.name, reason=told.error)
            self._catch_up(peer)  # an operator may have decided otherwise meanwhile
            self._on_awaited()

    def opened(self, peer: Peer) -> None:
        """Its connection is open, again or for the first time. What a worker has lost or got since it was seen last, an
        operator has decided."""
        if peer not in self._peers():
            return  # it serves another model, or is about to leave
        seen, has = self._seen.get(peer.id), {adapter.name: adapter for adapter in peer.record.adapters}
        for name in seen or ():
            if name not in has:
                self._decided[name] = None
        for name, adapter in has.items():
            is_news = name not in self._decided if seen is None else seen.get(name) != adapter
            if adapter.is_ordered and is_news:
                self._decided[name] = adapter
        self._seen[peer.id] = has
        self._note()
        for each in self._peers():
            self._catch_up(each)
        self._on_awaited()

    def lost(self, peer: Peer) -> None:
        """A worker that is gone does not count: another that comes in its place is another worker."""
        for order in self._orders.values():
            order.answered_by(peer.id, "")
        self._catching_up = {order: each for order, each in self._catching_up.items() if each.peer is not peer}

    def left(self, peer: Peer) -> None:
        self.lost(peer)
        self._seen.pop(peer.id, None)

    def _note(self) -> None:
        peers = self._peers()
        if any(map(_generates, peers)):
            self._last = adapters_of(peers)

    def _catch_up(self, peer: Peer) -> None:
        """Orders what the worker has missed, once."""
        under_way = {each.name for each in self._catching_up.values() if each.peer is peer}
        has = {adapter.name: adapter.digest for adapter in peer.record.adapters}
        for name, adapter in self._decided.items():
            order = uuid.uuid4().hex
            if adapter is None:
                if name in has:
                    peer.send(UnloadAdapter(order=order, name=name, decides=False))
            elif has.get(name) != adapter.digest and name not in under_way and name not in peer.adapter_failures:
                message = LoadAdapter(order=order, name=name, path=adapter.path, digest=adapter.digest)
                if peer.record.role is not Role.ENCODE and peer.send(message):
                    log.info("a worker is given a LoRA adapter that it has missed", worker=peer.id, name=name)
                    self._catching_up[order] = _CatchUp(peer, name)


def _check(order: _Order, what: str) -> None:
    if order.errors:
        worker_id, reason = next(iter(order.errors.items()))
        error: type[RequestError] = UnavailableError if reason.startswith("no answer") else InvalidRequestError
        raise error(f"{what}: worker {worker_id}: {reason}", param="lora_path")
