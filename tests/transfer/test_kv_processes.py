"""Producers in processes of their own that are killed, or stopped and continued, while they may write a consumer's blocks."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
from patience import until
from prepared import Process, popen
from relay_pair import Consumer

from kvrelay.engine.fence import PASSED
from kvrelay.ids import RequestId, new_request_id, new_transfer_id
from kvrelay.transfer.relay.link import TransferSettings
from kvrelay.wire.serving import TransferInfo
from tests.devices import ON_A_CARD
from tests.transfer_peers import FAKE_CARD

HERE = pathlib.Path(__file__).resolve().parent
LEASE_S = 1.0


@contextmanager
def reserved(transport: str) -> Iterator[tuple[Process, Consumer, RequestId]]:
    """A consumer that has reserved blocks, and the process that may write them (or whose blocks it copies)."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent.parent), str(HERE), *sys.path])}
    command = [sys.executable, str(HERE / "relay_child.py"), transport, str(LEASE_S)]
    child: Process = popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    consumer = Consumer(transport=transport, settings=TransferSettings(lease_s=LEASE_S, hello_retry_s=0.1))
    try:
        assert child.stdout is not None
        assert child.stdin is not None
        told = json.loads(child.stdout.readline())
        transfer = TransferInfo(
            transfer_id=new_transfer_id(),
            mode="write",
            producer=told["worker"],
            consumer=consumer.id,
            signal_address=told["address"],
        )
        child.stdin.write(msgspec.json.encode(transfer).decode() + "\n")
        child.stdin.flush()
        request = new_request_id()
        consumer.relay.expect(request, transfer, 16)
        until(lambda: consumer.is_started(request))
        consumer.relay.reserve(request, [4, 5, 6, 7], 0, PASSED)
        until(lambda: consumer.relay.counts().in_flight == 1)
        yield child, consumer, request
    finally:
        consumer.close()
        child.kill()
        child.wait()


@pytest.mark.parametrize("transport", ["shm", "nixl", "mooncake", FAKE_CARD, pytest.param("cuda_ipc", marks=ON_A_CARD)])
def test_a_killed_producer_is_found_out_and_the_blocks_come_back(transport: str) -> None:
    with reserved(transport) as (child, consumer, request):
        child.kill()
        until(lambda: request in consumer.arrivals())
        assert consumer.arrivals()[request].error
        until(lambda: consumer.is_freed(request))


def test_a_stopped_writer_keeps_the_blocks_quarantined_until_it_goes_on() -> None:
    with reserved("nixl") as (child, consumer, request):
        child.send_signal(signal.SIGSTOP)
        until(lambda: request in consumer.arrivals())
        assert "has not answered" in consumer.arrivals()[request].error
        time.sleep(2 * LEASE_S)
        assert not consumer.is_freed(request), "time is no proof"
        child.send_signal(signal.SIGCONT)
        until(lambda: consumer.is_freed(request))


@pytest.mark.parametrize("transport", ["shm", FAKE_CARD, pytest.param("cuda_ipc", marks=ON_A_CARD)])
def test_where_the_consumer_copies_a_stopped_producer_holds_nothing_up(transport: str) -> None:
    with reserved(transport) as (child, consumer, request):
        child.send_signal(signal.SIGSTOP)
        until(lambda: request in consumer.arrivals())
        until(lambda: consumer.is_freed(request))
