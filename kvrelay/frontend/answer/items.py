"""The output of a response, item by item, and the events that tell of it as it grows."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any, assert_never

from kvrelay.frontend.answer.deltas import CallArguments, CallStart, Delta, Reasoning, Text
from kvrelay.frontend.answer.types import TokenLogprob

Emit = Callable[..., None]  # emit(event name, field=value, ...)
Item = dict[str, Any]

_EVENTS = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}


class OutputItems:
    """Messages, reasoning and calls in the order in which they are written; at most one is open at a time."""

    def __init__(self, emit: Emit) -> None:
        self.items: list[Item] = []
        self._emit = emit
        self._open: _OpenItem | None = None

    def add(self, deltas: list[Delta], logprobs: list[TokenLogprob]) -> None:
        for delta in deltas:
            match delta:
                case Text(text):
                    self._message().grow(text, logprobs)
                    logprobs = []
                case Reasoning(text):
                    item = {"id": _new_id("rs"), "type": "reasoning", "summary": [], "content": [], "status": "in_progress"}
                    self._open_item("reasoning", item).grow(text, [])
                case CallStart(_, call_id, name):
                    self._begin(
                        {"id": _new_id("fc"), "type": "function_call", "call_id": call_id, "name": name, "arguments": "",
                         "status": "in_progress"}
                    )  # fmt: skip
                case CallArguments(_, text):
                    assert self._open is not None, "the arguments of a call follow its start"
                    self._open.grow(text, [])
                case _ as never:
                    assert_never(never)

    def finish(self, status: str) -> None:
        if not self.items:
            self._message()  # an empty answer is an empty message
        self._close(status)

    def _message(self) -> _OpenItem:
        item = {"id": _new_id("msg"), "type": "message", "role": "assistant", "status": "in_progress", "content": []}
        return self._open_item("message", item)

    def _open_item(self, kind: str, item: Item) -> _OpenItem:
        """The open item if it is of that kind, else a new one."""
        return self._open if self._open is not None and self._open.type == kind else self._begin(item)

    def _begin(self, item: Item) -> _OpenItem:
        self._close("completed")
        self._open = _OpenItem(self._emit, len(self.items), item)
        self.items.append(item)
        return self._open

    def _close(self, status: str) -> None:
        if self._open is not None:
            self._open.close(status)
            self._open = None


class _OpenItem:
    """An item that still grows. `item` is the response's entry for it."""

    def __init__(self, emit: Emit, output_index: int, item: Item) -> None:
        self.type: str = item["type"]
        self._emit = emit
        self._item = item
        self._output_index = output_index
        self._place: dict[str, Any] = {"item_id": item["id"], "output_index": output_index}
        self._event = f"response.{_EVENTS[self.type]}"
        self._written: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        emit("response.output_item.added", output_index=output_index, item=item)
        if self.type != "function_call":
            self._place["content_index"] = 0
            emit("response.content_part.added", **self._place, part=self._part(""))

    def grow(self, text: str, logprobs: list[TokenLogprob]) -> None:
        self._written.append(text)
        self._logprobs += logprobs
        shown = {"logprobs": logprobs} if self.type == "message" else {}
        self._emit(f"{self._event}.delta", **self._place, delta=text, **shown)

    def close(self, status: str) -> None:
        text = "".join(self._written)
        if self.type == "function_call":
            self._item["arguments"] = text
            self._emit(f"{self._event}.done", **self._place, name=self._item["name"], arguments=text)
        else:
            part = self._part(text)
            self._item["content"] = [part]
            shown = {"logprobs": self._logprobs} if self.type == "message" else {}
            self._emit(f"{self._event}.done", **self._place, text=text, **shown)
            self._emit("response.content_part.done", **self._place, part=part)
        self._item["status"] = status
        self._emit("response.output_item.done", output_index=self._output_index, item=self._item)

    def _part(self, text: str) -> dict[str, Any]:
        if self.type == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs}


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
