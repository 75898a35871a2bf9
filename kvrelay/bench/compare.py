"""`kvrelay bench compare A B`: two result files side by side."""

from __future__ import annotations

import pathlib

import msgspec
from rich.console import Console
from rich.table import Table

from kvrelay.bench.harness.report import BenchResult, format_figure
from kvrelay.errors import ConfigError
from kvrelay.options import Parser


def run(argv: list[str], console: Console) -> None:
    """Raises ConfigError."""
    parser = Parser(prog="kvrelay bench compare", description="Shows two result files side by side.")
    parser.add_argument("one", metavar="A", type=pathlib.Path, help="a file that --json has written")
    parser.add_argument("other", metavar="B", type=pathlib.Path, help="another, of the same scenario")
    files = parser.parse_strictly(argv)
    one, other = _read(files.one), _read(files.other)
    if one.scenario != other.scenario:
        raise ConfigError(f"{files.one} is of bench {one.scenario}, {files.other} of bench {other.scenario}")
    console.print(compare(one, other))
    for name, result in (("A", one), ("B", other)):
        console.print(f"{name}: {result.commit[:12]}: {result.command}\n   {result.hardware}", highlight=False, soft_wrap=True)


def compare(one: BenchResult, other: BenchResult) -> Table:
    table = Table("figure", title=f"kvrelay bench {one.scenario}")
    for heading in ("A", "B", "B over A"):
        table.add_column(heading, justify="right")
    for name in dict.fromkeys([*one.results, *other.results]):
        a, b = one.results.get(name), other.results.get(name)
        ratio = f"{b / a:.3f}" if a and b is not None else ""
        table.add_row(name, _shown(a), _shown(b), ratio)
    return table


def _shown(figure: float | None) -> str:
    return "" if figure is None else format_figure(figure)


def _read(path: pathlib.Path) -> BenchResult:
    try:
        return msgspec.json.decode(path.read_bytes(), type=BenchResult)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is not a result of kvrelay bench: {error}") from error
