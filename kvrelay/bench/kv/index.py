"""What a stopped context index costs a stream: nothing, or the design is wrong.

kvrelay serve --prefill 1 --decode 1 --context-index ...   with pools so small that every request pushes others out
one stream is timed, token by token; beside it others come and go, each with an id that the index has to be told
round by round the index works, or is stopped (SIGSTOP): the same load, in turn

The index is a stand-in that knows nothing, or ContextPilot's own server (`--contextpilot PYTHON`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
from rich.console import Console

from kvrelay.bench.harness.child import Child
from kvrelay.bench.harness.report import Target, median_ratio
from kvrelay.bench.harness.scenario import Part, Results
from kvrelay.bench.harness.server import HOST, Server, free_port, serve, serve_app
from kvrelay.bench.harness.workload import draw, traffic
from kvrelay.bench.kv.scheduler import KVBench
from kvrelay.errors import BenchError

STREAM_TOKENS = 100
_PROMPT_TOKENS = 120
_OTHERS = 2  # requests at a time beside the stream
_INDEX_START_S = 60.0
_METRIC = "kvrelay_eviction_sync_requests_total"
_SETTINGS = {"kv-blocks": 96, "max-model-len": 512, "local-prefill-tokens": 0, "served-model-name": "bench"}


def measure(options: KVBench, console: Console) -> Results:
    with open_index(options.contextpilot) as (pid, url), console.status("starting a prefill and a decode worker"):
        settings = {**_SETTINGS, "context-index": url}
        with serve(options.local_model(), settings, prefill=1, decode=1, log="error") as server:
            figures = asyncio.run(_measure(server, pid, options.rounds, console))
    return figures | {"index_is_contextpilot": float(bool(options.contextpilot))}


@contextlib.contextmanager
def open_index(contextpilot: str) -> Iterator[tuple[int, str]]:
    """Its process, and its URL."""
    if not contextpilot:
        with Child() as index:
            yield index.pid, f"http://{HOST}:{index.call(serve_app, 'kvrelay.bench.kv.index_server:APP')}"
        return
    port = free_port()
    flags = ["--host", HOST, "--port", str(port), "--infer-api-url", f"http://{HOST}:9"]
    with open_process([contextpilot, "-m", "contextpilot.server.http_server", *flags]) as pid:
        deadline = time.monotonic() + _INDEX_START_S
        while not _answers(port):
            if time.monotonic() > deadline:
                raise BenchError(f"--contextpilot: {contextpilot} has no ContextPilot whose server starts")
            time.sleep(0.1)
        yield pid, f"http://{HOST}:{port}"


@contextlib.contextmanager
def open_process(command: list[str]) -> Iterator[int]:
    try:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, process_group=0)
    except OSError as error:
        raise BenchError(f"{command[0]} does not run: {error}") from error
    try:
        yield process.pid
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _answers(port: int) -> bool:
    try:
        return httpx.get(f"http://{HOST}:{port}/requests", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


@dataclass(frozen=True)
class Steps:
    """Of one round, medians in seconds: between two tokens at the client; of the decode worker by its own count of steps."""

    token_s: float
    engine_s: float


async def _measure(server: Server, index_pid: int, rounds: int, console: Console) -> Results:
    working: list[Steps] = []
    stopped: list[Steps] = []
    async with server.client() as client:
        await _round(client, 0)  # warms up
        for number in range(1, rounds + 1):
            console.print(f"round {number} of {rounds}", highlight=False)
            working.append(await _round(client, 2 * number))
            os.kill(index_pid, signal.SIGSTOP)
            try:
                stopped.append(await _round(client, 2 * number + 1))
            finally:
                os.kill(index_pid, signal.SIGCONT)
        sent = await _sent(client)
    if not sent:
        raise BenchError("the index was told nothing, so nothing was measured")
    return {
        "index_samples": float(rounds),
        "index_step_ms": statistics.median(each.token_s for each in working) * 1e3,
        "stopped_index_step_ms": statistics.median(each.token_s for each in stopped) * 1e3,
        "stopped_index_step_ratio": median_ratio([each.token_s for each in stopped], [each.token_s for each in working]),
        "index_engine_step_ms": statistics.median(each.engine_s for each in working) * 1e3,
        "stopped_index_engine_step_ms": statistics.median(each.engine_s for each in stopped) * 1e3,
        "stopped_index_engine_step_ratio": median_ratio(
            [each.engine_s for each in stopped], [each.engine_s for each in working]
        ),
        "index_ids_sent": sent,
    }


async def _round(client: httpx.AsyncClient, number: int) -> Steps:
    """While the stream runs, the decode worker makes one step after another."""

    async def ask(count: int) -> None:
        name = f"bench-{number}-{count}"
        body = {"prompt": draw(name, _PROMPT_TOKENS), "max_tokens": 2, "request_id": name}
        response = await client.post("/v1/completions", json={"model": "bench", **body})
        if response.status_code != 200:
            raise BenchError(f"a request failed: {response.text[:200]}")

    async with traffic(ask, _OTHERS):
        gaps, engine_s = await _gaps(client, number)
        return Steps(statistics.median(gaps), engine_s)


async def _gaps(client: httpx.AsyncClient, number: int) -> tuple[list[float], float]:
    """Times between tokens; and the time of a step, from the first token to the last, by the count that the worker keeps."""
    body = {"model": "bench", "prompt": draw(f"stream {number}", _PROMPT_TOKENS), "max_tokens": STREAM_TOKENS}
    times: list[float] = []
    counts: list[tuple[float, int]] = []
    async with client.stream("POST", "/v1/completions", json={**body, "ignore_eos": True, "stream": True}) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter())
                if len(times) in (2, STREAM_TOKENS - 2):
                    counts.append(await _decode_steps(client))
    if len(times) < STREAM_TOKENS // 2:
        raise BenchError(f"a stream of {STREAM_TOKENS} tokens came in {len(times)} pieces")
    if len(counts) < 2 or counts[1][1] == counts[0][1]:
        raise BenchError("the decode worker counted no steps")
    (begun, first), (ended, last) = counts
    return [after - before for before, after in itertools.pairwise(times)], (ended - begun) / (last - first)


async def _decode_steps(client: httpx.AsyncClient) -> tuple[float, int]:
    """How many there were, and when that was."""
    workers = (await client.get("/cluster")).json()["workers"]
    return time.perf_counter(), next(worker["steps"] for worker in workers if worker["role"] == "decode")


async def _sent(client: httpx.AsyncClient) -> float:
    lines = (await client.get("/metrics")).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f'{_METRIC}{{outcome="sent"}}'))


PART = Part(
    "a context index that is stopped",
    measure,
    {"stopped_index_step_ratio": Target("<=", 1.05), "stopped_index_engine_step_ratio": Target("<=", 1.05)},
)
