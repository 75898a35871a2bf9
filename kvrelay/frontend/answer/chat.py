"""POST /v1/chat/completions."""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from kvrelay.errors import InvalidRequestError
from kvrelay.frontend.answer import types
from kvrelay.frontend.answer.chunks import ChunkWriter, last_bytes, usage_of
from kvrelay.frontend.answer.deltas import Call as ToolCall
from kvrelay.frontend.answer.deltas import Collected, Delta, Reasoning
from kvrelay.frontend.answer.generation import Generation, Step
from kvrelay.frontend.answer.logprobs import chat_logprobs, prompt_logprobs
from kvrelay.frontend.answer.loop import Delivery, answer, delivery_of
from kvrelay.frontend.answer.reader import AnswerReader
from kvrelay.frontend.http.call import Call
from kvrelay.frontend.prompt.conversation import Conversation, prepare_conversation
from kvrelay.frontend.prompt.old_functions import old_names, with_tools
from kvrelay.frontend.prompt.types import ChatRequest
from kvrelay.frontend.service import Service

_decoder = msgspec.json.Decoder(ChatRequest)


async def chat_completions(service: Service, call: Call) -> None:
    request = await service.read(call, _decoder)
    call.name("chatcmpl-", request.request_id or request.rid)
    try:
        conversation = await prepare_conversation(service, call, with_tools(request))
    except InvalidRequestError as error:
        raise old_names(error, request) from error
    delivery = delivery_of(request.stream, request.use_beam_search)
    shape = functools.partial(_Chat, service, call, request, conversation, delivery)
    await answer(service, call, conversation.work, delivery, shape)


class _Chat:
    """A `Shape`. Streamed, one event per token: the first of a choice carries the role, the last one the finish reason."""

    shows_kept = True

    def __init__(
        self,
        service: Service,
        call: Call,
        request: ChatRequest,
        conversation: Conversation,
        delivery: Delivery,
        generation: Generation,
    ) -> None:
        self._service = service
        self._call = call
        self._request = request
        self._conversation = conversation
        self._delivery = delivery
        self._live = delivery is Delivery.EVENTS
        self._is_old = request.functions is not None
        self._generation = generation
        self._readers = [AnswerReader(conversation, sample) for sample in generation.samples]
        self._tokens: list[list[int]] = [[] for _ in self._readers]
        self._logprobs: list[list[types.TokenLogprob]] = [[] for _ in self._readers]
        self._begun = [False] * len(self._readers)
        self._is_text = conversation.plain and conversation.num_top_logprobs is None and not request.return_token_ids
        around_text, object_name = (b'"delta":{"content":', b"}"), "chat.completion.chunk"
        self._usage = functools.partial(_usage, generation, self._readers)
        self._chunks = ChunkWriter(
            around_text, object_name, call, service.answer_name(request.model), request.stream_options, self._usage
        )

    def take(self, step: Step) -> bytes:
        index = step.sample.index
        if self._is_text and self._begun[index] and (step.finish is None or not self._generation.says_more):
            return self._chunks.text(step)
        return self._event(step) if self._live else self._collect(step)

    def end(self) -> bytes:
        return last_bytes(self._delivery, self._chunks, self._generation, self._body, _results, _shown_with)

    def _read(self, step: Step) -> list[Delta]:
        deltas = self._readers[step.sample.index].push(step.text, last=step.finish is not None)
        shows_all = self._request.include_reasoning
        return deltas if shows_all else [delta for delta in deltas if not isinstance(delta, Reasoning)]

    def _finish_reason(self, reader: AnswerReader) -> str:
        reason = reader.finish_reason()
        return "function_call" if self._is_old and reason == "tool_calls" else reason

    # The whole answer

    def _collect(self, step: Step) -> bytes:
        index = step.sample.index
        reader = self._readers[index]
        reader.collected.add(self._read(step))
        if step.token is not None:
            self._tokens[index].append(step.token)
        if step.logprobs is not None:
            self._logprobs[index] += chat_logprobs(self._service.tokenizer, step, self._conversation.num_top_logprobs)
        return b""

    def _body(self) -> types.ChatCompletion:
        entries, work = self._generation.prompt_logprobs[0], self._conversation.work
        tokenizer = self._service.tokenizer
        return types.ChatCompletion(
            id=self._call.id,
            created=self._chunks.created,
            model=self._service.answer_name(self._request.model),
            choices=[self._choice(index, reader) for index, reader in enumerate(self._readers)],
            usage=self._usage(),
            prompt_logprobs=None if entries is None else prompt_logprobs(tokenizer, work.prompts[0], entries),
            prompt_token_ids=self._shown_prompt() if self._request.return_token_ids else msgspec.UNSET,
            kvrelay=self._generation.provenance(),
        )

    def _choice(self, index: int, reader: AnswerReader) -> types.ChatChoice:
        cumulative_logprob, beam_score = self._generation.beam_scores(reader.sample)
        shows_logprobs = self._conversation.num_top_logprobs is not None
        return types.ChatChoice(
            index=index,
            message=_message(reader.collected, is_old=self._is_old),
            finish_reason=self._finish_reason(reader),
            stop_reason=reader.sample.stop_reason,
            logprobs=types.ChatLogprobs(content=self._logprobs[index]) if shows_logprobs else None,
            token_ids=self._tokens[index] if self._request.return_token_ids else msgspec.UNSET,
            cumulative_logprob=cumulative_logprob,
            beam_score=beam_score,
            continuation=self._generation.continuation(reader.sample),
        )

    def _shown_prompt(self) -> list[int]:
        return self._service.images.shown(self._conversation.work.prompts[0])

    # Events

    def _event(self, step: Step) -> bytes:
        index = step.sample.index
        reader = self._readers[index]
        delta = _delta(self._read(step), is_old=self._is_old)
        logprobs = chat_logprobs(self._service.tokenizer, step, self._conversation.num_top_logprobs)
        choice: dict[str, Any] = {
            "index": index,
            "delta": delta,
            "logprobs": types.ChatLogprobs(content=logprobs) if logprobs else None,
            "finish_reason": None if step.finish is None else self._finish_reason(reader),
        }
        if step.finish is not None:
            choice["stop_reason"] = step.sample.stop_reason
        if self._request.return_token_ids:
            choice["token_ids"] = [] if step.token is None else [step.token]
        prompt = b""
        if not self._begun[index]:
            if self._request.return_token_ids and not any(self._begun):
                prompt = _as_extra(self._shown_prompt())
            self._begun[index] = True
            choice["delta"] = {"role": "assistant", "content": "", **delta}
        elif not delta and step.finish is None and not logprobs and not self._conversation.plain:
            return b""  # markup that shows nothing
        extra = self._generation.last_words(step, choice)
        return self._chunks.choice(choice, prompt + extra)


