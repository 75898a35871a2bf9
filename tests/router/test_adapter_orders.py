"""What an operator decided about LoRA adapters holds for workers and routers that come later, too."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from registry_records import make_record

from kvrelay.errors import InvalidRequestError, UnavailableError
from kvrelay.ids import WorkerId, new_worker_id
from kvrelay.router import adapters
from kvrelay.router.adapters import AdapterOrders
from kvrelay.states import Role
from kvrelay.wire.adapters import AboutAdapters, AdaptersTold, DropAdapter, LoadAdapter, UnloadAdapter, UseAdapter
from kvrelay.wire.registry import Adapter, WorkerRecord


def digest_of(path: str) -> str:
    return f"digest of {path}"


class Worker:
    """A worker as routers see it: as much of a peer as orders need. It carries out what `answer` is told to."""

    def __init__(self, role: Role = Role.DECODE, *options: str, fails: str = "") -> None:
        self.id: WorkerId = new_worker_id(role.value)
        has = [Adapter(name=name, digest=digest_of(f"/{name}"), path=f"/{name}") for name in options]
        self.record: WorkerRecord = make_record(id=self.id, role=role, adapters=has)
        self.adapter_failures: dict[str, str] = {}
        self.refusal = ""
        self.fails = fails
        self.is_slow = False
        self.aside: dict[str, LoadAdapter] = {}
        self.told: list[AboutAdapters] = []
        self.company: list[AdapterOrders] = []

    def send(self, message: AboutAdapters) -> bool:
        self.told.append(message)
        return True

    @property
    def has(self) -> list[str]:
        return [adapter.name for adapter in self.record.adapters]

    @property
    def paths(self) -> dict[str, str]:
        return {adapter.name: adapter.path for adapter in self.record.adapters}

    def answer(self) -> None:
        """What it was told, to the first of its routers; the others hear what it has now."""
        while self.told and not self.is_slow:
            message = self.told.pop(0)
            match message:
                case LoadAdapter() if self.fails:
                    self.tell(message.order, error=self.fails)
                case LoadAdapter() if message.digest:
                    self.add(message)
                    self.tell(message.order)
                case LoadAdapter():
                    self.aside[message.order] = message
                    self.tell(message.order)
                case UseAdapter():
                    self.add(read := self.aside.pop(message.read))
                    self.tell(message.order, decided=read.name)
                case DropAdapter():
                    self.aside.pop(message.read, None)
                case UnloadAdapter():
                    self.keep(adapter for adapter in self.record.adapters if adapter.name != message.name)
                    self.tell(message.order, decided=message.name if message.decides else "")

    def add(self, read: LoadAdapter) -> None:
        added = Adapter(name=read.name, digest=digest_of(read.path), path=read.path, is_ordered=True)
        self.keep([*(adapter for adapter in self.record.adapters if adapter.name != read.name), added])

    def keep(self, adapters: Iterable[Adapter]) -> None:
        self.record = msgspec.structs.replace(self.record, adapters=list(adapters))

    def tell(self, order: str, *, error: str = "", decided: str = "") -> None:
        for index, orders in enumerate(self.company):
            told = AdaptersTold(adapters=self.record.adapters, decided=decided)
            first = msgspec.structs.replace(told, order=order, error=error)
            orders.told(self, told if index else first)  # type: ignore[arg-type]


class World:
    """Workers, and routers of which the first gives the orders."""

    def __init__(self, num_routers: int = 1) -> None:
        self.workers: list[Worker] = []
        self.routers = [self.router() for _ in range(num_routers)]

    def router(self) -> AdapterOrders:
        return AdapterOrders(lambda: self.workers)  # type: ignore[arg-type,return-value]

    def add(self, *workers: Worker) -> None:
        for worker in workers:
            self.workers.append(worker)
            worker.company = self.routers
            for orders in self.routers:
                orders.opened(worker)  # type: ignore[arg-type]

    def kill(self, worker: Worker) -> None:
        self.workers.remove(worker)
        for orders in self.routers:
            orders.left(worker)  # type: ignore[arg-type]

    async def order(self, order: Any) -> None:
        task = asyncio.ensure_future(order)
        while not task.done():
            await asyncio.sleep(0)
            self.answer()
        await task

    def answer(self) -> None:
        for worker in self.workers:
            worker.answer()


async def test_a_worker_that_comes_later_is_given_what_an_operator_loaded_and_nothing_else() -> None:
    world, (first, second, encode) = World(), (Worker(), Worker(Role.PREFILL), Worker(Role.ENCODE))
    world.add(first, second, encode)
    (orders,) = world.routers
    for name in ("sql", "poems"):
        await world.order(orders.load(name, f"/{name}", in_place=False))
    await world.order(orders.unload("poems"))
    for lost in (first, second, encode):
        world.kill(lost)
        later = Worker(lost.record.role)
        world.add(later)
        assert orders.awaited == (set() if lost is encode else {later.record.role})
        world.answer()
        assert later.has == ([] if lost is encode else ["sql"])
        assert not orders.awaited


async def test_names_stay_known_while_their_only_worker_is_away() -> None:
    world, worker = World(), Worker(Role.WHOLE, "option")
    world.add(worker)
    (orders,) = world.routers
    await world.order(orders.load("sql", "/sql", in_place=False))
    world.kill(worker)
    assert list(orders.known) == ["option", "sql"]
    world.add(Worker(Role.WHOLE))
    assert list(orders.known) == ["sql"]  # it has come without the option


async def test_what_was_unloaded_or_replaced_is_so_on_a_worker_whose_options_say_otherwise() -> None:
    world, worker = World(), Worker(Role.WHOLE, "a", "b", "c")
    world.add(worker)
    (orders,) = world.routers
    await world.order(orders.unload("a"))
    await world.order(orders.load("b", "/other", in_place=True))
    world.kill(worker)
    later = Worker(Role.WHOLE, "a", "b", "c")
    world.add(later)
    world.answer()
    assert later.paths == {"b": "/other", "c": "/c"}


async def test_every_router_knows_what_one_of_them_was_told_and_so_does_one_that_starts_later() -> None:
    world, worker = World(2), Worker(Role.WHOLE)
    world.add(worker)
    first, second = world.routers
    await world.order(first.load("sql", "/sql", in_place=False))
    await world.order(first.load("poems", "/poems", in_place=False))
    await world.order(first.unload("poems"))
    third = world.router()
    world.routers[:] = [second, third]  # the one that gave the orders is gone
    third.opened(worker)  # type: ignore[arg-type]
    later = Worker(Role.WHOLE)
    world.add(later)
    assert [message.name for message in later.told if isinstance(message, LoadAdapter)] == ["sql", "sql"]
    world.answer()
    assert later.has == ["sql"]
    assert list(second.known) == list(third.known) == ["sql"]


async def test_a_router_that_was_away_brings_nothing_back() -> None:
    """It missed the order, and sees at the worker that it was given."""
    world, worker = World(2), Worker(Role.WHOLE)
    world.add(worker)
    first, second = world.routers
    await world.order(first.load("sql", "/sql", in_place=False))
    world.routers.remove(second)
    await world.order(first.unload("sql"))
    await world.order(first.load("poems", "/poems", in_place=False))
    second.opened(worker)  # type: ignore[arg-type]
    assert worker.told == []
    assert list(second.known) == ["poems"]


async def test_a_worker_that_cannot_load_what_it_missed_is_shown_and_not_asked_again() -> None:
    world, worker = World(), Worker(Role.WHOLE)
    world.add(worker)
    (orders,) = world.routers
    await world.order(orders.load("sql", "/sql", in_place=False))
    world.kill(worker)
    later = Worker(Role.WHOLE, fails="there is no such folder")
    world.add(later)
    world.answer()
    assert later.adapter_failures == {"sql": "there is no such folder"}
    assert not orders.awaited
    world.add(Worker(Role.WHOLE))
    assert later.told == []
    later.fails = ""
    await world.order(orders.load("sql", "/sql", in_place=True))
    assert later.adapter_failures == {}
    assert later.has == ["sql"]


async def test_an_order_that_has_failed_is_not_given_to_workers_that_come_later() -> None:
    world = World()
    world.add(Worker(), Worker(fails="no room"))
    (orders,) = world.routers
    with pytest.raises(InvalidRequestError, match="no room"):
        await world.order(orders.load("sql", "/sql", in_place=False))
    later = Worker()
    world.add(later)
    assert later.told == []
    assert [worker.has for worker in world.workers] == [[], [], []]


async def test_one_that_some_worker_cannot_read_replaces_none() -> None:
    world, good, bad = World(2), Worker(Role.WHOLE), Worker(Role.WHOLE)
    world.add(good, bad)
    first, second = world.routers
    await world.order(first.load("sql", "/sql", in_place=False))
    bad.fails = "no answer is in the folder"  # whatever it says: the order is at fault, not the cluster
    with pytest.raises(InvalidRequestError, match=f"was not loaded: worker {bad.id}: no answer is"):
        await world.order(first.load("sql", "/other", in_place=True))
    world.answer()
    assert good.paths == bad.paths == {"sql": "/sql"}
    assert good.aside == {}
    assert first.known["sql"].path == second.known["sql"].path == "/sql"


async def test_a_worker_that_does_not_answer_in_time_gets_nothing_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "_ANSWER_WITHIN_S", 0.01)
    world, quick, slow = World(), Worker(Role.WHOLE), Worker(Role.WHOLE)
    world.add(quick, slow)
    (orders,) = world.routers
    slow.is_slow = True
    with pytest.raises(UnavailableError, match=f"worker {slow.id}: no answer within"):
        await world.order(orders.load("sql", "/sql", in_place=False))
    slow.is_slow = False
    world.answer()
    assert quick.has == slow.has == []
    assert quick.aside == slow.aside == {}
    assert dict(orders.known) == {}


async def test_a_worker_that_comes_while_others_read_an_adapter_is_given_it() -> None:
    world, worker, later = World(), Worker(Role.WHOLE), Worker(Role.WHOLE)
    world.add(worker)
    (orders,) = world.routers
    loading = asyncio.ensure_future(orders.load("sql", "/sql", in_place=False))
    while not worker.told:
        await asyncio.sleep(0)
    world.add(later)
    await world.order(loading)
    world.answer()
    assert later.has == ["sql"]
    assert not orders.awaited


async def test_workers_of_another_model_decide_nothing() -> None:
    world, worker, other = World(), Worker(Role.WHOLE), Worker(Role.WHOLE)
    world.add(worker)
    (orders,) = world.routers
    other.company, other.refusal = world.routers, "it serves another model"
    orders.opened(other)  # type: ignore[arg-type]
    other.add(LoadAdapter(order="", name="sql", path="/sql"))
    other.tell("", decided="sql")
    world.add(Worker(Role.WHOLE))
    assert [each.told for each in world.workers] == [[], []]
    assert dict(orders.known) == {}


async def test_an_order_that_the_only_worker_carries_out_while_it_drains_holds_for_its_successor() -> None:
    world, worker = World(), Worker(Role.WHOLE)
    world.add(worker)
    (orders,) = world.routers
    loading = asyncio.ensure_future(orders.load("sql", "/sql", in_place=False))
    while not worker.told:
        await asyncio.sleep(0)
    world.workers.remove(worker)  # it gets no requests any more, and still answers
    while not loading.done():
        worker.answer()
        await asyncio.sleep(0)
    assert (await loading).workers == [worker.id]
    later = Worker(Role.WHOLE)
    world.add(later)
    world.answer()
    assert later.has == ["sql"]


async def test_what_is_unloaded_while_a_worker_still_reads_it_goes_again() -> None:
    world, worker = World(), Worker(Role.WHOLE)
    world.add(worker)
    (orders,) = world.routers
    await world.order(orders.load("sql", "/sql", in_place=False))
    later = Worker(Role.WHOLE)
    world.add(later)
    reading = later.told.pop()
    await world.order(orders.unload("sql"))
    later.told.append(reading)  # it ends after the order to unload
    world.answer()
    assert later.has == []
    assert dict(orders.known) == {}
