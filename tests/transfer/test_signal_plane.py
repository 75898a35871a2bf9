"""The signal plane over real sockets: openings that cannot work, frames that are no messages, strangers, workers that go."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
import zmq
from patience import until
from relay_pair import TINY, Consumer, Producer, info

from kvrelay.ids import new_request_id, new_transfer_id, new_worker_id
from kvrelay.transfer.relay.link import TransferSettings
from kvrelay.transfer.relay.signal import Probe
from kvrelay.wire.codec import encode
from kvrelay.wire.kv import KV_VERSION, ReadDone, decode_for_consumer
from kvrelay.wire.relay import Heartbeat, Hello, Map, Refused, Welcome

FAST = TransferSettings(lease_s=3.0, hello_retry_s=0.1)


@pytest.fixture
def producer() -> Iterator[Producer]:
    side = Producer(settings=FAST)
    yield side
    side.close()


class RawConsumer:
    """A DEALER that says what it likes."""

    def __init__(self, address: str, identity: str) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.IDENTITY, identity.encode())
        self.socket.connect(address)

    def ask(self, *frames: bytes) -> object:
        self.socket.send_multipart(frames)
        assert self.socket.poll(5000), "no answer"
        return decode_for_consumer(self.socket.recv())

    def close(self) -> None:
        self.socket.close()


@pytest.fixture
def raw(producer: Producer) -> Iterator[Callable[[str], RawConsumer]]:
    made: list[RawConsumer] = []

    def make(identity: str) -> RawConsumer:
        made.append(RawConsumer(producer.relay.signal_address, identity))
        return made[-1]

    yield make
    for each in made:
        each.close()


def hello(worker: str, **changes: object) -> bytes:
    message = Hello(version=KV_VERSION, worker_id=worker, fingerprint="tiny/float32")  # type: ignore[arg-type]
    return encode(msgspec.structs.replace(message, **changes))


def test_another_protocol_version_is_refused_naming_both(raw: Callable[[str], RawConsumer]) -> None:
    worker = new_worker_id("decode")
    answer = raw(worker).ask(hello(worker, version=99))
    assert isinstance(answer, Refused)
    assert answer.about == "opening"
    assert "99" in answer.reason
    assert str(KV_VERSION) in answer.reason


def test_a_hello_under_another_name_is_refused(raw: Callable[[str], RawConsumer]) -> None:
    answer = raw(new_worker_id("decode")).ask(hello(new_worker_id("decode")))
    assert isinstance(answer, Refused)
    assert "says hello as" in answer.reason


def test_garbage_is_counted_and_answered_and_the_connection_lives_on(
    producer: Producer, raw: Callable[[str], RawConsumer]
) -> None:
    worker = new_worker_id("decode")
    consumer = raw(worker)
    garbage = [
        b"",
        b"\xc1",
        b"\x00" * 1000,
        b"hello",
        msgspec.msgpack.encode({"type": "NoSuchMessage"}),
        msgspec.msgpack.encode({"type": "Reserve", "transfer_id": 7}),
        msgspec.msgpack.encode({"type": "Reserve", "transfer_id": new_request_id()}),
        msgspec.msgpack.encode([1, 2, 3]),
        encode(ReadDone(transfer_id=new_request_id())),  # type: ignore[arg-type]
        b"\x81" * 100_000,
    ]
    for frame in garbage:
        answer = consumer.ask(frame)
        assert isinstance(answer, Refused), frame[:20]
        assert answer.about == "frame"
    answer = consumer.ask(b"two", b"frames")
    assert isinstance(answer, Refused)
    assert producer.relay.mapping().malformed == len(garbage) + 1
    assert isinstance(consumer.ask(hello(worker)), Welcome)


def test_an_id_of_the_wrong_kind_is_answered_naming_both(raw: Callable[[str], RawConsumer]) -> None:
    answer = raw(new_worker_id("decode")).ask(encode(ReadDone(transfer_id=new_request_id())))  # type: ignore[arg-type]
    assert isinstance(answer, Refused)
    assert "expected a TransferId" in answer.reason
    assert "which is RequestId" in answer.reason


def test_a_consumer_that_has_not_said_hello_is_told_to(raw: Callable[[str], RawConsumer]) -> None:
    consumer = raw(new_worker_id("decode"))
    for message in (
        Heartbeat(number=1, transfers=[]),
        ReadDone(transfer_id=new_transfer_id()),
        Map(layout=TINY, host="here", engines=[]),
    ):
        answer = consumer.ask(encode(message))
        assert isinstance(answer, Refused)
        assert answer.about == "sender"


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"num_layers": 9}, "num_layers is 2 here and 9 there"),
        ({"dtype": "bfloat16"}, "dtype is float32 here and bfloat16 there"),
        ({"tp": 99}, "heads in 99 ranks"),
        ({"block_size": 0}, "blocks of 0 tokens"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_naming_the_field(
    raw: Callable[[str], RawConsumer], change: dict[str, object], names: str
) -> None:
    worker = new_worker_id("decode")
    consumer = raw(worker)
    assert isinstance(consumer.ask(hello(worker)), Welcome)
    layout = msgspec.structs.replace(TINY, **change)
    answer = consumer.ask(encode(Map(layout=layout, host="here", engines=[])))
    assert isinstance(answer, Refused)
    assert names in answer.reason


def test_a_stranger_without_a_worker_id_is_counted(producer: Producer, raw: Callable[[str], RawConsumer]) -> None:
    raw("stranger").socket.send(hello(new_worker_id("decode")))
    until(lambda: producer.relay._turns.machine.counts.malformed == 1)


def test_another_model_fails_the_transfers_of_both_sides_with_the_reason(producer: Producer) -> None:
    consumer = Consumer(producer.network, fingerprint="other/bfloat16", settings=FAST)
    try:
        transfer, here, there = info(producer, consumer), new_request_id(), new_request_id()
        producer.relay.expect(here, transfer, 4)
        consumer.relay.expect(there, transfer, 4)
        until(lambda: consumer.arrivals().get(there) is not None)
        until(lambda: producer.failures().get(here) is not None)
        for reason in (consumer.arrivals()[there].error, producer.failures()[here]):
            assert "other/bfloat16" in reason
            assert "tiny/float32" in reason
    finally:
        consumer.close()


def test_a_producer_that_is_not_there_fails_the_request_at_once(producer: Producer) -> None:
    consumer = Consumer(producer.network, settings=TransferSettings())
    try:
        gone = info(producer, consumer)
        request = new_request_id()
        producer.close()
        consumer.relay.expect(request, gone, 4)
        until(lambda: request in consumer.arrivals())
        assert "no process listens" in consumer.arrivals()[request].error
    finally:
        consumer.close()


def test_a_signal_address_that_is_none_fails_the_request(producer: Producer) -> None:
    consumer = Consumer(producer.network, settings=FAST)
    try:
        request = new_request_id()
        consumer.relay.expect(request, msgspec.structs.replace(info(producer, consumer), signal_address="nonsense"), 4)
        until(lambda: request in consumer.arrivals())
        assert "cannot connect" in consumer.arrivals()[request].error
    finally:
        consumer.close()


def test_a_listening_socket_is_no_proof_of_death_and_a_closed_one_is() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        address = f"tcp://127.0.0.1:{listening.getsockname()[1]}"
        assert _probe(address) is False
    assert _probe(address) is True
    assert _probe("tcp://nonsense") is False


def _probe(address: str) -> bool:
    probe = Probe(address)
    try:
        while (refused := probe.refused()) is None:
            time.sleep(0.01)
        return refused
    finally:
        probe.close()
