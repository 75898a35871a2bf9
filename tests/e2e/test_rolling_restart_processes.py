"""Every worker process is replaced in its turn while streams run: none of them fails, and each says what it would say alone."""

from __future__ import annotations

import asyncio
import pathlib
import random
import signal

from chaos_load import Kind, Load, keep_asking, make_requests
from patience import PATIENCE_S
from process_cluster import ProcessCluster, WorkerProcess
from server import is_idle
from tiny_models import tiny_model

NUM_STREAMS = 8
ROLES = ("prefill", "decode")
WORKER_FLAGS = ("--kv-blocks", "256", "--max-batch", "16", "--threads", "1", "--progress", "plain")


async def replace_all(cluster: ProcessCluster, load: Load, clients: list[asyncio.Task[None]]) -> None:
    """A successor first, then SIGTERM: the old worker finishes what it has, and leaves."""
    for old in list(cluster.workers):
        successor = cluster.add(old.role)
        await asyncio.to_thread(cluster.until, lambda: successor.pid in ready(cluster))  # noqa: B023
        old.signal(signal.SIGTERM)
        assert await asyncio.to_thread(old.process.wait, PATIENCE_S) == 0, old.log.read_text()[-2000:]
        await served(load, len(load.outcomes) + NUM_STREAMS, clients)


def ready(cluster: ProcessCluster) -> set[int]:
    return {entry["pid"] for entry in cluster.shown() if entry["state"] == "ready"}


async def served(load: Load, count: int, clients: list[asyncio.Task[None]]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while len(load.outcomes) < count:
            assert not any(client.done() for client in clients)
            await asyncio.sleep(0.05)


async def restart_under_load(cluster: ProcessCluster, load: Load, model: pathlib.Path) -> None:
    requests = make_requests(model, 5, 12)
    over = asyncio.Event()
    clients = [
        asyncio.create_task(keep_asking(cluster.host, cluster.port, requests, load, random.Random(number), over))
        for number in range(NUM_STREAMS)
    ]
    try:
        await served(load, NUM_STREAMS, clients)
        await replace_all(cluster, load, clients)
    finally:
        over.set()
        await asyncio.gather(*clients)


def test_a_rolling_restart_of_worker_processes_fails_no_request(tmp_path: pathlib.Path) -> None:
    model, load = tiny_model("llama"), Load()
    flags = ("--local-prefill-tokens", "16")
    with ProcessCluster(str(model), tmp_path, registration_s=4.0, router_flags=flags, worker_flags=WORKER_FLAGS) as cluster:
        first: list[WorkerProcess] = [cluster.add(role) for role in ROLES]
        cluster.until_ready(len(ROLES))
        asyncio.run(restart_under_load(cluster, load, model))
        wrong = [outcome for outcome in load.outcomes if outcome.kind not in (Kind.COMPLETED, Kind.LEFT)]
        assert not wrong, f"{wrong}\n{cluster.logs()}"
        assert not {worker.pid for worker in first} & ready(cluster)
        cluster.until(lambda: all(is_idle(entry) for entry in cluster.shown()))
