"""Schemas of tools and formats, over HTTP: closed objects, and refusals that name the tool, the place and the keyword."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from kvrelay.frontend.prompt.call_formats import hermes
from kvrelay.frontend.prompt.tools import plan_tools
from kvrelay.frontend.prompt.types import FunctionDefinition, FunctionTool
from tests.frontend.serving import TOKENIZER, fake_backend, http_client, make_app
from tests.frontend.test_parsers import allows, written

TEXT = {"type": "string"}
OPEN = {"type": "object", "properties": {"city": TEXT}, "required": ["city"]}
FORM = hermes(TOKENIZER)


async def ask(path: str, **body: Any) -> httpx.Response:
    async with http_client(make_app(fake_backend("hello"))) as client:
        return await client.post(path, json=body)


def function(parameters: Any, name: str = "f", **settings: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **settings}}


def forced(*parameters: Any) -> Any:
    tools = [FunctionTool(function=FunctionDefinition(name=f"f{n}", parameters=each)) for n, each in enumerate(parameters)]
    return plan_tools(tools, "required", None, None, reads_calls=True, form=FORM).grammar


def test_arguments_have_no_properties_but_those_of_the_schema() -> None:
    assert allows(forced(OPEN), written("f0", {"city": "Paris"}))
    assert not allows(forced(OPEN), written("f0", {"city": "Paris", "b": 1}))
    assert allows(forced({**OPEN, "additionalProperties": True}), written("f0", {"city": "Paris", "b": 1}))


@pytest.mark.parametrize("parameters", [None, {}])
def test_a_function_without_parameters_takes_no_arguments(parameters: Any) -> None:
    assert allows(forced(parameters), written("f0", {}))
    assert not allows(forced(parameters), written("f0", {"b": 1}))


def test_white_space_in_arguments_is_bounded() -> None:
    assert not allows(forced(OPEN), written("f0", {"city": "Paris"}).replace('"city"', " " * 40 + '"city"'))


@pytest.mark.parametrize(
    ("part", "place", "keyword"),
    [
        ({"type": "array", "items": TEXT, "uniqueItems": True}, "", "uniqueItems"),
        ({"anyOf": [TEXT, {"not": TEXT}]}, ".anyOf[1]", "not"),
        ({"type": "thing"}, "", "Invalid type: thing"),
    ],
)
async def test_a_tool_that_cannot_be_used_is_named(part: Any, place: str, keyword: str) -> None:
    bad = {"type": "object", "properties": {"tags": part}, "required": ["tags"]}
    tools = [function(OPEN, "good"), function(bad, "bad")]
    messages = [{"role": "user", "content": "hello"}]
    answer = await ask("/v1/chat/completions", messages=messages, tools=tools, tool_choice="required")
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "tools[1].function.parameters")
    assert "tools[1].function.parameters" in error["message"]
    assert f"properties.tags{place}: " in error["message"]
    assert keyword in error["message"]
    assert "coerce" not in error["message"]
    flat = [{"type": "function", **tool["function"]} for tool in tools]
    answer = await ask("/v1/responses", input="hello", tools=flat, tool_choice="required")
    error = answer.json()["error"]
    assert error["param"] == "tools[1].parameters"
    assert "tools[1].parameters" in error["message"]


@pytest.mark.parametrize("strict", [True, None])
async def test_what_other_servers_take_is_taken(strict: bool | None) -> None:
    parameters = {
        "type": "object",
        "properties": {
            "phone": {"type": "string", "format": "phone"},
            "either": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
            "by_name": {"type": "object", "propertyNames": {"pattern": "^a"}},
        },
    }
    messages = [{"role": "user", "content": "hello"}]
    tools = [function(parameters, strict=strict)]
    assert (await ask("/v1/chat/completions", messages=messages, tools=tools, tool_choice="required")).status_code == 200
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": parameters}}
    assert (await ask("/v1/chat/completions", messages=messages, response_format=shape)).status_code == 200
    both = await ask("/v1/chat/completions", messages=messages, response_format=shape, tools=tools)
    assert both.status_code == 200, both.text


async def test_a_format_that_cannot_be_used_is_refused_with_its_place() -> None:
    schema = {"type": "object", "properties": {"tags": {"type": "array", "uniqueItems": True}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = await ask("/v1/chat/completions", messages=[{"role": "user", "content": "hello"}], response_format=wanted)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "response_format")
    assert "properties.tags: the keyword uniqueItems" in error["message"]
    answer = await ask("/v1/completions", prompt="hello", guided_json=json.dumps(schema))
    assert answer.json()["error"]["param"] == "guided_json"


async def test_gbnf_is_a_grammar() -> None:
    assert (await ask("/v1/completions", prompt="hello", guided_grammar='root ::= "a" | "b" root')).status_code == 200
    assert (await ask("/v1/completions", prompt="hello", structured_outputs={"grammar": 'root ::= "a"'})).status_code == 200
    answer = await ask("/v1/completions", prompt="hello", guided_grammar='root ::= "a')
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "guided_grammar")