def _usage(generation: Generation, readers: list[AnswerReader]) -> types.Usage:
    reasoning = sum(reader.reasoning_tokens for reader in readers)
    return usage_of(generation.prompt_tokens, generation.output_tokens, sum(generation.cached_tokens), reasoning)


def _message(collected: Collected, *, is_old: bool) -> types.AnswerMessage:
    calls = [
        types.AnswerToolCall(id=call.id, function=types.AnswerFunction(name=call.name, arguments=call.arguments))
        for call in collected.calls.values()
    ]
    text = "".join(collected.text)
    return types.AnswerMessage(
        role="assistant",
        content=None if calls and not text else text,
        reasoning_content="".join(collected.reasoning) or None,
        tool_calls=None if is_old else calls or None,
        function_call=calls[0].function if is_old and calls else None,
    )


def _delta(deltas: list[Delta], *, is_old: bool) -> dict[str, Any]:
    """Several deltas of one token, as one."""
    collected = Collected()
    collected.add(deltas)
    merged: dict[str, Any] = {}
    if collected.text:
        merged["content"] = "".join(collected.text)
    if collected.reasoning:
        merged["reasoning_content"] = "".join(collected.reasoning)
    if collected.calls and is_old:
        call = collected.calls.get(0, ToolCall())
        merged["function_call"] = (
            {"name": call.name, "arguments": call.arguments} if call.name else {"arguments": call.arguments}
        )
    elif collected.calls:
        merged["tool_calls"] = [_call_delta(index, call) for index, call in collected.calls.items()]
    return merged


def _call_delta(index: int, call: ToolCall) -> dict[str, Any]:
    if not call.id:
        return {"index": index, "function": {"arguments": call.arguments}}
    return {"index": index, "id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _results(body: types.ChatCompletion) -> list[dict[str, Any]]:
    """The choices of a whole answer, each as the one chunk of it."""
    chunks: list[dict[str, Any]] = [msgspec.to_builtins(choice) for choice in body.choices]
    for chunk in chunks:
        chunk["delta"] = chunk.pop("message")
        for place, tool_call in enumerate(chunk["delta"].get("tool_calls", ())):
            tool_call["index"] = place
    return chunks


def _shown_with(body: types.ChatCompletion) -> bytes:
    """What the first chunk of a whole answer has beside its choice."""
    return b"" if isinstance(body.prompt_token_ids, msgspec.UnsetType) else _as_extra(body.prompt_token_ids)


def _as_extra(prompt: list[int]) -> bytes:
    return b',"prompt_token_ids":' + msgspec.json.encode(prompt)
