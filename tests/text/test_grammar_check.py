"""A grammar that cannot work is refused before any worker sees it, in words that name the field."""

from __future__ import annotations

import json

import pytest

from kvrelay.sampling import Grammar, GrammarKind
from kvrelay.text.grammar_check import MAX_SOURCE_CHARACTERS, check_grammar


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        (GrammarKind.JSON_OBJECT, ""),
        (GrammarKind.JSON_SCHEMA, '{"type": "object", "properties": {"a": {"type": "integer"}}}'),
        (GrammarKind.JSON_SCHEMA, "{}"),
        (GrammarKind.JSON_SCHEMA, "true"),
        (GrammarKind.REGEX, r"\d+/[a-z]*"),
        (GrammarKind.CHOICE, '["yes", "no \\" and \\n", "é", ""]'),
        (GrammarKind.LARK, 'start: "a" | "b" start'),
    ],
)
def test_good_grammars_pass(kind: GrammarKind, source: str) -> None:
    assert check_grammar(Grammar(kind=kind, source=source)) is None


@pytest.mark.parametrize(
    ("kind", "source", "says"),
    [
        (GrammarKind.JSON_SCHEMA, "", "not JSON"),
        (GrammarKind.JSON_SCHEMA, '{"type": "object"', "not JSON"),
        (GrammarKind.JSON_SCHEMA, '{"type": "object"} }, {"json_schema": {"type": "string"}', "not JSON"),
        (GrammarKind.JSON_SCHEMA, "[]", "a schema must be a JSON object"),
        (GrammarKind.JSON_SCHEMA, "3", "a schema must be a JSON object"),
        (GrammarKind.JSON_SCHEMA, '{"type": "thing"}', "Invalid type: thing"),
        (GrammarKind.JSON_SCHEMA, "false", "Unsatisfiable"),
        (GrammarKind.JSON_SCHEMA, '{"enum": []}', "Unsatisfiable"),
        (GrammarKind.JSON_SCHEMA, '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        (GrammarKind.JSON_SCHEMA, '{"$ref": "http://elsewhere/x"}', "elsewhere"),
        (GrammarKind.JSON_SCHEMA, "[" * 100_000 + "]" * 100_000, "not JSON"),
        (GrammarKind.REGEX, "(a", "unclosed group"),
        (GrammarKind.REGEX, "a(?=b)", "look-around"),
        (GrammarKind.REGEX, "\ud800", "surrogate"),
        (GrammarKind.REGEX, "a" * (MAX_SOURCE_CHARACTERS + 1), "longer than"),
        (GrammarKind.CHOICE, "yes", "not a JSON list of strings"),
        (GrammarKind.CHOICE, "[1]", "not a JSON list of strings"),
        (GrammarKind.CHOICE, "[]", "between 1 and"),
        (GrammarKind.CHOICE, json.dumps(["x"] * 5000), "between 1 and"),
        (GrammarKind.LARK, "start: nowhere", "nowhere"),
        (GrammarKind.LARK, "", "Empty grammar"),
    ],
)  # fmt: skip
def test_bad_grammars_are_refused_with_a_reason(kind: GrammarKind, source: str, says: str) -> None:
    problem = check_grammar(Grammar(kind=kind, source=source))
    assert problem is not None
    assert says in problem
    assert "response_format" in problem
    assert "\n" not in problem
    assert len(problem) < 700


@pytest.mark.parametrize(
    ("kind", "source", "problem"),
    [
        (GrammarKind.REGEX, "a(", "this regular expression cannot be used: unclosed group"),
        (GrammarKind.LARK, 'start: "a"\n  | nowhere', 'this grammar cannot be used: line 1, column 8: unknown name: "nowhere"'),
        (GrammarKind.LARK, "root ::= nowhere", "this grammar cannot be used: it is not GBNF: Rule 'nowhere' not found"),
        (GrammarKind.JSON_SCHEMA, '{"items": {"pattern": "("}}', "this schema cannot be used: items: unclosed group"),
    ],
)
def test_reasons_show_nothing_that_the_client_did_not_write(kind: GrammarKind, source: str, problem: str) -> None:
    assert check_grammar(Grammar(kind=kind, source=source)) == f"response_format: {problem}"
