"""Peers of protocol 2 and 3 work together. What version 2 says was recorded from its own code (data/protocol_2/README.md).

The recorded peers here are scripts: they say what was recorded, byte for byte, but for the ids and ports of this run.
"""

from __future__ import annotations

import asyncio
import json
import pathlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from registry_records import make_record

from kvrelay.config import EngineOptions
from kvrelay.discovery.embedded import EmbeddedMembership
from kvrelay.discovery.static import StaticMembership
from kvrelay.engine.engine import Engine
from kvrelay.ids import WorkerId, new_kept_id, new_request_id, new_router_id, new_worker_id
from kvrelay.metrics import Metrics
from kvrelay.router.backend import GenerateRequest
from kvrelay.router.link import WorkerLink
from kvrelay.router.router import Router
from kvrelay.runner.fake import FakeRunner
from kvrelay.sampling import BeamSearch, SamplingParams
from kvrelay.wire import OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION, agreed, speaks
from kvrelay.wire.codec import Decoder, encode
from kvrelay.wire.registry import FromRegistry, Register, Registered, ToRegistry, WorkerRecord
from kvrelay.wire.serving import (
    AskKept,
    Drain,
    Hello,
    Image,
    Keep,
    KeptTold,
    PeerLost,
    Ping,
    ReleaseKept,
    Resumed,
    StepOutputs,
    Submit,
    ToRouter,
    ToWorker,
    Welcome,
)
from kvrelay.worker.serving import ServingLoop

FOLDER = pathlib.Path(__file__).parent / "data" / "protocol_2"
MEANINGS: dict[str, Any] = json.loads((FOLDER / "meanings.json").read_text())
PATIENCE_S = 10.0
PROMPT = list(range(1, 20))
PARAMS = SamplingParams(max_tokens=4, temperature=0.0, n=2, logprobs=2, seed=5)

to_registry: Decoder[ToRegistry] = Decoder(ToRegistry)
from_registry: Decoder[FromRegistry] = Decoder(FromRegistry)
to_worker: Decoder[ToWorker] = Decoder(ToWorker)
to_router: Decoder[ToRouter] = Decoder(ToRouter)
READERS: dict[tuple[str, str], list[Callable[[bytes], Any]]] = {
    ("registry", "worker"): [to_registry.decode],
    ("registry", "registry"): [from_registry.decode],
    ("serving", "router"): [to_worker.decode],
    ("serving", "worker"): [to_router.decode],
}


def recorded(name: str) -> bytes:
    return (FOLDER / f"{name}.bin").read_bytes()


def replaced(frame: bytes, old: str, new: str) -> bytes:
    """Ids and addresses of the recording, exchanged for those of this run. Lengths are part of the encoding."""
    assert len(old) == len(new)
    assert old.encode() in frame
    return frame.replace(old.encode(), new.encode())


def plain(message: msgspec.Struct) -> Any:
    """As `meanings.json` has it."""
    made = msgspec.to_builtins(message, builtin_types=(bytes,))
    return json.loads(json.dumps(made, default=lambda data: {"bytes": data.hex()}))


def is_unsaid(value: Any) -> bool:
    """A default; of a struct that is new, nothing but defaults."""
    return all(map(is_unsaid, value.values())) if isinstance(value, dict) else not value


def assert_means(today: Any, then: Any) -> None:
    """Equal in all that version 2 knew; what it did not know has its default."""
    if isinstance(then, dict):
        assert then.keys() <= today.keys()
        for key, value in today.items():
            if key in then:
                assert_means(value, then[key])
            else:
                assert is_unsaid(value), f"{key} is {value!r} although nobody said so"
    elif isinstance(then, list):
        assert len(then) <= len(today)
        assert not any(today[len(then) :])
        for one, other in zip(today, then, strict=False):
            assert_means(one, other)
    else:
        assert today == then


