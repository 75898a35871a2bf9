"""One answer of a chat as it is read: text, reasoning and tool calls told apart, and added up if it is not streamed."""

from __future__ import annotations

from kvrelay.frontend.answer.deltas import Collected, Delta, Parser, Text
from kvrelay.frontend.answer.generation import Sample
from kvrelay.frontend.answer.reasoning import ReasoningParser
from kvrelay.frontend.answer.tool_parser import ToolCallParser
from kvrelay.frontend.prompt.conversation import Conversation
from kvrelay.states import FinishReason


class AnswerReader:
    """`push` each step's text, with `last` for the last one."""

    __slots__ = ("_parser", "_reasoning", "_tools", "collected", "reasoning_tokens", "sample")

    def __init__(self, conversation: Conversation, sample: Sample) -> None:
        self.sample = sample
        self._tools = ToolCallParser() if conversation.tools.parse else None
        self._reasoning = ReasoningParser(self._tools, opened=conversation.opened) if conversation.reasons else None
        self._parser: Parser | None = self._reasoning or self._tools
        self.collected = Collected()
        self.reasoning_tokens = 0

    def push(self, text: str, *, last: bool) -> list[Delta]:
        if self._parser is None:
            return [Text(text)] if text else []
        if self._reasoning is not None and self._reasoning.thinking:
            self.reasoning_tokens += 1
        deltas = self._parser.push(text)
        if last:
            deltas += self._parser.finish()
        return deltas

    def finish_reason(self) -> str:
        reason = self.sample.finish
        assert reason is not None
        calls = self._tools is not None and self._tools.num_calls > 0
        return "tool_calls" if calls and reason is FinishReason.STOP else reason.value
