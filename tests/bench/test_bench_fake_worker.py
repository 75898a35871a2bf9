"""The fake worker as its router sees it: a process of its own, on the real planes."""

from __future__ import annotations

import asyncio
import os
import pathlib
import time
from collections.abc import AsyncIterator

import pytest
import zmq
import zmq.asyncio

from kvrelay.bench.harness.child import Child
from kvrelay.bench.router.fake_worker import FakeWorker
from kvrelay.discovery.embedded import EmbeddedMembership
from kvrelay.errors import BenchError, ConfigError
from kvrelay.ids import new_request_id, new_router_id
from kvrelay.planes.cluster_key import load_key
from kvrelay.sampling import SamplingParams
from kvrelay.states import FinishReason
from kvrelay.wire import PROTOCOL_VERSION
from kvrelay.wire.codec import Decoder, encode
from kvrelay.wire.registry import WorkerRecord
from kvrelay.wire.serving import Abort, Hello, StepOutputs, Submit, ToRouter, Welcome

CORE = min(os.sched_getaffinity(0))


class FakeRouter:
    """Just enough of a router to talk to the worker."""

    def __init__(self, child: Child, address: str) -> None:
        self.child = child
        self._decoder: Decoder[ToRouter] = Decoder(ToRouter)
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(address)

    async def send(self, message: Hello | Submit | Abort) -> None:
        await self._socket.send(encode(message))

    async def receive(self) -> ToRouter:
        return self._decoder.decode(await asyncio.wait_for(self._socket.recv(), 60))

    async def step(self) -> StepOutputs:
        message = await self.receive()
        assert isinstance(message, StepOutputs)
        return message

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(scope="module")
async def shared_router() -> AsyncIterator[FakeRouter]:
    """One worker for all tests."""
    membership = EmbeddedMembership("tcp://127.0.0.1:*")
    joined: asyncio.Future[WorkerRecord] = asyncio.get_running_loop().create_future()
    membership.start(joined.set_result, lambda record: None, lambda worker, loss: None)
    with Child(CORE) as child:
        await asyncio.to_thread(child.keep, FakeWorker, membership.address, "m", [10, 11, 12])
        record = await asyncio.wait_for(joined, 60)
        fake = FakeRouter(child, record.serving_address)
        await fake.send(Hello(version=PROTOCOL_VERSION, router_id=new_router_id()))
        assert isinstance(await fake.receive(), Welcome)
        yield fake
        fake.close()
    membership.close()


@pytest.fixture
def router(shared_router: FakeRouter) -> FakeRouter:
    """As a new one: steps take no time, and no times are left from the test before."""
    shared_router.child.ask(FakeWorker.set_tick, 0.0)
    return shared_router


def submit(max_tokens: int) -> Submit:
    return Submit(request_id=new_request_id(), external_id="x", prompt=[1, 2], params=SamplingParams(max_tokens=max_tokens))


async def test_each_step_gives_each_request_one_token_until_its_limit(router: FakeRouter) -> None:
    first = submit(4)
    await router.send(first)
    outputs = [output for _ in range(4) for output in (await router.step()).outputs]
    assert [output.request_id for output in outputs] == [first.request_id] * 4
    assert [output.tokens for output in outputs] == [[10], [11], [12], [10]]
    assert [output.position for output in outputs] == [0, 1, 2, 3]
    assert [output.finish for output in outputs] == [None, None, None, FinishReason.LENGTH]


async def test_requests_of_one_step_share_one_message(router: FakeRouter) -> None:
    assert router.child.ask(FakeWorker.set_tick, 0.3) == []
    requests = [submit(2), submit(2)]
    for request in requests:
        await router.send(request)
    steps = [await router.step(), await router.step()]
    assert [{output.request_id for output in step.outputs} for step in steps] == [{r.request_id for r in requests}] * 2
    times = router.child.ask(FakeWorker.set_tick, 0.0)
    assert len(times) == 2
    assert all(time_s > 0 for time_s in times)


async def test_an_aborted_request_gets_nothing_more(router: FakeRouter) -> None:
    router.child.ask(FakeWorker.set_tick, 0.3)
    kept, dropped = submit(1), submit(1)
    await router.send(dropped)
    await router.send(Abort(request_ids=[dropped.request_id]))
    await router.send(kept)
    assert [output.request_id for output in (await router.step()).outputs] == [kept.request_id]


def test_a_child_runs_on_its_core_and_raises_here_what_it_raised_there() -> None:
    with Child(CORE) as child:
        assert child.call(os.sched_getaffinity, 0) == {CORE}
        with pytest.raises(ConfigError, match="larger than 4096 bytes"):
            child.call(load_key, __file__)
        assert child.call(os.getpid) == child.pid != os.getpid()
    assert len(os.sched_getaffinity(0)) >= 1


def test_a_child_that_ends_early_is_an_error() -> None:
    with Child(CORE) as child, pytest.raises(BenchError, match="ended early"):
        child.call(os._exit, 3)


def test_a_silent_child_is_an_error_and_is_ended() -> None:
    with Child(CORE, answer_s=0.1) as child, pytest.raises(BenchError, match="did not answer"):
        child.call(time.sleep, 60)
    assert not pathlib.Path(f"/proc/{child.pid}").exists()
