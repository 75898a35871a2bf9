"""The router against a worker that misbehaves: a bare socket that says whatever a test wants."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest
import zmq
import zmq.asyncio
from patience import PATIENCE_S, eventually
from registry_records import make_record

from kvrelay.discovery.base import Loss, OnChanged, OnJoined, OnLeft
from kvrelay.errors import UnavailableError
from kvrelay.ids import RequestId, new_request_id, new_worker_id
from kvrelay.metrics import Metrics
from kvrelay.router.backend import GenerateRequest
from kvrelay.router.failover import RetryRules
from kvrelay.router.peer import difference
from kvrelay.router.router import Router
from kvrelay.sampling import SamplingParams
from kvrelay.states import FinishReason, Role
from kvrelay.wire import PROTOCOL_VERSION
from kvrelay.wire.codec import Decoder, encode
from kvrelay.wire.registry import WorkerLoad, WorkerRecord
from kvrelay.wire.serving import Drain, Hello, Ping, Refused, SequenceOutput, StepOutputs, Submit, ToWorker, Welcome


class GivenMembership:
    """A registry that says what the test says."""

    address = ""

    def start(self, on_joined: OnJoined, on_changed: OnChanged, on_left: OnLeft) -> None:
        self.joined, self.changed, self.left = on_joined, on_changed, on_left

    def close(self) -> None:
        pass


class Scripted:
    """A router, and a worker's socket in the hands of the test."""

    def __init__(self) -> None:
        self.membership = GivenMembership()
        self.metrics = Metrics()
        self.router = Router(membership=self.membership, metrics=self.metrics, registration_s=0.6, rules=RetryRules(wait_s=0.0))
        self.router.start()
        self.socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.socket.setsockopt(zmq.LINGER, 0)
        port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.record = make_record(serving_address=f"tcp://127.0.0.1:{port}")
        self.identity = b""
        self._decoder: Decoder[ToWorker] = Decoder(ToWorker)

    async def receive(self) -> ToWorker:
        async with asyncio.timeout(PATIENCE_S):
            self.identity, frame = await self.socket.recv_multipart()
        return self._decoder.decode(frame)

    async def receive_other_than(self, *kinds: type[msgspec.Struct]) -> ToWorker:
        while isinstance(message := await self.receive(), kinds):
            pass
        return message

    async def send(self, *messages: msgspec.Struct | bytes) -> None:
        for message in messages:
            frame = message if isinstance(message, bytes) else encode(message)
            await self.socket.send_multipart([self.identity, frame])

    async def open(self) -> None:
        self.membership.joined(self.record)
        assert isinstance(await self.receive(), Hello)
        await self.send(self.welcome())
        await eventually(lambda: self.router.ready)

    def welcome(self, **changes: object) -> Welcome:
        return Welcome(version=PROTOCOL_VERSION, worker=msgspec.structs.replace(self.record, **changes))

    def outputs(self, *outputs: SequenceOutput, **changes: object) -> StepOutputs:
        made = StepOutputs(worker_id=self.record.id, step=1, load=WorkerLoad(), outputs=list(outputs))
        return msgspec.structs.replace(made, **changes)

    def malformed(self) -> float:
        value = self.metrics.registry.get_sample_value("kvrelay_malformed_messages_total", {"plane": "serving"})
        return value or 0.0

    def close(self) -> None:
        self.router.close()
        self.socket.close()


@pytest.fixture
async def scripted() -> AsyncIterator[Scripted]:
    made = Scripted()
    yield made
    made.close()


def ask() -> GenerateRequest:
    return GenerateRequest(external_id="client", prompt=[1, 2], params=SamplingParams(max_tokens=2, seed=9), cache_salt="s")


def token(request_id: RequestId, position: int, value: int, *, last: bool = False) -> SequenceOutput:
    return SequenceOutput(request_id, 0, position, [value], FinishReason.LENGTH if last else None)


async def test_a_submit_carries_the_whole_request(scripted: Scripted) -> None:
    await scripted.open()
    stream = scripted.router.submit(ask())
    submit = await scripted.receive_other_than(Ping)
    assert isinstance(submit, Submit)
    assert (submit.request_id, submit.external_id, submit.prompt) == (stream.request_id, "client", [1, 2])
    assert (submit.params.seed, submit.cache_salt) == (9, "s")


def test_workers_that_cannot_replace_each_other_say_why() -> None:
    first = make_record(fingerprint="a")
    assert difference(make_record(fingerprint="a"), first) == ""
    assert difference(make_record(fingerprint="b"), first).startswith("it serves another model")
    said = difference(make_record(fingerprint="a-kv-fp8", kv_dtype="fp8"), first)
    assert said == f"its --kv-dtype is fp8, that of {first.id} is auto"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
