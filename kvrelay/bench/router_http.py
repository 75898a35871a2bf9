"""What the router adds to a request: the real one, alone on a core, between a fake worker and a load generator on another.

    core B: load (load.py)  --HTTP-->  core A: router  --serving plane-->  core B: fake worker (fake_worker.py)

The worker computes nothing, so what is left of the time is the router's: HTTP, JSON, chat template, tokenising, dispatch,
merging, detokenising, events. Every answer is checked in the load generator; one that is not whole counts as lost.
"""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import httpx
import msgspec
from rich.console import Console

from kvrelay.bench.bare_sse import Listening
from kvrelay.bench.fake_worker import FakeWorkerSettings, Ready, SetTick, TakeTimes, Times
from kvrelay.bench.load import BareRequest, BareResult, LoadRequest, LoadResult
from kvrelay.bench.processes import Child
from kvrelay.bench.report import Target, percentile
from kvrelay.checkpoint.fetch import resolve
from kvrelay.config import read_environment
from kvrelay.errors import BenchError
from kvrelay.launch.console import ConsoleProgress
from kvrelay.text.tokenizer import Tokenizer

TOKENS = 16  # of a short request
CLOSED_LOOP_CONNECTIONS = 32
LATENCY_REQUESTS_S = 4.0
# Of the throughput run. The real engine over a runner that takes no time needs 0.12 ms for a step of 1 sequence, 0.25 ms for
# 8, 0.73 ms for 32. Pace matters (more tokens share a message), so the run with instant steps has the same target beside it.
STEP_S = 0.0005
STREAM_TOKENS = 60  # of a stream in the wide run
TICK_S = 0.05
PROMPT = "Write a short poem about a relay race in the rain."
_WORDS = " the runner takes the stick and runs on in the cold rain while all who watch call out her name"
HOST = "127.0.0.1"
_START_S = 120.0

TARGETS = {
    "added_ttft_ms_p50": Target("<=", 1.0),
    "streamed_rps": Target(">=", 900.0),
    "streamed_rps_instant_steps": Target(">=", 900.0),
    "ideal_token_share_512": Target(">=", 0.9),
    "lost_512": Target("<=", 0.0),
}


@dataclass
class Bench:
    """The processes of one run and what they are asked."""

    router: Child
    worker: Child
    load: Child
    bare: Child
    bare_port: int
    port: int
    model: str

    def run_load(self, *, tokens: int, connections: int, duration_s: float = 0.0) -> LoadResult:
        request = LoadRequest(
            host=HOST,
            port=self.port,
            model=self.model,
            prompt=PROMPT,
            tokens=tokens,
            connections=connections,
            duration_s=duration_s,
        )
        self.load.send(request)
        return self.load.receive(LoadResult, 2 * request.timeout_s + duration_s)

    def set_tick(self, tick_s: float) -> None:
        self.worker.send(SetTick(tick_s=tick_s))

    def worker_times(self) -> list[float]:
        self.worker.send(TakeTimes())
        return self.worker.receive(Times, 30.0).first_token_s

    def bare_ttft(self) -> list[float]:
        self.load.send(BareRequest(host=HOST, port=self.bare_port, repeats=500))
        return self.load.receive(BareResult, 60.0).ttft_s


def measure(model: str, seconds: int, streams: int, console: Console) -> dict[str, float]:
    results: dict[str, float] = {}
    tokens = plain_tokens(model)
    with contextlib.ExitStack() as stack:
        with console.status("starting router and fake worker"):
            bench = stack.enter_context(_processes(model, tokens))
            bench.run_load(tokens=TOKENS, connections=1, duration_s=1.0)  # warms up
        scenarios: tuple[tuple[str, Callable[[], dict[str, float]]], ...] = (
            ("time to first token", lambda: measure_latency(bench)),
            (f"{CLOSED_LOOP_CONNECTIONS} connections", lambda: measure_throughput(bench, seconds)),
            (f"{streams} streams", lambda: measure_streams(bench, streams)),
            (f"{streams} connections at once", lambda: measure_burst(bench, streams)),
        )
        for number, (title, scenario) in enumerate(scenarios, 1):
            with console.status(f"{number} of {len(scenarios)}: {title}"):
                results |= scenario()
    return results


def measure_latency(bench: Bench) -> dict[str, float]:
    """One connection, one request after another; the bare endpoint before and after, on the router's core too."""
    bare = bench.bare_ttft()
    bench.set_tick(0.0)
    bench.worker_times()
    result = bench.run_load(tokens=TOKENS, connections=1, duration_s=LATENCY_REQUESTS_S)
    _require_whole(result, "one connection")
    worker_s = statistics.median(bench.worker_times())
    bare += bench.bare_ttft()
    return {
        "added_ttft_ms_p50": (percentile(result.ttft_s, 50) - worker_s) * 1e3,
        "added_ttft_ms_p99": (percentile(result.ttft_s, 99) - worker_s) * 1e3,
        "worker_ttft_ms_p50": worker_s * 1e3,
        "bare_ttft_ms_p50": percentile(bare, 50) * 1e3,
        "bare_ttft_ms_p99": percentile(bare, 99) * 1e3,
    }


