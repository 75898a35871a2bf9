"""What a stopped context index costs a stream: nothing, or the design is wrong.

kvrelay serve --prefill 1 --decode 1 --context-index ...   with pools so small that every request pushes others out
one stream is timed, token by token; beside it others come and go, each with an id that the index has to be told
round by round the index works, or is stopped (SIGSTOP): the same load, in turn

The index is a stand-in that knows nothing, or ContextPilot's own server (`--contextpilot PYTHON`), which has put a context of
each request into its index before the round.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import httpx
from rich.console import Console

from kvrelay.bench.harness.child import Child
from kvrelay.bench.harness.report import Target, median_ratio
from kvrelay.bench.harness.scenario import Part, Results
from kvrelay.bench.harness.server import HOST, Server, serve, serve_app
from kvrelay.bench.harness.workload import draw, traffic
from kvrelay.bench.kv.contextpilot import index_contexts, open_contextpilot
from kvrelay.bench.kv.scheduler import KVBench
from kvrelay.errors import BenchError

STREAM_TOKENS = 100
_PROMPT_TOKENS = 120
_OTHERS = 2  # requests at a time beside the stream
_MOST_REQUESTS = 200  # with an id of their own beside the stream of one round: more than there is time for
_METRIC = "kvrelay_eviction_sync_requests_total"
_SETTINGS = {"kv-blocks": 96, "max-model-len": 512, "local-prefill-tokens": 0, "served-model-name": "bench"}


def measure(options: KVBench, console: Console) -> Results:
    with open_index(options.contextpilot) as index, console.status("starting a prefill and a decode worker"):
        settings = {**_SETTINGS, "context-index": index.url}
        with serve(options.local_model(), settings, prefill=1, decode=1, log="error") as server:
            figures = asyncio.run(_measure(server, index, options.rounds, console))
    return figures | {"index_is_contextpilot": float(bool(options.contextpilot))}


@dataclass(frozen=True)
class Index:
    """A context index, and how requests come to ids that it is to be told of: so many for each round."""

    pid: int
    url: str
    name_requests: Callable[[int], list[str]]


@contextlib.contextmanager
def open_index(contextpilot: str) -> Iterator[Index]:
    if contextpilot:
        with open_contextpilot(contextpilot) as (pid, url):
            yield Index(pid, url, lambda number: index_contexts(url, _contexts(number)))
        return
    with Child() as index:
        url = f"http://{HOST}:{index.call(serve_app, 'kvrelay.bench.kv.index_server:APP')}"
        yield Index(index.pid, url, lambda number: [f"bench-{number}-{count}" for count in range(_MOST_REQUESTS)])


def _contexts(number: int) -> list[list[int]]:
    """Two documents each, of which the next one has the second, too."""
    first = number * (_MOST_REQUESTS + 1)
    return [[document, document + 1] for document in range(first, first + _MOST_REQUESTS)]


@dataclass(frozen=True)
class Steps:
    """Of one round, medians in seconds: between two tokens at the client; of the decode worker by its own count of steps."""

    token_s: float
    engine_s: float


async def _measure(server: Server, index: Index, rounds: int, console: Console) -> Results:
    working: list[Steps] = []
    stopped: list[Steps] = []
    async with server.client() as client:
        await _round(client, 0, index.name_requests(0))  # warms up
        for number in range(1, rounds + 1):
            console.print(f"round {number} of {rounds}", highlight=False)
            working.append(await _round(client, 2 * number, index.name_requests(2 * number)))
            names = index.name_requests(2 * number + 1)
            os.kill(index.pid, signal.SIGSTOP)
            try:
                stopped.append(await _round(client, 2 * number + 1, names))
            finally:
                os.kill(index.pid, signal.SIGCONT)
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


async def _round(client: httpx.AsyncClient, number: int, names: Sequence[str]) -> Steps:
    """While the stream runs, the decode worker makes one step after another."""
    fresh_names = itertools.cycle(names)

    async def ask(count: int) -> None:
        prompt = draw(f"bench-{number}-{count}", _PROMPT_TOKENS)
        body = {"prompt": prompt, "max_tokens": 2, "request_id": next(fresh_names)}
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
