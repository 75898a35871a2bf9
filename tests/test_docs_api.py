"""docs/api.md says what is true, in both directions: every endpoint, request field, header and status that exists is in it, and
everything that it names exists."""

from __future__ import annotations

import ast
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvrelay.errors import RequestError
from kvrelay.frontend.app import ROUTES
from kvrelay.frontend.http import call
from kvrelay.frontend.pages.admin import DrainRequest, LoadAdapterRequest, RoleRequest
from kvrelay.frontend.pages.openapi import ERRORS, openapi
from kvrelay.frontend.prompt.messages_types import CountTokensRequest, MessagesRequest
from kvrelay.frontend.prompt.responses_types import ResponsesRequest
from kvrelay.frontend.prompt.types import (
    HARMLESS_FIELDS,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    HarmlessFields,
    TokenizeRequest,
)

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/api.md").read_text(encoding="utf-8")
FRONTEND = ROOT / "kvrelay/frontend"
# Headers that every HTTP server has, with their usual meaning.
PLAIN_HEADERS = {"cache-control", "connection", "content-length", "content-type"}
REQUESTS = (
    ChatRequest,
    CompletionRequest,
    ResponsesRequest,
    MessagesRequest,
    CountTokensRequest,
    TokenizeRequest,
    DetokenizeRequest,
    DrainRequest,
    RoleRequest,
)


# Reading the page


def section(heading: str) -> str:
    """What follows a heading, up to the next one of any level."""
    _, found, rest = PAGE.partition(f"\n{heading}\n")
    assert found, f"docs/api.md has no {heading!r}"
    return re.split(r"\n##+ ", rest)[0]


def names(text: str) -> set[str]:
    return set(re.findall(r"`([\w-]+)`", text))


def first_column(heading: str) -> set[str]:
    return {name for row in re.findall(r"^\| (.*?) \|", section(heading), re.MULTILINE) for name in names(row)}


def refused(heading: str) -> set[str]:
    found = re.search(r"^Refused: (.*?)\.$", section(heading), re.MULTILINE | re.DOTALL)
    return set() if found is None else names(found.group(1))


def fields(*headings: str) -> set[str]:
    """Fields that these sections name: in the first column of their tables, or as refused."""
    return set().union(*(first_column(heading) | refused(heading) for heading in headings))


# Endpoints


def test_endpoints() -> None:
    documented = re.findall(r"`((?:GET|POST|PUT|DELETE) /\S*)`", section("## Endpoints"))
    existing = {f"{method} {path.replace(':path', '')}" for path, method, _ in ROUTES}
    assert sorted(documented) == sorted(existing)


def test_openapi_has_all_endpoints_for_programs() -> None:
    described = {f"{method.upper()} {path}" for path, methods in openapi()["paths"].items() for method in methods}
    existing = {f"{method} {path.replace(':path', '')}" for path, method, _ in ROUTES}
    assert existing - described == {"GET /", "GET /assets/{name}", "GET /docs", "GET /openapi.json"}
    assert described <= existing


# Fields


def fields_of(request: type[msgspec.Struct]) -> set[str]:
    return {field.name for field in msgspec.structs.fields(request)}


def own_fields(request: type[msgspec.Struct]) -> set[str]:
    """All but the harmless ones, which stand in a list of their own unless the request makes use of them."""
    harmless = fields_of(HarmlessFields) - set(request.__annotations__) if issubclass(request, HarmlessFields) else set()
    return fields_of(request) - harmless


