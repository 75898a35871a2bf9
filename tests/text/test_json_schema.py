"""What clients' schemas become: closed objects, other words for keywords that are not known, and places of errors."""

from __future__ import annotations

import functools
import json
from typing import Any

import llguidance
import pytest

from kvrelay.sampling import Grammar, GrammarKind
from kvrelay.text.grammar_check import check_grammar, to_definition
from kvrelay.text.json_schema import SchemaError, prepare_schema
from tests.text.tiny_tokenizers import folder_of

TEXT = {"type": "string"}
NUMBER = {"type": "integer"}


@functools.cache
def tokenizer() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer((folder_of("byte_level") / "tokenizer.json").read_text(), eos_token=2)


def grammar_of(schema: Any) -> Grammar:
    return Grammar(kind=GrammarKind.JSON_SCHEMA, source=json.dumps(schema))


def accepts(grammar: Grammar, text: str) -> bool:
    assert check_grammar(grammar) is None
    matcher = llguidance.LLMatcher(tokenizer(), to_definition(grammar))
    tokens = tokenizer().tokenize_str(text)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def allows(schema: Any, value: Any) -> bool:
    return accepts(grammar_of(schema), json.dumps(value))


BASE = {"type": "object", "properties": {"a": TEXT}, "required": ["a"]}
TREE = {"type": "object", "properties": {"name": TEXT, "below": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (BASE, {"a": "x"}, {"a": "x", "b": 1}),
        ({"properties": {"a": TEXT}}, {"a": "x"}, {"b": 1}),
        ({"type": "object", "properties": {}}, {}, {"b": 1}),
        ({"type": "object", "properties": {"in": BASE}}, {"in": {"a": "x"}}, {"in": {"a": "x", "b": 1}}),
        ({"type": "array", "items": BASE}, [{"a": "x"}], [{"a": "x", "b": 1}]),
        ({"anyOf": [BASE, {"type": "null"}]}, {"a": "x"}, {"a": "x", "b": 1}),
        ({"$ref": "#/$defs/base", "$defs": {"base": BASE}}, {"a": "x"}, {"a": "x", "b": 1}),
        ({"$ref": "#/$defs/tree", "$defs": {"tree": TREE}}, {"name": "x", "below": [{"name": "y"}]}, {"below": [{"z": 1}]}),
        ({"type": "object", "patternProperties": {"^x": NUMBER}}, {"x1": 1}, {"y": 1}),
        ({**BASE, "required": ["a", "b"]}, {"a": "x", "b": [1]}, {"a": "x", "b": 1, "c": 1}),
        ({**BASE, "unevaluatedProperties": False}, {"a": "x"}, {"a": "x", "b": 1}),
    ],
)  # fmt: skip
def test_objects_with_properties_have_no_others(schema: Any, good: Any, bad: Any) -> None:
    assert allows(schema, good)
    assert not allows(schema, bad)


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({**BASE, "additionalProperties": True}, {"a": "x", "b": 1}),
        ({**BASE, "additionalProperties": NUMBER}, {"a": "x", "b": 1}),
        ({**BASE, "unevaluatedProperties": True}, {"a": "x", "b": 1}),
        ({"type": "object"}, {"b": 1}),
        ({"type": "object", "properties": {"free": {"type": "object"}}}, {"free": {"b": 1}}),
        ({}, {"b": 1}),
    ],
)
def test_objects_that_are_meant_to_be_open_stay_open(schema: Any, value: Any) -> None:
    assert allows(schema, value)


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [BASE, {"properties": {"b": NUMBER}}]},
        {**BASE, "allOf": [{"properties": {"b": NUMBER}}]},
        {"$ref": "#/$defs/base", "properties": {"b": NUMBER}, "$defs": {"base": BASE}},
        {"allOf": [{"$ref": "#/definitions/base"}, {"properties": {"b": NUMBER}}], "definitions": {"base": BASE}},
        {"type": "object", "properties": {"a": TEXT, "b": NUMBER}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
    ],
)
def test_several_schemas_of_one_object_are_closed_together(schema: Any) -> None:
    assert allows(schema, {"a": "x", "b": 1})
    assert not allows(schema, {"a": "x", "c": 1})
    assert not allows(schema, {"a": 1})


def test_a_definition_that_is_a_part_somewhere_is_closed_elsewhere() -> None:
    both = {"allOf": [{"$ref": "#/$defs/base"}, {"properties": {"b": NUMBER}}]}
    schema = {"type": "object", "properties": {"one": {"$ref": "#/$defs/base"}, "two": both}, "$defs": {"base": BASE}}
    assert allows(schema, {"one": {"a": "x"}, "two": {"a": "x", "b": 1}})
    assert not allows(schema, {"one": {"a": "x", "b": 1}})


