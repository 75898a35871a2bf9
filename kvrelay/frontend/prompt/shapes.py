"""From the fields that ask for a shape of the output, under the names of four servers, to the one grammar it must follow."""

from __future__ import annotations

import operator
from typing import Any

import msgspec

from kvrelay.errors import InvalidRequestError
from kvrelay.frontend.http.errors import missing
from kvrelay.frontend.prompt.structural_tags import structural_tag
from kvrelay.frontend.prompt.types import (
    JsonObjectFormat,
    JsonSchemaFormat,
    ResponseFormat,
    SamplingFields,
    StructuralTagFormat,
    StructuredOutputs,
)
from kvrelay.sampling import Grammar, GrammarKind
from kvrelay.text.tokenizer import Tokenizer

Shape = tuple[str, Grammar]  # the field that asks for a grammar, and the grammar

_FIELDS = (
    "structured_outputs",
    "response_format",
    "guided_json",
    "json_schema",
    "guided_regex",
    "regex",
    "guided_choice",
    "guided_grammar",
    "grammar",
    "ebnf",
    "structural_tag",
)
_values = operator.attrgetter(*_FIELDS)


def shape_of(request: SamplingFields, tokenizer: Tokenizer) -> Shape | None:
    if _values(request).count(None) == len(_FIELDS):  # as with most requests
        return None
    wanted = request.structured_outputs or StructuredOutputs()
    schemas = {
        "guided_json": request.guided_json,
        "json_schema": request.json_schema,
        "structured_outputs.json": wanted.json,
    }
    expressions = {
        "guided_regex": request.guided_regex,
        "regex": request.regex,
        "structured_outputs.regex": wanted.regex,
    }
    choices = {"guided_choice": request.guided_choice, "structured_outputs.choice": wanted.choice}
    grammars = {
        "guided_grammar": request.guided_grammar,
        "grammar": request.grammar,
        "ebnf": request.ebnf,
        "structured_outputs.grammar": wanted.grammar,
    }
    tags = {"structural_tag": request.structural_tag, "structured_outputs.structural_tag": wanted.structural_tag}
    shapes = [
        *_response_format(request.response_format, tokenizer),
        *((field, _json_schema(schema)) for field, schema in schemas.items() if schema is not None),
        *((field, Grammar(kind=GrammarKind.REGEX, source=text)) for field, text in expressions.items() if text is not None),
        *(
            (field, Grammar(kind=GrammarKind.CHOICE, source=_json(those)))
            for field, those in choices.items()
            if those is not None
        ),
        *((field, Grammar(kind=GrammarKind.LARK, source=text)) for field, text in grammars.items() if text is not None),
        *((field, structural_tag(_tag(tag, field), field, tokenizer)) for field, tag in tags.items() if tag is not None),
    ]
    if wanted.json_object:
        shapes.append(("structured_outputs.json_object", Grammar(kind=GrammarKind.JSON_OBJECT)))
    if len(shapes) > 1:
        raise InvalidRequestError(f"{shapes[1][0]} cannot be combined with {shapes[0][0]}", param=shapes[1][0])
    return shapes[0] if shapes else None


def _response_format(wanted: ResponseFormat | None, tokenizer: Tokenizer) -> list[Shape]:
    if isinstance(wanted, JsonObjectFormat):
        return [("response_format", Grammar(kind=GrammarKind.JSON_OBJECT))]
    if isinstance(wanted, JsonSchemaFormat):
        if wanted.json_schema.schema is None:
            raise missing("response_format.json_schema.schema")
        return [("response_format", _json_schema(wanted.json_schema.schema))]
    if isinstance(wanted, StructuralTagFormat):
        return [("response_format", structural_tag(wanted, "response_format", tokenizer))]
    return []


def _json_schema(schema: dict[str, Any] | str) -> Grammar:
    return Grammar(kind=GrammarKind.JSON_SCHEMA, source=schema if isinstance(schema, str) else _json(schema))


def _tag(given: StructuralTagFormat | str, field: str) -> StructuralTagFormat:
    """vLLM takes it as JSON text."""
    if not isinstance(given, str):
        return given
    try:
        return msgspec.json.decode(given, type=StructuralTagFormat)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise InvalidRequestError(f"{field}: it is not a structural tag: {error}", param=field) from None


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
