"""Grammars in llguidance's format, and whether one can be compiled at all.

No model is needed: the front end refuses a bad schema before a worker sees it, and the runner compiles the same definition.
"""

from __future__ import annotations

import json
from typing import Any

import llguidance
import msgspec

from kvrelay.errors import InvalidRequestError
from kvrelay.sampling import Grammar, GrammarKind

MAX_SOURCE_CHARACTERS = 256 * 1024
MAX_CHOICES = 4096
_ANY_OBJECT = {"type": "object"}
# A space, or a new line with its indentation. Unbounded white space is valid JSON too, but a model that begins with it may
# never end.
_JSON_WHITE_SPACE = r"\x20|\x0A\x20{0,24}"


def check_grammar(grammar: Grammar) -> str | None:
    """Why this grammar cannot be used, or None."""
    try:
        definition = to_definition(grammar)
    except InvalidRequestError as error:
        return error.message
    failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(definition, limits=limits())
    return describe(grammar, messages[0]) if failed else None


def to_definition(grammar: Grammar) -> str:
    """In llguidance's own format. Raises InvalidRequestError if the source is not of its kind."""
    if len(grammar.source) > MAX_SOURCE_CHARACTERS:
        raise _refused(grammar, f"it is longer than {MAX_SOURCE_CHARACTERS} characters")
    try:
        grammar.source.encode()
    except UnicodeEncodeError:
        raise _refused(grammar, "it contains a lone surrogate") from None
    matcher = llguidance.LLMatcher
    match grammar.kind:
        case GrammarKind.JSON_OBJECT:
            return _from_schema(_ANY_OBJECT)
        case GrammarKind.JSON_SCHEMA:
            return _from_schema(_read_schema(grammar))
        case GrammarKind.REGEX:
            # \d means 0 to 9, not the digits of every script: authors expect that, and other servers do it.
            return str(matcher.grammar_from_lark(f"start: /{llguidance.regex_to_lark(grammar.source, 'd')}/"))
        case GrammarKind.CHOICE:
            return str(matcher.grammar_from_lark(_choices(grammar)))
        case GrammarKind.LARK:
            return str(matcher.grammar_from_lark(grammar.source))


def limits() -> llguidance.LLParserLimits:
    """Short error texts: the default ones contain the whole parser state."""
    return llguidance.LLParserLimits(verbose_errors=False)


def describe(grammar: Grammar, problem: str) -> str:
    """One line for the client, naming the field."""
    text = " ".join(problem.replace("<non-verbose/>", "").split())
    return f"response_format: this {grammar.kind.value} cannot be used: {text[:500]}"


def _from_schema(schema: dict[str, Any]) -> str:
    return str(llguidance.LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": _JSON_WHITE_SPACE}))


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
