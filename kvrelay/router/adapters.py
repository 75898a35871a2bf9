"""LoRA adapters of a cluster: which there are, and an operator's orders to load and unload them on every worker.

An order goes to all workers that compute, and ends when each has answered. All of them read an adapter before any uses it:

    LoadAdapter  ->  each reads the folder, sets the adapter aside, and answers
    UseAdapter   ->  all could: it takes its name, in the place of one that had it
    DropAdapter  ->  some could not: nothing has changed anywhere

What holds longer than an order:

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

from kvrelay.errors import ConflictError, InvalidRequestError, NotFoundError, UnavailableError
from kvrelay.ids import WorkerId
from kvrelay.log import Log
from kvrelay.router.backend import AdapterChange
from kvrelay.router.peer import Peer
from kvrelay.states import Role
from kvrelay.wire.adapters import AboutAdapters, AdaptersTold, DropAdapter, LoadAdapter, UnloadAdapter, UseAdapter
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
    name: str
    asked: Sequence[Peer]
    unanswered: Sequence[Peer]  # when the order has ended: in time
    ended: asyncio.Future[None]
    done_by: list[Peer] = field(default_factory=list)
    errors: dict[WorkerId, str] = field(default_factory=dict)

    @property
    def has_failed(self) -> bool:
        return bool(self.errors or self.unanswered)

    def answered_by(self, peer: Peer, error: str) -> None:
        if peer in self.unanswered:
            if error:
                self.errors[peer.id] = error
            else:
                self.done_by.append(peer)
            self.without(peer)

    def without(self, peer: Peer) -> None:
        """It has answered, or is gone."""
        self.unanswered = [each for each in self.unanswered if each is not peer]
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
            if not in_place and name in adapters_of(self._peers()):
                raise ConflictError(f"the LoRA adapter {name!r} is loaded already; load_inplace replaces it", param="lora_name")
            read = await self._give(self._peers(), lambda order: LoadAdapter(order=order, name=name, path=path))
            if read.has_failed:
                for peer in read.asked:
                    peer.send(DropAdapter(read=read.name))
            _check(read, f"the LoRA adapter {name!r} was not loaded")
            used = await self._give(read.done_by, lambda order: UseAdapter(order=order, read=read.name))
            if not used.done_by:
                _check(used, f"the LoRA adapter {name!r} was not loaded")
            self._catch_up_all()  # those that came meanwhile, or were away for a moment
            return AdapterChange(name=name, workers=[peer.id for peer in used.done_by])

    async def unload(self, name: str) -> AdapterChange:
        async with self._one_by_one:
            if name not in self.known:
                raise NotFoundError(f"there is no LoRA adapter {name[:200]!r}", param="lora_name", code="adapter_not_found")
            order = await self._give(self._peers(), lambda order: UnloadAdapter(order=order, name=name))
            _check(order, f"the LoRA adapter {name!r} was not unloaded everywhere")
            return AdapterChange(name=name, workers=[peer.id for peer in order.done_by])

    async def _give(self, peers: Sequence[Peer], message: Callable[[str], AboutAdapters]) -> _Order:
        """Ends when each has answered, is gone, or has had its time. Raises UnavailableError if all are gone."""
        name = uuid.uuid4().hex
        asked = [peer for peer in peers if peer.record.role is not Role.ENCODE and peer.send(message(name))]
        order = self._orders[name] = _Order(name, asked, asked, asyncio.get_running_loop().create_future())
        try:
            if asked:
                await asyncio.wait((order.ended,), timeout=_ANSWER_WITHIN_S)
        finally:
            del self._orders[name]
        if not order.done_by and not order.has_failed:
            raise UnavailableError("no worker can be reached", code="no_worker")
        return order

    def told(self, peer: Peer, told: AdaptersTold) -> None:
        log.info("adapters of a worker", worker=peer.id, adapters=",".join(adapter.name for adapter in told.adapters))
        self._seen[peer.id] = has = {adapter.name: adapter for adapter in told.adapters}
        if told.decided and not peer.refusal:  # it serves this model, even if it is about to leave
            self._decided[told.decided] = has.get(told.decided)
            peer.adapter_failures.pop(told.decided, None)
        self._note()
        order = self._orders.get(told.order)
        if order is not None:
            order.answered_by(peer, told.error)
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
        self._catch_up_all()

    def lost(self, peer: Peer) -> None:
        """A worker that is gone does not count: another that comes in its place is another worker."""
        for order in self._orders.values():
            order.without(peer)
        self._catching_up = {order: each for order, each in self._catching_up.items() if each.peer is not peer}

    def left(self, peer: Peer) -> None:
        self.lost(peer)
        self._seen.pop(peer.id, None)

    def _note(self) -> None:
        peers = self._peers()
        if any(map(_generates, peers)):
            self._last = adapters_of(peers)

    def _catch_up_all(self) -> None:
        for peer in self._peers():
            self._catch_up(peer)
        self._on_awaited()

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
    for worker_id, reason in order.errors.items():
        raise InvalidRequestError(f"{what}: worker {worker_id}: {reason}", param="lora_path")
    for peer in order.unanswered:
        raise UnavailableError(f"{what}: worker {peer.id}: no answer within {_ANSWER_WITHIN_S:g} s", param="lora_path")
