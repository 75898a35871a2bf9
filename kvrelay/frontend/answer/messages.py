"""POST /v1/messages: Anthropic's form of a conversation, whole or streamed; and how many tokens its prompt has."""

from __future__ import annotations

import functools
from typing import Any, assert_never

import msgspec

from kvrelay.errors import InvalidRequestError
from kvrelay.frontend.answer.deltas import CallArguments, CallStart, Delta, Reasoning, Text
from kvrelay.frontend.answer.generation import Generation, Step
from kvrelay.frontend.answer.loop import answer, delivery_of
from kvrelay.frontend.answer.reader import AnswerReader
from kvrelay.frontend.answer.types import Output
from kvrelay.frontend.http.call import Call
from kvrelay.frontend.prompt.conversation import Conversation, count_prompt, prepare_conversation
from kvrelay.frontend.prompt.messages_input import chat_request, own_names, prompt_request
from kvrelay.frontend.prompt.messages_types import CountTokensRequest, MessagesRequest
from kvrelay.frontend.service import Service

_decoder = msgspec.json.Decoder(MessagesRequest)
_count_decoder = msgspec.json.Decoder(CountTokensRequest)
_encode = msgspec.json.Encoder().encode
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageUsage(Output, frozen=True, kw_only=True):
    """Prompt tokens that were cached are not among the input tokens."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0


class MessageAnswer(Output, frozen=True, kw_only=True):
    id: str
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage
    type: str = "message"
    role: str = "assistant"


class TokenCount(Output, frozen=True, kw_only=True):
    input_tokens: int


async def messages(service: Service, call: Call) -> None:
    request = await service.read(call, _decoder)
    call.name("msg_", None)
    try:
        conversation = await prepare_conversation(service, call, chat_request(request))
    except InvalidRequestError as error:
        raise own_names(error, request) from error
    shape = functools.partial(_Message, service, call, request, conversation)
    await answer(service, call, conversation.work, delivery_of(request.stream), shape)


async def count_tokens(service: Service, call: Call) -> None:
    request = await service.read(call, _count_decoder)
    try:
        num_tokens = await count_prompt(service, prompt_request(request))
    except InvalidRequestError as error:
        raise own_names(error, request) from error
    await call.answer_json(TokenCount(input_tokens=num_tokens))


class _Message:
    """A `Shape`: one message in the making, whose last block may be open. Events pile up until the next `take` or `end`."""

    shows_kept = False

    def __init__(
        self, service: Service, call: Call, request: MessagesRequest, conversation: Conversation, generation: Generation
    ) -> None:
        self._model = service.answer_name(request.model)
        self._call = call
        self._streams = bool(request.stream)
        self._stop_sequences = request.stop_sequences or []
        self._generation = generation
        self._reader = AnswerReader(conversation, generation.samples[0])
        self._content: list[dict[str, Any]] = []
        self._is_open = False
        self._written: list[str] = []  # of the open block
        self._events: list[bytes] = []
        self._begun = False

    def take(self, step: Step) -> bytes:
        self._begin()
        for delta in self._reader.push(step.text, last=step.finish is not None):
            self._add(delta)
        return self._pending()

    def end(self) -> bytes:
        self._close()
        message = self._message(*self._stop())
        if not self._streams:
            return _encode(message)
        stop = {"stop_reason": message.stop_reason, "stop_sequence": message.stop_sequence}
        self._emit("message_delta", delta=stop, usage=message.usage)
        self._emit("message_stop")
        return self._pending()

    def _begin(self) -> None:
        """With the first token: only then is it known how much of the prompt was cached."""
        if not self._begun:
            self._begun = True
            self._emit("message_start", message=self._message(None, None))

    def _add(self, delta: Delta) -> None:
        match delta:
            case Text(text):
                self._open("text", {"type": "text", "text": ""})
                self._grow(text, {"type": "text_delta", "text": text})
            case Reasoning(text):
                self._open("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                self._grow(text, {"type": "thinking_delta", "thinking": text})
            case CallStart(_, call_id, name):
                self._close()
                block_id = f"toolu_{call_id.removeprefix('call_')}"
                self._open("tool_use", {"type": "tool_use", "id": block_id, "name": name, "input": {}})
            case CallArguments(_, text):
                self._grow(text, {"type": "input_json_delta", "partial_json": text})
            case _ as never:
                assert_never(never)

    def _open(self, kind: str, block: dict[str, Any]) -> None:
        """Unless a block of that kind is open."""
        if self._is_open and self._content[-1]["type"] == kind:
            return
        self._close()
        self._emit("content_block_start", index=len(self._content), content_block=block)
        self._content.append(block)
        self._is_open = True

    def _grow(self, text: str, delta: dict[str, str]) -> None:
        self._written.append(text)
        self._emit("content_block_delta", index=len(self._content) - 1, delta=delta)

    def _close(self) -> None:
        if not self._is_open:
            return
        block, text = self._content[-1], "".join(self._written)
        if block["type"] == "tool_use":
            block["input"] = _arguments(text)
        else:
            block[block["type"]] = text
        self._emit("content_block_stop", index=len(self._content) - 1)
        self._is_open = False
        self._written = []

    def _stop(self) -> tuple[str, str | None]:
        reason, found = self._reader.finish_reason(), self._reader.sample.stop_reason
        if reason == "stop" and isinstance(found, str) and found in self._stop_sequences:
            return "stop_sequence", found
        return _STOP_REASONS[reason], None

    def _message(self, stop_reason: str | None, stop_sequence: str | None) -> MessageAnswer:
        generation = self._generation
        cached = sum(generation.cached_tokens)
        return MessageAnswer(
            id=self._call.id,
            model=self._model,
            content=self._content,
            stop_reason=stop_reason,
            stop_sequence=stop_sequence,
            usage=MessageUsage(
                input_tokens=generation.prompt_tokens - cached,
                output_tokens=generation.output_tokens,
                cache_read_input_tokens=cached,
            ),
        )

    def _emit(self, name: str, **fields: Any) -> None:
        """Encodes at once: what the fields hold may grow on."""
        if self._streams:
            self._events.append(b"event: %b\ndata: %b\n\n" % (name.encode(), _encode({"type": name, **fields})))

    def _pending(self) -> bytes:
        events = b"".join(self._events)
        self._events.clear()
        return events


def _arguments(text: str) -> dict[str, Any]:
    """Empty for a call that was cut off."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {}
