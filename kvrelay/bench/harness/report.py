"""The result of a scenario: a table on the terminal, a JSON file for scripts."""

from __future__ import annotations

import operator
import os
import pathlib
import platform
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
from rich.console import Console
from rich.table import Table

from kvrelay.errors import ConfigError

_COMPARE: dict[str, Callable[[float, float], bool]] = {"<=": operator.le, ">=": operator.ge}


class BenchResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result file, a contract: scripts read exactly these fields."""

    scenario: str
    commit: str
    hardware: str
    command: str
    results: dict[str, float]


@dataclass(frozen=True)
class Target:
    """What a figure must reach."""

    comparison: Literal["<=", ">="]
    value: float

    def met(self, figure: float) -> bool:
        return _COMPARE[self.comparison](figure, self.value)

    def __str__(self) -> str:
        return f"{self.comparison} {self.value:g}"


def show(result: BenchResult, targets: Mapping[str, Target], console: Console, command: str = "kvrelay bench") -> None:
    table = Table(title=f"{command} {result.scenario}")
    table.add_column("figure")
    table.add_column("value", justify="right")
    table.add_column("target", justify="right")
    table.add_column("")
    for name, figure in result.results.items():
        target = targets.get(name)
        verdict = "" if target is None else "[green]met" if target.met(figure) else "[red]missed"
        table.add_row(name, format_figure(figure), "" if target is None else str(target), verdict)
    console.print(table)
    console.print(result.hardware, highlight=False, soft_wrap=True)


def format_figure(figure: float) -> str:
    """Four digits that mean something, without an exponent."""
    if figure == int(figure):
        return f"{int(figure)}"
    decimals = 0 if abs(figure) >= 1000 else 1 if abs(figure) >= 100 else 3
    return f"{figure:.{decimals}f}"


def percentile(values: Sequence[float], share: int) -> float:
    """The smallest value that at least `share` % of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * share // 100) - 1)]


def median_ratio(ones: Sequence[float], others: Sequence[float]) -> float:
    """Of what was measured in the same round: one that was disturbed does not count."""
    return statistics.median(one / other for one, other in zip(ones, others, strict=True))


def write(result: BenchResult, path: pathlib.Path) -> None:
    write_file("--json", path, msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")


def write_file(option: str, path: pathlib.Path, content: bytes) -> None:
    """Raises ConfigError, which names the option that asked for the file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"{option}: cannot write {path}: {error.strerror}") from error


def current_commit() -> str:
    """Of the source tree this package runs from; "+changes" when files differ from it, other than the results themselves. An
    exported tree names its commit in a file COMMIT; "unknown" outside of both."""
    folder = pathlib.Path(__file__).resolve().parent
    exported = folder.parents[2] / "COMMIT"
    if exported.is_file():
        return exported.read_text(encoding="ascii").strip()
    head = _git(folder, "rev-parse", "HEAD")
    if head is None:
        return "unknown"
    changed = _git(folder.parents[2], "status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/results")
    return head + ("+changes" if changed else "")


def _git(folder: pathlib.Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def machine_name(*, card: bool) -> str:
    """The processor and its cores, or the card. Raises ConfigError if there is none."""
    if card:
        import torch

        if not torch.cuda.is_available():
            raise ConfigError("there is no NVIDIA card here that PyTorch finds")
        return torch.cuda.get_device_name()
    return f"{_cpu_model()}, {_num_cores()} cores"


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


def describe_hardware() -> str:
    """One line: processor, cores, memory, PyTorch, threads, GPU if there is one."""
    import torch  # late: a running scenario may want it for itself

    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    card = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return (
        f"{_cpu_model()} ({platform.machine()}), {_num_cores()} cores, {memory_gib:.0f} GiB, "
        f"Python {platform.python_version()}, torch {torch.__version__}, {torch.get_num_threads()} threads{card}"
    )


def _cpu_model() -> str:
    """As the kernel names it. Arm kernels give part numbers only, so those are named here."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    if name := facts.get("model name") or facts.get("Model"):
        return name
    implementer, part = facts.get("CPU implementer", ""), facts.get("CPU part", "")
    return _ARM_PARTS.get((implementer, part)) or platform.processor() or "unknown processor"


_ARM_PARTS = {
    ("0x41", "0xd08"): "Arm Cortex-A72",
    ("0x41", "0xd0c"): "Arm Neoverse-N1",
    ("0x41", "0xd40"): "Arm Neoverse-V1",
    ("0x41", "0xd49"): "Arm Neoverse-N2",
    ("0x41", "0xd4f"): "Arm Neoverse-V2",
    ("0x41", "0xd84"): "Arm Neoverse-V3",
    ("0xc0", "0xac3"): "Ampere-1",
}
