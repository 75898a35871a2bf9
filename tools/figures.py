"""Writes the tables of figures of README and docs/scale.md from the result files: `python tools/figures.py` (`--check`: says
whether they are so).

A machine is a folder of bench/results, whose files come from one commit (`kvrelay bench all`), and has a column of the tables
of processors or of that of cards. The rows are those of figure_rows.py. Targets that a machine misses and no row shows are
told below README's tables.
"""

from __future__ import annotations

import pathlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence

import msgspec
from figure_rows import CARD_ROWS, CPU_ROWS, SCALE_ROWS
from table_row import Row

from kvrelay.bench.harness.report import BenchResult
from kvrelay.bench.main import find_scenario

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"

__all__ = ["PAGES", "RESULTS", "Row", "main", "missed_elsewhere", "read_machine", "written"]


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


def machines(rows: tuple[Row, ...]) -> dict[pathlib.Path, dict[str, dict[str, float]]]:
    """The folders of machines with a card, or of those without: with their scenarios' figures."""
    measured = {folder: read_machine(folder) for folder in sorted(RESULTS.iterdir())}
    return {folder: found for folder, found in measured.items() if found and ("gpu" in found) == (rows is CARD_ROWS)}


def table(rows: tuple[Row, ...]) -> str:
    measured = machines(rows)
    lines = [["what", "is", "target", *map(title, measured)], ["---"] * (3 + len(measured))]
    for row in rows:
        figures = [found.get(row.scenario, {}) for found in measured.values()]
        lines.append([row.what, row.statistics(figures), row.target(), *map(row.cell, figures)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def with_what_else_is_missed(rows: tuple[Row, ...]) -> str:
    missed = [
        f"{title(folder)} also misses {', '.join(names)}."
        for folder, found in machines(rows).items()
        if (names := missed_elsewhere(rows, found))
    ]
    below = "\n".join(["", *missed]) if missed else "\nEvery target that was measured and that no row shows is met."
    return f"{table(rows)}\n{below}"


PAGES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"cpu": lambda: with_what_else_is_missed(CPU_ROWS), "card": lambda: with_what_else_is_missed(CARD_ROWS)},
    "docs/scale.md": {"scale": lambda: table(SCALE_ROWS)},
}


def written(page: str) -> str:
    """A page of PAGES with the figures of the files."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for name, figures in PAGES[page].items():
        before, begin, rest = re.split(rf"(<!-- figures:{name} .*?-->\n)", text)
        text = before + begin + figures() + "\n<!-- figures:end -->" + rest.partition("<!-- figures:end -->")[2]
    return text


def main(arguments: list[str]) -> int:
    new = {page: written(page) for page in PAGES}
    if "--check" not in arguments:
        for page, text in new.items():
            (ROOT / page).write_text(text, encoding="utf-8")
        return 0
    stale = [page for page, text in new.items() if text != (ROOT / page).read_text(encoding="utf-8")]
    for page in stale:
        print(f"{page}'s figures are not those of bench/results: run python tools/figures.py", file=sys.stderr)
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
