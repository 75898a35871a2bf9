"""What only Mooncake needs: an engine of its own for every peer, reused with care."""

from __future__ import annotations

import os
import time
from types import ModuleType

import msgspec
import numpy as np
import pytest
from patience import PATIENCE_S

from kvrelay.ids import new_worker_id
from kvrelay.transfer.engines import mooncake
from kvrelay.transfer.engines.mooncake import MooncakeEngine, MooncakeInfo
from kvrelay.transfer.region import shared_region

INFO = MooncakeInfo("prefill-1", "10.0.0.1", 16000, 4096, 4096)


@pytest.fixture
def clients(monkeypatch: pytest.MonkeyPatch) -> mooncake._Clients:
    def make_engine(library: ModuleType, host: str) -> object:
        return object()

    monkeypatch.setattr(mooncake, "make_engine", make_engine)
    return mooncake._Clients("127.0.0.1")


def test_a_client_is_reused_for_other_peers_and_for_the_same_one(clients: mooncake._Clients) -> None:
    client = clients.take(INFO)
    assert clients.take(INFO) is not client  # still in use
    clients.give_back(client)
    assert clients.take(INFO) is client
    clients.give_back(client)
    assert clients.take(msgspec.structs.replace(INFO, port=16001)) is client


def test_a_client_is_not_reused_for_a_new_peer_at_an_old_address(clients: mooncake._Clients) -> None:
    """It would send to the memory that the old peer had there."""
    client = clients.take(INFO)
    clients.give_back(client)
    assert clients.take(msgspec.structs.replace(INFO, engine="prefill-2")) is not client


def test_peers_that_come_and_go_leave_no_threads() -> None:
    here, there = (MooncakeEngine(new_worker_id(role)) for role in ("prefill", "decode"))
    for engine in (here, there):
        engine.register(shared_region(4096))
    num_threads = []
    for _ in range(8):
        peer = new_worker_id("decode")
        here.add_peer(peer, there.local_info())
        here.read(peer, np.array([[0, 0, 4096]], dtype=np.int64))
        deadline = time.monotonic() + PATIENCE_S
        while not (completions := here.poll()):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert [completion.error for completion in completions] == [""]
        here.remove_peer(peer)
        time.sleep(0.02)  # its thread ends
        num_threads.append(len(os.listdir("/proc/self/task")))
    assert num_threads[-1] <= num_threads[1] + 1
    here.close()
    there.close()
