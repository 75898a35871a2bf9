"""What a scenario hands back, and how it is shown: a table on the terminal, a JSON file for scripts."""

from __future__ import annotations

import operator
import pathlib
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


def show(result: BenchResult, targets: Mapping[str, Target], console: Console) -> None:
    table = Table(title=f"kvrelay bench {result.scenario}")
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


def write(result: BenchResult, path: pathlib.Path) -> None:
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    except OSError as error:
        raise ConfigError(f"--json: cannot write {path}: {error.strerror}") from error


def current_commit() -> str:
    """Of the source tree this package runs from; "+changes" when files differ from it. An exported tree names its commit in a
    file COMMIT; "unknown" outside of both."""
    folder = pathlib.Path(__file__).resolve().parent
    exported = folder.parent.parent / "COMMIT"
    if exported.is_file():
        return exported.read_text(encoding="ascii").strip()
    head = _git(folder, "rev-parse", "HEAD")
    if head is None:
        return "unknown"
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return head + ("+changes" if changed else "")


def _git(folder: pathlib.Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
