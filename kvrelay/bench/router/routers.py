"""What a second router process is worth: the same load on one router, and on two behind the same port (SO_REUSEPORT).

The first holds the registry, the second joins it. No process is bound to a core: on two cores the load generator and the fake
worker compete with the routers, so the gain there is less than what routers with cores of their own have.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator

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
_LOAD_S = 60.0  # beside the length of a run


def measure(options: RouterBench, console: Console) -> Results:
    """Runs with one router and with two take turns."""
    model, port, own_port, registry = options.model, free_port(), free_port(), f"tcp://{HOST}:{free_port()}"
    shared = [f"--host={HOST}", f"--port={port}", "--reuse-port"]
    with (
        console.status("starting a router and a fake worker") as status,
        Child() as worker,
        Child(answer_s=_LOAD_S + options.seconds) as client,
        Command(["router", model, *shared, f"--registry-listen={registry}"]) as first,
    ):
        await_page(f"http://{HOST}:{port}/version", first)
        worker.keep(FakeWorker, registry, model, plain_tokens(model))
        served = await_page(f"http://{HOST}:{port}/v1/models", first)["data"][0]["id"]
        await_page(f"http://{HOST}:{port}/health", first)
        worker.ask(FakeWorker.set_tick, STEP_S)

        def rate(seconds: float) -> float:
            request = LoadRequest(HOST, port, served, PROMPT, TOKENS, CLOSED_LOOP_CONNECTIONS, seconds)
            result = client.call(load.run, request)
            require_whole(result, f"{CLOSED_LOOP_CONNECTIONS} connections")
            return result.completed / result.wall_s

        rate(1.0)  # warms up
        one: list[float] = []
        two: list[float] = []
        for number in range(1, ROUNDS + 1):
            status.update(f"round {number} of {ROUNDS}: one router")
            one.append(rate(options.seconds))
            status.update(f"round {number} of {ROUNDS}: two routers")
            with _second(["router", model, *shared, f"--own-port={own_port}", f"--registry={registry}"], own_port):
                rate(1.0)
                two.append(rate(options.seconds))
    return summarise(one, two)


@contextlib.contextmanager
def _second(command: list[str], own_port: int) -> Iterator[None]:
    with Command(command) as router:
        await_page(f"http://{HOST}:{own_port}/health", router)
        yield


def summarise(one: list[float], two: list[float]) -> Results:
    """Of runs that took turns."""
    return {
        "routers_1_rps": statistics.median(one),
        "routers_2_rps": statistics.median(two),
        "routers_2_over_1": statistics.median(after / before for before, after in zip(one, two, strict=True)),
    }


PART = Part("one router process, and two behind one port", measure, {})