@pytest.mark.parametrize(
    ("request_type", "headings"),
    [
        (ChatRequest, ("### Common fields", "### Chat only")),
        (CompletionRequest, ("### Common fields", "### Legacy completions only")),
        (ResponsesRequest, ("## Responses",)),
        (MessagesRequest, ("## Messages, Anthropic's form",)),
        (TokenizeRequest, ("### Tokenize",)),
        (DetokenizeRequest, ("### Detokenize",)),
        (RoleRequest, ("## Administration",)),
        (LoadAdapterRequest, ("## Adapters",)),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_fields_of_a_request(request_type: type[msgspec.Struct], headings: tuple[str, ...]) -> None:
    assert fields(*headings) == own_fields(request_type)


def test_fields_of_a_drain_are_those_of_a_change_of_role_without_the_role() -> None:
    assert fields_of(DrainRequest) == fields_of(RoleRequest) - {"role"}


@pytest.mark.parametrize(
    ("request_type", "heading"),
    [
        (ChatRequest, "### Chat only"),
        (CompletionRequest, "### Legacy completions only"),
        (ResponsesRequest, "## Responses"),
        (MessagesRequest, "## Messages, Anthropic's form"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_refused_fields(request_type: type[msgspec.Struct], heading: str) -> None:
    assert refused(heading) == {field.name for field in msgspec.structs.fields(request_type) if field.type is type(None)}


def test_harmless_fields() -> None:
    found = re.search(r"\*\*Accepted and not used\*\*(.*?)\n3\.", section("## Three kinds of fields"), re.DOTALL)
    assert found is not None
    assert names(found.group(1)) - {"stream_options"} == set(HARMLESS_FIELDS)


def structs_in(annotation: object) -> Iterator[type[msgspec.Struct]]:
    """The structs that a field's type is made of."""
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        yield annotation
    for part in typing.get_args(annotation) if not isinstance(annotation, types.UnionType) else annotation.__args__:
        yield from structs_in(part)


def test_fields_inside_of_fields_are_mentioned() -> None:
    found: set[type[msgspec.Struct]] = set()
    waiting: list[type[msgspec.Struct]] = list(REQUESTS)
    while waiting:
        struct = waiting.pop()
        if struct not in found:
            found.add(struct)
            waiting += [inner for field in msgspec.structs.fields(struct) for inner in structs_in(field.type)]
    inner_fields = {name for struct in found - set(REQUESTS) for name in fields_of(struct)}
    assert len(inner_fields) > 30, "the search is broken"
    assert sorted(inner_fields - names(PAGE)) == []


# Headers


def literal_headers() -> tuple[set[str], set[str]]:
    """Names of headers that the front end reads, and of those that it writes, as literals in its source."""
    read, written = {name.decode() for name in call._TRACE_HEADERS}, set()
    for path in FRONTEND.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(func=ast.Attribute(attr="header"), args=[ast.Constant(value=bytes(name))]):
                    read.add(name.decode())
                case ast.Tuple(elts=[ast.Constant(value=bytes(name)), _]) if re.fullmatch(rb"[a-z]+(-[a-z]+)*", name):
                    written.add(name.decode())
    return read - PLAIN_HEADERS, written - PLAIN_HEADERS - {name.decode() for name in call._TRACE_HEADERS}


def test_headers_of_requests() -> None:
    assert first_column("### Of requests") == literal_headers()[0]


def test_headers_of_answers() -> None:
    assert first_column("### Of answers") == literal_headers()[1]


# Errors


def error_classes(root: type[RequestError] = RequestError) -> Iterator[type[RequestError]]:
    for error in root.__subclasses__():
        if error.__module__ == "kvrelay.errors":
            yield error
            yield from error_classes(error)


def test_statuses_and_their_types() -> None:
    rows = re.findall(r"^\| (\d{3}) \| (.*?) ?\|", section("## Errors"), re.MULTILINE)
    documented = {(int(status), kind) for status, kinds in rows for kind in names(kinds) or {""}}
    plain = re.findall(r"_plain\((\d{3}),", (FRONTEND / "http/connections.py").read_text(encoding="utf-8"))
    existing = {(error.status, error.kind) for error in error_classes()} | {(int(status), "") for status in plain}
    assert documented == existing


def test_openapi_has_a_type_for_every_answer_in_json() -> None:
    for path, methods in openapi()["paths"].items():
        for operation in methods.values():
            content = operation["responses"]["200"]["content"]
            assert "$ref" in content.get("application/json", {"schema": "$ref"})["schema"], path


def test_openapi_knows_all_statuses() -> None:
    """But 405, which is about a method that an operation does not have."""
    assert set(ERRORS) == {error.status for error in error_classes()} - {405}
