"""`kvrelay bench all`: every figure of README, in one go and at one commit.

Each scenario is a process of its own (`kvrelay bench NAME --json FILE`) and writes `bench/results/<machine>/NAME.json`: the
processor and its number of cores, or the card. `tools/figures.py` then writes README's tables from these files. A tree with
changes that are not committed is refused, since its figures could not be repeated; `--draft` measures it into build/.
"""

from __future__ import annotations

import functools
import pathlib
import re
import subprocess
import sys
import time
from typing import Annotated

from msgspec import Meta
from rich.console import Console

from kvrelay.bench.harness.child import VLLM_PYTHON
from kvrelay.bench.harness.report import current_commit, machine_name
from kvrelay.bench.harness.scenario import BenchOptions, Part, Results, Scenario
from kvrelay.errors import BenchError, ConfigError

PUBLISHED, DRAFTS = pathlib.Path("bench/results"), pathlib.Path("build/bench")
# What README shows needs more than the defaults in a few places.
_OPTIONS: dict[str, list[str]] = {
    "engine": ["--rounds", "5", "--peer", "transformers,vllm,llama.cpp"],
    "router": [],
    "relay": [],
    "kv": [],
    "two-stage": [],
    "encode": [],
    "vllm": [],
    "gpu": [],
}
_DRAWINGS = {"relay": "relay-itl.svg", "two-stage": "two-stage.svg"}


class EverythingBench(BenchOptions, frozen=True, kw_only=True):
    """Where the results go."""

    draft: Annotated[bool, Meta(description="measure a tree with changes too, and write to build/bench")] = False


def _measure(name: str, options: EverythingBench, console: Console) -> Results:
    if not options.draft and (commit := current_commit()).endswith("+changes"):
        raise ConfigError(f"the tree differs from its commit ({commit[:12]}): commit first, or measure a --draft")
    folder = (DRAFTS if options.draft else PUBLISHED) / slug(machine_name(card=name == "gpu"))
    started = time.monotonic()
    if _run(python_for(name), arguments(name, folder)):
        raise BenchError(
            f"kvrelay bench {name} has failed (its message is above); the files in {folder} are not of one commit now"
        )
    console.print(f"wrote {folder / name}.json", highlight=False)
    return {f"{name}_minutes": (time.monotonic() - started) / 60}


def python_for(name: str) -> str:
    """This one, but for vLLM where that has an environment of its own."""
    return str(VLLM_PYTHON) if name == "vllm" and VLLM_PYTHON.exists() else sys.executable


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


def arguments(name: str, folder: pathlib.Path) -> list[str]:
    drawing = ["--plot", str(folder / _DRAWINGS[name])] if name in _DRAWINGS else []
    profile = ["--profile", str(folder / "kv-scheduler-profile.txt")] if name == "kv" else []
    return [name, *_OPTIONS[name], "--json", str(folder / f"{name}.json"), *drawing, *profile]


def slug(name: str) -> str:
    """As a folder is called: "Intel(R) Xeon(R) @ 2.50GHz, 2 cores" -> "intel-xeon-2.50ghz-2-cores"."""
    return re.sub(r"[^a-z0-9.]+", "-", re.sub(r"\((r|tm)\)", "", name.lower())).strip("-")


SCENARIO = Scenario(
    EverythingBench,
    {name: Part(f"kvrelay bench {name}", functools.partial(_measure, name), {}, by_default=name != "gpu") for name in _OPTIONS},
)
