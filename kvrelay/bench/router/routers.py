"""What a second router process is worth: the same load on one router, and on two behind the same port (SO_REUSEPORT).

The first holds the registry, the second joins it. Two load generators and two fake workers stand beside them, as one of each
carries little more than one router. No process is bound to a core: on two cores they compete with the routers, so requests per
second hardly grow there. What routers with a core each would carry follows from their processor time: as many times more as
the busier of two spends less on a request of both than one alone does.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from rich.console import Console

from kvrelay.bench.harness.child import Child, Command
from kvrelay.bench.harness.scenario import Part, Results
from kvrelay.bench.harness.server import HOST, await_page, free_port
from kvrelay.bench.router import load
from kvrelay.bench.router.fake_worker import FakeWorker
from kvrelay.bench.router.http import (
    CLOSED_LOOP_CONNECTIONS,
    PROMPT,
    STEP_S,
    TOKENS,
    RouterBench,
    plain_tokens,
    require_whole,
)
from kvrelay.bench.router.load import LoadRequest

ROUNDS = 3
_EACH = 2  # load generators, and fake workers
_LOAD_S = 60.0  # beside the length of a run


@dataclass(frozen=True, slots=True)
class Run:
    rps: float
    busiest_cpu_ms: float  # of the router that spent most, for each request of all


def measure(options: RouterBench, console: Console) -> Results:
    """Runs with one router and with two take turns."""
    model, port, own_port, registry = options.model, free_port(), free_port(), f"tcp://{HOST}:{free_port()}"
    shared = [f"--host={HOST}", f"--port={port}", "--reuse-port"]
    with (
        console.status("starting a router and fake workers") as status,
        contextlib.ExitStack() as children,
        Command(["router", model, *shared, f"--registry-listen={registry}"]) as first,
        ThreadPoolExecutor(_EACH) as threads,
    ):
        workers = [children.enter_context(Child()) for _ in range(_EACH)]
        clients = [children.enter_context(Child(answer_s=_LOAD_S + options.seconds)) for _ in range(_EACH)]
        await_page(f"http://{HOST}:{port}/version", first)
        for worker in workers:
            worker.keep(FakeWorker, registry, model, plain_tokens(model))
        served = await_page(f"http://{HOST}:{port}/v1/models", first)["data"][0]["id"]
        await_page(f"http://{HOST}:{port}/health", first)
        for worker in workers:
            worker.ask(FakeWorker.set_tick, STEP_S)

        def run(seconds: float, routers: Sequence[Command]) -> Run:
            request = LoadRequest(HOST, port, served, PROMPT, TOKENS, CLOSED_LOOP_CONNECTIONS, seconds)
            before = [router.cpu_s() for router in routers]
            results = list(threads.map(lambda client: client.call(load.run, request), clients))
            for result in results:
                require_whole(result, f"{CLOSED_LOOP_CONNECTIONS} connections")
            busiest_s = max(router.cpu_s() - begun for router, begun in zip(routers, before, strict=True))
            completed = sum(result.completed for result in results)
            return Run(sum(result.completed / result.wall_s for result in results), busiest_s / completed * 1e3)

        run(1.0, [first])  # warms up
        one: list[Run] = []
        two: list[Run] = []
        for number in range(1, ROUNDS + 1):
            status.update(f"round {number} of {ROUNDS}: one router")
            one.append(run(options.seconds, [first]))
            status.update(f"round {number} of {ROUNDS}: two routers")
            with _second(["router", model, *shared, f"--own-port={own_port}", f"--registry={registry}"], own_port) as second:
                run(1.0, [first, second])
                two.append(run(options.seconds, [first, second]))
    return summarise(one, two)


@contextlib.contextmanager
def _second(command: list[str], own_port: int) -> Iterator[Command]:
    with Command(command) as router:
        await_page(f"http://{HOST}:{own_port}/health", router)
        yield router


def summarise(one: list[Run], two: list[Run]) -> Results:
    """Of runs that took turns."""
    turns = list(zip(one, two, strict=True))
    return {
        "routers_samples": float(len(turns)),
        "routers_1_rps": statistics.median(run.rps for run in one),
        "routers_2_rps": statistics.median(run.rps for run in two),
        "routers_2_over_1": statistics.median(after.rps / before.rps for before, after in turns),
        "routers_2_over_1_on_cores_of_their_own": statistics.median(
            before.busiest_cpu_ms / after.busiest_cpu_ms for before, after in turns
        ),
    }


PART = Part("one router process, and two behind one port", measure, {})