@pytest.mark.parametrize("name", sorted(MEANINGS))
def test_every_recorded_frame_still_means_the_same(name: str) -> None:
    plane, sender, _ = name.removeprefix("kinds/").split(".") if name.startswith("kinds/") else ("", *name.split(".")[1:])
    if not plane:
        plane = "registry" if name.split(".")[-1] in ("Register", "Registered", "Renew", "Leave") else "serving"
    for read in READERS[plane, sender]:
        assert_means(plain(read(recorded(name))), MEANINGS[name])


def test_two_versions_that_follow_each_other_are_spoken() -> None:
    assert PROTOCOL_VERSION - OLDEST_PROTOCOL_VERSION == 1
    assert [version for version in range(9) if speaks(version)] == [2, 3, 4]  # the next one speaks ours
    assert [agreed(version) for version in (2, 3, 4)] == [2, 3, 3]


# A worker of version 2


class RecordedWorker:
    """Says what the worker of version 2 said, through sockets of its own."""

    def __init__(self, registry: str = "") -> None:
        context = zmq.asyncio.Context.instance()
        self.serving = context.socket(zmq.ROUTER)
        self.serving.setsockopt(zmq.LINGER, 0)
        self.port = self.serving.bind_to_random_port("tcp://127.0.0.1", min_port=30000, max_port=60000)
        self._registry = context.socket(zmq.DEALER)
        self._registry.setsockopt(zmq.LINGER, 0)
        if registry:
            self._registry.connect(registry)
        record: Any = MEANINGS["session/00.worker.Register"]["record"]
        self.id = WorkerId(record["id"])
        self._address = record["serving_address"]
        self.router = b""

    async def ask_registry(self, name: str) -> bytes:
        frame = recorded(name)
        if self._address.encode() in frame:
            frame = replaced(frame, self._address, f"tcp://127.0.0.1:{self.port}")
        await self._registry.send(frame)
        async with asyncio.timeout(PATIENCE_S):
            return await self._registry.recv()

    async def hear(self) -> bytes:
        """The next message of a router that is no ping."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                self.router, frame = await self.serving.recv_multipart()
                if not isinstance(to_worker.decode(frame), Ping):
                    return bytes(frame)

    async def say(self, frame: bytes) -> None:
        await self.serving.send_multipart([self.router, frame])

    def close(self) -> None:
        self.serving.close()
        self._registry.close()


@pytest.fixture
async def served() -> AsyncIterator[tuple[Router, RecordedWorker]]:
    membership = EmbeddedMembership("tcp://127.0.0.1:*")
    router = Router(membership=membership, metrics=Metrics(), lease_s=3.0, model="fake")
    router.start()
    worker = RecordedWorker(membership.address)
    yield router, worker
    worker.close()
    router.close()


def keys_of(frame: bytes) -> set[str]:
    return set(msgspec.msgpack.decode(frame))


async def test_a_worker_of_version_2_joins_is_renewed_and_leaves(served: tuple[Router, RecordedWorker]) -> None:
    router, worker = served
    assert await worker.ask_registry("session/00.worker.Register") == recorded("session/01.registry.Registered")
    assert [entry["id"] for entry in router.cluster()["workers"]] == [worker.id]
    assert await worker.ask_registry("session/10.worker.Renew") == recorded("session/11.registry.Registered")
    assert await worker.ask_registry("session/12.worker.Leave") == recorded("session/13.registry.Registered")
    assert router.cluster()["workers"] == []


async def test_a_worker_of_version_2_serves_a_request(served: tuple[Router, RecordedWorker]) -> None:
    router, worker = served
    await worker.ask_registry("session/00.worker.Register")
    hello = await worker.hear()
    assert keys_of(hello) == keys_of(recorded("session/02.router.Hello"))
    assert to_worker.decode(hello).version == 2  # type: ignore[union-attr]
    await worker.say(recorded("session/03.worker.Welcome"))
    async with asyncio.timeout(PATIENCE_S):
        await router.until_usable(1)
    stream = router.submit(GenerateRequest(external_id="client", prompt=PROMPT, params=PARAMS))
    submit = await worker.hear()
    then = MEANINGS["session/04.router.Submit"]
    assert keys_of(submit) <= {*then, "type"}, "a word that version 2 does not know"
    assert_means(plain(to_worker.decode(submit)), {**then, "request_id": stream.request_id})
    for number in range(5, 9):
        await worker.say(replaced(recorded(f"session/{number:02d}.worker.StepOutputs"), then["request_id"], stream.request_id))
    tokens: dict[int, list[int]] = {}
    async with asyncio.timeout(PATIENCE_S):
        while outputs := await stream.next():
            for output in outputs:
                tokens.setdefault(output.sample, []).extend(output.tokens)
                assert output.logprobs is not None
    assert tokens == recorded_tokens()
    assert router.cluster()["in_flight"] == 0


def recorded_tokens() -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {0: [], 1: []}
    for number in range(5, 9):
        step = to_router.decode(recorded(f"session/{number:02d}.worker.StepOutputs"))
        assert isinstance(step, StepOutputs)
        for output in step.outputs:
            tokens[output.sample] += output.tokens
    return tokens


class Owner:
    """Of a link."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()

    def link_opened(self, record: WorkerRecord) -> None:
        self.opened.set()

    def link_broken(self, reason: str) -> None:
        self.opened.clear()

    def link_outputs(self, outputs: StepOutputs) -> None:
        raise AssertionError("nothing was asked for")

    def link_told(self, told: KeptTold) -> None:
        raise AssertionError(f"told of leases: {told}")

    def link_malformed(self, reason: str) -> None:
        raise AssertionError(reason)


