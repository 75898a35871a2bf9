"""Workers of several ranks as processes: what a client sees, and what is left when a rank dies."""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import urllib.request
from pathlib import Path
from typing import Any

import httpx
import patience
import psutil
import pytest
import torch
from devices import DEVICES, on
from lora_adapters import adapted_model, adapter_folder
from parity import assert_parity, reference_tokens
from patience import until
from process_cluster import ProcessCluster, WorkerProcess
from server import Server, is_idle, serve
from tiny_models import reference_model, tiny_model

PROMPT = list(range(5, 125))
NUM_TOKENS = 12
FLAGS = ("--kv-blocks", "128", "--max-batch", "8", "--threads", "1")
NO_WATCHDOG = ("--watchdog-s", "3600")
devices = pytest.mark.parametrize("device", DEVICES)
REGISTRATION_S = 600.0  # the longest there is; renewed every third of it


@pytest.fixture(autouse=True)
def patience_s(monkeypatch: pytest.MonkeyPatch) -> float:
    """Over before a registration of `REGISTRATION_S` runs out, or a watchdog ends a worker: what is waited for when a rank has
    been killed comes of its worker's notice alone."""
    monkeypatch.setattr(patience, "PATIENCE_S", REGISTRATION_S / 2)
    return patience.PATIENCE_S


def gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def ranks_of(pid: int) -> list[psutil.Process]:
    """The other ranks of the worker with this process id."""
    children = psutil.Process(pid).children(recursive=True)
    return [child for child in children if "kvrelay.runner.ranks.process" in child.cmdline()]


def choices_of(url: str, prompt: list[int], num_tokens: int, **more: object) -> list[list[int]]:
    body = {
        "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **more
    }  # fmt: skip
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=patience.PATIENCE_S) as response:
        return [choice["token_ids"] for choice in json.loads(response.read())["choices"]]


def stream(url: str, prompt: list[int], num_tokens: int, seen: list[int]) -> None:
    """Its tokens, as they come."""
    body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    with httpx.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}, timeout=patience.PATIENCE_S) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                seen += choice.get("token_ids") or []


def tokens_of(url: str, prompt: list[int] = PROMPT, num_tokens: int = NUM_TOKENS, adapter: str | None = None) -> list[int]:
    (tokens,) = choices_of(url, prompt, num_tokens, model=adapter)
    return tokens


def beams_of_transformers(prompt: list[int], num_tokens: int, width: int) -> list[list[int]]:
    found = reference_model("kv2").generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False, num_beams=width,
        num_return_sequences=width, max_new_tokens=num_tokens, min_new_tokens=num_tokens, pad_token_id=0,
    )  # fmt: skip
    return [row[len(prompt) :].tolist() for row in found]


def check(tokens: list[int], prompt: list[int] = PROMPT, num_tokens: int = NUM_TOKENS, adapter: str | None = None) -> None:
    reference = reference_model("kv2") if adapter is None else adapted_model("kv2", adapter)
    assert_parity(tokens, *reference_tokens(reference, prompt, num_tokens), f"ranks, {adapter or 'the base'}")


def check_adapters(url: str, prompt: list[int]) -> None:
    """The base and two adapters, beside each other."""
    models = (None, "all", "queries")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        answers = [pool.submit(tokens_of, url, prompt, NUM_TOKENS, adapter) for adapter in models]
    for adapter, answer in zip(models, answers, strict=True):
        check(answer.result(), prompt, NUM_TOKENS, adapter)


def lora() -> list[str]:
    return [f"--lora={name}={adapter_folder('kv2', name)}" for name in ("all", "queries")]


def workers(server: Server) -> list[dict[str, Any]]:
    shown: list[dict[str, Any]] = server.get("/cluster")["workers"]
    return shown


