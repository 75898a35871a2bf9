"""The documentation says what is true: every option, API field and state is in it, and its links lead somewhere."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import msgspec
import pytest
from msgspec import inspect

from kvrelay import config, states
from kvrelay.frontend.prompt import responses_types
from kvrelay.frontend.prompt import types as openai_types

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
REQUESTS = [
    openai_types.ChatRequest,
    openai_types.CompletionRequest,
    openai_types.TokenizeRequest,
    openai_types.DetokenizeRequest,
    responses_types.ResponsesRequest,
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


@pytest.mark.parametrize("request_type", REQUESTS, ids=lambda request_type: request_type.__name__)
def test_every_field_of_a_request_is_documented(request_type: type[msgspec.Struct]) -> None:
    mentioned = set(re.findall(r"`(\w+)`", (ROOT / "docs/api.md").read_text(encoding="utf-8")))
    assert [field.name for field in msgspec.structs.fields(request_type) if field.name not in mentioned] == []


def test_harmless_fields_are_listed() -> None:
    mentioned = set(re.findall(r"`(\w+)`", (ROOT / "docs/api.md").read_text(encoding="utf-8")))
    assert set(openai_types.HARMLESS_FIELDS) <= mentioned


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
