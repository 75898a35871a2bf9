"""What an answer is made of, in the order in which it is written. Streams show the deltas one by one, bodies add them up."""

from __future__ import annotations

import dataclasses
import uuid
from typing import Protocol, assert_never


@dataclasses.dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins. `index` counts the calls of one answer."""

    index: int
    id: str
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments, which are JSON text."""

    index: int
    text: str


Delta = Text | Reasoning | CallStart | CallArguments


class Parser(Protocol):
    """Parses the text of one answer as it comes."""

    def push(self, text: str) -> list[Delta]: ...

    def finish(self) -> list[Delta]:
        """The text has ended. Returns what was held back."""


@dataclasses.dataclass(slots=True)
class Call:
    id: str = ""  # empty, as the name is, if the call began in deltas before
    name: str = ""
    arguments: str = ""


class Collected:
    """Deltas added up: of one token, or of a whole answer."""

    __slots__ = ("calls", "reasoning", "text")

    def __init__(self) -> None:
        self.text: list[str] = []
        self.reasoning: list[str] = []
        self.calls: dict[int, Call] = {}

    def add(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            match delta:
                case Text(text):
                    self.text.append(text)
                case Reasoning(text):
                    self.reasoning.append(text)
                case CallStart(index, call_id, name):
                    self.calls[index] = Call(call_id, name)
                case CallArguments(index, text):
                    self.calls.setdefault(index, Call()).arguments += text
                case _ as never:
                    assert_never(never)


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def held_suffix(text: str, tag: str) -> int:
    """Length of the longest end of `text` that begins `tag`."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
