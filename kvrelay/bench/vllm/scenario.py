"""`kvrelay bench vllm`: vLLM's engine as 1P1D on this machine's processors, once behind kvrelay (`--engine vllm`), once with
vLLM's own servers, its NIXL connector and a proxy as its examples have one.

One cluster is up at a time, in turns: a server of vLLM with that connector keeps a core busy when nothing is asked of it. Both
meet the same requests. Needs vLLM and NIXL in this environment.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated

from msgspec import Meta
from rich.console import Console

from kvrelay.bench.harness.child import Command
from kvrelay.bench.harness.report import Target as Bar
from kvrelay.bench.harness.scenario import ModelBench, Part, Results, Scenario
from kvrelay.bench.harness.server import HOST, await_page, free_port, serve
from kvrelay.bench.serve.client import Asked, Target, find_model
from kvrelay.bench.serve.scenario import run_sessions
from kvrelay.bench.serve.sessions import Wanted, make_sessions
from kvrelay.bench.vllm import proxy
from kvrelay.errors import BenchError, ConfigError

_NEEDED = ("vllm", "nixl")
_START_S = 900.0
_MAX_BATCH, _BLOCK_SIZE = 8, 32
_CONNECTOR = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
_KVRELAY, _NIXL = "kvrelay", "nixl_connector"


class VllmBench(ModelBench, frozen=True, kw_only=True):
    """The model and what is asked."""

    turns: Annotated[int, Meta(ge=1, description="how often each cluster is started and asked")] = 3
    input_tokens: Annotated[int, Meta(ge=1, description="words of a prompt, about a token each")] = 256
    output_tokens: Annotated[int, Meta(ge=8, description="tokens of an answer")] = 32
    alone: Annotated[int, Meta(ge=1, description="requests of a turn that come one after another")] = 6
    together: Annotated[int, Meta(ge=1, description="requests of a turn that come at once")] = 8
    threads: Annotated[int, Meta(ge=1, description="of each vLLM, on any core")] = 1
    gib: Annotated[int, Meta(ge=1, description="KV memory of each vLLM")] = 1


def measure(options: VllmBench, console: Console) -> Results:
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        raise ConfigError(f"bench vllm needs {' and '.join(missing)} in this environment (docs/benchmarks.md#vllm)")
    turns: list[dict[str, Results]] = []
    for number in range(options.turns):
        turns.append({})
        for name, cluster in _CLUSTERS.items():
            with contextlib.ExitStack() as running:
                with console.status(f"{name}: two vLLMs start"):
                    url = running.enter_context(cluster(options))
                target = Target(url, find_model(url, {}), {}, ignore_eos=True, shows_special=True)
                _ask(target, options, 1, 3 * number, 1, f"{name}, to warm up")
                turns[-1][name] = _turn(target, options, number, name)
    return summarise(turns)


@contextlib.contextmanager
def _behind_kvrelay(options: VllmBench) -> Iterator[str]:
    settings = {
        "engine": "vllm",
        "engine-args": json.dumps({"enforce_eager": True, "block_size": _BLOCK_SIZE}),
        "max-model-len": _max_len(options),
        "max-batch": _MAX_BATCH,
        "threads": options.threads,
        "local-prefill-tokens": 0,
    }
    with serve(
        options.local_model(), settings, prefill=1, decode=1, environment=_environment(options), start_s=_START_S
    ) as server:
        yield server.url


@contextlib.contextmanager
def _own_servers(options: VllmBench) -> Iterator[str]:
    """A server for prompts and one for decodes, and the proxy."""
    with contextlib.ExitStack() as running:
        started = [running.enter_context(_server(options)) for _ in range(2)]
        for process, url in started:
            await_page(f"{url}/v1/models", process, start_s=_START_S)
        port, (prefill, decode) = free_port(), (url for _, url in started)
        command = ["kvrelay.bench.vllm.proxy:app", f"--port={port}", "--log-level=warning", "--no-access-log"]
        environment = {proxy.PREFILL: prefill, proxy.DECODE: decode}
        process = running.enter_context(Command(command, module="uvicorn", environment=environment))
        url = f"http://{HOST}:{port}"
        await_page(f"{url}/v1/models", process)
        yield url


@contextlib.contextmanager
def _server(options: VllmBench) -> Iterator[tuple[Command, str]]:
    port = free_port()
    settings = {
        "model": options.local_model().model,
        "served-model-name": "model",
        "host": HOST,
        "port": port,
        "dtype": "float32",
        "max-model-len": _max_len(options),
        "max-num-seqs": _MAX_BATCH,
        "block-size": _BLOCK_SIZE,
        "kv-transfer-config": json.dumps(_CONNECTOR),
    }
    flags = [f"--{name}={value}" for name, value in settings.items()]
    environment = _environment(options) | {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
    with Command([*flags, "--enforce-eager"], module="vllm.entrypoints.openai.api_server", environment=environment) as process:
        yield process, f"http://{HOST}:{port}"


def _environment(options: VllmBench) -> dict[str, str]:
    return {
        "OMP_NUM_THREADS": str(options.threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": str(options.gib),
        "VLLM_LOGGING_LEVEL": "WARNING",
    }


def _max_len(options: VllmBench) -> int:
    return 2 * options.input_tokens + options.output_tokens + 64


def _turn(target: Target, options: VllmBench, number: int, name: str) -> Results:
    """Its prompts are new to every cache, and the same for both clusters."""
    asked, _ = _ask(target, options, options.alone, 3 * number + 1, 1, f"{name}, one by one")
    _, wall_s = _ask(target, options, options.together, 3 * number + 2, options.together, f"{name}, together")
    return {
        "ttft_ms": statistics.median(1e3 * one.ttft_s for one in asked),
        "second_token_ms": statistics.median(1e3 * (one.times[1] - one.sent_at) for one in asked),
        "step_ms": statistics.median(1e3 * (one.times[-1] - one.times[1]) / (len(one.times) - 2) for one in asked),
        "requests_per_s": options.together / wall_s,
    }


def _ask(target: Target, options: VllmBench, count: int, seed: int, at_once: int, title: str) -> tuple[Sequence[Asked], float]:
    wanted = Wanted(count, 0.0, options.input_tokens, options.output_tokens, seed)
    asked, wall_s = run_sessions(target, make_sessions("fixed", wanted), at_once, title)
    if problems := [one.problem for one in asked if one.problem]:
        raise BenchError(f"{title}: {problems[0]}")
    return asked, wall_s


def summarise(turns: Sequence[Mapping[str, Results]]) -> Results:
    """Medians of the turns, and the median of their ratios."""
    results: Results = {"turns": len(turns)}
    for figure in turns[0][_KVRELAY]:
        for name in _CLUSTERS:
            results[f"{figure}_{name}"] = statistics.median(each[name][figure] for each in turns)
        results[f"{figure}_over_{_NIXL}"] = statistics.median(each[_KVRELAY][figure] / each[_NIXL][figure] for each in turns)
    return results


_CLUSTERS = {_NIXL: _own_servers, _KVRELAY: _behind_kvrelay}
_BARS = {
    "ttft_ms_over_nixl_connector": Bar("<=", 1.0),
    "second_token_ms_over_nixl_connector": Bar("<=", 1.0),
    "requests_per_s_over_nixl_connector": Bar(">=", 1.0),
}
SCENARIO = Scenario(VllmBench, {"vllm": Part("vLLM behind kvrelay, and with its own connector", measure, _BARS)})
