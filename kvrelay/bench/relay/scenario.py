"""`kvrelay bench relay`: what it costs to hand KV from one worker to another, and what it is good for.

1. The data plane alone: shared memory against memcpy, NIXL and Mooncake against themselves (`transfer.py`).
2. One prefill and one decode process, a core each, with the real model: how long the hand-over takes, how much of it is left
   when the prompt is computed, and how evenly running requests get their tokens while long prompts arrive.
3. The last of these again with one worker that does both, on the same two cores, with usual chunks of prompts and small ones.
"""

from __future__ import annotations

import asyncio
import pathlib
import statistics
import time
from dataclasses import dataclass
from typing import Annotated

import msgspec
import uvloop
from msgspec import Meta
from rich.console import Console
from rich.status import Status

from kvrelay.bench.harness.child import two_cores
from kvrelay.bench.harness.cluster import Answer, LiveCluster, abort, finish, live_cluster, start
from kvrelay.bench.harness.handover import beyond_steps, gaps_within, late_share, moved
from kvrelay.bench.harness.pair import EngineMissing
from kvrelay.bench.harness.plot import Dots, write_plot
from kvrelay.bench.harness.report import Target, percentile
from kvrelay.bench.harness.scenario import ModelBench, Part, Results, Scenario
from kvrelay.bench.harness.workload import greedy
from kvrelay.bench.relay.transfer import measure_library, measure_shm
from kvrelay.checkpoint.spec import ModelSpec, read_spec
from kvrelay.config import ClusterOptions, EngineOptions, Positive
from kvrelay.errors import BenchError

HANDOVER_TOKENS = 192  # one chunk
HANDOVERS = 16
DECODED_TOKENS = 9  # the first of prefill, the second of the hand-over, the others for the time of a step
OVERLAP_TOKENS = 2048
OVERLAPS = 2
STREAMS = 4
STREAM_TOKENS = 16  # of their prompts
LONG_TOKENS = 1024
SMALL_CHUNK = 64  # tokens of a step of the worker that does both, where it is to serve running requests more evenly
SETTLE_S = 1.0
_ENDLESS = 3500  # tokens: no stream ends before it is aborted
# Room for everything a cluster runs, so that nothing is ever preempted.
_ENGINE = EngineOptions(kv_blocks=1024, max_model_len=4096)

TARGETS = {
    "shm_over_memcpy": Target(">=", 0.6),
    "nixl_over_raw": Target(">=", 0.9),
    "mooncake_over_raw": Target(">=", 0.9),
    "handover_beyond_step_ms_p50": Target("<=", 2.0),
    "unsent_share_2048": Target("<=", 0.1),
    "itl_p99_ratio": Target("<=", 0.5),
}


class RelayBench(ModelBench, frozen=True, kw_only=True):
    """What is measured, and how long."""

    seconds: Annotated[Positive, Meta(description="how long long prompts arrive, beside running requests")] = 25
    plot: Annotated[str, Meta(description="file of the drawing")] = "build/relay-itl.svg"


@dataclass(frozen=True)
class Gaps:
    """Times between two tokens of running requests: when each ended since the first long prompt came, and its length."""

    points: list[tuple[float, float]]
    long_prompts: int
    seconds: float

    def percentile_s(self, share: int) -> float:
        return percentile([gap for _, gap in self.points], share)


def measure(options: RelayBench, console: Console) -> Results:
    cores = two_cores()
    spec = read_spec(pathlib.Path(options.local_model().model))
    results: Results = {}
    with console.status("1 of 6: moving bytes"):
        results |= measure_transports(spec, cores, console)
    with console.status("2 of 6: hand-over") as status:
        figures, apart = uvloop.run(_apart(options, cores, status))
    with console.status("5 of 6: inter-token latency, one worker for both"):
        together = uvloop.run(_together(options, cores, _ENGINE))
    with console.status(f"6 of 6: the same with chunks of {SMALL_CHUNK} tokens"):
        small_chunks = uvloop.run(_together(options, cores, msgspec.structs.replace(_ENGINE, token_budget=SMALL_CHUNK)))
    results |= figures | summarise_gaps(apart, together, small_chunks)
    dots = {"1 prefill + 1 decode": apart, "1 whole, same cores": together, f"1 whole, chunks of {SMALL_CHUNK}": small_chunks}
    title = "Time between tokens of running requests while long prompts arrive"
    series = {name: [(at, gap * 1e3) for at, gap in gaps.points] for name, gaps in dots.items()}
    write_plot(pathlib.Path(options.plot), [Dots(title, series)])
    console.print(f"wrote {options.plot}")
    return results


async def _apart(options: RelayBench, cores: tuple[int, int], status: Status) -> tuple[Results, Gaps]:
    async with live_cluster(options.local_model(threads=1), _ENGINE, ClusterOptions(prefill=1, decode=1)) as cluster:
        cluster.pin({"prefill": cores[:1], "decode": cores[1:]})
        results = await measure_handover(cluster)
        status.update(f"3 of 6: overlap at {OVERLAP_TOKENS} tokens")
        results |= await measure_overlap(cluster)
        status.update("4 of 6: inter-token latency, prefill and decode apart")
        return results, await measure_gaps(cluster, options.seconds)


