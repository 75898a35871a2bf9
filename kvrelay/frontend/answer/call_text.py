"""A tool call as JSON text: how it begins, where its arguments end, and what it says once it is complete."""

from __future__ import annotations

import re

import msgspec

BEGINNING = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)', re.DOTALL)
_JSON_MARK = re.compile(r'["\\{}\[\]]')


class WrittenCall(msgspec.Struct):
    """A call whose keys are in another order; it is read once it is complete."""

    name: str
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()

    def arguments_text(self) -> str:
        raw = (bytes(self.arguments) or bytes(self.parameters) or b"{}").decode()
        return json_string(raw) or raw


class Arguments:
    """Follows one JSON value to its end, looking only at strings and brackets."""

    __slots__ = ("_depth", "_escaped", "_in_string", "complete")

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self.complete = False

    def take(self, text: str) -> tuple[str, str]:
        """The part of the text that belongs to the value, and the rest."""
        place = 0
        while place < len(text):
            if self._escaped:
                self._escaped = False
                place += 1
                continue
            mark = _JSON_MARK.search(text, place)
            if mark is None:
                break
            place = mark.end()
            self._note(mark.group())
            if self._depth == 0:
                self.complete = True
                return text[:place], text[place:]
        return text, ""

    def _note(self, mark: str) -> None:
        if self._in_string:
            self._escaped = mark == "\\"
            self._in_string = mark != '"'
        elif mark == '"':
            self._in_string = True
        elif mark in "{[":
            self._depth += 1
        elif mark in "}]":
            self._depth -= 1


def json_string(text: str) -> str | None:
    try:
        return msgspec.json.decode(text, type=str)
    except (msgspec.DecodeError, UnicodeError):
        return None
