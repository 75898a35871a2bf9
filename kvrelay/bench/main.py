"""`kvrelay bench SCENARIO [--json FILE]`: runs a scenario, shows a table, writes the result file."""

from __future__ import annotations

import argparse
import pathlib
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rich.console import Console

from kvrelay.bench import report
from kvrelay.errors import ConfigError, KVRelayError
from kvrelay.options import Parser, suggest

_HELP = """\
usage: kvrelay bench SCENARIO [--json FILE] [options]

Measures this installation and says how far it is from what is possible.

scenarios:
  machine     memory bandwidth and GEMM rate of this machine
  engine      decode and prefill against those limits, and against transformers (--peer transformers)
  router      what the router adds to a request and how many it carries; what its choices and a lost worker cost
  relay       what handing KV between workers costs, and what it is good for
  kv          what KV's life costs: scheduling, preemption, a context index that is stopped
  two-stage   what continuing from a request costs, against asking again; and a beam search against single requests
  encode      what encode workers and the relay of embeddings cost, and what they are good for
  gpu         the engine on one NVIDIA card: correct against transformers, then decode and prefill of an 8B shape

`kvrelay bench SCENARIO --help` shows a scenario's options. Every figure is compared with something measured in the same
run, because a shared machine is never the same twice; docs/benchmarks.md tells the method.
"""

Results = dict[str, float]
Targets = Mapping[str, report.Target]


@dataclass(frozen=True)
class Scenario:
    """What a subcommand is: its options, and how to carry it out."""

    description: str
    add_options: Callable[[Parser], None]
    measure: Callable[[argparse.Namespace, Console], tuple[Results, Targets]]


def run(argv: list[str]) -> int:
    """The command's main; `argv` is what follows `kvrelay bench`. Returns the exit status."""
    console = Console(stderr=True)
    if not argv or argv[0] in ("-h", "--help"):
        print(_HELP, end="")
        return 0 if argv else 2
    try:
        _run_scenario(argv, console)
    except KVRelayError as error:
        console.print(f"[red]error:[/] {error}", highlight=False, soft_wrap=True)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        console.print("stopped")
        return 130
    return 0


def _run_scenario(argv: list[str], console: Console) -> None:
    scenario = SCENARIOS.get(argv[0])
    if scenario is None:
        raise ConfigError(f"unknown scenario {argv[0]!r}{suggest(argv[0], SCENARIOS)} (there are {', '.join(SCENARIOS)})")
    parser = Parser(prog=f"kvrelay bench {argv[0]}", description=scenario.description)
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the result there")
    scenario.add_options(parser)
    options = parser.parse_strictly(argv[1:])
    results, targets = scenario.measure(options, console)
    from kvrelay.bench.machine import describe  # loads torch, which a running scenario may want to have for itself

    result = report.BenchResult(
        scenario=argv[0],
        commit=report.current_commit(),
        hardware=describe(),
        command=shlex.join(["kvrelay", "bench", *argv]),
        results=results,
    )
    report.show(result, targets, console)
    if options.json is not None:
        report.write(result, options.json)
        console.print(f"wrote {options.json}")


def _machine_options(parser: Parser) -> None:
    parser.add_argument("--threads", type=positive, default=0, metavar="N", help="CPU threads (default: all cores)")


def _engine_options(parser: Parser) -> None:
    _machine_options(parser)
    parser.add_argument(
        "--model", default="smollm2", metavar="MODEL", help="smollm2 (default), a folder, a .gguf file, a hub id"
    )
    parser.add_argument("--load", choices=["auto", "dummy"], default="auto", help="dummy: random weights of the model's shape")
    parser.add_argument("--peer", choices=["transformers"], help="run the same workload there and show the ratios")
    parser.add_argument("--rounds", type=positive, default=7, metavar="N", help="figures are medians over so many (default 7)")


def _router_options(parser: Parser) -> None:
    from kvrelay.bench import router

    names = ",".join(router.PARTS)
    parser.add_argument(
        "--only", type=router.parse, default=tuple(router.PARTS), metavar="PARTS", help=f"some of {names} (default all)"
    )
    parser.add_argument(
        "--model", default="smollm2", metavar="MODEL", help="smollm2 (default), a folder, a .gguf file, a hub id"
    )
    parser.add_argument("--load", choices=["auto", "dummy"], default="auto", help="dummy: random weights of the model's shape")
    parser.add_argument("--seconds", type=positive, default=10, metavar="S", help="length of the throughput run (default 10)")
    parser.add_argument("--streams", type=positive, default=512, metavar="N", help="streams of the wide runs (default 512)")


def _relay_options(parser: Parser) -> None:
    parser.add_argument(
        "--model", default="smollm2", metavar="MODEL", help="smollm2 (default), a folder, a .gguf file, a hub id"
    )
    parser.add_argument("--seconds", type=positive, default=25, metavar="S", help="long prompts arrive so long (default 25)")
    plot = pathlib.Path("bench/results/relay-itl.svg")
    parser.add_argument("--plot", type=pathlib.Path, default=plot, metavar="FILE.svg", help=f"the drawing (default {plot})")


def _kv_options(parser: Parser) -> None:
    from kvrelay.bench import kv

    names = ",".join(kv.PARTS)
    parser.add_argument(
        "--only",
        type=kv.parse,
        default=kv.DEFAULT_PARTS,
        metavar="PARTS",
        help=f"some of {names} (default all but overlap)",
    )
    parser.add_argument(
        "--model", default="smollm2", metavar="MODEL", help="smollm2 (default), a folder, a .gguf file, a hub id"
    )
    parser.add_argument("--load", choices=["auto", "dummy"], default="auto", help="dummy: random weights of the model's shape")
    parser.add_argument("--rounds", type=positive, default=5, metavar="N", help="figures are medians over so many (default 5)")
    profile = pathlib.Path("bench/results/kv-scheduler-profile.txt")
    parser.add_argument("--profile", type=pathlib.Path, default=profile, metavar="FILE", help=f"a profile (default {profile})")


