"""Structural tags: text in which certain tags have contents of a certain shape, as a Lark grammar.

    structures, triggers    free text; where a trigger appears, one of the structures that begin with it must follow
    format                  XGrammar's tree of formats, which says the same and more (`_Format`)

A tag that the tokenizer has as one token is that token; others are letters, up to which free text runs lazily.
"""

from __future__ import annotations

import json
from typing import Any, Literal, assert_never

import msgspec

from kvrelay.errors import InvalidRequestError
from kvrelay.frontend.prompt.types import Body, NotEmpty, Schema, StructuralTagFormat
from kvrelay.sampling import Grammar, GrammarKind
from kvrelay.text.grammar_check import as_lark, check_grammar
from kvrelay.text.tokenizer import Tokenizer


def structural_tag(wanted: StructuralTagFormat, field: str, tokenizer: Tokenizer) -> Grammar:
    is_older = wanted.format is None
    writer = _Writer(tokenizer, "structures" if is_older else "tags")
    start = writer.write(_read(wanted, field), field if is_older else f"{field}.format")
    return Grammar(kind=GrammarKind.LARK, source="\n".join([f"start: {start}", *writer.rules]) + "\n")


# Formats


class _ConstString(Body, frozen=True, kw_only=True, tag_field="type", tag="const_string"):
    value: str


class _JsonSchema(Body, frozen=True, kw_only=True, tag_field="type", tag="json_schema"):
    json_schema: Schema | bool
    style: Literal["json"] = "json"


class _Regex(Body, frozen=True, kw_only=True, tag_field="type", tag="regex"):
    pattern: str


class _Ebnf(Body, frozen=True, kw_only=True, tag_field="type", tag="grammar"):
    grammar: str


class _AnyText(Body, frozen=True, kw_only=True, tag_field="type", tag="any_text"):
    excludes: list[NotEmpty] = []


class _Sequence(Body, frozen=True, kw_only=True, tag_field="type", tag="sequence"):
    elements: list[_Format]


class _Or(Body, frozen=True, kw_only=True, tag_field="type", tag="or"):
    elements: list[_Format]


class _Tag(Body, frozen=True, kw_only=True, tag_field="type", tag="tag"):
    begin: str
    content: _Format
    end: str


class _TriggeredTags(Body, frozen=True, kw_only=True, tag_field="type", tag="triggered_tags"):
    triggers: list[NotEmpty]
    tags: list[_Tag]
    at_least_one: bool = False  # the text begins with a tag
    stop_after_first: bool = False
    excludes: list[NotEmpty] = []


class _SeparatedTags(Body, frozen=True, kw_only=True, tag_field="type", tag="tags_with_separator"):
    tags: list[_Tag]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


_Format = _ConstString | _JsonSchema | _Regex | _Ebnf | _AnyText | _Sequence | _Or | _Tag | _TriggeredTags | _SeparatedTags


def _read(wanted: StructuralTagFormat, field: str) -> _Format:
    if wanted.format is None:
        if wanted.structures is None or wanted.triggers is None:
            raise InvalidRequestError(f"{field}: a structural tag needs a format, or structures and triggers", param=field)
        tags = [
            _Tag(begin=each.begin, content=_JsonSchema(json_schema=each.schema or {}), end=each.end)
            for each in wanted.structures
        ]
        return _TriggeredTags(triggers=wanted.triggers, tags=tags, at_least_one=wanted.at_least_one)
    if wanted.structures is not None or wanted.triggers is not None or wanted.at_least_one:
        raise InvalidRequestError(f"{field}.format cannot be combined with structures and triggers", param=f"{field}.format")
    try:
        found: _Format = msgspec.convert(wanted.format, type=_Format)
    except (msgspec.ValidationError, RecursionError) as error:
        reason = str(error).replace("`$", f"`{field}.format")
        raise InvalidRequestError(f"{field}.format: {reason}", param=f"{field}.format") from None
    return found


# Rules


