"""Writes README's tables of figures from the result files: `python tools/figures.py` (`--check`: says whether they are so).

A machine is a folder of bench/results, whose files come from one commit (`kvrelay bench all`), and has a column of the table of
processors or of that of cards. The rows are those of figure_rows.py. Targets that a machine misses and no row shows are told
below the table.
"""

from __future__ import annotations

import pathlib
import re
import sys
from collections.abc import Mapping, Sequence

import msgspec
from figure_rows import CARD_ROWS, CPU_ROWS
from table_row import Row

from kvrelay.bench.harness.report import BenchResult
from kvrelay.bench.main import find_scenario

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"

__all__ = ["RESULTS", "Row", "main", "missed_elsewhere", "read_machine", "table", "written"]


def read_machine(folder: pathlib.Path) -> dict[str, dict[str, float]]:
    """Scenario -> its figures."""
    found: dict[str, dict[str, float]] = {}
    for path in sorted(folder.glob("*.json"), key=lambda path: path.stem):
        result = msgspec.json.decode(path.read_bytes(), type=BenchResult)
        found.setdefault(result.scenario, {}).update(result.results)
    return found


def title(folder: pathlib.Path) -> str:
    """What the machine calls itself, and the commit."""
    results = [msgspec.json.decode(path.read_bytes(), type=BenchResult) for path in sorted(folder.glob("*.json"))]
    hardware = re.sub(r" Processor| CPU|\s*\([^)]*\)", "", ", ".join(results[0].hardware.split(", ")[:2]))
    if "gpu" in {result.scenario for result in results}:
        hardware = results[0].hardware.split(", ")[-1]
    return f"{hardware} ({results[0].commit[:7]})"


def missed_elsewhere(rows: Sequence[Row], results: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Figures of a machine that miss a target, and that none of the rows shows."""
    shown = {(row.scenario, name) for row in rows for name in row.figures()}
    return [
        f"`{name}` {figures[name]:.2f} ({target})"
        for scenario, figures in results.items()
        for name, target in find_scenario(scenario).targets.items()
        if name in figures and (scenario, name) not in shown and not target.met(figures[name])
    ]


def table(rows: tuple[Row, ...]) -> str:
    """Of the machines with a card, or of those without."""
    measured = {folder: read_machine(folder) for folder in sorted(RESULTS.iterdir())}
    machines = {folder: found for folder, found in measured.items() if found and ("gpu" in found) == (rows is CARD_ROWS)}
    lines = [["what", "is", "target", *map(title, machines)], ["---"] * (3 + len(machines))]
    for row in rows:
        figures = [found.get(row.scenario, {}) for found in machines.values()]
        lines.append([row.what, row.statistics(figures), row.target(), *map(row.cell, figures)])
    missed = [
        f"{title(folder)} also misses {', '.join(names)}."
        for folder, found in machines.items()
        if (names := missed_elsewhere(rows, found))
    ]
    below = "\n".join(["", *missed]) if missed else "\nEvery target that was measured and that no row shows is met."
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n" + below


def written(readme: str) -> str:
    for name, rows in (("cpu", CPU_ROWS), ("card", CARD_ROWS)):
        pattern = rf"(<!-- figures:{name} .*?-->\n).*?(<!-- figures:end -->)"
        readme, count = re.subn(
            pattern, lambda match, rows=rows: f"{match[1]}{table(rows)}\n{match[2]}", readme, flags=re.DOTALL
        )  # type: ignore[misc]
        assert count == 1, f"README has no place for figures:{name}"
    return readme


def main(arguments: list[str]) -> int:
    readme = ROOT / "README.md"
    before = readme.read_text(encoding="utf-8")
    after = written(before)
    if "--check" not in arguments:
        readme.write_text(after, encoding="utf-8")
        return 0
    if before != after:
        print("README's figures are not those of bench/results: run python tools/figures.py", file=sys.stderr)
    return int(before != after)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
