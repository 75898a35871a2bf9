"""The documentation says what is true: every option and state is in it, links lead somewhere. (The API: test_docs_api.py)"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from msgspec import inspect

from kvrelay import config, states

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
OPTION_GROUPS = [
    config.ModelOptions,
    config.EngineOptions,
    config.RouterOptions,
    config.ClusterOptions,
    config.TransferOptions,
    config.WorkerOptions,
]


def option_table(group: type[config.Options]) -> list[str]:
    """The lines that docs/cli.md must have for a group of options."""
    described = inspect.type_info(group)
    assert isinstance(described, inspect.StructType)
    return ["| option | default | is |", "|---|---|---|", *map(_option_row, described.fields)]


def _option_row(field: inspect.Field) -> str:
    kind, text = field.type, ""
    while isinstance(kind, inspect.Metadata):
        text = (kind.extra_json_schema or {}).get("description", text)
        kind = kind.type
    default = {True: "on", False: "off"}[field.default] if isinstance(kind, inspect.BoolType) else field.default
    values = f" ({', '.join(map(str, kind.values))})" if isinstance(kind, inspect.LiteralType) else ""
    shown = f"`{default}`" if default != "" else "none"
    return f"| `--{field.name.replace('_', '-')}` | {shown} | {text.replace('<', '&lt;')}{values} |"


@pytest.mark.parametrize("group", OPTION_GROUPS, ids=lambda group: group.__name__)
def test_every_option_is_documented_as_it_is(group: type[config.Options]) -> None:
    lines = (ROOT / "docs/cli.md").read_text(encoding="utf-8").splitlines()
    assert [row for row in option_table(group) if row not in lines] == []


@pytest.mark.parametrize("machine", [states.RequestState, states.KVState, states.WorkerState])
def test_every_state_is_drawn(machine: type[states.RequestState | states.KVState | states.WorkerState]) -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    assert [state.name for state in machine if state.name not in page] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?://|#)([^)#\s]+)", page.read_text(encoding="utf-8"))
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_in_the_pages_is_python(page: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        ast.parse(block)


@pytest.mark.parametrize("script", sorted((ROOT / "examples").glob("*.py")), ids=lambda script: script.name)
def test_examples_are_short_and_say_how_to_run_them(script: Path) -> None:
    source = script.read_text(encoding="utf-8")
    assert len(source.splitlines()) < 40
    assert f"Usage: {script.name}" in (ast.get_docstring(ast.parse(source)) or "")