@pytest.mark.parametrize("version", [2, 3])
async def test_a_worker_hears_nothing_that_its_version_does_not_know(version: int) -> None:
    worker, owner = RecordedWorker(), Owner()
    record = make_record(version=version, serving_address=f"tcp://127.0.0.1:{worker.port}")
    link = WorkerLink(record, owner, router_id=new_router_id(), lease_s=30.0)
    assert to_worker.decode(await worker.hear()).version == version  # type: ignore[union-attr]
    await worker.say(encode(Welcome(version=version, worker=record)))
    async with asyncio.timeout(PATIENCE_S):
        await owner.opened.wait()
    plain_one = Submit(request_id=new_request_id(), external_id="", prompt=[1], params=SamplingParams())
    known = [PeerLost(worker_id=new_worker_id("decode")), Drain(), msgspec.structs.replace(plain_one, resume=[Resumed(0, [5])])]
    lease = new_kept_id()
    news = [
        ReleaseKept(kept_ids=[lease]),
        AskKept(handle=lease, owner=""),
        msgspec.structs.replace(plain_one, keep=Keep([lease], 9.0)),
        msgspec.structs.replace(plain_one, inherit=lease),
        msgspec.structs.replace(plain_one, images=[Image(digest="", start=0, num_tokens=1, grid=(1, 1, 1))]),
        msgspec.structs.replace(plain_one, params=SamplingParams(beam=BeamSearch(width=2))),
    ]
    assert [link.send(message) for message in known] == [True] * 3
    assert [link.send(message) for message in news] == [version == 3] * 6
    assert link.send(plain_one)
    expected = [*known, *(news if version == 3 else []), plain_one]
    assert [to_worker.decode(await worker.hear()) for _ in expected] == expected
    link.close()
    worker.close()


async def test_a_worker_of_version_2_that_was_named_answers_our_hello_in_its_version() -> None:
    worker = RecordedWorker()
    joined: asyncio.Future[WorkerRecord] = asyncio.get_running_loop().create_future()
    membership = StaticMembership([f"tcp://127.0.0.1:{worker.port}"], router_id=new_router_id(), lease_s=30.0)
    membership.start(joined.set_result, lambda record: None, lambda worker_id, loss: None)
    assert to_worker.decode(await worker.hear()).version == 3  # type: ignore[union-attr]
    await worker.say(recorded("session/03.worker.Welcome"))
    async with asyncio.timeout(PATIENCE_S):
        assert (await joined).version == 2
    membership.close()
    worker.close()


# A router of version 2


