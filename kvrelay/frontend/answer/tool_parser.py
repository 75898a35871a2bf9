"""Reads tool calls as Hermes and Qwen models write them: `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`.

A call is announced as soon as its name is complete, and its arguments are passed on as they are written. Whole answers are
read by the same code, so both ways give the same calls. Text that turns out not to be a call is shown as text.
"""

from __future__ import annotations

import re

import msgspec

from kvrelay.frontend.answer.deltas import CallArguments, CallStart, Delta, Text, held_suffix, new_call_id
from kvrelay.frontend.prompt.tools import CLOSE, OPEN

_BEGINNING = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)', re.DOTALL)
_JSON_MARK = re.compile(r'["\\{}\[\]]')


class _WrittenCall(msgspec.Struct):
    """A call whose keys are in another order; it is read once it is complete."""

    name: str
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()


class ToolCallParser:
    """Reads one answer. White space around calls belongs to the markup and is not shown."""

    __slots__ = ("_arguments", "_call", "_held", "num_calls")

    def __init__(self) -> None:
        self.num_calls = 0  # announced so far
        self._held = ""  # text not yet understood
        self._call: str | None = None  # inside a call: its text while its name is not known
        self._arguments: _Arguments | None = None  # inside a call whose name is known

    def push(self, text: str) -> list[Delta]:
        deltas: list[Delta] = []
        text, self._held = self._held + text, ""
        while text:
            if self._call is None:
                text = self._read_text(text, deltas)
            else:
                text = self._read_call(text, deltas)
        return deltas

    def finish(self) -> list[Delta]:
        """A call that was cut off before its name was complete is text."""
        held, self._held = self._held, ""
        deltas: list[Delta] = []
        if self._call is not None and self._arguments is None:
            self._take_whole(self._call + held, deltas, closed=False)
        elif self._call is None and held:
            deltas.append(Text(held))
        self._call = self._arguments = None
        return deltas

    def _read_text(self, text: str, deltas: list[Delta]) -> str:
        before, opened, rest = text.partition(OPEN)
        if opened:
            self._call = ""
            shown = before.rstrip()
        else:
            shown = text[: len(text) - held_suffix(text, OPEN)].rstrip()
            self._held = text[len(shown) :]
        if self.num_calls and not shown.strip():
            shown = ""
        if shown:
            deltas.append(Text(shown))
        return rest

    def _read_call(self, text: str, deltas: list[Delta]) -> str:
        if self._arguments is None:
            return self._read_name(text, deltas)
        if not self._arguments.complete:
            written, text = self._arguments.take(text)
            deltas.append(CallArguments(self.num_calls - 1, written))
            return text
        _, closed, rest = text.partition(CLOSE)
        if closed:
            self._call = self._arguments = None
            return rest
        self._held = text[len(text) - held_suffix(text, CLOSE) :]
        return ""

    def _read_name(self, text: str, deltas: list[Delta]) -> str:
        assert self._call is not None
        self._call += text
        beginning = _BEGINNING.match(self._call)
        name = None if beginning is None else _json_string(beginning.group(1))
        if beginning is not None and name is not None:
            rest, self._call = self._call[beginning.end() :], ""
            self._announce(name, deltas)
            self._arguments = _Arguments()
            return rest
        whole, closed, rest = self._call.partition(CLOSE)
        if closed:
            self._take_whole(whole, deltas, closed=True)
            self._call = None
        return rest

    def _take_whole(self, written: str, deltas: list[Delta], *, closed: bool) -> None:
        try:
            call = msgspec.json.decode(written, type=_WrittenCall)
        except (msgspec.DecodeError, RecursionError, UnicodeError):
            deltas.append(Text(OPEN + written + (CLOSE if closed else "")))
            return
        raw = (bytes(call.arguments) or bytes(call.parameters) or b"{}").decode()
        self._announce(call.name, deltas)
        deltas.append(CallArguments(self.num_calls - 1, _json_string(raw) or raw))

    def _announce(self, name: str, deltas: list[Delta]) -> None:
        deltas.append(CallStart(self.num_calls, new_call_id(), name))
        self.num_calls += 1


class _Arguments:
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


def _json_string(text: str) -> str | None:
    try:
        return msgspec.json.decode(text, type=str)
    except (msgspec.DecodeError, UnicodeError):
        return None