@pytest.mark.parametrize("kind", ["phone", "int32", "binary", "json-pointer", ""])
def test_unknown_formats_are_ignored(kind: str) -> None:
    assert allows({"type": "string", "format": kind}, "anything")


def test_known_formats_are_followed() -> None:
    assert allows({"type": "string", "format": "date"}, "2020-01-02")
    assert not allows({"type": "string", "format": "date"}, "tomorrow")


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "array", "items": NUMBER, "uniqueItems": False}, [1, 1], ["x"]),
        ({"type": "array", "items": NUMBER, "maxItems": 1, "uniqueItems": True}, [1], [1, 2]),
        ({"type": "object", "propertyNames": {"pattern": "^a"}, "additionalProperties": NUMBER}, {"ab": 1}, {"b": 1}),
        ({"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": NUMBER}, {"b": 1}, {"c": 1}),
        ({"type": "object", "propertyNames": {"maxLength": 2}, "additionalProperties": NUMBER}, {"ab": 1}, {"abc": 1}),
        ({"type": "object", "propertyNames": {"$ref": "#/$defs/n"}, "$defs": {"n": {"enum": ["a"]}}}, {"a": 1}, {"c": 1}),
        ({"type": "object", "propertyNames": TEXT, "additionalProperties": NUMBER}, {"c": 1}, {"c": "x"}),
        ({"oneOf": [NUMBER, {"type": "number"}]}, 1, "x"),
        ({"oneOf": [BASE, {"type": "object", "properties": {"b": NUMBER}}]}, {"b": 1}, {"c": 1}),
        ({"type": "string", "then": {"minLength": 3}}, "x", 1),
    ],
)
def test_keywords_in_other_words(schema: Any, good: Any, bad: Any) -> None:
    assert allows(schema, good)
    assert not allows(schema, bad)


@pytest.mark.parametrize(
    ("schema", "path", "keyword"),
    [
        ({"type": "array", "uniqueItems": True}, "", "uniqueItems"),
        ({"properties": {"tags": {"type": "array", "uniqueItems": True}}}, ".properties.tags", "uniqueItems"),
        ({"anyOf": [TEXT, {"not": NUMBER}]}, ".anyOf[1]", "not"),
        ({"$defs": {"d": {"items": {"if": {}}}}}, ".$defs.d.items", "if"),
        ({"properties": {"a": {"contains": TEXT}}}, ".properties.a", "contains"),
        ({"properties": {"a": TEXT}, "propertyNames": {"pattern": "b"}}, "", "propertyNames"),
        ({"propertyNames": {"anyOf": []}}, "", "propertyNames"),
        ({"dependentRequired": {"a": ["b"]}}, "", "dependentRequired"),
    ],
)
def test_what_cannot_be_followed_is_refused_with_its_place(schema: Any, path: str, keyword: str) -> None:
    with pytest.raises(SchemaError, match=keyword) as refused:
        prepare_schema(schema)
    assert refused.value.path == path
    problem = check_grammar(grammar_of(schema))
    assert problem is not None
    assert keyword in problem
    assert path.removeprefix(".") in problem


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ({"type": "thing"}, "Invalid type: thing"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "string", "pattern": "^a$", "minLength": 3}, "nothing fits it"),
    ],
)
def test_errors_of_the_compiler_have_their_place(part: Any, says: str) -> None:
    within = {"type": "array", "items": part, "minItems": 1}
    problem = check_grammar(grammar_of({"type": "object", "properties": {"a": TEXT, "b": within}, "required": ["b"]}))
    assert problem is not None
    assert "properties.b.items: " in problem
    assert says in problem
    assert "SearchRegex" not in problem


def test_a_schema_nested_too_deeply_is_refused() -> None:
    deep: Any = {}
    for _ in range(5000):
        deep = {"items": deep}
    with pytest.raises(SchemaError, match="too deeply"):
        prepare_schema(deep)


# GBNF

CHESS = r"""
# moves
root ::= "1. " move " " move "\n"
move ::= [NBKQR]? [a-h] [1-8] | castle
castle ::= "O-O" "-O"?
"""


def test_gbnf_is_translated() -> None:
    grammar = Grammar(kind=GrammarKind.LARK, source=CHESS)
    assert accepts(grammar, "1. Nf3 O-O-O\n")
    assert not accepts(grammar, "1. Nf9 O-O\n")


def test_gbnf_that_is_wrong_is_refused() -> None:
    problem = check_grammar(Grammar(kind=GrammarKind.LARK, source='root ::= "a'))
    assert problem is not None
    assert "GBNF" in problem
    assert "\n" not in problem
