"""The events of streamed chats and completions, as bytes.

Most events of a stream differ in their text only. All around it is encoded once per stream and choice, so that an event costs
one JSON encoding of a short text and one join. There is one event per token; those that are ready together are sent together.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvrelay.frontend.answer.types import CompletionTokensDetails, PromptTokensDetails, Usage
from kvrelay.states import FinishReason

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode
_FINISH: dict[FinishReason | None, bytes] = {None: b"null", **{reason: _encode(reason.value) for reason in FinishReason}}


class ChunkWriter:
    """Writes the chunks of one stream: `head` + choice + `tail`."""

    __slots__ = ("_continuous", "_head", "_heads", "_kind", "_tail")

    def __init__(
        self, kind: bytes, answer_id: str, object_name: str, created: int, model: str, *, usage: bool, continuous: bool
    ):
        """`kind` is what holds a choice's text: b'"delta":{"content":' or b'"text":'."""
        self._head = b"".join(
            (
                b'data: {"id":', _encode(answer_id), b',"object":', _encode(object_name), b',"created":', _encode(created),
                b',"model":', _encode(model), b',"system_fingerprint":null,"choices":[',
            )
        )  # fmt: skip
        self._tail = b'],"usage":null}\n\n' if usage and not continuous else b"]}\n\n"
        self._continuous = continuous
        self._kind = kind
        self._heads: dict[int, bytes] = {}

    def text(self, index: int, text: str, close: bytes, finish: FinishReason | None, usage: Usage | None) -> bytes:
        """A chunk that carries text only. `close` ends what `kind` opened."""
        head = self._heads.get(index)
        if head is None:
            head = self._heads[index] = b'%b{"index":%d,%b' % (self._head, index, self._kind)
        return b"%b%b%b,\"logprobs\":null,\"finish_reason\":%b}%b" % (
            head, _encode(text), close, _FINISH[finish], self._tail if usage is None else self._with_usage(usage),
        )  # fmt: skip

    def choice(self, choice: dict[str, Any], usage: Usage | None, extra: bytes = b"") -> bytes:
        """A chunk with anything else in it. `extra` is what stands beside the choices."""
        tail = self._tail if usage is None else self._with_usage(usage)
        return self._head + _encode(choice) + b"]" + extra + tail[1:]

    def usage(self, usage: Usage, extra: bytes = b"") -> bytes:
        """The last chunk, which has no choice."""
        return self._head + b"]" + extra + self._with_usage(usage)[1:]

    @staticmethod
    def _with_usage(usage: Usage) -> bytes:
        return b'],"usage":' + _encode(usage) + b"}\n\n"


def usage_of(prompt_tokens: int, completion_tokens: int, cached_tokens: int, reasoning_tokens: int = 0) -> Usage:
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens),
        completion_tokens_details=CompletionTokensDetails(reasoning_tokens=reasoning_tokens),
    )
