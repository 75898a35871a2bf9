"""What the router adds to a request: the real one, alone on a core, between a fake worker and a load generator on another.

    core B: load (load.py)  --HTTP-->  core A: router  --serving plane-->  core B: fake worker (fake_worker.py)

The worker computes nothing, so what is left of the time is the router's: HTTP, JSON, chat template, tokenising, dispatch,
merging, detokenising, events. Every answer is checked in the load generator; one that is not whole counts as lost.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta
from rich.console import Console

from kvrelay.bench.harness.child import Child, Command, two_cores
from kvrelay.bench.harness.report import Target, percentile
from kvrelay.bench.harness.scenario import ModelBench, Part, Results
from kvrelay.bench.harness.server import HOST, await_page, free_port, serve_app
from kvrelay.bench.router import load
from kvrelay.bench.router.fake_worker import FakePair, FakeWorker, more_workers
from kvrelay.bench.router.load import LoadRequest, LoadResult
from kvrelay.checkpoint.fetch import resolve
from kvrelay.config import Positive, read_environment
from kvrelay.errors import BenchError
from kvrelay.launch.console import console_progress
from kvrelay.text.tokenizer import Tokenizer

TOKENS = 16  # of a short request
CLOSED_LOOP_CONNECTIONS = 32
LATENCY_REQUESTS_S = 4.0
BARE_S = 0.5
# Of the throughput run. The real engine over a runner that takes no time needs 0.12 ms for a step of 1 sequence, 0.25 ms for
# 8, 0.73 ms for 32. Pace matters (more tokens share a message), so the run with instant steps has the same target beside it.
STEP_S = 0.0005
STREAM_TOKENS = 60  # of a stream in the wide run
TICK_S = 0.05
PROMPT = "Write a short poem about a relay race in the rain."
_WORDS = " the runner takes the stick and runs on in the cold rain while all who watch call out her name"
_LOAD_S = 60.0  # beside the length of a run

_PAIR_FIGURES = (
    "ttft_samples",
    "added_ttft_ms_p50",
    "added_ttft_ms_p99",
    "streamed_samples",
    "streamed_rps",
    "streamed_rps_instant_steps",
    "router_cpu_ms_per_request",
)

TARGETS = {
    "added_ttft_ms_p50": Target("<=", 1.0),
    "streamed_rps": Target(">=", 900.0),
    "streamed_rps_instant_steps": Target(">=", 900.0),
    "ideal_token_share_512": Target(">=", 0.9),
    "lost_512": Target("<=", 0.0),
}


class RouterBench(ModelBench, frozen=True, kw_only=True):
    """What is measured, and how long."""

    seconds: Annotated[Positive, Meta(description="length of each throughput run of the part http")] = 10
    streams: Annotated[Positive, Meta(description="streams of its wide runs")] = 512
    workers: Annotated[int, Meta(ge=2, description="among which the part decision chooses, half of each role")] = 64
    blocks: Annotated[Positive, Meta(description="in its prefix index")] = 1_000_000


@dataclass
class Bench:
    """The processes of one run and what they are asked."""

    router: Command
    worker: Child
    client: Child
    bare_port: int
    port: int
    model: str
    other_core: int  # that the router does not run on
    is_pair: bool = False  # one prefill and one decode worker

    def run_load(self, *, tokens: int, connections: int, duration_s: float = 0.0, port: int = 0) -> LoadResult:
        port = port or self.port
        request = LoadRequest(HOST, port, self.model, PROMPT, tokens, connections, duration_s)
        return self.client.call(load.run, request)

    def set_tick(self, tick_s: float) -> list[float]:
        """Returns how long the worker held each request since the last time."""
        return self.worker.ask(FakePair.set_tick if self.is_pair else FakeWorker.set_tick, tick_s)

    def bare_ttft(self) -> list[float]:
        result = self.run_load(tokens=1, connections=1, duration_s=BARE_S, port=self.bare_port)
        require_whole(result, "the bare endpoint")
        return result.ttft_s


def measure(options: RouterBench, console: Console) -> Results:
    streams = options.streams
    steps: dict[str, Callable[[Bench], Results]] = {
        "time to first token": measure_latency,
        f"{CLOSED_LOOP_CONNECTIONS} connections": lambda bench: measure_throughput(bench, options.seconds),
        f"{streams} streams": lambda bench: measure_streams(bench, streams),
        f"{streams} connections at once": lambda bench: measure_burst(bench, streams),
    }
    results: Results = {}
    with console.status("starting router and fake worker") as status, processes(options) as bench:
        bench.run_load(tokens=TOKENS, connections=1, duration_s=1.0)  # warms up
        for number, (title, measure_it) in enumerate(steps.items(), 1):
            status.update(f"{number} of {len(steps)}: {title}")
            results |= measure_it(bench)
    with console.status("starting router and fake workers: 1P1D"), processes(options, is_pair=True) as bench:
        bench.run_load(tokens=TOKENS, connections=1, duration_s=1.0)  # warms up
        pair = measure_latency(bench) | measure_throughput(bench, options.seconds)
    return results | {f"{name}_1p1d": pair[name] for name in _PAIR_FIGURES}


def measure_latency(bench: Bench) -> Results:
    """One connection, one request after another; the bare endpoint before and after, on the router's core too."""
    bare = bench.bare_ttft()
    bench.set_tick(0.0)
    result = bench.run_load(tokens=TOKENS, connections=1, duration_s=LATENCY_REQUESTS_S)
    require_whole(result, "one connection")
    worker_s = statistics.median(bench.set_tick(0.0))
    bare += bench.bare_ttft()
    return {
        "ttft_samples": float(len(result.ttft_s)),
        "added_ttft_ms_p50": (percentile(result.ttft_s, 50) - worker_s) * 1e3,
        "added_ttft_ms_p99": (percentile(result.ttft_s, 99) - worker_s) * 1e3,
        "worker_ttft_ms_p50": worker_s * 1e3,
        "bare_ttft_ms_p50": percentile(bare, 50) * 1e3,
        "bare_ttft_ms_p99": percentile(bare, 99) * 1e3,
    }


