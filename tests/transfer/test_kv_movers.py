"""The relay as an engine uses it: real threads, real sockets, and an engine's thread that only leaves notes and polls."""

from __future__ import annotations

import random
import select
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import msgspec
import pytest
from memory_faults import random_faults
from patience import PATIENCE_S, until
from relay_pair import TINY, Consumer, Producer, info

from kvrelay.engine.fence import PASSED
from kvrelay.errors import WrongIdError
from kvrelay.ids import RequestId, TransferId, new_request_id, new_worker_id
from kvrelay.transfer.engines.base import Completion, Mover, TransferError
from kvrelay.transfer.engines.memory import MemoryEngine, MemoryNetwork
from kvrelay.transfer.region import Region
from kvrelay.transfer.relay import thread
from kvrelay.transfer.relay.link import TransferSettings
from kvrelay.transfer.relay.thread import ThreadFailedError
from tests.devices import ON_A_CARD
from tests.transfer_peers import FAKE_CARD, ON_CARD

FAST = TransferSettings(lease_s=3.0, hello_retry_s=0.1)
MODES = pytest.mark.parametrize("mode", ["write", "read"])
MOVERS = pytest.mark.parametrize("mover", list(Mover), ids=lambda mover: f"{mover.value}_moves")


class Closing:
    """Closes what a test made."""

    def __init__(self) -> None:
        self.sides: list[Producer | Consumer] = []

    def producer(self, network: MemoryNetwork | None = None, **options: object) -> Producer:
        side = Producer(network, **options)
        self.sides.append(side)
        return side

    def consumer(self, network: MemoryNetwork | None = None, **options: object) -> Consumer:
        side = Consumer(network, **options)
        self.sides.append(side)
        return side


@pytest.fixture
def make() -> Iterator[Closing]:
    closing = Closing()
    yield closing
    for side in closing.sides:
        side.close()


