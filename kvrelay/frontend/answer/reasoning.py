"""Splits off a model's reasoning: `<think>reasoning</think>answer`."""

from __future__ import annotations

import enum

from kvrelay.frontend.answer.deltas import Delta, Parser, Reasoning, Text, held_suffix

_OPEN = "<think>"
_CLOSE = "</think>"


class _State(enum.Enum):
    START = "nothing but white space yet"
    THINKING = "between the tags"
    GAP = "white space after the closing tag"
    ANSWER = "the answer, to its end"


class ReasoningParser:
    """An answer that does not begin with the tag (after white space) has no reasoning. `answer` parses the text after it."""

    __slots__ = ("_answer", "_held", "_state")

    def __init__(self, answer: Parser | None, *, opened: bool) -> None:
        """`opened`: the prompt already ended with the opening tag."""
        self._answer = answer
        self._held = ""
        self._state = _State.THINKING if opened else _State.START

    @property
    def thinking(self) -> bool:
        return self._state is _State.THINKING

    def push(self, text: str) -> list[Delta]:
        if self._state is _State.ANSWER:
            return self._pass_on(text)
        text, self._held = self._held + text, ""
        deltas: list[Delta] = []
        if self._state is _State.START:
            text = self._open(text)
        if self._state is _State.THINKING:
            text = self._think(text, deltas)
        if self._state is _State.GAP:
            text = text.lstrip()
            if text:
                self._state = _State.ANSWER
        if self._state is _State.ANSWER and text:
            deltas += self._pass_on(text)
        return deltas

    def finish(self) -> list[Delta]:
        held, self._held = self._held, ""
        deltas: list[Delta] = []
        if held:
            deltas = [Reasoning(held)] if self.thinking else self._pass_on(held)
        if self._answer is not None:
            deltas += self._answer.finish()
        return deltas

    def _open(self, text: str) -> str:
        """Drops the opening tag if there is one; holds text back while it may become one."""
        begun = text.lstrip()
        if begun.startswith(_OPEN):
            self._state = _State.THINKING
            return begun.removeprefix(_OPEN).lstrip("\n")
        if _OPEN.startswith(begun):
            self._held = text
            return ""
        self._state = _State.ANSWER
        return text

    def _think(self, text: str, deltas: list[Delta]) -> str:
        """Takes the reasoning out of `text`; returns the text after the closing tag."""
        reasoning, closed, rest = text.partition(_CLOSE)
        if closed:
            self._state = _State.GAP
        else:
            keep = held_suffix(text, _CLOSE)
            reasoning, self._held = text[: len(text) - keep], text[len(text) - keep :]
        if reasoning:
            deltas.append(Reasoning(reasoning))
        return rest

    def _pass_on(self, text: str) -> list[Delta]:
        return [Text(text)] if self._answer is None else self._answer.push(text)
