"""`kvrelay bench relay`: what it costs to hand KV from one worker to another, and what it is good for.

1. The data plane alone: shared memory against memcpy, NIXL and Mooncake against themselves (`relay_transfer.py`).
2. One prefill and one decode process, a core each, with the real model: how long the hand-over takes, how much of it is left
   when the prompt is computed, and how evenly running requests get their tokens while long prompts arrive.
3. The last of these again with one worker that does both, on the same two cores.
"""

from __future__ import annotations

import itertools
import os
import pathlib
import statistics
import time
from dataclasses import dataclass

from rich.console import Console

from kvrelay.bench.relay_client import RelayClient, Tracked
from kvrelay.bench.relay_plot import Series, write_plot
from kvrelay.bench.relay_transfer import EngineMissing, measure_library, measure_shm
from kvrelay.bench.report import Target, percentile
from kvrelay.checkpoint.fetch import resolve
from kvrelay.checkpoint.spec import ModelSpec, read_spec
from kvrelay.config import ClusterOptions, read_environment
from kvrelay.errors import BenchError
from kvrelay.launch.console import ConsoleProgress

HANDOVER_TOKENS = 192  # one chunk
HANDOVERS = 16
DECODED_TOKENS = 9  # the first of prefill, the second of the hand-over, the others for the time of a step
OVERLAP_TOKENS = 2048
OVERLAPS = 2
STREAMS = 4
STREAM_TOKENS = 16  # of their prompts
LONG_TOKENS = 1024
SETTLE_S = 1.0
_ENDLESS = 3500  # tokens: no stream ends before it is aborted

TARGETS = {
    "shm_over_memcpy": Target(">=", 0.6),
    "nixl_over_raw": Target(">=", 0.9),
    "mooncake_over_raw": Target(">=", 0.9),
    "handover_excess_ms_p50": Target("<=", 2.0),
    "unsent_share_2048": Target("<=", 0.1),
    "itl_p99_ratio": Target("<=", 0.5),
}


def measure(model: str, seconds: int, plot: pathlib.Path, console: Console) -> dict[str, float]:
    folder = resolve(model, read_environment(), ConsoleProgress())
    spec = read_spec(folder)
    cores = choose_cores()
    results: dict[str, float] = {}
    with console.status("1 of 5: moving bytes"):
        chunk_s = measure_transports(spec, cores, results, console)
    with RelayClient(str(folder), ClusterOptions(prefill=1, decode=1), [[cores[0]], [cores[1]]], spec.vocab_size) as client:
        with console.status("2 of 5: hand-over"):
            results |= measure_handover(client, chunk_s)
        with console.status(f"3 of 5: overlap at {OVERLAP_TOKENS} tokens"):
            results |= measure_overlap(client)
        with console.status("4 of 5: inter-token latency, prefill and decode apart"):
            apart = measure_gaps(client, seconds)
    status = console.status("5 of 5: inter-token latency, one worker for both")
    with status, RelayClient(str(folder), ClusterOptions(whole=1), [list(cores)], spec.vocab_size) as client:
        together = measure_gaps(client, seconds)
    results |= summarise_gaps(apart, together)
    write_plot(plot, [Series("1 prefill + 1 decode", apart.points), Series("1 whole, same cores", together.points)])
    console.print(f"wrote {plot}")
    return results


