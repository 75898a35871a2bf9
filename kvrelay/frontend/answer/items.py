"""The output of a response, item by item, and the events that tell of it as it grows."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import msgspec

from kvrelay.frontend.answer.deltas import CallArguments, CallStart, Delta, Reasoning, Text
from kvrelay.frontend.answer.types import TokenLogprob

Emit = Callable[..., None]  # emit(event name, field=value, ...)
Item = dict[str, Any]


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
                    self._item(_OpenMessage).grow(text, logprobs)
                    logprobs = []
                case Reasoning(text):
                    self._item(_OpenReasoning).grow(text, [])
                case CallStart(_, call_id, name):
                    self._begin(_OpenCall(self._emit, len(self.items), call_id, name))
                case CallArguments(_, text):
                    self._item(_OpenCall).grow(text, [])

    def finish(self, status: str) -> None:
        if not self.items:
            self._item(_OpenMessage)  # an empty answer is an empty message
        self._close(status)

    def _item(self, kind: type[_OpenMessage | _OpenReasoning | _OpenCall]) -> _OpenItem:
        if not isinstance(self._open, kind):
            assert kind is not _OpenCall, "a call's arguments follow its start"
            self._begin(kind(self._emit, len(self.items)))
        assert self._open is not None
        return self._open

    def _begin(self, item: _OpenItem) -> None:
        self._close("completed")
        self._open = item
        self.items.append(item.item)
        item.begin()

    def _close(self, status: str) -> None:
        if self._open is not None:
            self._open.close(status)
            self._open = None


class _OpenItem:
    """An item that still grows. `item` is what the response holds of it."""

    def __init__(self, emit: Emit, output_index: int, item: Item) -> None:
        self._emit = emit
        self.item = item
        self._place = {"item_id": item["id"], "output_index": output_index}
        self._written: list[str] = []

    def begin(self) -> None:
        # Encoded at once: the item grows on.
        item = msgspec.json.decode(msgspec.json.encode(self.item))
        self._emit("response.output_item.added", output_index=self._place["output_index"], item=item)

    def grow(self, text: str, logprobs: list[TokenLogprob]) -> None:
        raise NotImplementedError

    def close(self, status: str) -> None:
        self.item["status"] = status
        self._emit("response.output_item.done", output_index=self._place["output_index"], item=self.item)


class _OpenMessage(_OpenItem):
    def __init__(self, emit: Emit, output_index: int) -> None:
        item = {"id": _new_id("msg"), "type": "message", "role": "assistant", "status": "in_progress", "content": []}
        super().__init__(emit, output_index, item)
        self._logprobs: list[TokenLogprob] = []

    def begin(self) -> None:
        super().begin()
        self._emit("response.content_part.added", **self._place, content_index=0, part=self._part("", []))

    def grow(self, text: str, logprobs: list[TokenLogprob]) -> None:
        self._written.append(text)
        self._logprobs += logprobs
        self._emit("response.output_text.delta", **self._place, content_index=0, delta=text, logprobs=logprobs)

    def close(self, status: str) -> None:
        text = "".join(self._written)
        part = self._part(text, self._logprobs)
        self.item["content"] = [part]
        self._emit("response.output_text.done", **self._place, content_index=0, text=text, logprobs=self._logprobs)
        self._emit("response.content_part.done", **self._place, content_index=0, part=part)
        super().close(status)

    @staticmethod
    def _part(text: str, logprobs: list[TokenLogprob]) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


class _OpenReasoning(_OpenItem):
    def __init__(self, emit: Emit, output_index: int) -> None:
        item = {"id": _new_id("rs"), "type": "reasoning", "summary": [], "content": [], "status": "in_progress"}
        super().__init__(emit, output_index, item)

    def begin(self) -> None:
        super().begin()
        part = {"type": "reasoning_text", "text": ""}
        self._emit("response.content_part.added", **self._place, content_index=0, part=part)

    def grow(self, text: str, logprobs: list[TokenLogprob]) -> None:
        self._written.append(text)
        self._emit("response.reasoning_text.delta", **self._place, content_index=0, delta=text)

    def close(self, status: str) -> None:
        text = "".join(self._written)
        part = {"type": "reasoning_text", "text": text}
        self.item["content"] = [part]
        self._emit("response.reasoning_text.done", **self._place, content_index=0, text=text)
        self._emit("response.content_part.done", **self._place, content_index=0, part=part)
        super().close(status)


class _OpenCall(_OpenItem):
    def __init__(self, emit: Emit, output_index: int, call_id: str = "", name: str = "") -> None:
        item = {
            "id": _new_id("fc"),
            "type": "function_call",
            "call_id": call_id,
            "name": name,
            "arguments": "",
            "status": "in_progress",
        }
        super().__init__(emit, output_index, item)

    def grow(self, text: str, logprobs: list[TokenLogprob]) -> None:
        self._written.append(text)
        self._emit("response.function_call_arguments.delta", **self._place, delta=text)

    def close(self, status: str) -> None:
        arguments = "".join(self._written)
        self.item["arguments"] = arguments
        self._emit("response.function_call_arguments.done", **self._place, name=self.item["name"], arguments=arguments)
        super().close(status)


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
