"""The tables of docs/cli.md and docs/operations.md that are made from the code: options, environment, metrics.

`python tests/documented.py` writes them anew; tests/test_docs.py compares them. A table stands under the heading it belongs to.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

from prometheus_client.metrics import MetricWrapperBase

from kvrelay import config
from kvrelay.bench.main import SCENARIOS
from kvrelay.cli import main as cli
from kvrelay.cli import router, serve, worker
from kvrelay.metrics import Metrics
from kvrelay.options import Parser, add_options, flag_of
from kvrelay.router.collector import WorkerCollector
from kvrelay.states import Role

ROOT = Path(__file__).resolve().parent.parent
GROUPS: dict[str, type[config.Options]] = {
    "Model": config.ModelOptions,
    "Engine": config.EngineOptions,
    "Router": config.RouterOptions,
    "Cluster": config.ClusterOptions,
    "Cards": config.CardOptions,
    "Transfer": config.TransferOptions,
    "Worker": config.WorkerOptions,
}
BY_GROUPS = {"serve": serve.GROUPS, "router": router.GROUPS, "worker": worker.GROUPS}
COMMANDS = [*(name for name in cli.COMMANDS if name != "bench"), *(f"bench {name}" for name in SCENARIOS)]


class _Caught(Exception):
    """A parser that is about to parse."""


def parser_of(command: str) -> Parser:
    """The parser that `kvrelay COMMAND` makes, of whichever module."""
    caught: list[Parser] = []

    def catch(parser: Parser, argv: Sequence[str]) -> argparse.Namespace:
        caught.append(parser)
        raise _Caught

    with mock.patch.object(Parser, "parse_strictly", catch), contextlib.suppress(_Caught):
        cli.main(command.split())
    return caught[0]


def shown_actions(parser: Parser) -> list[argparse.Action]:
    """What --help shows, without --help itself."""
    return [action for action in parser._actions if action.help != argparse.SUPPRESS and "--help" not in action.option_strings]


def options_of(command: str) -> set[str]:
    return {option for action in shown_actions(parser_of(command)) for option in action.option_strings}


def role_options() -> set[str]:
    """Those of `serve` for one role, which --help does not list. docs/cli.md tells the rule that makes them."""
    names = {name for group in serve.PER_ROLE for name in group.__struct_fields__}
    return {flag_of(name, role) for name in names for role in Role}


def cli_tables() -> dict[str, list[str]]:
    """Heading of docs/cli.md -> its table. Options that `serve`, `router` and `worker` share are listed by group."""
    tables = {title: _table(_group_parser(group)) for title, group in GROUPS.items()}
    commands = {f"`kvrelay {command}`": _table(parser_of(command)) for command in COMMANDS if command not in BY_GROUPS}
    return tables | {heading: table for heading, table in commands.items() if table}


def _group_parser(group: type[config.Options]) -> Parser:
    parser = Parser(prog="")
    add_options(parser, [group])
    return parser


def _table(parser: Parser) -> list[str]:
    rows = [_row(action) for action in shown_actions(parser)]
    return ["| option | default | is |", "|---|---|---|", *rows] if rows else []


def _row(action: argparse.Action) -> str:
    text, default = (action.help or "").replace("%%", "%"), _default(action)
    note = re.search(r" \(default:? ([^()]*)\)$", text)
    if note:
        text, default = text[: note.start()], f"`{note[1]}`"
    values = f" ({', '.join(map(str, action.choices))})" if action.choices and action.option_strings else ""
    name = action.option_strings[0] if action.option_strings else str(action.metavar)
    return f"| `{name}` | {default} | {text.replace('<', '&lt;')}{values} |"


def _default(action: argparse.Action) -> str:
    value = action.default
    if isinstance(action.const, bool):
        return "`on`" if value is True else "`off`"
    return "none" if value in (None, "", [], argparse.SUPPRESS) else f"`{value}`"


def metric_table() -> list[str]:
    own = [metric for metric in vars(Metrics()).values() if isinstance(metric, MetricWrapperBase)]
    rows = [_metric_row(metric._name, metric._type, metric._labelnames, metric._documentation) for metric in own]
    for family in WorkerCollector(list).collect():
        rows.append(_metric_row(family.name, family.type, family._labelnames, family.documentation))  # type: ignore[attr-defined]
    return ["| metric | kind | is |", "|---|---|---|", *rows]


def _metric_row(name: str, kind: str, labels: Sequence[str], text: str) -> str:
    suffix = "_total" if kind == "counter" else ""
    shown = f"{{{', '.join(labels)}}}" if labels else ""
    return f"| `{name}{suffix}{shown}` | {kind} | {text} |"


def metric_names() -> set[str]:
    return {re.findall(r"`(\w+)", row)[0] for row in metric_table()[2:]}


def tables_in(page: str) -> dict[str, list[str]]:
    """Heading -> the lines of the first table under it."""
    found: dict[str, list[str]] = {}
    heading, over = "", False
    for line in page.splitlines():
        if line.startswith("#"):
            heading, over = line.lstrip("# "), False
        elif line.startswith("|") and not over:
            found.setdefault(heading, []).append(line)
        elif heading in found:
            over = True
    return found


def with_tables(page: str, tables: dict[str, list[str]]) -> str:
    """The page with these tables in the place of those under their headings. A heading that is missing is added at the end."""
    for heading, table in tables.items():
        text = "\n".join(table)
        section = re.compile(rf"(^#+ {re.escape(heading)}\n(?:(?!#|\|).*\n)*)((?:\|.*\n)*)", re.MULTILINE)
        if section.search(page):
            page = section.sub(lambda match, text=text: f"{match[1]}{text}\n", page, count=1)  # type: ignore[misc]
        else:
            page = f"{page.rstrip()}\n\n### {heading}\n\n{text}\n"
    return page


def main() -> int:
    for name, tables in (("docs/cli.md", cli_tables()), ("docs/operations.md", {"Metrics": metric_table()})):
        page = ROOT / name
        page.write_text(with_tables(page.read_text(encoding="utf-8"), tables), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
