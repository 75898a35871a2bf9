"""Workers that leave, change their role, die, hang and wake up: real processes and real KV transfers, while requests come.

The runner computes nothing, but checks every byte of KV that it would attend to: whoever touches a reused block ends a worker.
Every answer must be that of an undisturbed run, and at the end nobody holds anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import pathlib
import random
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
from patience import PATIENCE_S, eventually
from prepared import Process, popen
from server import is_idle

from kvrelay.discovery.base import Membership
from kvrelay.discovery.embedded import EmbeddedMembership
from kvrelay.discovery.static import StaticMembership
from kvrelay.errors import ConflictError, NotFoundError
from kvrelay.ids import new_router_id
from kvrelay.metrics import Metrics
from kvrelay.router.backend import GenerateRequest
from kvrelay.router.router import Router
from kvrelay.sampling import SamplingParams
from kvrelay.states import Role

SCRIPT = pathlib.Path(__file__).parent / "fake_worker_process.py"
ROOT = SCRIPT.parents[2]
LEASE_S = 2.0  # a shorter one takes workers for hung that only wait for their turn on a busy machine
NEVER_S = 600.0  # a transfer lease that no test outlives: nothing can end by it
NUM_CLIENTS = 6
Entry = dict[str, Any]


class Cluster:
    """A router here, and worker processes."""

    def __init__(self, membership: Membership) -> None:
        self.router = Router(
            membership=membership, metrics=Metrics(), policy="round_robin", registration_s=LEASE_S, model="fake"
        )
        self.registry = membership.address or "static"
        self.processes: dict[int, Process] = {}

    def add(self, role: str, *arguments: str) -> Process:
        flags = [
            f"--registry={self.registry}",
            f"--role={role}",
            f"--registration-s={LEASE_S}",
            f"--transfer-lease-s={NEVER_S}",
        ]
        command = [sys.executable, str(SCRIPT), *flags, "--token-budget=32", "--step-time-s=0.01", *arguments]
        process: Process = popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)})
        self.processes[process.pid] = process
        return process

    @property
    def workers(self) -> list[Entry]:
        return self.router.cluster()["workers"]  # type: ignore[no-any-return]

    def of(self, role: str) -> list[Entry]:
        return [entry for entry in self.workers if entry["role"] == role and entry["state"] == "ready"]

    def at(self, pid: int) -> Entry | None:
        return next((entry for entry in self.workers if entry["pid"] == pid and entry["state"] == "ready"), None)

    def steps_of(self, entry: Entry) -> int:
        return sum(each["steps"] for each in self.workers if each["id"] == entry["id"])

    async def ended(self, process: Process) -> int:
        return await asyncio.to_thread(process.wait, PATIENCE_S)

    async def idle(self) -> None:
        """The leak check."""
        await eventually(lambda: all(map(is_idle, self.workers)))
        assert self.router.cluster()["in_flight"] == 0

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
        self.router.close()


@contextlib.asynccontextmanager
async def cluster_of(*roles: str, arguments: tuple[str, ...] = ()) -> AsyncIterator[Cluster]:
    cluster = Cluster(EmbeddedMembership("tcp://127.0.0.1:*"))
    cluster.router.start()
    try:
        for role in roles:
            cluster.add(role, *arguments)
        async with asyncio.timeout(PATIENCE_S):
            await cluster.router.until_usable(len(roles))
        yield cluster
        await cluster.idle()
    finally:
        cluster.close()


@pytest.fixture(scope="module")
async def shared() -> AsyncIterator[Cluster]:
    """Two of each. What a test takes away, the next one finds replaced."""
    async with cluster_of("prefill", "prefill", "decode", "decode") as cluster:
        yield cluster


@pytest.fixture
async def two_of_each(shared: Cluster) -> AsyncIterator[Cluster]:
    for role in ("prefill", "decode"):
        for _ in range(2 - len(shared.of(role))):
            shared.add(role)
    await eventually(lambda: len(shared.of("prefill")) == len(shared.of("decode")) == 2)
    yield shared
    await shared.idle()


_salts = itertools.count()


def request(number: int, max_tokens: int = 12) -> GenerateRequest:
    """Always the same prompt, but never found in a cache: all of its KV has to be moved each time."""
    draw = random.Random(number)
    prompt = [draw.randrange(1000) for _ in range(draw.randint(60, 400))]
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    salt = str(next(_salts))
    return GenerateRequest(external_id=f"client-{number}", prompt=prompt, params=params, cache_salt=salt)


async def answer(router: Router, number: int) -> list[int]:
    tokens: list[int] = []
    stream = router.submit(request(number))
    async with asyncio.timeout(PATIENCE_S):
        while outputs := await stream.next():
            for output in outputs:
                assert output.position == len(tokens), "a gap, or a token twice"
                tokens += output.tokens
    return tokens


class Load:
    """Clients that ask one thing after another. Every answer is compared with that of the idle cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._over = asyncio.Event()
        self.served = 0

    async def __aenter__(self) -> Load:
        self._expected = [await answer(self._cluster.router, number) for number in range(NUM_CLIENTS)]
        assert all(len(tokens) == 12 for tokens in self._expected)
        self._clients = [asyncio.create_task(self._ask(number)) for number in range(NUM_CLIENTS)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._over.set()
        await asyncio.gather(*self._clients)

    async def _ask(self, number: int) -> None:
        while not self._over.is_set():
            assert await answer(self._cluster.router, number) == self._expected[number]
            self.served += 1

    async def more(self, count: int = 2 * NUM_CLIENTS) -> None:
        """Until so many more were served."""
        wanted = self.served + count
        await eventually(lambda: self.served >= wanted or any(client.done() for client in self._clients))


async def test_workers_change_their_roles_under_load(two_of_each: Cluster) -> None:
    cluster = two_of_each
    async with Load(cluster) as load:
        for role, other in (("prefill", "decode"), ("decode", "prefill")):
            before = cluster.of(role)[0]
            with pytest.raises(ConflictError, match=f"is a {role} worker already"):
                cluster.router.drain(before["id"], Role(role))
            cluster.router.drain(before["id"], Role(other))
            await eventually(lambda: (now := cluster.at(before["pid"])) is not None and now["id"] != before["id"])  # noqa: B023
            after = cluster.at(before["pid"])
            assert after is not None
            assert after["role"] == other
            assert cluster.processes[before["pid"]].poll() is None
            await load.more()
        assert (len(cluster.of("prefill")), len(cluster.of("decode"))) == (2, 2)


async def in_the_middle_of_transfers(cluster: Cluster, entry: Entry) -> None:
    """Until some are open with this worker, and have moved something."""
    moved = {worker["id"]: worker["transfers"]["bytes"] for worker in cluster.workers}

    def moving() -> bool:
        now = next((worker for worker in cluster.workers if worker["id"] == entry["id"]), None)
        assert now is not None
        return now["transfers"]["in_flight"] > 0 and any(
            worker["transfers"]["bytes"] > moved.get(worker["id"], 0) for worker in cluster.workers
        )

    await eventually(moving)


async def hang(cluster: Cluster, load: Load, role: str) -> None:
    entry = cluster.of(role)[0]
    await in_the_middle_of_transfers(cluster, entry)
    os.kill(entry["pid"], signal.SIGSTOP)
    await eventually(lambda: all(each["id"] != entry["id"] for each in cluster.workers))
    await load.more()  # blocks are reused meanwhile
    os.kill(entry["pid"], signal.SIGCONT)
    await eventually(lambda: cluster.at(entry["pid"]) is not None)
    back = cluster.at(entry["pid"])
    assert back is not None
    assert back["id"] != entry["id"]
    assert back["role"] == role
    await load.more()


@pytest.mark.parametrize("role", [pytest.param("prefill", marks=pytest.mark.long), "decode"])
async def test_a_hung_worker_is_replaced_by_others_and_comes_back_as_new(two_of_each: Cluster, role: str) -> None:
    async with Load(two_of_each) as load:
        await hang(two_of_each, load, role)


@pytest.mark.long
async def test_a_hung_worker_whose_peers_memory_it_writes_comes_back_as_new() -> None:
    """As above, where the producer writes: it may wake up in the middle of that."""
    arguments = ("--transfer=nixl",)
    async with cluster_of("prefill", "prefill", "decode", "decode", arguments=arguments) as cluster, Load(cluster) as load:
        for role in ("prefill", "decode"):
            await hang(cluster, load, role)


async def test_a_killed_prefill_worker_fails_its_transfers_at_once(two_of_each: Cluster) -> None:
    """No lease of theirs can have ended: it is the router's word, or the proof of death, that ends them."""
    cluster = two_of_each

    def failed() -> int:
        return sum(entry["transfers"]["failed"] for entry in cluster.of("decode"))

    async with Load(cluster) as load:
        entry, before = cluster.of("prefill")[0], failed()
        await in_the_middle_of_transfers(cluster, entry)
        os.kill(entry["pid"], signal.SIGKILL)
        await eventually(lambda: failed() > before)
        await load.more()


async def test_draining_under_load_loses_nothing(two_of_each: Cluster) -> None:
    cluster = two_of_each
    async with Load(cluster) as load:
        for role in ("prefill", "decode"):
            entry = cluster.of(role)[0]
            order = cluster.router.drain(entry["id"])
            assert (order.role, order.next_role, order.warning) == (Role(role), None, "")
            with pytest.raises(ConflictError, match="draining already"):
                cluster.router.drain(entry["id"])
            assert await cluster.ended(cluster.processes[entry["pid"]]) == 0
            await eventually(lambda gone=entry["id"]: all(each["id"] != gone for each in cluster.workers))  # type: ignore[misc]
            await load.more()
        assert len(cluster.workers) == 2
        order = cluster.router.drain(cluster.of("prefill")[0]["id"])
        assert order.warning == "it is the last prefill worker: decode workers compute every prompt themselves"
        await eventually(lambda: not cluster.of("prefill"))
        await load.more()
        with pytest.raises(NotFoundError):
            cluster.router.drain("decode-nobody")


async def test_a_sigterm_during_a_change_of_role_ends_the_worker() -> None:
    async with cluster_of("decode", "decode") as cluster:
        entry = cluster.of("decode")[0]
        streams = [cluster.router.submit(request(number, max_tokens=80)) for number in range(4)]
        cluster.router.drain(entry["id"], Role.PREFILL)
        cluster.processes[entry["pid"]].send_signal(signal.SIGTERM)
        for stream in streams:
            tokens = 0
            while outputs := await stream.next():
                tokens += sum(len(output.tokens) for output in outputs)
            assert tokens == 80
        assert await cluster.ended(cluster.processes[entry["pid"]]) == 0


async def test_a_worker_told_to_leave_that_hangs_just_ends_when_it_wakes() -> None:
    async with cluster_of("whole", "whole") as cluster:
        entry = cluster.of("whole")[0]
        streams = [cluster.router.submit(request(number, max_tokens=100)) for number in range(4)]
        cluster.router.drain(entry["id"])
        # Between two steps it reads what it was told.
        await eventually(lambda: cluster.steps_of(entry) > entry["steps"] + 2)
        os.kill(entry["pid"], signal.SIGSTOP)
        await eventually(lambda: len(cluster.workers) == 1)
        os.kill(entry["pid"], signal.SIGCONT)
        assert await cluster.ended(cluster.processes[entry["pid"]]) == 0
        for stream in streams:  # the other one has taken them over
            tokens = 0
            while outputs := await stream.next():
                tokens += sum(len(output.tokens) for output in outputs)
            assert tokens == 100


async def test_a_hung_worker_of_a_static_registry_comes_back_as_new() -> None:
    probe = await asyncio.start_server(lambda _reader, _writer: None, "127.0.0.1", 0)
    port = probe.sockets[0].getsockname()[1]
    probe.close()
    address = f"tcp://127.0.0.1:{port}"
    cluster = Cluster(StaticMembership([address], router_id=new_router_id(), registration_s=LEASE_S))
    cluster.router.start()
    try:
        process = cluster.add("whole", f"--worker-port={port}")
        await eventually(lambda: cluster.at(process.pid))
        entry = cluster.at(process.pid)
        assert entry is not None
        process.send_signal(signal.SIGSTOP)
        await eventually(lambda: not cluster.workers)
        process.send_signal(signal.SIGCONT)
        await eventually(lambda: cluster.at(process.pid))
        assert cluster.workers[0]["id"] != entry["id"]
        assert len(await answer(cluster.router, 1)) == 12
        await cluster.idle()
    finally:
        cluster.close()
