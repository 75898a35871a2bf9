"""Reads tool calls as Hermes and Qwen models write them: `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`.

A call is announced as soon as its name is complete, and its arguments are passed on as they are written. Whole answers are
read by the same code, so both ways give the same calls. Text that turns out not to be a call is shown as text; markup that
the length limit cut off is not shown.
"""

from __future__ import annotations

import msgspec

from kvrelay.frontend.answer.call_text import BEGINNING, Arguments, WrittenCall, json_string
from kvrelay.frontend.answer.deltas import CallArguments, CallStart, Delta, Text, held_suffix, new_call_id
from kvrelay.frontend.prompt.call_formats import CLOSE, OPEN

_SURE = "<tool"  # a shorter beginning of the tag may be anything


class ToolCallParser:
    """Reads one answer. White space around calls belongs to the markup and is not shown."""

    __slots__ = ("_arguments", "_call", "_forced", "_held", "num_calls")

    def __init__(self, *, forced: bool = False) -> None:
        """`forced`: the answer must be calls."""
        self._forced = forced
        self.num_calls = 0  # announced so far
        self._held = ""  # text not yet understood
        self._call: str | None = None  # inside a call: its text while its name is not known
        self._arguments: Arguments | None = None  # inside a call whose name is known

    def push(self, text: str) -> list[Delta]:
        deltas: list[Delta] = []
        text, self._held = self._held + text, ""
        while text:
            if self._call is None:
                text = self._read_text(text, deltas)
            else:
                text = self._read_call(text, deltas)
        return deltas

    def finish(self, *, cut: bool = False) -> list[Delta]:
        """What the model ended itself before it was a call is text. What was cut off is a call that no client can use."""
        held, self._held = self._held, ""
        deltas: list[Delta] = []
        if self._call is not None and self._arguments is None:
            self._take_whole(self._call + held, deltas, closed=False, cut=cut)
        elif self._call is None and held and not (cut and self._begins_call(held.lstrip())):
            deltas.append(Text(held))
        self._call = self._arguments = None
        return deltas

    def _begins_call(self, text: str) -> bool:
        """Whether held text is markup: surely if there must be calls, else from the tag's word on."""
        return self._forced or text.startswith(_SURE)

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
        beginning = BEGINNING.match(self._call)
        name = None if beginning is None else json_string(beginning.group(1))
        if beginning is not None and name is not None:
            rest, self._call = self._call[beginning.end() :], ""
            self._announce(name, deltas)
            self._arguments = Arguments()
            return rest
        whole, closed, rest = self._call.partition(CLOSE)
        if closed:
            self._take_whole(whole, deltas, closed=True)
            self._call = None
        return rest

    def _take_whole(self, written: str, deltas: list[Delta], *, closed: bool, cut: bool = False) -> None:
        try:
            call = msgspec.json.decode(written, type=WrittenCall)
        except (msgspec.DecodeError, RecursionError, UnicodeError):
            if not cut:
                deltas.append(Text(OPEN + written + (CLOSE if closed else "")))
            return
        self._announce(call.name, deltas)
        deltas.append(CallArguments(self.num_calls - 1, call.arguments_text()))

    def _announce(self, name: str, deltas: list[Delta]) -> None:
        deltas.append(CallStart(self.num_calls, new_call_id(), name))
        self.num_calls += 1
