"""Whole clusters with a cluster key: everything works, and a process without the key has no part in it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
import zmq
from patience import PATIENCE_S, eventually
from prometheus_client.parser import text_string_to_metric_families
from server import serve
from tiny_models import tiny_model

from kvrelay import LLM, SamplingParams
from kvrelay.config import ClusterOptions
from kvrelay.discovery.base import router_record
from kvrelay.discovery.choose import open_membership
from kvrelay.ids import new_router_id
from kvrelay.metrics import Metrics
from kvrelay.planes import curve as plane
from kvrelay.planes.cluster_key import derive, load_key, write_new_key
from kvrelay.router.backend import GenerateRequest
from kvrelay.router.router import Router
from kvrelay.states import Role

FAKE_WORKER = pathlib.Path(__file__).parent / "worker" / "fake_worker_process.py"
SMALL: dict[str, Any] = {"kv_blocks": 64, "max_batch": 8, "threads": 1}


@pytest.fixture
def key(tmp_path: pathlib.Path) -> str:
    file = tmp_path / "cluster.key"
    write_new_key(file)
    return str(file)


@pytest.fixture(autouse=True)
def _forget_the_key() -> Iterator[None]:
    yield
    plane.use_key(None)


@pytest.fixture
async def router(key: str) -> AsyncIterator[tuple[Router, str]]:
    """In this process, with the key, and the address of its registry."""
    plane.use_key(load_key(key))
    metrics = Metrics()
    membership, _ = open_membership(ClusterOptions(), router_record(new_router_id()), metrics, "tcp://127.0.0.1:*")
    router = Router(membership=membership, metrics=metrics, registration_s=2.0, local_prefill_tokens=0)
    router.start()
    yield router, membership.address
    router.close()


async def test_processes_need_the_key_to_join_and_hand_over(
    router: tuple[Router, str], key: str, tmp_path: pathlib.Path
) -> None:
    """Strangers first: a worker without a key and one with another. Then a prefill and a decode worker of ours."""
    served, registry = router
    wrong = tmp_path / "wrong.key"
    write_new_key(wrong)
    processes = [worker_process(registry, "", "--role=prefill"), worker_process(registry, str(wrong), "--role=decode")]
    try:
        for stranger in processes:
            await asyncio.to_thread(_until_it_says, stranger, "no registry answers")
        assert served.cluster()["workers"] == []
        assert sum(_refused(served, "kvrelay_refused_peers").values()) >= 2
        members = [worker_process(registry, key, f"--role={role}") for role in ("prefill", "decode")]
        processes += members
        async with asyncio.timeout(PATIENCE_S):
            await served.until_usable(2)
        assert {worker["pid"] for worker in served.cluster()["workers"]} == {member.pid for member in members}
        assert await _ask(served) == await _ask(served)
        assert set(_refused(served, "kvrelay_worker_refused_peers").values()) == {0.0}
        knocked = next(peer for peer in served._peers.values() if peer.record.role is Role.DECODE)
        with plane.keyed(None), contextlib.ExitStack() as strangers:

            def is_counted_by_now() -> bool:
                """Knocks once more: many a stranger leaves before the worker has read its greeting, and does not return."""
                strangers.enter_context(plane.connecting(zmq.DEALER)).connect(knocked.record.serving_address)
                return _refused(served, "kvrelay_worker_refused_peers")[knocked.id] >= 1

            await eventually(is_counted_by_now)
        others = _refused(served, "kvrelay_worker_refused_peers").items()
        assert [value for worker, value in others if worker != knocked.id] == [0.0]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _refused(router: Router, name: str) -> dict[str, float]:
    """By worker, if it is a metric of workers, as a scraper reads it."""
    families = {family.name: family for family in text_string_to_metric_families(router._metrics.render().decode())}
    return {sample.labels.get("worker", ""): sample.value for sample in families[name].samples}


async def _ask(router: Router) -> list[int]:
    params = SamplingParams(max_tokens=8, temperature=0.0)
    stream = router.submit(GenerateRequest(external_id="client", prompt=list(range(3, 90)), params=params))
    assert stream.transfer_id is not None
    tokens: list[int] = []
    async with asyncio.timeout(PATIENCE_S):
        while outputs := await stream.next():
            tokens += [token for output in outputs for token in output.tokens]
    assert len(tokens) == 8
    return tokens


def worker_process(registry: str, key: str, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(FAKE_WORKER.parents[2]), "KVRELAY_CLUSTER_KEY": key}
    command = [sys.executable, str(FAKE_WORKER), f"--registry={registry}", *arguments]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def _until_it_says(process: subprocess.Popen[str], words: str) -> None:
    assert process.stderr is not None
    assert any(words in line for line in process.stderr), "it ended"


@pytest.mark.long
def test_serve_hands_the_key_to_its_workers(key: str) -> None:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    with serve(str(tiny_model("llama")), *flags, "--local-prefill-tokens=0", "--cluster-key", key) as server:
        answer = httpx.post(server.url + "/v1/completions", json={"prompt": "The quick", "max_tokens": 6}, timeout=PATIENCE_S)
        assert answer.status_code == 200
        assert answer.headers["x-kvrelay-prefill"].startswith("prefill-")
        assert answer.headers["x-kvrelay-transfer-id"].startswith("xfer-")


def test_a_local_cluster_has_its_own_key(key: str) -> None:
    """Whatever the process around it belongs to."""
    other = derive(b"o" * 32)
    plane.use_key(other)
    with LLM(str(tiny_model("llama")), whole=1, cluster_key=key, progress=False, **SMALL) as llm:
        (answer,) = llm.generate(["The quick"], SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
        assert len(answer.outputs[0].token_ids) == 4
    assert plane.current_key() is other
