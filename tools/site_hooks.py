"""What `make docs` adds to the pages in docs/: reference pages made from the code, diagrams (drawings.py), and
links to files of the repository.

reference/endpoints.md   from the server's own OpenAPI description
reference/messages.md    from the structs in `kvrelay/wire`
reference/states.md      from `kvrelay/states.py`
"""

from __future__ import annotations

import enum
import importlib
import pathlib
import pkgutil
import re
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from kvrelay import states, wire
from kvrelay.frontend.pages.openapi import openapi

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from drawings import svg_of

_DIAGRAM = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    pages = {"endpoints": endpoints(), "messages": messages(), "states": state_machines()}
    for name, text in pages.items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Diagrams are drawn; a file of the repository that is no page is named instead of linked."""
    markdown = _DIAGRAM.sub(lambda match: f'<div style="overflow-x: auto">\n{svg_of(match[1])}\n</div>', markdown)
    return _OUTSIDE.sub(lambda match: f"{match[1]} (`{match[2]}` in the repository)", markdown)


def endpoints() -> str:
    lines = [
        "# Endpoints",
        "",
        "Made from the types that read requests and write answers. [The API](../api.md) explains the fields.",
        "",
    ]
    described = openapi()
    lines += ["| request | is | body | statuses |", "|---|---|---|---|"]
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            body = _linked(content.get("schema", {}))
            lines.append(
                f"| `{method.upper()} {path}` | {operation['summary']} | {body} | {', '.join(operation['responses'])} |"
            )
    for name, schema in described["components"]["schemas"].items():
        lines += ["", f"## {name}", "", schema.get("description", ""), ""]
        if fields := schema.get("properties"):
            lines += ["| field | type | default |", "|---|---|---|"]
            lines += [f"| `{field}` | {_type(about)} | {_default(field, about, schema)} |" for field, about in fields.items()]
        else:
            lines.append(_type(schema))
    return "\n".join(lines) + "\n"


def _linked(schema: dict[str, Any]) -> str:
    name = schema.get("$ref", "").rpartition("/")[2]
    return f"[{name}](#{re.sub(r'[^a-z0-9_-]', '', name.lower())})" if name else ""


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return _linked(schema)
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(_type, schema["anyOf"])))
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type(schema['items'])}" if isinstance(schema.get("items"), dict) else "list"
    return str(schema.get("type", "any"))


def _default(field: str, about: dict[str, Any], schema: dict[str, Any]) -> str:
    return "required" if field in schema.get("required", ()) else f"`{about['default']}`" if "default" in about else ""


def messages() -> str:
    lines = [
        "# Messages",
        "",
        "Every message between processes, by channel: msgpack, tagged, frozen. Made from `kvrelay/wire`.",
    ]
    for module in sorted(pkgutil.iter_modules(wire.__path__), key=lambda module: module.name):
        source = importlib.import_module(f"kvrelay.wire.{module.name}")
        found = [each for each in vars(source).values() if _is_struct(each) and each.__module__ == source.__name__]
        if found:
            lines += ["", f"## `wire/{module.name}.py`", "", (source.__doc__ or "").partition("\n\n")[0]]
        for each in found:
            lines += ["", f"### {each.__name__}", "", _text(each), "", *_fields(each)]
    return "\n".join(lines) + "\n"


def _is_struct(each: object) -> bool:
    return isinstance(each, type) and issubclass(each, msgspec.Struct) and each is not msgspec.Struct


def _text(each: type) -> str:
    return " ".join((each.__doc__ or "").split())


def _fields(each: type) -> list[str]:
    rows = [f"| `{field.name}` | `{_name(field.type)}` |" for field in msgspec.structs.fields(each)]
    return ["| field | type |", "|---|---|", *rows] if rows else ["No fields."]


def _name(kind: Any) -> str:
    text = kind.__name__ if isinstance(kind, type) and not hasattr(kind, "__args__") else str(kind)
    return re.sub(r"\b(typing|kvrelay(\.\w+)*|msgspec)\.", "", text).replace("|", "\\|")


def state_machines() -> str:
    lines = ["# States", "", "Every state and which may follow it, made from `kvrelay/states.py`."]
    source = pathlib.Path(states.__file__).read_text(encoding="utf-8")
    edges = [table for name, table in vars(states).items() if name.endswith("_EDGES")]
    for machine in _enums():
        following = next((table for table in edges if isinstance(next(iter(table)), machine)), None)
        lines += ["", f"## {machine.__name__}", "", _text(machine), ""]
        heading = ["state", "is"] + (["may become"] if following is not None else [])
        lines += [f"| {' | '.join(heading)} |", "|" + "---|" * len(heading)]
        for state in machine:
            cells = [f"`{state.name}`", _meaning(source, machine, state)]
            if following is not None:
                cells.append(", ".join(sorted(f"`{each.name}`" for each in following.get(state, ()))) or "nothing")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _enums() -> Iterator[type[enum.Enum]]:
    for each in vars(states).values():
        if isinstance(each, type) and issubclass(each, enum.Enum) and each.__module__ == states.__name__:
            yield each


def _meaning(source: str, machine: type[enum.Enum], state: enum.Enum) -> str:
    """The comment behind a member, which its class may share with others by name only."""
    body = source.partition(f"class {machine.__name__}(")[2].partition("\nclass ")[0]
    found = re.search(rf'^    {state.name} = "\w+"  # (.*)$', body, re.MULTILINE)
    return found[1] if found else ""