def measure_throughput(bench: Bench, seconds: int) -> Results:
    """With a step every STEP_S, and with steps that take no time, whose messages then hold hardly more than a token each."""
    paced, paced_cpu_s = _closed_loop(bench, STEP_S, seconds)
    unpaced, _ = _closed_loop(bench, 0.0, seconds)
    return {
        "streamed_samples": float(paced.completed),
        "streamed_rps": paced.completed / paced.wall_s,
        "router_cpu_ms_per_request": paced_cpu_s / paced.completed * 1e3,
        "closed_loop_ttft_ms_p50": percentile(paced.ttft_s, 50) * 1e3,
        "closed_loop_ttft_ms_p99": percentile(paced.ttft_s, 99) * 1e3,
        "streamed_rps_instant_steps": unpaced.completed / unpaced.wall_s,
    }


def _closed_loop(bench: Bench, step_s: float, seconds: int) -> tuple[LoadResult, float]:
    """Every connection sends its next request when the last one ended. Also the router's processor time."""
    bench.set_tick(step_s)
    cpu_before_s = bench.router.cpu_s()
    result = bench.run_load(tokens=TOKENS, connections=CLOSED_LOOP_CONNECTIONS, duration_s=float(seconds))
    require_whole(result, f"{CLOSED_LOOP_CONNECTIONS} connections")
    return result, bench.router.cpu_s() - cpu_before_s


def measure_streams(bench: Bench, streams: int) -> Results:
    """The ramp is part of the wall time: a router that takes long to accept all connections delivers fewer tokens a second."""
    bench.set_tick(TICK_S)
    cpu_before_s = bench.router.cpu_s()
    result = bench.run_load(tokens=STREAM_TOKENS, connections=streams)
    cpu_s = bench.router.cpu_s() - cpu_before_s
    bench.set_tick(0.0)
    require_whole(result, f"{streams} streams")
    return {
        f"ideal_token_share_{streams}": result.token_events / result.wall_s / (streams / TICK_S),
        f"router_cpu_share_{streams}": cpu_s / result.wall_s,
        f"gap_ms_p50_{streams}": percentile(result.gaps_s, 50) * 1e3,
        f"gap_ms_p99_{streams}": percentile(result.gaps_s, 99) * 1e3,
        f"ramp_ttft_ms_p50_{streams}": percentile(result.ttft_s, 50) * 1e3,
        f"ramp_ttft_ms_max_{streams}": max(result.ttft_s) * 1e3,
    }


def measure_burst(bench: Bench, streams: int) -> Results:
    bench.set_tick(0.0)
    result = bench.run_load(tokens=TOKENS, connections=streams)
    if not result.ttft_s:
        raise BenchError(f"all {streams} connections were lost: {result.problems}")
    return {
        f"lost_{streams}": float(result.lost),
        "burst_ttft_ms_p50": percentile(result.ttft_s, 50) * 1e3,
        "burst_ttft_ms_max": max(result.ttft_s) * 1e3,
    }


def require_whole(result: LoadResult, what: str) -> None:
    """A rate of wrong answers is no rate."""
    if result.lost or not result.completed:
        raise BenchError(f"{what}: {result.lost} answers lost or wrong, {result.completed} whole: {result.problems}")


@contextlib.contextmanager
def processes(options: RouterBench, *, num_workers: int = 1, is_pair: bool = False) -> Iterator[Bench]:
    """`is_pair`: a prefill and a decode worker, and every prompt is handed over; else so many whole ones."""
    other_core, router_core = two_cores()
    model, port, registry = options.model, free_port(), f"tcp://{HOST}:{free_port()}"
    url = f"http://{HOST}:{port}"
    tokens = plain_tokens(model)
    flags = [f"--host={HOST}", f"--port={port}", f"--registry-listen={registry}", "--local-prefill-tokens=0"]
    with (
        Child(other_core) as worker,
        Child(other_core, answer_s=_LOAD_S + options.seconds) as client,
        Child(router_core) as bare,
        Command(["router", model, *flags], router_core) as router,
    ):
        await_page(f"{url}/version", router)
        worker.keep(FakePair if is_pair else FakeWorker, registry, model, tokens)
        worker.call(more_workers, registry, model, tokens, num_workers - 1)
        await_page(f"{url}/health", router)
        served = await_page(f"{url}/v1/models", router)["data"][0]["id"]
        bare_port = bare.call(serve_app, "kvrelay.bench.router.bare_sse:APP")
        yield Bench(
            router=router,
            worker=worker,
            client=client,
            bare_port=bare_port,
            port=port,
            model=served,
            other_core=other_core,
            is_pair=is_pair,
        )


def plain_tokens(model: str) -> list[int]:
    """Tokens that are whole words, so that each one gives exactly one event with text."""
    tokenizer = Tokenizer.load(resolve(model, read_environment(), console_progress()))
    tokens = dict.fromkeys(tokenizer.encode(_WORDS, add_special_tokens=False))
    whole = [token for token in tokens if tokenizer.token_text(token).strip().isalpha()]
    if len(whole) < 2:
        raise BenchError(f"the tokenizer of {model} has no plain words")
    return whole


PART = Part("what the router adds to a request, and how many it carries", measure, TARGETS)