@devices
def test_one_worker_of_two_ranks_gives_the_tokens_of_transformers_and_leaves_no_process(device: str) -> None:
    """On a card both ranks share it, and the pool is as large as it leaves room for."""
    flags = FLAGS if device == "cpu" else (*FLAGS[2:], "--gpu-memory", "0.2")
    with serve(str(tiny_model("kv2")), "--whole", "1", "--tp", "2", *on(device), *flags, *lora(), fresh=True) as server:
        (worker,) = workers(server)
        started = ranks_of(worker["pid"])
        assert len(started) == 1
        check_adapters(server.url, PROMPT)
        server.idle_workers()
        server.stop()
        until(lambda: all(map(gone, started)))


@devices
def test_blocks_of_all_ranks_are_swapped_and_copied(device: str) -> None:
    """Two of the streams fit, and not three; beams share blocks and copy those that they write."""
    small = ("--kv-blocks", "24", "--swap-blocks", "100", "--max-model-len", "176", *FLAGS[2:])
    with serve(str(tiny_model("kv2")), "--whole", "1", "--tp", "2", *on(device), *small) as server:
        asked = [PROMPT[index : index + 60] for index in range(6)]
        with concurrent.futures.ThreadPoolExecutor() as pool:
            answers = [pool.submit(tokens_of, server.url, prompt, 100) for prompt in asked]
        for prompt, answer in zip(asked, answers, strict=True):
            check(answer.result(), prompt, 100)
        counted = {family.name: sum(sample.value for sample in family.samples) for family in server.metrics()}
        assert counted["kvrelay_worker_host_swapped_in"] > 0
        beams = choices_of(server.url, PROMPT[:37], 12, use_beam_search=True, beam_width=4, n=4)
        assert beams == beams_of_transformers(PROMPT[:37], 12, 4)
        server.idle_workers()


@devices
@pytest.mark.parametrize(
    "degrees", [(2, 1), *(pytest.param(each, marks=pytest.mark.long) for each in ((1, 2), (2, 2)))], ids=str
)
def test_degrees_differ_by_role_and_a_killed_router_leaves_no_rank(device: str, degrees: tuple[int, int]) -> None:
    options = ("--prefill-tp", str(degrees[0]), "--decode-tp", str(degrees[1]), "--local-prefill-tokens", "0")
    with serve(str(tiny_model("kv2")), *options, *on(device), *FLAGS, fresh=True) as server:
        started = [rank for worker in workers(server) for rank in ranks_of(worker["pid"])]
        assert len(started) == sum(degrees) - 2
        check(tokens_of(server.url))
        server.process.kill()
        server.process.wait()
        until(lambda: all(map(gone, started)))


@devices
@pytest.mark.parametrize(("mode", "adapter"), [("write", "all"), ("read", None)])
def test_a_rank_killed_in_mid_transfer_is_one_failure_and_the_request_goes_on_elsewhere(
    device: str, mode: str, adapter: str | None, tmp_path: Path, patience_s: float
) -> None:
    """The prefill worker's second rank stands still, so that the transfer has begun and cannot end; then it is killed."""
    flags = ("--tp", "2", "--token-budget", "32", *on(device), *FLAGS, *NO_WATCHDOG, *lora())
    router = ("--mode", mode, "--local-prefill-tokens", "0")
    with (
        ProcessCluster(
            str(tiny_model("kv2")), tmp_path, registration_s=REGISTRATION_S, router_flags=router, worker_flags=flags
        ) as cluster,
        concurrent.futures.ThreadPoolExecutor() as pool,
    ):
        prefill, decode = cluster.add("prefill"), cluster.add("decode")
        cluster.until_ready(2)
        check_adapters(cluster.url, PROMPT[:50])
        (rank,) = ranks_of(prefill.pid)
        rank.suspend()
        answer = pool.submit(tokens_of, cluster.url, adapter=adapter)
        cluster.until(lambda: entry(cluster, decode)["transfers"]["in_flight"] == 1)
        spare = cluster.add("prefill")
        cluster.until_ready(3)
        os.kill(rank.pid, signal.SIGKILL)
        check(answer.result(patience_s), adapter=adapter)
        prefill.process.wait(patience_s)
        assert gone(rank)
        cluster.until(lambda: is_idle(entry(cluster, decode)) and is_idle(entry(cluster, spare)))
        transfers = entry(cluster, decode)["transfers"]
        assert (transfers["failed"], transfers["done"]) == (1, 4)
        check_adapters(cluster.url, PROMPT[:70])


