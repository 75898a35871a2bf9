"""The events of streamed chats and completions, as bytes.

Most events of a stream differ in their text only. What surrounds it is encoded once per stream and choice, so that an event
costs one JSON encoding of a short text and one join. There is one event per token; events that are ready together are
sent together.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from kvrelay.frontend.answer.continuation import as_extra
from kvrelay.frontend.answer.generation import Generation
from kvrelay.frontend.answer.loop import Delivery
from kvrelay.frontend.answer.types import ChatCompletion, Completion, CompletionTokensDetails, PromptTokensDetails, Usage
from kvrelay.frontend.http.call import Call
from kvrelay.frontend.prompt.types import StreamOptions
from kvrelay.states import FinishReason

B = TypeVar("B", ChatCompletion, Completion)
_DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode
_FINISH: dict[FinishReason | None, bytes] = {None: b"null", **{reason: _encode(reason.value) for reason in FinishReason}}


class ChunkWriter:
    """Writes the chunks of one stream: `head` + choice + `tail`."""

    __slots__ = ("_begin", "_close", "_continuous", "_head", "_heads", "_include_usage", "_tail", "_usage", "created")

    def __init__(
        self,
        around_text: tuple[bytes, bytes],
        object_name: str,
        call: Call,
        model: str,
        options: StreamOptions | None,
        usage: Callable[[], Usage],
    ) -> None:
        """A choice's text is written between the two of `around_text`. `usage` counts what was generated so far."""
        self.created = int(time.time())
        self._head = b"".join(
            (
                b'data: {"id":', _encode(call.id), b',"object":', _encode(object_name), b',"created":', _encode(self.created),
                b',"model":', _encode(model), b',"system_fingerprint":null,"choices":[',
            )
        )  # fmt: skip
        self._include_usage = options is not None and bool(options.include_usage)
        self._continuous = options is not None and bool(options.continuous_usage_stats)
        self._tail = b'],"usage":null}\n\n' if self._include_usage and not self._continuous else b"]}\n\n"
        self._begin, self._close = around_text
        self._usage = usage
        self._heads: dict[int, bytes] = {}

    def text(self, index: int, text: str, finish: FinishReason | None) -> bytes:
        """A chunk that carries text only."""
        head = self._heads.get(index)
        if head is None:
            head = self._heads[index] = b'%b{"index":%d,%b' % (self._head, index, self._begin)
        return b"%b%b%b,\"logprobs\":null,\"finish_reason\":%b}%b" % (
            head, _encode(text), self._close, _FINISH[finish], self._with_usage() if self._continuous else self._tail,
        )  # fmt: skip

    def choice(self, choice: dict[str, Any], extra: bytes = b"") -> bytes:
        """A chunk with anything else in it. `extra` comes beside the choices."""
        tail = self._with_usage() if self._continuous else self._tail
        return self._head + _encode(choice) + b"]" + extra + tail[1:]

    def end(self, extra: bytes = b"") -> bytes:
        """The last events: usage, if it is to be included, in a chunk without choices."""
        return self._head + b"]" + extra + self._with_usage()[1:] + _DONE if self._include_usage else _DONE

    def _with_usage(self) -> bytes:
        return b'],"usage":' + _encode(self._usage()) + b"}\n\n"


def last_bytes(
    delivery: Delivery,
    chunks: ChunkWriter,
    generation: Generation,
    body: Callable[[], B],
    results: Callable[[B], list[dict[str, Any]]],
) -> bytes:
    """How an answer ends: with the last events, with its body, or with one chunk for each of the body's choices (`results`)."""
    if delivery is Delivery.EVENTS:
        return chunks.end(as_extra(generation.provenance()))
    whole = body()
    if delivery is Delivery.BODY:
        return _encode(whole)
    extra = as_extra(whole.kvrelay)
    return b"".join([chunks.choice(choice, extra) for choice in results(whole)]) + chunks.end(extra)


def usage_of(prompt_tokens: int, completion_tokens: int, cached_tokens: int, reasoning_tokens: int = 0) -> Usage:
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens),
        completion_tokens_details=CompletionTokensDetails(reasoning_tokens=reasoning_tokens),
    )
