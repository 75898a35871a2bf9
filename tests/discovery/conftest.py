"""An etcd for each test that asks for one, a router's view of it, and a worker's registration."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from etcd_server import EtcdServer, etcd_server
from etcd_tools import Relay, View

from kvrelay.discovery.etcd import EtcdRegistration


@pytest.fixture
def server() -> Iterator[EtcdServer]:
    with etcd_server() as running:
        yield running


@pytest.fixture
async def view(server: EtcdServer) -> AsyncIterator[View]:
    made = View(server.address)
    yield made
    made.membership.close()


@pytest.fixture
async def relay(server: EtcdServer) -> AsyncIterator[Relay]:
    made = Relay(server)
    await made.start()
    yield made
    await made.close()


@pytest.fixture
def hasty_registration(server: EtcdServer) -> Iterator[EtcdRegistration]:
    """For tests in which etcd is stopped."""
    made = EtcdRegistration(server.address, timeout_s=0.5)
    yield made
    made.close()


@pytest.fixture
def registration(server: EtcdServer) -> Iterator[EtcdRegistration]:
    made = EtcdRegistration(server.address, timeout_s=5.0)
    yield made
    made.close()