@devices
def test_streams_go_on_elsewhere_when_a_rank_of_a_decode_worker_that_receives_their_kv_is_killed(
    device: str, tmp_path: Path, patience_s: float
) -> None:
    """Two streams have begun there, and the KV of two others is on its way from a prefill worker, whose second rank stands
    still meanwhile."""
    num_tokens, flags = 100, ("--tp", "2", "--token-budget", "32", *on(device), *FLAGS, *NO_WATCHDOG)
    with (
        ProcessCluster(
            str(tiny_model("kv2")), tmp_path, registration_s=REGISTRATION_S, router_flags=("--local-prefill-tokens", "0"),
            worker_flags=flags,
        ) as cluster,
        concurrent.futures.ThreadPoolExecutor() as pool,
    ):  # fmt: skip
        prefill, decode = cluster.add("prefill"), cluster.add("decode")
        cluster.until_ready(2)
        (computing,), (receiving,) = ranks_of(prefill.pid), ranks_of(decode.pid)
        asked = [PROMPT[index:] for index in range(4)]
        seen: list[list[int]] = [[] for _ in asked]
        streams = [pool.submit(stream, cluster.url, asked[index], num_tokens, seen[index]) for index in (0, 1)]
        cluster.until(lambda: bool(seen[0] and seen[1]))
        computing.suspend()
        streams += [pool.submit(stream, cluster.url, asked[index], num_tokens, seen[index]) for index in (2, 3)]
        cluster.until(lambda: entry(cluster, decode)["transfers"]["in_flight"] == 2)
        receiving.suspend()  # so that nothing there ends before the kill
        spare = cluster.add("decode")
        cluster.until_ready(3)
        receiving.kill()
        decode.process.wait(patience_s)
        computing.resume()
        for answer, prompt, tokens in zip(streams, asked, seen, strict=True):
            answer.result(patience_s)
            check(tokens, prompt, num_tokens)
        assert gone(receiving)
        cluster.until(lambda: is_idle(entry(cluster, prefill)) and is_idle(entry(cluster, spare)))
        assert entry(cluster, prefill)["transfers"]["failed"] == 2


@devices
def test_streams_go_on_elsewhere_when_a_rank_of_their_decode_worker_is_killed(
    device: str, tmp_path: Path, patience_s: float
) -> None:
    num_tokens, flags = 100, ("--tp", "2", *on(device), *FLAGS, *NO_WATCHDOG)
    with (
        ProcessCluster(str(tiny_model("kv2")), tmp_path, registration_s=REGISTRATION_S, worker_flags=flags) as cluster,
        concurrent.futures.ThreadPoolExecutor() as pool,
    ):
        first, second = cluster.add("whole"), cluster.add("whole")
        cluster.until_ready(2)
        asked = [PROMPT[: 20 + index] for index in range(6)]
        (rank,) = ranks_of(first.pid)
        rank.suspend()  # so that those it takes part in cannot end
        answers = [pool.submit(tokens_of, cluster.url, prompt, num_tokens) for prompt in asked]
        cluster.until(lambda: cluster.get("/cluster")["in_flight"] > 0)
        rank.kill()
        for prompt, answer in zip(asked, answers, strict=True):
            check(answer.result(patience_s), prompt, num_tokens)
        first.process.wait(patience_s)
        cluster.until(lambda: is_idle(entry(cluster, second)))


def entry(cluster: ProcessCluster, worker: WorkerProcess) -> dict[str, Any]:
    """As GET /cluster shows this worker."""
    (found,) = [shown for shown in cluster.shown() if shown["pid"] == worker.pid]
    return found
