"""The documentation says what is true: every option, metric and state is in it, and its links lead somewhere."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from enum import Enum
from pathlib import Path

import documented
import pytest

from kvrelay import states
from kvrelay.bench.main import SCENARIOS
from kvrelay.cli import main as cli

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


# The command line: what exists is documented, and what is documented exists. `python tests/documented.py` writes the tables.


@pytest.mark.parametrize("heading", documented.cli_tables())
def test_every_option_is_documented_as_it_is(heading: str) -> None:
    """Name, default, choices and description; nothing else is in the table."""
    assert documented.tables_in(page("docs/cli.md")).get(heading) == documented.cli_tables()[heading]


def test_every_table_of_options_belongs_to_a_group_or_a_command() -> None:
    options = {heading for heading, rows in documented.tables_in(page("docs/cli.md")).items() if "| option |" in rows[0]}
    assert options == set(documented.cli_tables())


@pytest.mark.parametrize("command", documented.BY_GROUPS)
def test_the_commands_with_groups_have_no_other_options(command: str) -> None:
    """And docs/cli.md says under each group which commands take it."""
    rest = documented.options_of(command) - {"--config"}
    for title, group in documented.GROUPS.items():
        section = page("docs/cli.md").partition(f"\n### {title}\n")[2].partition("\n|")[0]
        assert (f"`{command}`" in section) == (group in documented.BY_GROUPS[command])
        if group in documented.BY_GROUPS[command]:
            rest -= {f"--{switch}{name.replace('_', '-')}" for name in group.__struct_fields__ for switch in ("", "no-")}
    assert rest == set()


def test_the_commands_and_scenarios_are_listed() -> None:
    listed = re.findall(r"^kvrelay (\S+)", page("docs/cli.md"), re.MULTILINE)
    assert [name for name in listed if "=" not in name] == list(cli.COMMANDS)
    (scenarios,) = re.findall(r"measurements: (.*) \(benchmarks.md\)", page("docs/cli.md"))
    assert scenarios.split(", ") == list(SCENARIOS)
    assert set(re.findall(r"^kvrelay bench (\S+)", page("docs/benchmarks.md"), re.MULTILINE)) == {*SCENARIOS, "compare"}


def test_the_environment_is_documented() -> None:
    source = (ROOT / "kvrelay/config.py").read_text(encoding="utf-8")
    read = set(re.findall(r"""os\.environ\.get\("(\w+)\"""", source))
    section = page("docs/cli.md").partition("## Config file and environment")[2].partition("\n## ")[0]
    assert set(re.findall(r"`([A-Z][A-Z_]+)`", section)) == read


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_option_that_a_page_names_exists(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    known = {option for command in documented.COMMANDS for option in documented.options_of(command)} | documented.role_options()
    named = {option for code in re.findall(r"`(--[^`]*)`", text) for option in re.findall(r"--[a-z][a-z-]*", code)}
    assert named - known - {"--name", "--no-name", "--help"} == set()
    for line in re.findall(r"kvrelay [a-z][^`\n#]*", text):
        words = line.split()
        command = " ".join(words[1:3]) if words[1] == "bench" else words[1]
        if command in documented.COMMANDS:
            used = {option for word in words for option in re.findall(r"^\[?(--[a-z][a-z-]*)", word)}
            known = documented.options_of(command) | (documented.role_options() if command == "serve" else set())
            assert used - known - {"--help"} == set(), line


# Metrics


def test_every_metric_is_documented_as_it_is() -> None:
    assert documented.tables_in(page("docs/operations.md"))["Metrics"] == documented.metric_table()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_metric_that_a_page_names_exists(path: Path) -> None:
    known = documented.metric_names()
    for name in re.findall(r"`(kvrelay_[a-z0-9_]+\*?)", path.read_text(encoding="utf-8")):
        assert any(each.startswith(name[:-1]) for each in known) if name.endswith("*") else name in known, name


# States, links and examples (the API: test_docs_api.py, commands: test_docs_commands.py)


@pytest.mark.parametrize("machine", [states.RequestState, states.KVState, states.WorkerState])
def test_every_state_is_drawn(machine: type[states.RequestState | states.KVState | states.WorkerState]) -> None:
    drawn = page("docs/architecture.md")
    assert [state.name for state in machine if state.name not in drawn] == []


@pytest.mark.parametrize(
    ("name", "edges"),
    [("docs/architecture.md", states.REQUEST_EDGES), ("docs/lifecycle.md", states.KV_EDGES)],
    ids=["request", "kv"],
)
def test_the_changes_of_states_are_drawn_and_no_others(name: str, edges: Mapping[Enum, frozenset[Enum]]) -> None:
    (diagram,) = re.findall(r"stateDiagram-v2\n(.*?)```", page(name), re.DOTALL)
    drawn = set(re.findall(r"(\w+) --> (\w+)", diagram))
    assert drawn == {(state.name, following.name) for state, many in edges.items() for following in many}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    targets = re.findall(r"\]\((?!https?://|#)([^)#\s]+)", path.read_text(encoding="utf-8"))
    assert [target for target in targets if not (path.parent / target).exists()] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_python_in_the_pages_is_python(path: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL):
        ast.parse(block)


@pytest.mark.parametrize("script", sorted((ROOT / "examples").glob("*.py")), ids=lambda script: script.name)
def test_examples_are_short_and_say_how_to_run_them(script: Path) -> None:
    source = script.read_text(encoding="utf-8")
    assert len(source.splitlines()) < 40
    assert f"Usage: {script.name}" in (ast.get_docstring(ast.parse(source)) or "")