class RecordedRouter:
    """Says what the router of version 2 said, to a worker of today."""

    def __init__(self, address: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IDENTITY, MEANINGS["session/02.router.Hello"]["router_id"].encode())
        self._socket.connect(address)

    def say(self, frame: bytes) -> None:
        self._socket.send(frame)

    def hear(self) -> bytes:
        assert self._socket.poll(PATIENCE_S * 1000), "no answer"
        return self._socket.recv()

    def hear_step(self) -> StepOutputs:
        step = to_router.decode(self.hear())
        assert isinstance(step, StepOutputs)
        return step

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def loop() -> Iterator[ServingLoop]:
    """A worker as the recorded one was, of today's code."""
    worker_id = new_worker_id("whole")
    runner = FakeRunner(num_blocks=64, vocab_size=1000, block_size=16)
    engine = Engine(
        options=EngineOptions(check_invariants=True),
        runner=runner,
        worker_id=worker_id,
        eos_token_ids=frozenset(),
        max_model_len=runner.max_model_len,
        vocab_size=1000,
        cache_seed="fake",
    )
    made = ServingLoop(engine, host="127.0.0.1", port=0)
    made.record = make_record(id=worker_id, serving_address=made.address)
    thread = threading.Thread(target=lambda: made.run(on_draining=lambda: None), daemon=True)
    thread.start()
    yield made
    made.stop_asked = True
    made.wake()
    thread.join(PATIENCE_S)
    assert made.num_open == 0
    made.close()
    engine.close()


def test_a_router_of_version_2_is_served(loop: ServingLoop) -> None:
    router = RecordedRouter(loop.address)
    router.say(recorded("session/02.router.Hello"))
    welcome = to_router.decode(router.hear())
    assert isinstance(welcome, Welcome)
    assert welcome.version == 2
    router.say(recorded("session/04.router.Submit"))
    router.say(recorded("session/09.router.Ping"))
    tokens: dict[int, list[int]] = {0: [], 1: []}
    finished: set[int] = set()
    while finished != {0, 1}:
        for output in router.hear_step().outputs:
            assert output.request_id == MEANINGS["session/04.router.Submit"]["request_id"]
            tokens[output.sample] += output.tokens
            if output.finish is not None:
                finished.add(output.sample)
    assert tokens == recorded_tokens()
    router.close()


@pytest.mark.parametrize("end", ["Abort", "Finish"])
def test_a_router_of_version_2_ends_a_request(loop: ServingLoop, end: str) -> None:
    router = RecordedRouter(loop.address)
    router.say(recorded("session/02.router.Hello"))
    router.hear()
    submit = to_worker.decode(recorded("session/04.router.Submit"))
    assert isinstance(submit, Submit)
    router.say(encode(msgspec.structs.replace(submit, params=SamplingParams(max_tokens=900, temperature=0.0))))
    while not router.hear_step().outputs:
        pass
    then = MEANINGS[f"kinds/serving.router.{end}"]
    known = then["request_id"] if end == "Finish" else then["request_ids"][0]
    router.say(replaced(recorded(f"kinds/serving.router.{end}"), known, submit.request_id))
    while (load := router.hear_step().load).running or load.blocks.in_use:
        pass
    router.close()


def test_a_router_that_is_two_versions_away_is_refused(loop: ServingLoop) -> None:
    router = RecordedRouter(loop.address)
    for version in (0, PROTOCOL_VERSION + 2):
        router.say(encode(Hello(version=version, router_id=new_router_id())))
        assert f"protocol {version}" in to_router.decode(router.hear()).reason  # type: ignore[union-attr]
    router.say(encode(Hello(version=PROTOCOL_VERSION + 1, router_id=new_router_id())))
    assert to_router.decode(router.hear()).version == PROTOCOL_VERSION  # type: ignore[union-attr]
    router.close()


# The registry


async def test_the_registry_answers_each_worker_in_its_own_version() -> None:
    membership = EmbeddedMembership("tcp://127.0.0.1:*")
    membership.start(lambda record: None, lambda record: None, lambda worker_id, loss: None)
    for version, answered in ((2, 2), (3, 3), (4, 3)):
        register = Register(record=make_record(version=version), ttl_s=9.0)
        assert membership._answer([encode(register)]) == Registered(version=answered)
    membership.close()
