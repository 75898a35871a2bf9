"""Grammars in llguidance's format, and whether one can be compiled at all.

No model is needed: the front end refuses a bad schema before a worker sees it, and the runner compiles the same definition.
"""

from __future__ import annotations

import json
import re
from typing import Any

import llguidance
import msgspec
from llguidance.gbnf_to_lark import gbnf_to_lark

from kvrelay.errors import InvalidRequestError
from kvrelay.sampling import Grammar, GrammarKind
from kvrelay.text.json_schema import SchemaError, parts_of, prepare_schema

MAX_SOURCE_CHARACTERS = 256 * 1024
MAX_CHOICES = 4096
_ANY_OBJECT = {"type": "object"}
_EMPTY_REGEX = re.compile(r"Regex is empty: .*")  # and then the expression, in llguidance's own form
# llguidance's errors: "at LINE(COLUMN): problem", then the line with a mark under it; the regex library's: the expression, a
# mark, "error: problem".
_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
_QUOTED_LINE = re.compile(r"\n\s*(?:\d+ )?\|(?s:.*)$")
_IN_REGEX = re.compile(r"(?:at \d+\(\d+\): invalid regex .*)?regex parse error: .* error: (.*)$")
_NAMES = {
    GrammarKind.JSON_OBJECT: "schema",
    GrammarKind.JSON_SCHEMA: "schema",
    GrammarKind.REGEX: "regular expression",
    GrammarKind.CHOICE: "list of choices",
    GrammarKind.LARK: "grammar",
}
_GBNF = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)


def check_grammar(grammar: Grammar) -> str | None:
    """Why this grammar cannot be used, or None."""
    try:
        definition = to_definition(grammar)
    except InvalidRequestError as error:
        return error.message
    problem = _problem(definition)
    if problem is None:
        return None
    return describe(grammar, _inner_problem(grammar) or problem)


def _problem(definition: str) -> str | None:
    failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(definition, limits=limits())
    return messages[0] if failed else None


def _inner_problem(grammar: Grammar) -> str | None:
    """What is wrong with a part of a schema that cannot be compiled, and with which."""
    if grammar.kind is not GrammarKind.JSON_SCHEMA:
        return None
    for path, part in parts_of(prepare_schema(_read_schema(grammar))):
        problem = _problem(_from_schema(part))
        if problem is not None:
            return f"{path.removeprefix('.')}: {problem}"
    return None


def to_definition(grammar: Grammar) -> str:
    """In llguidance's own format. Raises InvalidRequestError if the source is not of its kind."""
    if len(grammar.source) > MAX_SOURCE_CHARACTERS:
        raise _refused(grammar, f"it is longer than {MAX_SOURCE_CHARACTERS} characters")
    try:
        grammar.source.encode()
    except UnicodeEncodeError:
        raise _refused(grammar, "it contains a lone surrogate") from None
    match grammar.kind:
        case GrammarKind.JSON_OBJECT:
            return _from_schema(prepare_schema(_ANY_OBJECT))
        case GrammarKind.JSON_SCHEMA:
            try:
                return _from_schema(prepare_schema(_read_schema(grammar)))
            except SchemaError as error:
                raise _refused(grammar, str(error)) from None
        case GrammarKind.REGEX | GrammarKind.CHOICE | GrammarKind.LARK:
            return str(llguidance.LLMatcher.grammar_from_lark(_rules(grammar)))


def as_lark(grammar: Grammar) -> str:
    """As a part of a Lark rule."""
    if grammar.kind is GrammarKind.JSON_OBJECT:
        return f"%json {json.dumps(prepare_schema(_ANY_OBJECT))}"
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        return f"%json {json.dumps(prepare_schema(_read_schema(grammar)))}"
    return f"%lark {{\n{_rules(grammar)}\n}}"


def _rules(grammar: Grammar) -> str:
    """Of a grammar that is not about JSON, in Lark."""
    match grammar.kind:
        case GrammarKind.REGEX:
            # \d means 0 to 9, not the digits of every script: authors expect that, and other servers do it.
            return f"start: /{llguidance.regex_to_lark(grammar.source, 'd')}/"
        case GrammarKind.CHOICE:
            return _choices(grammar)
        case _:
            return _as_lark(grammar)


def limits() -> llguidance.LLParserLimits:
    """Short error texts: the default ones contain the whole parser state."""
    return llguidance.LLParserLimits(verbose_errors=False)


def describe(grammar: Grammar, problem: str) -> str:
    """One line for the client, naming the field, without the rules that we put around what the client wrote."""
    text = " ".join(_QUOTED_LINE.sub("", problem.replace("<non-verbose/>", "")).split())
    text = _EMPTY_REGEX.sub("nothing fits it", text)
    if (inside := _IN_REGEX.search(text)) is not None and grammar.kind is not GrammarKind.LARK:
        text = f"{text[: inside.start()]}{inside.group(1)}"
    is_own = grammar.kind is GrammarKind.LARK and not _GBNF.search(grammar.source)
    text = _PLACE.sub(r"line \1, column \2: " if is_own else "", text)
    return f"response_format: this {_NAMES[grammar.kind]} cannot be used: {text[:500]}"


def _from_schema(schema: dict[str, Any]) -> str:
    return str(llguidance.LLMatcher.grammar_from_json_schema(schema))


def _as_lark(grammar: Grammar) -> str:
    """llama.cpp's GBNF is translated: its rules are written `name ::= ...`, which no rule of Lark is."""
    if not _GBNF.search(grammar.source):
        return grammar.source
    try:
        return str(gbnf_to_lark(grammar.source))
    except Exception as error:  # noqa: BLE001 - the library raises what it happens to meet
        raise _refused(grammar, f"it is not GBNF: {error}") from None


def _read_schema(grammar: Grammar) -> dict[str, Any]:
    try:
        schema = msgspec.json.decode(grammar.source)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _refused(grammar, f"it is not JSON: {error}") from None
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    if not isinstance(schema, dict):
        raise _refused(grammar, "a schema must be a JSON object")
    return schema


def _choices(grammar: Grammar) -> str:
    try:
        choices = msgspec.json.decode(grammar.source, type=list[str])
    except (msgspec.DecodeError, RecursionError) as error:
        raise _refused(grammar, f"it is not a JSON list of strings: {error}") from None
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise _refused(grammar, f"it must name between 1 and {MAX_CHOICES} choices")
    # A terminal (capital letters): the lexer takes thousands of alternatives, where the parser would reach its limits.
    return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(choice) for choice in choices)


def _refused(grammar: Grammar, problem: str) -> InvalidRequestError:
    return InvalidRequestError(describe(grammar, problem), param="response_format")