def _two_stage_options(parser: Parser) -> None:
    parser.add_argument(
        "--model", default="smollm2", metavar="MODEL", help="smollm2 (default), a folder, a .gguf file, a hub id"
    )
    parser.add_argument("--load", choices=["auto", "dummy"], default="auto", help="dummy: random weights of the model's shape")
    sizes = {
        "requests": (2, "requests of each way, besides one whose time to first token is taken"),
        "prompt-tokens": (500, "tokens of a prompt"),
        "thinking-tokens": (200, "tokens of stage 1"),
        "suffix-tokens": (5, "tokens between the stages"),
        "beam-width": (32, "beams of stage 2"),
        "beam-tokens": (3, "tokens of stage 2"),
    }
    for name, (default, text) in sizes.items():
        parser.add_argument(f"--{name}", type=positive, default=default, metavar="N", help=f"{text} (default {default})")
    plot = pathlib.Path("bench/results/two-stage.svg")
    parser.add_argument("--plot", type=pathlib.Path, default=plot, metavar="FILE.svg", help=f"the drawing (default {plot})")


def _encode_options(parser: Parser) -> None:
    from kvrelay.bench import encode

    names = ",".join(encode.PARTS)
    parser.add_argument(
        "--only", type=encode.parse, default=tuple(encode.PARTS), metavar="PARTS", help=f"some of {names} (default all)"
    )
    parser.add_argument(
        "--model", default="", metavar="MODEL", help="folder or hub id of a Qwen-VL checkpoint (default: made-up weights)"
    )
    parser.add_argument("--requests", type=positive, default=80, metavar="N", help="text requests per cluster (default 80)")
    parser.add_argument(
        "--transports", default="shm", metavar="NAMES", help="some of shm,nixl,mooncake for the part transfer (default shm)"
    )


def _gpu_options(parser: Parser) -> None:
    from kvrelay.bench.gpu import scenario

    scenario.add_options(parser)


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def _measure_machine(options: argparse.Namespace, console: Console) -> tuple[Results, Targets]:
    from kvrelay.bench import machine

    with console.status("measuring this machine"):
        return machine.measure(options.threads), {}


def _measure_engine(options: argparse.Namespace, console: Console) -> tuple[Results, Targets]:
    from kvrelay.bench import engine

    bench = engine.EngineBench(
        model=options.model,
        load=options.load,
        threads=options.threads,
        rounds=options.rounds,
        peer=options.peer is not None,
    )
    return bench.measure(console), engine.TARGETS


def _measure_router(options: argparse.Namespace, console: Console) -> tuple[Results, Targets]:
    from kvrelay.bench import router

    bench = router.RouterBench(
        model=options.model, load=options.load, seconds=options.seconds, streams=options.streams, only=options.only
    )
    return bench.measure(console), router.TARGETS


def _measure_relay(options: argparse.Namespace, console: Console) -> tuple[Results, Targets]:
    from kvrelay.bench import relay

    return relay.measure(options.model, options.seconds, options.plot, console), relay.TARGETS


def _measure_kv(options: argparse.Namespace, console: Console) -> tuple[Results, Targets]:
    from kvrelay.bench import kv

    bench = kv.KVBench(
        model=options.model, load=options.load, rounds=options.rounds, only=options.only, profile=options.profile
    )
    return bench.measure(console), kv.TARGETS


def _measure_two_stage(options: argparse.Namespace, console: Console) -> tuple[Results, Targets]:
    from kvrelay.bench import two_stage

    workload = two_stage.Workload(
        requests=options.requests,
        prompt=options.prompt_tokens,
        thinking=options.thinking_tokens,
        suffix=options.suffix_tokens,
        width=options.beam_width,
        beam=options.beam_tokens,
    )
    return two_stage.measure(options.model, options.load, workload, options.plot, console), two_stage.TARGETS


def _measure_encode(options: argparse.Namespace, console: Console) -> tuple[Results, Targets]:
    from kvrelay.bench import encode

    bench = encode.EncodeBench(
        model=options.model,
        requests=options.requests,
        transports=tuple(options.transports.split(",")),
        only=options.only,
    )
    return bench.measure(console), encode.TARGETS


def _measure_gpu(options: argparse.Namespace, console: Console) -> tuple[Results, Targets]:
    from kvrelay.bench.gpu import scenario

    return scenario.measure(options, console)


SCENARIOS = {
    "machine": Scenario("Memory bandwidth and GEMM rate of this machine.", _machine_options, _measure_machine),
    "engine": Scenario("Decode and prefill against this machine's limits.", _engine_options, _measure_engine),
    "router": Scenario(
        "What the router adds to a request, what its choices are worth, what a lost worker costs.",
        _router_options,
        _measure_router,
    ),
    "relay": Scenario("What handing KV between workers costs, and what it is good for.", _relay_options, _measure_relay),
    "kv": Scenario("What the life of a request's KV costs.", _kv_options, _measure_kv),
    "two-stage": Scenario(
        "What continuing from a request costs, against asking again.", _two_stage_options, _measure_two_stage
    ),
    "encode": Scenario(
        "What encode workers and the relay of their embeddings cost, and what they are good for.",
        _encode_options,
        _measure_encode,
    ),
    "gpu": Scenario("The engine on one NVIDIA card, correct and fast.", _gpu_options, _measure_gpu),
}


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
