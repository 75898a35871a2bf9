"""What a stopped context index costs a stream: nothing, or the design is wrong.

kvrelay serve --prefill 1 --decode 1 --context-index ...   with pools so small that every request pushes others out
one stream is timed, token by token; beside it others come and go, each with an id that the index has to be told
round by round the index works, or is stopped (SIGSTOP): the same load, in turn
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import statistics
import time

import httpx
from rich.console import Console

from kvrelay.bench.harness.child import Child
from kvrelay.bench.harness.report import Target, median_ratio
from kvrelay.bench.harness.scenario import Part, Results
from kvrelay.bench.harness.server import HOST, Server, serve, serve_app
from kvrelay.bench.harness.workload import draw, traffic
from kvrelay.bench.kv.scheduler import KVBench
from kvrelay.errors import BenchError

STREAM_TOKENS = 100
_PROMPT_TOKENS = 120
_OTHERS = 2  # requests at a time beside the stream
_METRIC = "kvrelay_eviction_sync_requests_total"
_SETTINGS = {"kv-blocks": 96, "max-model-len": 512, "local-prefill-tokens": 0, "served-model-name": "bench"}


def measure(options: KVBench, console: Console) -> Results:
    with Child() as index, console.status("starting a prefill and a decode worker"):
        port = index.call(serve_app, "kvrelay.bench.kv.index_server:APP")
        settings = {**_SETTINGS, "context-index": f"http://{HOST}:{port}"}
        with serve(options.local_model(), settings, prefill=1, decode=1, log="error") as server:
            return asyncio.run(_measure(server, index, options.rounds, console))


async def _measure(server: Server, index: Child, rounds: int, console: Console) -> Results:
    working: list[float] = []
    stopped: list[float] = []
    async with server.client() as client:
        await _round(client, 0)  # warms up
        for number in range(1, rounds + 1):
            console.print(f"round {number} of {rounds}", highlight=False)
            working.append(await _round(client, 2 * number))
            os.kill(index.pid, signal.SIGSTOP)
            try:
                stopped.append(await _round(client, 2 * number + 1))
            finally:
                os.kill(index.pid, signal.SIGCONT)
        sent = await _sent(client)
    if not sent:
        raise BenchError("the index was told nothing, so nothing was measured")
    return {
        "index_step_ms": statistics.median(working) * 1e3,
        "stopped_index_step_ms": statistics.median(stopped) * 1e3,
        "stopped_index_step_ratio": median_ratio(stopped, working),
        "index_ids_sent": sent,
    }


async def _round(client: httpx.AsyncClient, number: int) -> float:
    """The median time between two tokens of the stream, which is a step of the decode worker."""

    async def ask(count: int) -> None:
        name = f"bench-{number}-{count}"
        body = {"prompt": draw(name, _PROMPT_TOKENS), "max_tokens": 2, "request_id": name}
        response = await client.post("/v1/completions", json={"model": "bench", **body})
        if response.status_code != 200:
            raise BenchError(f"a request failed: {response.text[:200]}")

    async with traffic(ask, _OTHERS):
        return statistics.median(await _gaps(client, number))


async def _gaps(client: httpx.AsyncClient, number: int) -> list[float]:
    body = {"model": "bench", "prompt": draw(f"stream {number}", _PROMPT_TOKENS), "max_tokens": STREAM_TOKENS}
    times = []
    async with client.stream("POST", "/v1/completions", json={**body, "ignore_eos": True, "stream": True}) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter())
    if len(times) < STREAM_TOKENS // 2:
        raise BenchError(f"a stream of {STREAM_TOKENS} tokens came in {len(times)} pieces")
    return [after - before for before, after in itertools.pairwise(times)]


async def _sent(client: httpx.AsyncClient) -> float:
    lines = (await client.get("/metrics")).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f'{_METRIC}{{outcome="sent"}}'))


PART = Part("a context index that is stopped", measure, {"stopped_index_step_ratio": Target("<=", 1.05)})