def measure_throughput(bench: Bench, seconds: int) -> dict[str, float]:
    """With a step every STEP_S, and with steps that take no time, whose messages then hold hardly more than a token each."""
    paced, paced_cpu_s = _closed_loop(bench, STEP_S, seconds)
    unpaced, _ = _closed_loop(bench, 0.0, seconds)
    return {
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
    _require_whole(result, f"{CLOSED_LOOP_CONNECTIONS} connections")
    return result, bench.router.cpu_s() - cpu_before_s


def measure_streams(bench: Bench, streams: int) -> dict[str, float]:
    """The ramp is part of the wall time: a router that takes long to accept everybody delivers fewer tokens a second."""
    bench.set_tick(TICK_S)
    cpu_before_s = bench.router.cpu_s()
    result = bench.run_load(tokens=STREAM_TOKENS, connections=streams)
    cpu_s = bench.router.cpu_s() - cpu_before_s
    bench.set_tick(0.0)
    _require_whole(result, f"{streams} streams")
    return {
        f"ideal_token_share_{streams}": result.token_events / result.wall_s / (streams / TICK_S),
        f"router_cpu_share_{streams}": cpu_s / result.wall_s,
        f"gap_ms_p50_{streams}": percentile(result.gaps_s, 50) * 1e3,
        f"gap_ms_p99_{streams}": percentile(result.gaps_s, 99) * 1e3,
        f"ramp_ttft_ms_p50_{streams}": percentile(result.ttft_s, 50) * 1e3,
        f"ramp_ttft_ms_max_{streams}": max(result.ttft_s) * 1e3,
    }


def measure_burst(bench: Bench, streams: int) -> dict[str, float]:
    bench.set_tick(0.0)
    result = bench.run_load(tokens=TOKENS, connections=streams)
    if not result.ttft_s:
        raise BenchError(f"all {streams} connections were lost: {result.problems}")
    return {
        f"lost_{streams}": float(result.lost),
        "burst_ttft_ms_p50": percentile(result.ttft_s, 50) * 1e3,
        "burst_ttft_ms_max": max(result.ttft_s) * 1e3,
    }


def _require_whole(result: LoadResult, what: str) -> None:
    """A rate of wrong answers is no rate."""
    if result.lost or not result.completed:
        raise BenchError(f"{what}: {result.lost} answers lost or wrong, {result.completed} whole: {result.problems}")


def choose_cores() -> tuple[int, int]:
    """For the router, and for everybody else."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise BenchError("the router's benchmark needs two cores: one for the router alone, one for worker and load")
    return cores[1], cores[0]


@contextlib.contextmanager
def _processes(model: str, tokens: list[int]) -> Iterator[Bench]:
    router_core, other_core = choose_cores()
    port, registry_port = free_port(), free_port()
    registry = f"tcp://{HOST}:{registry_port}"
    router_command = ["kvrelay", "router", model, "--host", HOST, "--port", str(port), "--registry-listen", registry]
    with contextlib.ExitStack() as stack:
        router = stack.enter_context(Child(router_command, router_core))
        await_page(port, "/version", router)
        worker = stack.enter_context(Child(["kvrelay.bench.fake_worker"], other_core))
        worker.send(FakeWorkerSettings(registry=registry, model=model, max_model_len=2048, tokens=tokens))
        worker.receive(Ready, _START_S)
        await_page(port, "/health", router)
        served = msgspec.json.decode(await_page(port, "/v1/models", router), type=_Models).data[0].id
        load = stack.enter_context(Child(["kvrelay.bench.load"], other_core))
        bare = stack.enter_context(Child(["kvrelay.bench.bare_sse"], router_core))
        bare_port = bare.receive(Listening, _START_S).port
        yield Bench(router=router, worker=worker, load=load, bare=bare, bare_port=bare_port, port=port, model=served)


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


def await_page(port: int, path: str, router: Child) -> bytes:
    """The page, as soon as the router gives it."""
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        if not router.running:
            raise BenchError("the router ended early; its messages are above")
        with contextlib.suppress(httpx.TransportError):
            answer = httpx.get(f"http://{HOST}:{port}{path}", timeout=5.0)
            if answer.status_code == 200:
                return answer.content
        time.sleep(0.1)
    raise BenchError(f"the router did not give {path} within {_START_S:g} s")


def plain_tokens(model: str) -> list[int]:
    """Tokens that are whole words, so that each one gives exactly one event with text."""
    tokenizer = Tokenizer.load(resolve(model, read_environment(), ConsoleProgress()))
    tokens = dict.fromkeys(tokenizer.encode(_WORDS, add_special_tokens=False))
    whole = [token for token in tokens if tokenizer.token_text(token).strip().isalpha()]
    if len(whole) < 2:
        raise BenchError(f"the tokenizer of {model} has no plain words")
    return whole


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port