async def _together(options: RelayBench, cores: tuple[int, int], engine: EngineOptions) -> Gaps:
    async with live_cluster(options.local_model(threads=2), engine, ClusterOptions(whole=1)) as cluster:
        cluster.pin({"whole": cores})
        return await measure_gaps(cluster, options.seconds)


def _start(cluster: LiveCluster, num_tokens: int, max_tokens: int) -> Answer:
    return start(cluster.router, cluster.draw(num_tokens), greedy(max_tokens))


async def _ask(cluster: LiveCluster, num_tokens: int, max_tokens: int) -> Answer:
    """Raises BenchError if it fails."""
    answer = await finish(_start(cluster, num_tokens, max_tokens))
    if len(answer.times) != max_tokens:
        raise BenchError(f"a request had {len(answer.times)} tokens, not {max_tokens}")
    return answer


def measure_transports(spec: ModelSpec, cores: tuple[int, int], console: Console) -> Results:
    results = measure_shm(spec, cores, HANDOVER_TOKENS)
    for engine in ("nixl", "mooncake"):
        try:
            results |= measure_library(engine, spec)
        except EngineMissing as missing:
            console.print(f"[yellow]{engine} is left out:[/] {missing}", highlight=False, soft_wrap=True)
    return results


async def measure_handover(cluster: LiveCluster) -> Results:
    """One request after the other: from token 1 to token 2, beyond one of its own decode steps, a moment later on the same
    core. The last chunk's bytes are part of it."""
    requests = [(await _ask(cluster, HANDOVER_TOKENS, DECODED_TOKENS)).times for _ in range(HANDOVERS + 2)][2:]
    excess, steps = beyond_steps(requests)
    return {
        "handover_samples": float(len(excess)),
        "handover_beyond_step_ms_p50": statistics.median(excess) * 1e3,
        "handover_beyond_step_ms_p90": percentile(excess, 90) * 1e3,
        "handover_ms_p50": statistics.median(times[1] - times[0] for times in requests) * 1e3,
        "decode_step_ms_p50": statistics.median(steps) * 1e3,
    }


async def measure_overlap(cluster: LiveCluster) -> Results:
    """From the counts of the workers, of which the one that moves the bytes counts them."""
    before = moved(await cluster.at_rest())
    prefill_s = [(await _ask(cluster, OVERLAP_TOKENS, 2)).ttft_s for _ in range(OVERLAPS)]
    share = late_share(before, moved(await cluster.at_rest()))
    return {
        "unsent_samples": float(len(prefill_s)),
        f"unsent_share_{OVERLAP_TOKENS}": share,
        f"ttft_s_{OVERLAP_TOKENS}": statistics.median(prefill_s),
    }


async def measure_gaps(cluster: LiveCluster, seconds: int) -> Gaps:
    """STREAMS requests generate; beside them there is always one long prompt to compute, the next when the last one ended."""
    streams = [_start(cluster, STREAM_TOKENS, _ENDLESS) for _ in range(STREAMS)]
    while any(len(stream.tokens_at) < 2 for stream in streams):
        _check(streams)
        await asyncio.sleep(0.05)
    await asyncio.sleep(SETTLE_S)
    began_at = time.perf_counter()
    long_prompts = 0
    while time.perf_counter() - began_at < seconds:
        await _ask(cluster, LONG_TOKENS, 2)
        long_prompts += 1
    ended_at = time.perf_counter()
    _check(streams)
    await abort(streams)
    points = gaps_within([stream.tokens_at for stream in streams], began_at, ended_at)
    return Gaps(points, long_prompts, ended_at - began_at)


def summarise_gaps(apart: Gaps, together: Gaps, small_chunks: Gaps) -> Results:
    results = {"itl_p99_ratio": apart.percentile_s(99) / together.percentile_s(99)}
    sides = {"1p1d": apart, "whole": together, "whole_small_chunks": small_chunks}
    for figure, share in (("p99", 99), ("p50", 50), ("max", 100)):
        results |= {f"itl_{figure}_ms_{name}": gaps.percentile_s(share) * 1e3 for name, gaps in sides.items()}
    for name, gaps in sides.items():
        results[f"itl_samples_{name}"] = float(len(gaps.points))
        results[f"long_prompts_per_min_{name}"] = gaps.long_prompts * 60 / gaps.seconds
    return results


def _check(streams: list[Answer]) -> None:
    for stream in streams:
        if stream.task is None or stream.task.done():
            raise BenchError(f"a running request ended early: {stream.problem or 'it had all its tokens'}")


SCENARIO = Scenario(RelayBench, {"relay": Part("hand-over", measure, TARGETS)})
