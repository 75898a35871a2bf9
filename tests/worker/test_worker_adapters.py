"""Orders about LoRA adapters at a worker: what was read waits for the router's word."""

from __future__ import annotations

import threading

import pytest
from router.test_adapter_recovery import StubAdapters

from kvrelay.wire.adapters import AdaptersTold, DropAdapter, LoadAdapter, UseAdapter
from kvrelay.worker.adapters import AdapterOrders

ROUTER, OTHER = b"router", b"other"


class Orders(AdapterOrders):
    """Over adapters that are read when `end_reading` says so."""

    def __init__(self) -> None:
        self.stub = StubAdapters()
        self.has_read = threading.Semaphore(0)
        super().__init__(self.has_read.release)
        self.adapters = self.stub

    def end_reading(self) -> list[tuple[bytes, AdaptersTold]]:
        self.stub.may_end.set()
        assert self.has_read.acquire(timeout=60)
        return self.take()


@pytest.fixture
def orders() -> Orders:
    made = Orders()
    made.load(ROUTER, LoadAdapter(order="1", name="sql", path="/sql"))
    return made


def test_what_was_read_is_used_when_the_router_says_so_and_once(orders: Orders) -> None:
    assert orders.end_reading() == [(ROUTER, AdaptersTold(adapters=[], order="1"))]
    assert orders.use(OTHER, UseAdapter(order="2", read="1")).error
    told = orders.use(ROUTER, UseAdapter(order="3", read="1"))
    assert (told.error, told.decided, [adapter.name for adapter in told.adapters]) == ("", "sql", ["sql"])
    assert orders.use(ROUTER, UseAdapter(order="4", read="1")).error


@pytest.mark.parametrize("is_read", [True, False])
@pytest.mark.parametrize("is_gone", [True, False])
def test_what_nobody_will_use_is_not_kept(orders: Orders, is_read: bool, is_gone: bool) -> None:
    """Whether the router says so or is gone, and also if it is still read then."""
    if is_read:
        orders.end_reading()
    if is_gone:
        orders.forget(ROUTER)
    else:
        orders.drop(ROUTER, DropAdapter(read="1"))
    if not is_read:
        orders.end_reading()
    assert orders.use(ROUTER, UseAdapter(order="2", read="1")).error
    assert orders.records() == []


def test_what_a_worker_has_missed_is_used_at_once(orders: Orders) -> None:
    orders.end_reading()
    orders.load(ROUTER, LoadAdapter(order="2", name="poems", path="/poems", digest="digest of /poems"))
    ((_, told),) = orders.end_reading()
    assert (told.order, told.decided, [adapter.name for adapter in told.adapters]) == ("2", "", ["poems"])