class _Writer:
    """Writes formats as expressions, with the rules that these use."""

    def __init__(self, tokenizer: Tokenizer, tags_field: str) -> None:
        self._tokenizer = tokenizer
        self._tags_field = tags_field  # what clients call the tags with triggers
        self.rules: list[str] = []

    def write(self, wanted: _Format, path: str) -> str:
        match wanted:
            case _ConstString(value=value):
                return self._literal(value)
            case _JsonSchema(json_schema=schema):
                return self._grammar(GrammarKind.JSON_SCHEMA, msgspec.json.encode(schema).decode(), path)
            case _Regex(pattern=pattern):
                return self._grammar(GrammarKind.REGEX, pattern, path)
            case _Ebnf(grammar=source):
                return self._grammar(GrammarKind.LARK, source, path)
            case _AnyText(excludes=excludes):
                return f"{self._text(excludes)}?"
            case _Sequence(elements=elements):
                return " ".join(self._all(elements, path))
            case _Or(elements=elements):
                return "(" + " | ".join(self._all(elements, path)) + ")"
            case _Tag():
                return self._literal(wanted.begin) + " " + self._rest(wanted, path)
            case _TriggeredTags():
                return self._triggered(wanted, path)
            case _SeparatedTags(tags=tags):
                one = self._rule("(" + " | ".join(self._all(tags, path, "tags")) + ")")
                several = one if wanted.stop_after_first else f"{one} ({self._literal(wanted.separator)} {one})*"
                return f"({several})" if wanted.at_least_one else f"({several})?"
            case _ as never:
                assert_never(never)

    def _all(self, elements: list[Any], path: str, key: str = "elements") -> list[str]:
        if not elements:
            raise InvalidRequestError(f"{path}.{key} must not be empty", param=path)
        return [self.write(each, f"{path}.{key}[{place}]") for place, each in enumerate(elements)]

    def _grammar(self, kind: GrammarKind, source: str, path: str) -> str:
        grammar = Grammar(kind=kind, source=source)
        problem = check_grammar(grammar)
        if problem is not None:
            raise InvalidRequestError(f"{path}: {problem.removeprefix('response_format: ')}", param=path)
        return self._rule(as_lark(grammar))

    def _rule(self, body: str, *, lazy: bool = False) -> str:
        name = f"part_{len(self.rules)}"
        self.rules.append(f"{name}[lazy]: {body}" if lazy else f"{name}: {body}")
        return name

    def _text(self, excludes: list[str]) -> str:
        """Free text of at least one character."""
        name = f"TEXT_{len(self.rules)}"
        without = "".join(f" & ~/(?s:.*){_escaped(text)}(?s:.*)/" for text in excludes)
        self.rules.append(f"{name}: /(?s:.+)/{without}")
        return name

    def _literal(self, text: str) -> str:
        return self._pieces(self._tokenizer.split_own_tokens(text))

    def _pieces(self, pieces: list[str]) -> str:
        return " ".join(self._piece(piece) for piece in pieces) or '""'

    def _piece(self, piece: str) -> str:
        own = self._tokenizer.has_own_token(piece)
        return f"<[{self._tokenizer.token_id(piece)}]>" if own else json.dumps(piece)

    def _until(self, pieces: list[str], excludes: list[str]) -> str:
        """Free text and then these pieces, the first of which ends it."""
        first, *rest = pieces
        if self._tokenizer.has_own_token(first):
            return f"{self._text(excludes)}? {self._pieces(pieces)}"
        without = "".join(f" & ~/(?s:.*){_escaped(text)}(?s:.*)/" for text in excludes)
        lead = f"/(?s:.*){_escaped(first)}/{without}"
        return f"{self._rule(lead, lazy=not rest)} {self._pieces(rest) if rest else ''}"

    def _rest(self, tag: _Tag, path: str) -> str:
        """A tag behind its beginning."""
        end = self._tokenizer.split_own_tokens(tag.end)
        if isinstance(tag.content, _AnyText) and end:
            return self._until(end, tag.content.excludes)
        return f"{self.write(tag.content, f'{path}.content')} {self._pieces(end) if end else ''}"

    def _triggered(self, wanted: _TriggeredTags, path: str) -> str:
        leads: dict[str, list[str]] = {}  # what ends the free text: the tags that may follow it, without it
        whole: list[str] = []
        for place, tag in enumerate(wanted.tags):
            where = f"{path}.{self._tags_field}[{place}]"
            trigger = next((each for each in wanted.triggers if tag.begin.startswith(each)), None)
            if trigger is None:
                raise InvalidRequestError(f"{where}.begin: it begins with none of the triggers", param=f"{where}.begin")
            first = self._tokenizer.split_own_tokens(tag.begin)[0]
            lead = first if self._tokenizer.has_own_token(first) or len(first) < len(trigger) else trigger
            rest = self._rule(self._rest(tag, where))
            after = tag.begin.removeprefix(lead)
            leads.setdefault(lead, []).append(f"{self._literal(after) if after else ''} {rest}")
            whole.append(f"{self._literal(tag.begin)} {rest}")
        tagged = [f"{self._until([lead], wanted.excludes)} ({' | '.join(rests)})" for lead, rests in leads.items()]
        texts = [*(lead for lead in leads if not self._tokenizer.has_own_token(lead)), *wanted.excludes]
        free = "" if wanted.stop_after_first else f"{self._text(texts)}?"
        more = self._rule("(" + " | ".join(tagged) + ")")
        if wanted.at_least_one:
            first_tag = f"({' | '.join(whole)})"
            return first_tag if wanted.stop_after_first else f"{first_tag} {more}* {free}"
        return f"({more} | {self._text(texts)}?)" if wanted.stop_after_first else f"{more}* {free}"


def _escaped(text: str) -> str:
    """As a regular expression between slashes."""
    return "".join(char if char.isalnum() or char in " <>_" or char > "\x7f" else f"\\x{ord(char):02x}" for char in text)
