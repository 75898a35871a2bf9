"""`kvrelay bench SCENARIO [--json FILE]`: runs a scenario, shows a table, writes the result file."""

from __future__ import annotations

import importlib
import pathlib
import shlex
import signal
from typing import Any

from rich.console import Console
from rich.markup import escape

from kvrelay.bench import compare
from kvrelay.bench.harness import report
from kvrelay.bench.harness.scenario import BenchOptions, Scenario
from kvrelay.errors import ConfigError, KVRelayError
from kvrelay.options import Parser, add_options, collect, suggest

# Name -> the module that has its SCENARIO, and what it measures. Modules are imported when they are asked for.
SCENARIOS = {
    "machine": ("machine", "memory bandwidth and GEMM rate of this machine"),
    "engine": ("engine.scenario", "decode and prefill against those limits, and against peers (--peer transformers,...)"),
    "router": ("router.scenario", "what the router adds to a request and carries; what its choices and a lost worker cost"),
    "relay": ("relay.scenario", "what handing KV between workers costs, and what it is good for"),
    "kv": ("kv.scenario", "what the life of a request's KV costs: scheduling, preemption, a context index that is stopped"),
    "two-stage": ("two_stage.scenario", "what continuing from a request costs, against asking again; beams against requests"),
    "encode": ("encode.scenario", "what encode workers and the relay of embeddings cost, and what they are good for"),
    "gpu": ("gpu.scenario", "the engine on an NVIDIA card: against transformers, then decode and prefill of an 8B shape"),
    "serve": ("serve.scenario", "any OpenAI-compatible server under traffic from a seed"),
    "slo": ("slo.scenario", "the highest rate of requests that meets targets: one whole worker, 1P1D, 2P1D"),
    "vllm": ("vllm.scenario", "vLLM's engine as 1P1D: behind kvrelay, and with vLLM's own servers and NIXL connector"),
    "simulate": ("simulate.scenario", "what `kvrelay simulate` predicts, against real clusters: 1P1D and 2P2D"),
    "all": ("everything", "everything that README shows, at one commit (--draft: of a tree with changes)"),
}
_HELP = f"""\
usage: kvrelay bench SCENARIO [--json FILE] [options]
       kvrelay bench compare A B

Measures this installation and says how far it is from what is possible. `compare` shows two result files side by side.

scenarios:
{chr(10).join(f"  {name:<11} {summary}" for name, (_, summary) in SCENARIOS.items())}

`kvrelay bench SCENARIO --help` shows a scenario's options. Every figure is compared with something measured in the same
run, because a shared machine is never the same twice; docs/benchmarks.md tells the method.
"""


def run(argv: list[str]) -> int:
    """The command's main; `argv` is what follows `kvrelay bench`. Returns the exit status."""
    console = Console(stderr=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what was started for the measurement ends first
    if not argv or argv[0] in ("-h", "--help"):
        print(_HELP, end="")
        return 0 if argv else 2
    try:
        if argv[0] == "compare":
            compare.run(argv[1:], Console())
        else:
            _run_scenario(argv, console)
    except KVRelayError as error:
        console.print(f"[red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        console.print("stopped")
        return 130
    return 0


def find_scenario(name: str) -> Scenario[Any]:
    """Raises ConfigError."""
    if name not in SCENARIOS:
        raise ConfigError(f"unknown scenario {name!r}{suggest(name, SCENARIOS)} (there are {', '.join(SCENARIOS)})")
    scenario: Scenario[Any] = importlib.import_module(f"kvrelay.bench.{SCENARIOS[name][0]}").SCENARIO
    return scenario


def unused_options(scenario: Scenario[Any]) -> frozenset[str]:
    """A scenario of one part has no `--only`; what is given without its name is no option."""
    return frozenset({"only"} if len(scenario.parts) == 1 else ()) | {scenario.positional}


def build_parser(name: str, scenario: Scenario[Any]) -> Parser:
    parts = [f"  {part:<11} {scenario.parts[part].title}" for part in scenario.parts if len(scenario.parts) > 1]
    epilog = "\n".join(["parts:", *parts]) if parts else None
    parser = Parser(prog=f"kvrelay bench {name}", description=f"Measures {SCENARIOS[name][1]}.", epilog=epilog)
    if positional := scenario.positional:
        parser.add_argument(positional, metavar=positional.upper(), help="what is measured")
    add_options(parser, [scenario.options], skip=unused_options(scenario))
    return parser


def _parse(name: str, scenario: Scenario[Any], argv: list[str]) -> BenchOptions:
    options = collect(build_parser(name, scenario).parse_strictly(argv), [scenario.options], None)[scenario.options]
    assert isinstance(options, BenchOptions)
    return options


def _run_scenario(argv: list[str], console: Console) -> None:
    scenario = find_scenario(argv[0])
    options = _parse(argv[0], scenario, argv[1:])
    results = scenario.measure(options, console)
    result = report.BenchResult(
        scenario=argv[0],
        commit=report.current_commit(),
        hardware=report.describe_hardware(),
        command=shlex.join(["kvrelay", "bench", *argv]),
        results=results,
    )
    report.show(result, scenario.targets, console)
    if options.json:
        report.write(result, pathlib.Path(options.json))
        console.print(f"wrote {options.json}")
