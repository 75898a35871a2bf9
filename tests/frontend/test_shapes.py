"""Shapes of the output under the names of OpenAI, vLLM, SGLang and llama.cpp; structural tags; shapes together with tools."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
import pytest

from kvrelay.errors import InvalidRequestError
from kvrelay.frontend.prompt.structural_tags import structural_tag
from kvrelay.frontend.prompt.types import StructuralTagFormat
from kvrelay.sampling import Grammar, GrammarKind
from tests.frontend.serving import TOKENIZER, fake_backend, http_client, make_app
from tests.frontend.test_parsers import allows, written

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ADD = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": WEATHER}}]
EBNF = 'root ::= "yes" | "no"'
STRUCTURES = {
    "structures": [
        {"begin": "<f=add>", "schema": ADD, "end": "</f>"},
        {"begin": "<f=not>", "schema": {"type": "boolean"}, "end": "</f>"},
        {"begin": "[g/", "schema": {"type": "boolean"}, "end": "]"},
    ],
    "triggers": ["<f", "[g"],
}


async def ask(path: str, answer: str = "yes", **body: Any) -> tuple[httpx.Response, Grammar | None]:
    """The answer, and the grammar that the workers were given."""
    asked = {"messages": [{"role": "user", "content": "hello"}]} if path == CHAT else {"prompt": "hello"}
    backend = fake_backend(answer)
    async with http_client(make_app(backend)) as client:
        reply = await client.post(path, json={**asked, **body})
    return reply, backend.submitted[0].params.grammar if backend.submitted else None


def tag(**fields: Any) -> Grammar:
    wanted = msgspec.convert({"type": "structural_tag", **fields}, StructuralTagFormat)
    return structural_tag(wanted, "response_format", TOKENIZER)


# Names


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"regex": "yes|no"}, GrammarKind.REGEX),
        ({"ebnf": EBNF}, GrammarKind.LARK),
        ({"grammar": EBNF}, GrammarKind.LARK),
        ({"json_schema": json.dumps({"enum": ["yes", "no"]})}, GrammarKind.JSON_SCHEMA),
        ({"json_schema": {"enum": ["yes", "no"]}}, GrammarKind.JSON_SCHEMA),
        ({"guided_regex": "yes|no"}, GrammarKind.REGEX),
        ({"guided_grammar": EBNF}, GrammarKind.LARK),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, GrammarKind.CHOICE),
        ({"structured_outputs": {"structural_tag": json.dumps({"type": "structural_tag", **STRUCTURES})}}, GrammarKind.LARK),
        ({"structural_tag": {"type": "structural_tag", **STRUCTURES}}, GrammarKind.LARK),
        ({"response_format": {"type": "structural_tag", **STRUCTURES}}, GrammarKind.LARK),
    ],
)
async def test_a_shape_by_any_of_its_names(path: str, fields: dict[str, Any], kind: GrammarKind) -> None:
    reply, grammar = await ask(path, **fields)
    assert reply.status_code == 200, reply.text
    assert grammar is not None
    assert grammar.kind is kind


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"regex": "a", "ebnf": EBNF}, "ebnf"),
        ({"regex": "("}, "regex"),
        ({"ebnf": "root ::= missing"}, "ebnf"),
        ({"json_schema": "{"}, "json_schema"),
        ({"structural_tag": "{"}, "structural_tag"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"response_format": {"type": "structural_tag", "format": {"type": "odd"}}}, "response_format.format"),
    ],
)
async def test_a_shape_that_cannot_be_used_is_refused_under_the_name_it_came_by(fields: dict[str, Any], param: str) -> None:
    reply, _ = await ask(COMPLETIONS, **fields)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    assert param in reply.json()["error"]["message"]


# Structural tags


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("", True),
        ("hello < f [", True),
        ('so <f=add>{"a": 1}</f> and <f=not>true</f>[g/false] end', True),
        ("so <f=other>", False),
        ("so <f", False),
        ("[g true", False),
        ('<f=add>{"b": 1}</f>', False),
        ('<f=add>{"a": 1}', False),
    ],
)
def test_structures_and_their_triggers(text: str, fits: bool) -> None:
    assert allows(tag(**STRUCTURES), text) == fits


def test_a_tag_that_is_one_token() -> None:
    own = tag(structures=[{"begin": '<tool_call>{"x":', "schema": ADD, "end": "}</tool_call>"}], triggers=["<tool_call>"])
    assert TOKENIZER.has_own_token("<tool_call>")
    assert allows(own, 'see <tool_call>{"x":{"a": 1}}</tool_call> done')
    assert not allows(own, 'see <tool_call>{"y":1}</tool_call>')


THINK = {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"}
LETTERS = {"type": "tag", "begin": "<f>", "content": {"type": "regex", "pattern": "a+"}, "end": "</f>"}


EITHER = {"type": "or", "elements": [{"type": "regex", "pattern": "a/b+"}, {"type": "grammar", "grammar": EBNF}]}
TRIGGERED = {"type": "triggered_tags", "triggers": ["<f"], "tags": [LETTERS]}
SEPARATED = {"type": "tags_with_separator", "tags": [LETTERS], "separator": ", "}
THOUGHT = {"type": "sequence", "elements": [THINK, {"type": "json_schema", "json_schema": ADD}]}


@pytest.mark.parametrize(
    ("wanted", "fitting", "other"),
    [
        ({"type": "const_string", "value": "abc"}, "abc", "abd"),
        (THOUGHT, '<think>x <y</think>{"a": 2}', "<think>x"),
        (EITHER, "a/bb", "a"),
        (EITHER, "no", "yesno"),
        ({"type": "any_text", "excludes": ["bad"]}, "is good", "is bad."),
        ({**TRIGGERED, "at_least_one": True, "stop_after_first": True}, "<f>aa</f>", "<f>aa</f>."),
        ({**TRIGGERED, "at_least_one": True}, "<f>aa</f>.<f>a</f>", "."),
        ({**TRIGGERED, "stop_after_first": True}, "so <f>aa</f>", "<f>a</f>."),
        (SEPARATED, "<f>aa</f>, <f>a</f>", "<f>aa</f> <f>a</f>"),
        ({**SEPARATED, "at_least_one": True}, "<f>a</f>", ""),
    ],
)
def test_formats(wanted: dict[str, Any], fitting: str, other: str) -> None:
    grammar = tag(format=wanted)
    assert allows(grammar, fitting)
    assert not allows(grammar, other)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structures": [{"begin": "<g>", "end": ""}], "triggers": ["<f"]}, "response_format.structures[0].begin"),
        ({"format": {"type": "sequence", "elements": []}}, "response_format.format"),
        ({"format": {"type": "json_schema", "json_schema": {"not": {}}}}, "response_format.format"),
        (
            {"format": {"type": "or", "elements": [THINK, {"type": "regex", "pattern": "("}]}},
            "response_format.format.elements[1]",
        ),
        ({**STRUCTURES, "format": {"type": "any_text"}}, "response_format.format"),
    ],
)
def test_a_structural_tag_that_cannot_be_used_names_the_place(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        tag(**fields)
    assert caught.value.param == param


# Together with tools

SHAPES: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": ADD}}}, '{"a": 1}'),
    ({"response_format": {"type": "json_object"}}, "{}"),
    ({"regex": "[a-c]{2}\\}?"}, "ab}"),
    ({"guided_choice": ["yes", "no"]}, "no"),
    ({"ebnf": EBNF}, "yes"),
]


@pytest.mark.parametrize(("shape", "text"), SHAPES)
async def test_with_tools_an_answer_is_of_that_shape_or_calls(shape: dict[str, Any], text: str) -> None:
    for settings, fits in (({}, True), ({"parallel_tool_calls": False}, False)):
        reply, grammar = await ask(CHAT, tools=TOOLS, **shape, **settings)
        assert reply.status_code == 200, reply.text
        call = written("f", {"city": "Paris"})
        assert allows(grammar, text)
        assert allows(grammar, call)
        assert allows(grammar, f"{call}\n{call}") is fits
        assert not allows(grammar, "other")


@pytest.mark.parametrize(("shape", "text"), SHAPES)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
async def test_calls_that_must_be_made_have_the_shape_of_calls(shape: dict[str, Any], text: str, choice: Any) -> None:
    reply, grammar = await ask(CHAT, tools=TOOLS, tool_choice=choice, **shape)
    assert reply.status_code == 200, reply.text
    assert allows(grammar, written("f", {"city": "Paris"}))
    assert not allows(grammar, text)


async def test_a_shape_beside_a_forced_call_must_be_usable_all_the_same() -> None:
    reply, _ = await ask(CHAT, tools=TOOLS, tool_choice="required", regex="(")
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "regex")


async def test_a_response_with_tools_and_a_format() -> None:
    text = {"format": {"type": "json_schema", "name": "x", "schema": ADD}}
    tools = [{"type": "function", "name": "f", "parameters": WEATHER}]
    backend = fake_backend(written("f", {"city": "Paris"}))
    async with http_client(make_app(backend)) as client:
        for choice in ("required", "auto", {"type": "function", "name": "f"}):
            body = {"input": "hello", "text": text, "tools": tools, "tool_choice": choice}
            reply = await client.post("/v1/responses", json=body)
            assert reply.status_code == 200, reply.text
            assert [item["type"] for item in reply.json()["output"]] == ["function_call"]


# Several calls


async def test_several_calls_of_one_answer() -> None:
    answer = written("f", {"city": "Paris"}) + "\n" + written("f", {"city": "Rome"})
    reply, grammar = await ask(CHAT, answer, tools=TOOLS, tool_choice="required", parallel_tool_calls=True)
    calls = reply.json()["choices"][0]["message"]["tool_calls"]
    assert [json.loads(call["function"]["arguments"])["city"] for call in calls] == ["Paris", "Rome"]
    assert calls[0]["id"] != calls[1]["id"]
    assert allows(grammar, answer)
    _, grammar = await ask(CHAT, answer, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert not allows(grammar, answer)
