"""A real worker process, with the real engine around a runner that computes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator

import pytest
import zmq
from patience import PATIENCE_S, eventually
from prepared import Process, popen
from prometheus_client.parser import text_string_to_metric_families

from kvrelay.discovery.embedded import EmbeddedMembership
from kvrelay.errors import ConfigError, UnavailableError
from kvrelay.metrics import Metrics
from kvrelay.planes.curve import connecting, listening
from kvrelay.router.backend import GenerateRequest
from kvrelay.router.failover import RetryRules
from kvrelay.router.router import Router
from kvrelay.router.stream import RequestStream
from kvrelay.sampling import SamplingParams

SCRIPT = pathlib.Path(__file__).parent / "fake_worker_process.py"
ROOT = SCRIPT.parents[2]


@pytest.fixture
async def served() -> AsyncIterator[tuple[Router, str]]:
    membership = EmbeddedMembership("tcp://127.0.0.1:*")
    router = Router(membership=membership, metrics=Metrics(), registration_s=1.0, rules=RetryRules(wait_s=0.2))
    router.start()
    yield router, membership.address
    router.close()


@contextlib.contextmanager
def worker_process(registry: str, *arguments: str, pass_fds: tuple[int, ...] = ()) -> Iterator[Process]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(SCRIPT), f"--registry={registry}", *arguments]
    process: Process = popen(command, env=environment, pass_fds=pass_fds)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def until_ready(router: Router) -> None:
    async with asyncio.timeout(PATIENCE_S):
        await router.until_usable(1)


async def until_ended(process: Process) -> int:
    return await asyncio.to_thread(process.wait, PATIENCE_S)


def ask(prompt: list[int], max_tokens: int = 8) -> GenerateRequest:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return GenerateRequest(external_id="client", prompt=prompt, params=params)


async def tokens_of(stream: RequestStream) -> list[int]:
    tokens: list[int] = []
    async with asyncio.timeout(PATIENCE_S):
        while outputs := await stream.next():
            for output in outputs:
                tokens += output.tokens
    return tokens


async def test_streams_equal_their_solo_runs_and_nothing_leaks(served: tuple[Router, str]) -> None:
    router, registry = served
    with worker_process(registry):
        await until_ready(router)
        prompts = [[number, 7, number % 3] * 9 for number in range(24)]
        alone = [await tokens_of(router.submit(ask(prompt))) for prompt in prompts]
        streams = [router.submit(ask(prompt)) for prompt in prompts]
        gone = [router.submit(ask(prompt, max_tokens=500)) for prompt in prompts]
        for stream in gone:
            stream.abort()
        assert list(await asyncio.gather(*map(tokens_of, streams))) == alone
        async with asyncio.timeout(PATIENCE_S):
            while router.cluster()["workers"][0]["blocks"]["in_use"]:
                await asyncio.sleep(0.01)


async def test_sigterm_finishes_what_is_open_and_leaves(served: tuple[Router, str]) -> None:
    router, registry = served
    with worker_process(registry) as process:
        await until_ready(router)
        stream = router.submit(ask([1, 2, 3], max_tokens=300))
        first = await stream.next()
        process.send_signal(signal.SIGTERM)
        assert sum(len(output.tokens) for output in first) + len(await tokens_of(stream)) == 300
        assert await until_ended(process) == 0
        async with asyncio.timeout(PATIENCE_S):
            while router.cluster()["workers"]:
                await asyncio.sleep(0.01)


async def test_a_second_sigterm_does_not_wait(served: tuple[Router, str]) -> None:
    router, registry = served
    with worker_process(registry) as process:
        await until_ready(router)
        stream = router.submit(ask([1, 2, 3], max_tokens=900))
        await stream.next()
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_S):
            while router.ready:
                await asyncio.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        with pytest.raises(UnavailableError):
            await tokens_of(stream)
        assert await until_ended(process) == 0


async def test_a_killed_worker_fails_its_requests(served: tuple[Router, str]) -> None:
    router, registry = served
    with worker_process(registry) as process:
        await until_ready(router)
        stream = router.submit(ask([1, 2, 3], max_tokens=900))
        await stream.next()
        process.kill()
        with pytest.raises(UnavailableError, match="lost"):
            await tokens_of(stream)


async def test_a_worker_ends_with_its_launcher(served: tuple[Router, str]) -> None:
    router, registry = served
    ours, theirs = socket.socketpair()
    with worker_process(registry, f"--launcher-fd={theirs.fileno()}", pass_fds=(theirs.fileno(),)) as process:
        theirs.close()
        await until_ready(router)
        process.send_signal(signal.SIGINT)  # Ctrl-C is the launcher's to handle
        assert await tokens_of(router.submit(ask([5])))
        ours.close()
        assert await until_ended(process) == 1


async def test_a_worker_waits_for_a_registry_that_comes_later() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    with worker_process(address) as process:
        await asyncio.sleep(1.5)
        assert process.poll() is None
        router = Router(membership=EmbeddedMembership(address), metrics=Metrics(), registration_s=1.0)
        router.start()
        await until_ready(router)
        router.close()


def counted(router: Router, name: str, **labels: str) -> float | None:
    """Of the one worker, as a scraper reads it."""
    page = router._metrics.render().decode()
    families = {family.name: family for family in text_string_to_metric_families(page)}
    values = [sample.value for sample in families[name].samples if labels.items() <= sample.labels.items()]
    return values[0] if values else None


async def test_what_a_worker_cannot_understand_is_exported_by_plane(served: tuple[Router, str]) -> None:
    router, registry = served
    with worker_process(registry), connecting(zmq.DEALER) as stranger, connecting(zmq.DEALER) as subscriber:
        await until_ready(router)
        assert counted(router, "kvrelay_worker_malformed_messages", plane="serving") == 0
        (peer,) = router._peers.values()
        stranger.connect(peer.record.serving_address)
        subscriber.connect(peer.record.replay_address)
        for talker, times in ((stranger, 3), (subscriber, 2)):
            for _ in range(times):
                talker.send(b"\xc1")
        await eventually(lambda: counted(router, "kvrelay_worker_malformed_messages", plane="serving") == 3)
        await eventually(lambda: counted(router, "kvrelay_worker_malformed_messages", plane="events") == 2)


async def until_bound(address: str) -> EmbeddedMembership:
    """ZMQ closes a socket a little later than it is told to."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with contextlib.suppress(ConfigError):
                return EmbeddedMembership(address)
            await asyncio.sleep(0.01)


async def test_attempts_at_a_registry_that_does_not_answer_are_exported_once_it_does() -> None:
    with listening(zmq.ROUTER) as mute:
        address = f"tcp://127.0.0.1:{mute.bind_to_random_port('tcp://127.0.0.1')}"
        with worker_process(address):
            for _ in range(3):  # the second and the third, since the one before got no answer
                await asyncio.to_thread(mute.recv_multipart)
            mute.close()
            membership = await until_bound(address)
            router = Router(membership=membership, metrics=Metrics(), registration_s=1.0)
            router.start()
            await until_ready(router)
            await eventually(lambda: (counted(router, "kvrelay_worker_registry_retries") or 0) >= 2)
            router.close()