def choose_cores() -> tuple[int, int]:
    """For the two workers; the router runs wherever there is time."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise BenchError("the relay's benchmark needs two cores, one for each worker")
    return cores[0], cores[1]


def measure_transports(spec: ModelSpec, cores: tuple[int, int], results: dict[str, float], console: Console) -> float:
    """Returns the seconds that shared memory takes for the KV of HANDOVER_TOKENS."""
    shm = measure_shm(spec, cores, HANDOVER_TOKENS)
    results["shm_over_memcpy"] = shm.over_memcpy
    results["shm_in_order_over_memcpy"] = shm.in_order_over_memcpy
    results["shm_gb_per_s"] = shm.gb_per_s
    results["memcpy_gb_per_s"] = shm.memcpy_gb_per_s
    for engine in ("nixl", "mooncake"):
        try:
            figures = measure_library(engine, spec)
        except EngineMissing as missing:
            console.print(f"[yellow]{engine} is left out:[/] {missing}", highlight=False, soft_wrap=True)
            continue
        results[f"{engine}_over_raw"] = figures.over_raw
        results[f"{engine}_gb_per_s"] = figures.gb_per_s
        results[f"{engine}_raw_gb_per_s"] = figures.raw_gb_per_s
    return shm.chunk_s


def measure_handover(client: RelayClient, chunk_s: float) -> dict[str, float]:
    """One request after the other. Each is compared with its own decode steps, a moment later on the same core."""
    requests = [client.submit(HANDOVER_TOKENS, DECODED_TOKENS).wait() for _ in range(HANDOVERS + 2)][2:]
    handovers = [tokens_at[1] - tokens_at[0] for tokens_at in requests]
    steps = [statistics.median(_gaps(tokens_at[1:])) for tokens_at in requests]
    excess = [handover - step - chunk_s for handover, step in zip(handovers, steps, strict=True)]
    return {
        "handover_excess_ms_p50": statistics.median(excess) * 1e3,
        "handover_ms_p50": statistics.median(handovers) * 1e3,
        "decode_step_ms_p50": statistics.median(steps) * 1e3,
        "last_chunk_raw_ms_p50": chunk_s * 1e3,
    }


def measure_overlap(client: RelayClient) -> dict[str, float]:
    """From the counts of the workers, of which the one that moves the bytes counts them."""
    before = _moved(client)
    prefill_s = []
    for _ in range(OVERLAPS):
        request = client.submit(OVERLAP_TOKENS, 2)
        prefill_s.append(request.wait()[0] - request.submitted_at)
    after = _moved(client)
    num_bytes, late_bytes = after[0] - before[0], after[1] - before[1]
    if not num_bytes:
        raise BenchError("no bytes were handed over")
    return {f"unsent_share_{OVERLAP_TOKENS}": late_bytes / num_bytes, f"ttft_s_{OVERLAP_TOKENS}": statistics.median(prefill_s)}


def _moved(client: RelayClient) -> tuple[int, int]:
    transfers = [worker["transfers"] for worker in client.idle_workers()]
    if any(each["failed"] for each in transfers):
        raise BenchError(f"a transfer failed: {transfers}")
    return sum(each["bytes"] for each in transfers), sum(each["late_bytes"] for each in transfers)


@dataclass(frozen=True)
class Gaps:
    """Times between two tokens of running requests: when each ended since the first long prompt came, and its length."""

    points: list[tuple[float, float]]
    long_prompts: int
    seconds: float

    def percentile_s(self, share: int) -> float:
        return percentile([gap for _, gap in self.points], share)


def measure_gaps(client: RelayClient, seconds: int) -> Gaps:
    """STREAMS requests generate; beside them there is always one long prompt to compute, the next when the last one ended."""
    streams = [client.submit(STREAM_TOKENS, _ENDLESS) for _ in range(STREAMS)]
    while any(len(stream.tokens_at) < 2 for stream in streams):
        _check(streams)
        time.sleep(0.05)
    time.sleep(SETTLE_S)
    began_at = time.perf_counter()
    long_prompts = 0
    while time.perf_counter() - began_at < seconds:
        client.submit(LONG_TOKENS, 2).wait()
        long_prompts += 1
    ended_at = time.perf_counter()
    _check(streams)
    points = [
        (end - began_at, end - start)
        for stream in streams
        for start, end in itertools.pairwise(list(stream.tokens_at))
        if began_at <= end <= ended_at
    ]
    client.abort(streams)
    if not points:
        raise BenchError(f"no running request got a token in {ended_at - began_at:.0f} s")
    return Gaps(sorted(points), long_prompts, ended_at - began_at)


def summarise_gaps(apart: Gaps, together: Gaps) -> dict[str, float]:
    return {
        "itl_p99_ratio": apart.percentile_s(99) / together.percentile_s(99),
        "itl_p99_ms_1p1d": apart.percentile_s(99) * 1e3,
        "itl_p99_ms_whole": together.percentile_s(99) * 1e3,
        "itl_p50_ms_1p1d": apart.percentile_s(50) * 1e3,
        "itl_p50_ms_whole": together.percentile_s(50) * 1e3,
        "itl_max_ms_1p1d": apart.percentile_s(100) * 1e3,
        "itl_max_ms_whole": together.percentile_s(100) * 1e3,
        "long_prompts_per_min_1p1d": apart.long_prompts * 60 / apart.seconds,
        "long_prompts_per_min_whole": together.long_prompts * 60 / together.seconds,
    }


def _check(streams: list[Tracked]) -> None:
    for stream in streams:
        if stream.done.is_set():
            raise BenchError(f"a running request ended early: {stream.problem or 'it had all its tokens'}")


def _gaps(times: list[float]) -> list[float]:
    return [end - start for start, end in itertools.pairwise(times)]
