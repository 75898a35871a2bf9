"""Reads tool calls as Llama and Mistral models write them (`prompt/call_formats`): objects, or names with arguments, one after
the other behind a mark; of Llama models also without it, if the answer begins with an object.

As in `tool_parser`, a call is announced as soon as its name is complete; what turns out not to be a call is shown as text; and
what the length limit cut off before that is not shown.
"""

from __future__ import annotations

import enum
import re
import uuid
from typing import assert_never

import msgspec

from kvrelay.frontend.answer.call_text import BEGINNING, Arguments, WrittenCall, json_string
from kvrelay.frontend.answer.deltas import CallArguments, CallStart, Delta, Text, held_suffix, new_call_id
from kvrelay.frontend.prompt.call_formats import MARK, PYTHON_TAG

_FIRST_KEY = re.compile(r'\{\s*"([^"]*)"')
_KEYS = frozenset({"name", "type", "function", "id", "arguments", "parameters"})  # with which a call may begin
_NAMED = re.compile(r"([\w.-]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?=\{)")
_MAYBE_NAMED = re.compile(r"[\w.-]*(?:\[[A-Z_]*\]?\w*)*\s*")
_LONGEST_NAME = 200


class _State(enum.Enum):
    TEXT = "outside of calls"
    SECTION = "where a call may begin"
    CALL = "in a call whose name is not known"
    ARGUMENTS = "in its arguments"
    TAIL = "in its object, behind the arguments"
    OVER = "behind the only call: nothing is shown"


class ObjectCallParser:
    """Reads one answer."""

    def __init__(self, *, is_mistral: bool, forced: bool = False, one_call: bool = False) -> None:
        """`forced`: the answer must be calls. `one_call`: further ones are not wanted."""
        self.num_calls = 0  # announced so far
        self._is_mistral = is_mistral
        self._mark = MARK if is_mistral else PYTHON_TAG
        self._forced = forced
        self._one_call = one_call
        self._state = _State.TEXT
        self._held = ""  # text not yet understood
        self._begun = False  # there was text, or a mark: an object is no call by itself any more
        self._call = ""
        self._object = Arguments()  # follows the call's object to its end
        self._arguments = Arguments()
        self._in_object = True

    def push(self, text: str) -> list[Delta]:
        deltas: list[Delta] = []
        text, self._held = self._held + text, ""
        while text:
            match self._state:
                case _State.TEXT:
                    text = self._read_text(text, deltas)
                case _State.SECTION:
                    text = self._read_section(text, deltas)
                case _State.CALL:
                    text = self._read_call(text, deltas)
                case _State.ARGUMENTS:
                    text = self._read_arguments(text, deltas)
                case _State.TAIL:
                    text = self._read_tail(text)
                case _State.OVER:
                    text = ""
                case _ as never:
                    assert_never(never)
        return deltas

    def finish(self, *, cut: bool = False) -> list[Delta]:
        held, self._held = self._held, ""
        deltas: list[Delta] = []
        match self._state:
            case _State.TEXT if held and not (cut and self._begins_mark(held.strip())):
                deltas.append(Text(held))
            case _State.SECTION if held and not cut:
                deltas.append(Text(held))
            case _State.CALL if not (cut and self._is_surely_call()):
                deltas.append(Text(self._call))
            case _:
                pass  # markup
        self._state = _State.OVER
        return deltas

    def _begins_mark(self, text: str) -> bool:
        return self._forced or (len(text) > 2 and self._mark.startswith(text))

    def _is_surely_call(self) -> bool:
        return self._forced or self._begun or _FIRST_KEY.match(self._call) is not None

    def _read_text(self, text: str, deltas: list[Delta]) -> str:
        if not self._is_mistral and not self._begun:
            written = text.lstrip()
            if not written:
                self._held = text
                return ""
            if written.startswith("{"):
                return self._begin_call(written)
        before, marked, rest = text.partition(self._mark)
        if marked:
            shown, self._state, self._begun = before.rstrip(), _State.SECTION, True
        else:
            shown = text[: len(text) - held_suffix(text, self._mark)].rstrip()
            self._held = text[len(shown) :]
        if shown:
            self._begun = True
            deltas.append(Text(shown))
        return rest

    def _read_section(self, text: str, deltas: list[Delta]) -> str:
        text = text.lstrip(" \t\r\n,;]")
        if text.startswith(self._mark):
            return text.removeprefix(self._mark)
        if self._mark.startswith(text) and text:
            self._held = text
            return ""
        if text.startswith("["):
            return text[1:]
        if text.startswith("{"):
            return self._begin_call(text)
        if self._is_mistral and (named := _NAMED.match(text)) is not None:
            self._in_object = False
            return self._announce(named.group(1), text[named.end() :], deltas)
        if self._is_mistral and len(text) < _LONGEST_NAME and _MAYBE_NAMED.fullmatch(text):
            self._held = text
        elif text:
            self._state = _State.TEXT
            return text
        return ""

    def _begin_call(self, text: str) -> str:
        self._state, self._call, self._object, self._in_object = _State.CALL, "", Arguments(), True
        return text

    def _read_call(self, text: str, deltas: list[Delta]) -> str:
        written, rest = self._object.take(text)
        self._call += written
        beginning = BEGINNING.match(self._call)
        name = None if beginning is None else json_string(beginning.group(1))
        if beginning is not None and name is not None:
            return self._announce(name, self._call[beginning.end() :] + rest, deltas)
        first = _FIRST_KEY.match(self._call)
        if self._object.complete and (call := _whole_call(self._call)) is not None:
            self._announce(call.name, "", deltas)
            deltas.append(CallArguments(self.num_calls - 1, call.arguments_text()))
            self._end_call()
        elif self._object.complete or (first is not None and first.group(1) not in _KEYS):
            self._state, self._begun = _State.TEXT, True
            return self._call + rest
        return rest

    def _read_arguments(self, text: str, deltas: list[Delta]) -> str:
        written, rest = self._arguments.take(text)
        deltas.append(CallArguments(self.num_calls - 1, written))
        if self._arguments.complete:
            if self._in_object:
                self._state = _State.TAIL
            else:
                self._end_call()
        return rest

    def _read_tail(self, text: str) -> str:
        _, closed, rest = text.partition("}")
        if closed:
            self._end_call()
        return rest

    def _announce(self, name: str, rest: str, deltas: list[Delta]) -> str:
        call_id = uuid.uuid4().hex[:9] if self._is_mistral else new_call_id()  # Mistral's templates take ids of nine characters
        deltas.append(CallStart(self.num_calls, call_id, name))
        self.num_calls += 1
        self._state, self._arguments, self._begun = _State.ARGUMENTS, Arguments(), True
        return rest

    def _end_call(self) -> None:
        self._state = _State.OVER if self._one_call else _State.SECTION


def _whole_call(written: str) -> WrittenCall | None:
    """A call with its keys in any order."""
    try:
        call = msgspec.json.decode(written, type=WrittenCall)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return None
    return call if bytes(call.arguments) or bytes(call.parameters) else None