def hand_over(producer: Producer, consumer: Consumer, mode: str, *, num_tokens: int = 11, skip_blocks: int = 0) -> None:
    """One whole hand-over, checked byte by byte."""
    here, there = new_request_id(), new_request_id()
    transfer = info(producer, consumer, mode)
    producer.relay.expect(here, transfer, num_tokens)
    consumer.relay.expect(there, transfer, num_tokens)
    value = float(random.randrange(1, 1000))
    blocks = random.sample(range(producer.layout.num_blocks), -(-num_tokens // producer.layout.block_size))
    producer.relay.start(here, blocks, 0, PASSED)
    if mode == "read":
        producer.compute(here, blocks, num_tokens, value)
    until(lambda: consumer.is_started(there))
    skip = skip_blocks * consumer.layout.block_size
    mine = random.sample(range(consumer.layout.num_blocks), -(-(num_tokens - skip) // consumer.layout.block_size))
    consumer.relay.reserve(there, mine, skip, PASSED)
    if mode == "write":
        producer.compute(here, blocks, num_tokens, value)
    until(lambda: there in consumer.arrivals())
    arrival = consumer.arrivals()[there]
    assert arrival.error == ""
    assert [first.token for first in arrival.first_tokens] == [int(value)]
    assert consumer.holds(mine, skip, num_tokens, value)
    until(lambda: producer.is_released(here))
    assert here not in producer.failures()


@MODES
@MOVERS
def test_a_hand_over(make: Closing, mode: str, mover: Mover) -> None:
    producer = make.producer(mover=mover)
    consumer = make.consumer(producer.network, mover=mover)
    for skip_blocks in (0, 1, 2):
        hand_over(producer, consumer, mode, skip_blocks=skip_blocks)
    for side in (producer, consumer):
        assert side.relay.counts().in_flight == 0
        assert side.relay.counts().done == 3
        assert side.relay.mapping().size == 0
        assert side.relay.mapping().lookups > 0


@MODES
@pytest.mark.parametrize(
    ("transport", "sizes"),
    [
        *(("shm", sizes) for sizes in ((16, 24), (16, 32), (32, 16))),
        *(("nixl", sizes) for sizes in ((16, 24), (32, 16))),
        ("mooncake", (16, 24)),
        (FAKE_CARD, (16, 24)),
        *(pytest.param(name, (16, 24), marks=ON_A_CARD) for name in ON_CARD),
    ],
)
def test_a_hand_over_through_a_real_transport(make: Closing, mode: str, sizes: tuple[int, int], transport: str) -> None:
    layouts = [msgspec.structs.replace(TINY, block_size=size, num_blocks=12) for size in sizes]
    producer = make.producer(layout=layouts[0], transport=transport)
    consumer = make.consumer(layout=layouts[1], transport=transport)
    for skip_blocks in (0, 1):
        hand_over(producer, consumer, mode, num_tokens=75, skip_blocks=skip_blocks)


def test_one_producer_to_many_consumers(make: Closing) -> None:
    producer = make.producer()
    consumers = [make.consumer(producer.network) for _ in range(3)]
    for consumer in consumers * 2:
        hand_over(producer, consumer, "write")


def test_wrong_ids_are_refused_in_the_callers_thread(make: Closing) -> None:
    producer = make.producer()
    consumer = make.consumer(producer.network)
    for relay in (producer.relay, consumer.relay):
        with pytest.raises(WrongIdError, match="expected a RequestId"):
            relay.expect(RequestId(TransferId("xfer-1")), info(producer, consumer), 4)
        assert relay.counts().in_flight == 0


def test_setting_aside_and_a_late_reserve(make: Closing) -> None:
    producer = make.producer()
    consumer = make.consumer(producer.network)
    here, there = new_request_id(), new_request_id()
    transfer = info(producer, consumer)
    producer.relay.expect(here, transfer, 8)
    consumer.relay.expect(there, transfer, 8)
    producer.relay.start(here, [0, 1], 0, PASSED)
    producer.compute(here, [0, 1], 8, 3.0)
    producer.relay.set_aside(here)
    until(lambda: producer.poll() or here in producer.set_aside)
    until(lambda: consumer.is_started(there))
    consumer.relay.reserve(there, [5, 6], 0, PASSED)
    until(lambda: producer.poll() or here in producer.restart)
    producer.relay.start(here, [7, 8], 0, PASSED)
    producer.compute(here, [7, 8], 8, 3.0)
    until(lambda: there in consumer.arrivals())
    assert consumer.arrivals()[there].error == ""
    assert consumer.holds([5, 6], 0, 8, 3.0)


def test_a_consumer_aborts_and_gets_its_blocks_back(make: Closing) -> None:
    producer = make.producer()
    consumer = make.consumer(producer.network)
    here, there = new_request_id(), new_request_id()
    transfer = info(producer, consumer)
    producer.relay.expect(here, transfer, 8)
    consumer.relay.expect(there, transfer, 8)
    producer.relay.start(here, [0, 1], 0, PASSED)
    until(lambda: consumer.is_started(there))
    consumer.relay.reserve(there, [5, 6], 0, PASSED)
    consumer.relay.abort(there)
    until(lambda: consumer.is_freed(there))
    until(lambda: producer.is_released(here))
    assert there not in consumer.arrivals()
    producer.relay.abort(here)  # harmless
    hand_over(producer, consumer, "write")


def test_a_producer_that_closes_ends_its_transfers_with_a_reason(make: Closing) -> None:
    producer = make.producer()
    consumer = make.consumer(producer.network)
    here, there = new_request_id(), new_request_id()
    transfer = info(producer, consumer)
    producer.relay.expect(here, transfer, 8)
    consumer.relay.expect(there, transfer, 8)
    producer.relay.start(here, [0, 1], 0, PASSED)
    until(lambda: consumer.is_started(there))
    consumer.relay.reserve(there, [5, 6], 0, PASSED)
    producer.close()
    assert producer.failures()[here] == "the worker closes"
    until(lambda: consumer.is_freed(there))
    assert "the producer" in consumer.arrivals()[there].error


def test_a_consumer_that_closes_frees_everything(make: Closing) -> None:
    producer = make.producer()
    consumer = make.consumer(producer.network)
    here, there = new_request_id(), new_request_id()
    transfer = info(producer, consumer)
    producer.relay.expect(here, transfer, 8)
    consumer.relay.expect(there, transfer, 8)
    producer.relay.start(here, [0, 1], 0, PASSED)
    until(lambda: consumer.is_started(there))
    consumer.relay.reserve(there, [5, 6], 0, PASSED)
    consumer.close()
    assert consumer.arrivals()[there].error == "the worker closes"
    assert consumer.is_freed(there)
    until(lambda: here in producer.failures())
    assert producer.is_released(here)
    consumer.relay.expect(new_request_id(), info(producer, consumer), 4)
    until(lambda: len(consumer.arrivals()) == 2)


@pytest.mark.parametrize("which", ["producer", "consumer"])
def test_a_fault_in_the_thread_fails_every_transfer_and_lets_no_request_hang(make: Closing, which: str) -> None:
    network = MemoryNetwork()
    producer = make.producer(network, settings=FAST)
    consumer = make.consumer(network, settings=FAST)
    broken = producer if which == "producer" else consumer
    (engine,) = broken.parts.engines
    here, there = new_request_id(), new_request_id()
    transfer = info(producer, consumer)
    producer.relay.expect(here, transfer, 8)
    consumer.relay.expect(there, transfer, 8)
    producer.relay.start(here, [0, 1], 0, PASSED)
    until(lambda: consumer.is_started(there))
    consumer.relay.reserve(there, [5, 6], 0, PASSED)
    engine.poll = _raise  # type: ignore[method-assign]
    producer.relay.set_aside(here)  # wakes it
    consumer.relay.abort(new_request_id())  # and this wakes the other
    until(lambda: _has_failed(broken))  # by then it has told of every transfer
    if which == "producer":
        until(lambda: there in consumer.arrivals())
        until(lambda: consumer.is_freed(there))
    else:
        until(lambda: here in producer.failures())
    assert here in producer.released
    assert there in consumer.freed
    reason = producer._failures[here] if which == "producer" else consumer._arrivals[there].error
    assert "RuntimeError: out of order" in reason


def _has_failed(side: Producer | Consumer) -> bool:
    """A worker whose transfer thread is gone learns of it: it has to be replaced."""
    try:
        side.poll()
    except ThreadFailedError:
        assert side.relay.has_news, "the engine would not look"
        return True
    return False


def _raise() -> list[Completion]:
    raise RuntimeError("out of order")


def test_a_transport_that_cannot_register_fails_the_constructor() -> None:
    class Refuses(MemoryEngine):
        def register(self, region: Region) -> None:
            raise TransferError("no such memory")

    worker = new_worker_id("prefill")
    with pytest.raises(TransferError, match="no such memory"):
        Producer(engines=[Refuses(worker, MemoryNetwork())])
    with pytest.raises(TransferError, match="no such memory"):
        Consumer(engines=[Refuses(worker, MemoryNetwork())])


@MODES
@MOVERS
def test_transports_that_fail_cost_the_transfer_and_nothing_else(make: Closing, mode: str, mover: Mover) -> None:
    """Delays, failures and bytes that arrive twice: each transfer ends once, and what arrives is right."""
    network = MemoryNetwork()
    options = {"mover": mover, "settings": FAST}
    producer = make.producer(network, faults=random_faults(seed=1, delay=0.5, corrupt=0.3, duplicate=0.3), **options)
    consumer = make.consumer(network, faults=random_faults(seed=2, delay=0.5, corrupt=0.3, duplicate=0.3), **options)
    outcomes = [_try_once(producer, consumer, mode, number) for number in range(1, 25)]
    assert "arrived" in outcomes
    assert "failed" in outcomes
    assert producer.relay.counts().in_flight == 0
    assert consumer.relay.counts().in_flight == 0


def _try_once(producer: Producer, consumer: Consumer, mode: str, number: int) -> str:
    here, there = new_request_id(), new_request_id()
    transfer = info(producer, consumer, mode)
    producer.relay.expect(here, transfer, 11)
    consumer.relay.expect(there, transfer, 11)
    producer.relay.start(here, [3, 1, 2], 0, PASSED)
    if mode == "read":
        producer.compute(here, [3, 1, 2], 11, float(number))
    until(lambda: consumer.is_started(there))
    consumer.relay.reserve(there, [9, 4, 7], 0, PASSED)
    if mode == "write":
        producer.compute(here, [3, 1, 2], 11, float(number))
    until(lambda: there in consumer.arrivals())
    until(lambda: producer.is_released(here))
    if consumer.arrivals()[there].error:
        until(lambda: consumer.is_freed(there))
        return "failed"
    assert consumer.holds([9, 4, 7], 0, 11, float(number))
    return "arrived"


def test_a_dropped_move_is_given_up_when_the_request_is_aborted(make: Closing) -> None:
    network = MemoryNetwork()
    producer = make.producer(network, faults=random_faults(seed=1, drop=1.0), settings=FAST)
    consumer = make.consumer(network, settings=FAST)
    here, there = new_request_id(), new_request_id()
    transfer = info(producer, consumer)
    producer.relay.expect(here, transfer, 8)
    consumer.relay.expect(there, transfer, 8)
    producer.relay.start(here, [0, 1], 0, PASSED)
    until(lambda: consumer.is_started(there))
    consumer.relay.reserve(there, [5, 6], 0, PASSED)
    producer.compute(here, [0, 1], 8, 1.0)
    consumer.relay.abort(there)
    until(lambda: consumer.is_freed(there))
    until(lambda: producer.is_released(here))


def test_an_idle_thread_sleeps(make: Closing) -> None:
    producer = make.producer()
    consumer = make.consumer(producer.network)
    hand_over(producer, consumer, "write")
    for side in (producer, consumer):
        before = side.relay._turns.num_turns
        time.sleep(0.3)
        assert side.relay._turns.num_turns - before < 10


def test_a_command_ends_the_short_sleep_between_looks(make: Closing, monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []

    def endless(readable: list[int], writable: object, exceptional: object, seconds: float) -> object:
        naps.append(seconds)
        return select.select(readable, (), (), 10 * PATIENCE_S)

    turns = make.producer().relay._turns
    monkeypatch.setattr(thread, "select", SimpleNamespace(select=endless))
    monkeypatch.setattr(turns, "_look", lambda: 0.0005)
    for _ in range(3):
        done, before = threading.Event(), len(naps)
        turns.call(done.set)
        assert done.wait(PATIENCE_S)
        until(lambda before=before: len(naps) > before)


def test_the_engine_is_woken_by_news(make: Closing) -> None:
    producer = make.producer()
    consumer = make.consumer(producer.network)
    consumer.news.clear()
    transfer = info(producer, consumer)
    here, there = new_request_id(), new_request_id()
    producer.relay.expect(here, transfer, 4)
    consumer.relay.expect(there, transfer, 4)
    producer.relay.start(here, [0], 0, PASSED)
    assert consumer.news.wait(PATIENCE_S)
    assert consumer.is_started(there)
