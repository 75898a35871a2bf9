"""Several routers on one etcd, with workers in threads: what each sees, and what is left when a router or etcd goes."""

from __future__ import annotations

import asyncio
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest
from etcd_server import EtcdServer, etcd_server
from patience import PATIENCE_S, eventually
from stub_worker import StubWorker, stub_token

from kvrelay.discovery.etcd import EtcdMembership
from kvrelay.metrics import Metrics
from kvrelay.router.backend import GenerateRequest
from kvrelay.router.router import Router
from kvrelay.sampling import SamplingParams

SCRIPT = pathlib.Path(__file__).parent / "router_process.py"
ROOT = SCRIPT.parents[2]
LEASE_S = 1.0


class Cluster:
    """An etcd, two routers, and the workers that a test starts."""

    def __init__(self, server: EtcdServer) -> None:
        self.server = server
        self.metrics = [Metrics(), Metrics()]
        self.routers = [self._new_router(metrics) for metrics in self.metrics]
        self.workers: list[StubWorker] = []

    def _new_router(self, metrics: Metrics) -> Router:
        membership = EtcdMembership(
            self.server.address,
            registration_s=LEASE_S,
            timeout_s=5.0,
            probe_every_s=0.2,
            on_reachable=metrics.registry_up.set,
        )
        router = Router(membership=membership, metrics=metrics, registration_s=LEASE_S, model="stub")
        router.start()
        return router

    def start_worker(self) -> StubWorker:
        worker = StubWorker(self.server.address, registration_s=LEASE_S)
        self.workers.append(worker)
        return worker

    async def add(self) -> StubWorker:
        worker = self.start_worker()
        await eventually(lambda: all(router.num_usable == len(self.workers) for router in self.routers))
        return worker

    def are_up(self) -> list[float | None]:
        return [metrics.registry.get_sample_value("kvrelay_registry_up") for metrics in self.metrics]

    async def close(self) -> None:
        await asyncio.gather(*(asyncio.to_thread(worker.stop) for worker in self.workers))
        for router in self.routers:
            router.close()


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    with etcd_server() as server:
        made = Cluster(server)
        yield made
        await made.close()


async def serves(router: Router, prompt: list[int], count: int = 5) -> None:
    request = GenerateRequest(external_id="client", prompt=prompt, params=SamplingParams(max_tokens=count))
    stream, tokens = router.submit(request), []
    async with asyncio.timeout(PATIENCE_S):
        while outputs := await stream.next():
            tokens += [token for output in outputs for token in output.tokens]
    assert tokens == [stub_token(prompt, 0, position) for position in range(count)]


async def test_every_router_serves_through_every_worker(cluster: Cluster) -> None:
    workers = [await cluster.add() for _ in range(2)]
    for number in range(4):
        await asyncio.gather(*(serves(router, [number]) for router in cluster.routers))
    assert all(worker.engine.submitted for worker in workers)
    await asyncio.to_thread(workers.pop().stop)
    await eventually(lambda: all(router.num_usable == 1 for router in cluster.routers))

    def losses() -> list[float | None]:
        labels = {"role": "whole", "reason": "left"}
        return [each.registry.get_sample_value("kvrelay_worker_losses_total", labels) for each in cluster.metrics]

    await eventually(lambda: losses() == [1.0, 1.0])  # a worker that drains is unusable before it has left
    for router in cluster.routers:
        await serves(router, [9])


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)], ids=["killed", "stopped"]
)
async def test_the_requests_of_a_lost_router_are_aborted_within_its_time_and_the_others_go_on(
    cluster: Cluster, number: signal.Signals
) -> None:
    worker = await cluster.add()
    worker.engine.gate.clear()
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), cluster.server.address, str(LEASE_S)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert await asyncio.to_thread(process.stdout.readline) == b"sent\n"
        await eventually(lambda: len(worker.engine.submitted) == 1)
        process.send_signal(number)
        async with asyncio.timeout(LEASE_S + 2.0):
            await eventually(lambda: worker.engine.aborted == [worker.engine.submitted[0].request_id])
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    worker.engine.gate.set()
    for router in cluster.routers:
        await serves(router, [3])


async def test_requests_go_on_while_etcd_is_killed_and_workers_join_when_it_is_back(cluster: Cluster) -> None:
    await cluster.add()
    assert cluster.are_up() == [1.0, 1.0]
    await asyncio.to_thread(cluster.server.kill)
    await eventually(lambda: cluster.are_up() == [0.0, 0.0])
    late = cluster.start_worker()  # keeps trying
    await asyncio.sleep(1.5 * LEASE_S)
    for router in cluster.routers:
        await serves(router, [4])
    await asyncio.to_thread(cluster.server.start)
    await eventually(lambda: all(router.num_usable == 2 for router in cluster.routers))
    assert cluster.are_up() == [1.0, 1.0]
    for number in range(4):
        await asyncio.gather(*(serves(router, [number]) for router in cluster.routers))
    assert late.engine.submitted