async def test_a_worker_may_take_any_role(scripted: Scripted, device: str) -> None:
    scripted.record = msgspec.structs.replace(scripted.record, device=device)
    await scripted.open()
    scripted.router.drain(scripted.record.id, Role.ENCODE)
    assert await scripted.receive_other_than(Ping) == Drain(role=Role.ENCODE)


async def test_nonsense_of_a_worker_is_counted_and_its_requests_go_on(scripted: Scripted) -> None:
    await scripted.open()
    stream = scripted.router.submit(ask())
    await scripted.receive_other_than(Ping)
    draw = random.Random(11)
    nonsense = [b"", b"\xc1", b"\x91" * 9999, msgspec.msgpack.encode({"type": "StepOutputs"})]
    nonsense += [draw.randbytes(draw.randint(1, 200)) for _ in range(200)]
    await scripted.send(*nonsense)
    foreign = scripted.outputs(token(stream.request_id, 0, 666), worker_id=new_worker_id("whole"))
    unknown = scripted.outputs(token(new_request_id(), 0, 666), SequenceOutput(stream.request_id, 99, 0, [666]))
    await scripted.send(foreign, unknown)
    await scripted.send(scripted.outputs(token(stream.request_id, 0, 5), token(stream.request_id, 1, 6, last=True)))
    assert [output.tokens for output in await stream.next()] == [[5], [6]]
    assert scripted.malformed() == len(nonsense) + 1


async def test_repeated_and_early_outputs_come_out_once_and_in_order(scripted: Scripted) -> None:
    await scripted.open()
    stream = scripted.router.submit(ask())
    await scripted.receive_other_than(Ping)
    first, second = token(stream.request_id, 0, 5), token(stream.request_id, 1, 6, last=True)
    await scripted.send(scripted.outputs(second), scripted.outputs(first, first), scripted.outputs(first, second))
    tokens: list[int] = []
    while outputs := await stream.next():
        tokens += [value for output in outputs for value in output.tokens]
    assert tokens == [5, 6]


async def test_a_worker_that_forgot_the_router_fails_its_requests_and_is_asked_again(scripted: Scripted) -> None:
    await scripted.open()
    stream = scripted.router.submit(ask())
    await scripted.send(Refused(reason="who are you?"))
    with pytest.raises(UnavailableError, match="who are you"):
        await stream.next()
    assert not scripted.router.ready
    assert isinstance(await scripted.receive_other_than(Ping, Submit), Hello)
    await scripted.send(scripted.welcome())
    await eventually(lambda: scripted.router.ready)


@pytest.mark.parametrize(
    ("welcome", "problem"),
    [
        (lambda record: Welcome(version=PROTOCOL_VERSION + 1, worker=record), "protocol"),
        (lambda record: Welcome(version=PROTOCOL_VERSION, worker=make_record()), "answers where"),
        (lambda record: Refused(reason="router speaks protocol 1, this worker 2"), "this worker 2"),
    ],
)
async def test_a_worker_that_does_not_fit_is_not_used(
    scripted: Scripted, welcome: Callable[[WorkerRecord], msgspec.Struct], problem: str
) -> None:
    scripted.membership.joined(scripted.record)
    await scripted.receive()
    await scripted.send(welcome(scripted.record))
    await eventually(lambda: problem in scripted.router.cluster()["workers"][0]["problem"])
    with pytest.raises(UnavailableError, match=problem):
        scripted.router.submit(ask())


async def test_an_address_that_is_none_does_not_hurt(scripted: Scripted) -> None:
    scripted.membership.joined(make_record(serving_address="tcp://nowhere at all:::"))
    assert scripted.router.cluster()["workers"] == []
    await scripted.open()


async def test_pings_show_that_an_idle_router_lives(scripted: Scripted) -> None:
    await scripted.open()
    for _ in range(3):
        assert isinstance(await scripted.receive(), Ping)


async def test_a_worker_that_left_fails_what_was_open_and_says_nothing_more(scripted: Scripted) -> None:
    await scripted.open()
    stream = scripted.router.submit(ask())
    scripted.membership.left(scripted.record.id, Loss.EXPIRED)
    with pytest.raises(UnavailableError, match="did not renew its registration"):
        await stream.next()
    assert scripted.router.cluster()["workers"] == []
    scripted.membership.joined(scripted.record)
    await scripted.receive_other_than(Ping, Submit)
    await scripted.send(scripted.welcome(), scripted.outputs(token(stream.request_id, 0, 5)))
    await eventually(lambda: scripted.router.ready)
