"""`kvrelay bench vllm`: vLLM's engine as 1P1D on this machine's processors, once behind kvrelay (`--engine vllm`), once with
vLLM's own servers, its NIXL connector and a proxy as its examples have one.

Both clusters are up from the beginning and meet the same requests in turns. Needs vLLM and NIXL in this environment.
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

    rounds: Annotated[int, Meta(ge=1, description="of each cluster, in turns")] = 5
    input_tokens: Annotated[int, Meta(ge=1, description="words of a prompt, about a token each")] = 256
    output_tokens: Annotated[int, Meta(ge=2, description="tokens of an answer")] = 32
    alone: Annotated[int, Meta(ge=1, description="requests of a round that come one after another")] = 4
    together: Annotated[int, Meta(ge=1, description="requests of a round that come at once")] = 8
    gib: Annotated[int, Meta(ge=1, description="KV memory of each vLLM")] = 1


def measure(options: VllmBench, console: Console) -> Results:
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        raise ConfigError(f"bench vllm needs {' and '.join(missing)} in this environment (docs/benchmarks.md#vllm)")
    with contextlib.ExitStack() as running:
        with console.status("four vLLMs start"):
            urls = {
                _NIXL: running.enter_context(_own_servers(options)),
                _KVRELAY: running.enter_context(_behind_kvrelay(options)),
            }
        targets = {
            name: Target(url, find_model(url, {}), {}, ignore_eos=True, shows_special=True) for name, url in urls.items()
        }
        rounds = [
            {name: _round(target, options, number, name) for name, target in targets.items()}
            for number in range(options.rounds + 1)
        ]
    return summarise(rounds[1:])  # the first warms both up


@contextlib.contextmanager
def _behind_kvrelay(options: VllmBench) -> Iterator[str]:
    settings = {
        "engine": "vllm",
        "engine-args": json.dumps({"enforce_eager": True, "block_size": _BLOCK_SIZE}),
        "max-model-len": _max_len(options),
        "max-batch": _MAX_BATCH,
        "threads": 1,
        "local-prefill-tokens": 0,
    }
    with serve(
        options.local_model(), settings, prefill=1, decode=1, environment=_environment(options), start_s=_START_S
    ) as server:
        yield server.url


@contextlib.contextmanager
def _own_servers(options: VllmBench) -> Iterator[str]:
    """A server for prompts and one for decodes, each on a core of its own, and the proxy."""
    with contextlib.ExitStack() as running:
        started = [running.enter_context(_server(options, core)) for core in (0, 1)]
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
def _server(options: VllmBench, core: int) -> Iterator[tuple[Command, str]]:
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
    own = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()), "VLLM_CPU_OMP_THREADS_BIND": str(core)}
    environment = _environment(options) | own
    with Command([*flags, "--enforce-eager"], module="vllm.entrypoints.openai.api_server", environment=environment) as process:
        yield process, f"http://{HOST}:{port}"


def _environment(options: VllmBench) -> dict[str, str]:
    return {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": str(options.gib), "VLLM_LOGGING_LEVEL": "WARNING"}


def _max_len(options: VllmBench) -> int:
    return 2 * options.input_tokens + options.output_tokens + 64


def _round(target: Target, options: VllmBench, number: int, name: str) -> Results:
    """Its prompts are new to every cache, and the same for both clusters."""
    asked, _ = _ask(target, options, options.alone, 2 * number, 1, f"{name}, one by one")
    _, wall_s = _ask(target, options, options.together, 2 * number + 1, options.together, f"{name}, together")
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


def summarise(rounds: Sequence[Mapping[str, Results]]) -> Results:
    """Medians of the rounds, and the median of their ratios."""
    results: Results = {"rounds": len(rounds)}
    for figure in rounds[0][_KVRELAY]:
        for name in (_KVRELAY, _NIXL):
            results[f"{figure}_{name}"] = statistics.median(each[name][figure] for each in rounds)
        results[f"{figure}_over_{_NIXL}"] = statistics.median(each[_KVRELAY][figure] / each[_NIXL][figure] for each in rounds)
    return results


_BARS = {
    "ttft_ms_over_nixl_connector": Bar("<=", 1.0),
    "second_token_ms_over_nixl_connector": Bar("<=", 1.0),
    "requests_per_s_over_nixl_connector": Bar(">=", 1.0),
}
SCENARIO = Scenario(VllmBench, {"vllm": Part("vLLM behind kvrelay, and with its own connector", measure, _BARS)})
