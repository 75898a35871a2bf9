"""`kvrelay bench all`: every figure of README that this machine can give, in one go and at one commit.

Each run of a scenario is a process of its own (`kvrelay bench NAME --json FILE`) and writes a file of
`bench/results/<machine>/`: the processor and its number of cores, or (`--only gpu`) the card. `tools/figures.py` then writes
the tables of README and docs/scale.md from these files. A tree with changes that are not committed is refused, since its
figures could not be repeated; `--draft` measures it into build/.
"""

from __future__ import annotations

import functools
import pathlib
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta
from rich.console import Console

from kvrelay.bench.harness.child import CONTEXTPILOT_PYTHON, VLLM_PYTHON
from kvrelay.bench.harness.report import current_commit, machine_name
from kvrelay.bench.harness.scenario import BenchOptions, Part, Results, Scenario
from kvrelay.errors import BenchError, ConfigError

PUBLISHED, DRAFTS = pathlib.Path("bench/results"), pathlib.Path("build/bench")
CARD = "gpu"


class EverythingBench(BenchOptions, frozen=True, kw_only=True):
    """Where the results go, and of which model they are."""

    draft: Annotated[bool, Meta(description="measure a tree with changes too, and write to build/bench")] = False
    model: Annotated[
        str, Meta(description="text model of every scenario, where smollm2 cannot be fetched: a folder, or what each takes")
    ] = ""


@dataclass(frozen=True)
class Run:
    """A process that writes FILE.json. `options` are what README's figures need beyond the defaults; `outputs` are options with
    the names of further files."""

    scenario: str
    file: str
    options: tuple[str, ...] = ()
    outputs: tuple[tuple[str, str], ...] = ()
    takes_model: bool = True

    def arguments(self, folder: pathlib.Path, model: str) -> list[str]:
        named = ["--model", model] if model and self.takes_model else []
        outputs = [word for option, file in self.outputs for word in (option, str(folder / file))]
        return [self.scenario, *self.options, *named, "--json", str(folder / f"{self.file}.json"), *outputs]


# Of a card, what goes over HTTP is measured more often and the long prompts come for less time than by default.
RUNS: dict[str, tuple[Run, ...]] = {
    "engine": (Run("engine", "engine", ("--rounds", "5", "--peer", "transformers,vllm,llama.cpp")),),
    "router": (Run("router", "router"),),
    "relay": (Run("relay", "relay", outputs=(("--plot", "relay-itl.svg"),)),),
    "kv": (Run("kv", "kv", outputs=(("--profile", "kv-scheduler-profile.txt"),)),),
    "two-stage": (Run("two-stage", "two-stage", outputs=(("--plot", "two-stage.svg"),)),),
    "encode": (Run("encode", "encode", takes_model=False),),
    "vllm": (Run("vllm", "vllm"),),
    CARD: (
        Run("gpu", "gpu", ("--only", "parity,speed,fp8"), takes_model=False),
        Run("gpu", "gpu_relay", ("--only", "relay", "--rounds", "6", "--seconds", "6"), takes_model=False),
        Run("router", "router", ("--only", "routers", "--seconds", "3")),
    ),
}


def _measure(name: str, options: EverythingBench, console: Console) -> Results:
    if not options.draft and (commit := current_commit()).endswith("+changes"):
        raise ConfigError(f"the tree differs from its commit ({commit[:12]}): commit first, or measure a --draft")
    folder = (DRAFTS if options.draft else PUBLISHED) / slug(machine_name(card=name == CARD))
    started = time.monotonic()
    for run in RUNS[name]:
        arguments = [*run.arguments(folder, options.model), *_index_options(run, console)]
        if _run(python_for(run.scenario), arguments):
            failed = f"kvrelay bench {run.scenario} has failed (its message is above)"
            raise BenchError(f"{failed}; the files in {folder} are not of one commit now")
        console.print(f"wrote {folder / run.file}.json", highlight=False)
    return {f"{name}_minutes": (time.monotonic() - started) / 60}


def python_for(scenario: str) -> str:
    """This one, but for vLLM where that has an environment of its own."""
    return str(VLLM_PYTHON) if scenario == "vllm" and VLLM_PYTHON.exists() else sys.executable


def _index_options(run: Run, console: Console) -> list[str]:
    """The context index of `kv` is ContextPilot's where that is installed."""
    if run.scenario != "kv":
        return []
    if CONTEXTPILOT_PYTHON.exists():
        return ["--contextpilot", str(CONTEXTPILOT_PYTHON)]
    hint = "make .venv-contextpilot/.installed"
    console.print(f"[yellow]ContextPilot is left out:[/] a stand-in is the context index ({hint})", highlight=False)
    return []


def _run(python: str, arguments: list[str]) -> int:
    """Returns the exit status of `kvrelay bench ARGUMENTS`, which writes to this terminal, and ends before this does."""
    command = [python, "-m", "kvrelay", "bench", *arguments]
    process = subprocess.Popen(command, start_new_session=True)  # so that Ctrl-C reaches it once, as below
    try:
        return process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise


def slug(name: str) -> str:
    """As a folder is called: "Intel(R) Xeon(R) @ 2.50GHz, 2 cores" -> "intel-xeon-2.50ghz-2-cores"."""
    return re.sub(r"[^a-z0-9.]+", "-", re.sub(r"\((r|tm)\)", "", name.lower())).strip("-")


def _title(runs: tuple[Run, ...]) -> str:
    return ", ".join(dict.fromkeys(f"kvrelay bench {run.scenario}" for run in runs))


SCENARIO = Scenario(
    EverythingBench,
    {name: Part(_title(runs), functools.partial(_measure, name), {}, by_default=name != CARD) for name, runs in RUNS.items()},
)
