"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from kvrelay.frontend.answer.chunks import DONE, ChunkWriter, usage_of
from kvrelay.frontend.answer.deltas import CallArguments, CallStart, Delta, Reasoning, Text
from kvrelay.frontend.answer.generation import Generation, Step
from kvrelay.frontend.answer.logprobs import chat_logprob, prompt_logprobs
from kvrelay.frontend.answer.types import (
    AnswerFunction,
    AnswerMessage,
    AnswerToolCall,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    TokenLogprob,
    Usage,
)
from kvrelay.frontend.http.call import Call
from kvrelay.frontend.http.reading import BodyReader
from kvrelay.frontend.prompt.beams import scores, stream_results
from kvrelay.frontend.prompt.continuation import as_extra
from kvrelay.frontend.prompt.conversation import Answer, Conversation, prepare_conversation, shown_prompt
from kvrelay.frontend.prompt.types import ChatRequest
from kvrelay.frontend.service import Service

_read = BodyReader(ChatRequest)


async def chat_completions(service: Service, call: Call) -> None:
    request = await _read(service, call)
    call.name("chatcmpl-", request.request_id or request.rid)
    conversation = await prepare_conversation(service, call, request)
    generation = Generation(service, call, conversation.work, trace=call.trace())
    try:
        if request.stream and request.use_beam_search:
            whole = await _whole(service, call, request, conversation, generation)
            await stream_results(call, generation, whole, request.stream_options)
        elif request.stream:
            await _ChatStream(service, call, request, conversation, generation).run()
        else:
            await call.answer_json(await _whole(service, call, request, conversation, generation), generation.headers())
    finally:
        generation.close()


def _usage(generation: Generation, answers: list[Answer]) -> Usage:
    reasoning = sum(answer.reasoning_tokens for answer in answers)
    return usage_of(generation.prompt_tokens, generation.output_tokens, sum(generation.cached_tokens), reasoning)


# The whole answer at once


async def _whole(
    service: Service, call: Call, request: ChatRequest, conversation: Conversation, generation: Generation
) -> ChatCompletion:
    answers = [conversation.new_answer(sample) for sample in generation.samples]
    logprobs: list[list[TokenLogprob]] = [[] for _ in answers]
    tokens: list[list[int]] = [[] for _ in answers]
    while steps := await generation.next():
        for step in steps:
            answer = answers[step.sample.index]
            answer.collected.add(answer.push(step.text, last=step.finish is not None))
            if step.token is not None:
                tokens[step.sample.index].append(step.token)
                if step.logprobs is not None and conversation.num_top_logprobs is not None:
                    logprobs[step.sample.index].append(
                        chat_logprob(service.tokenizer, step.token, step.logprobs, conversation.num_top_logprobs)
                    )
    await generation.settle()
    shows_logprobs = conversation.num_top_logprobs is not None
    beams = [scores(generation.beam(answer.sample)) for answer in answers]
    choices = [
        ChatChoice(
            index=place,
            message=_message(answer),
            finish_reason=answer.finish_reason(),
            logprobs=ChatLogprobs(content=logprobs[place]) if shows_logprobs else None,
            token_ids=tokens[place] if request.return_token_ids else msgspec.UNSET,
            cumulative_logprob=beams[place][0],
            beam_score=beams[place][1],
            continuation=generation.continuation(answer.sample),
        )
        for place, answer in enumerate(answers)
    ]
    entries = generation.prompt_logprobs[0]
    prompt = conversation.work.prompts[0]
    return ChatCompletion(
        id=call.id,
        created=int(time.time()),
        model=service.model,
        choices=choices,
        usage=_usage(generation, answers),
        prompt_logprobs=msgspec.UNSET if entries is None else prompt_logprobs(service.tokenizer, prompt, entries),
        prompt_token_ids=shown_prompt(service, conversation.work) if request.return_token_ids else msgspec.UNSET,
        kvrelay=generation.provenance(),
    )


def _message(answer: Answer) -> AnswerMessage:
    collected = answer.collected
    calls = [
        AnswerToolCall(id=call.id, function=AnswerFunction(name=call.name, arguments=call.arguments))
        for call in collected.calls
    ]
    text = "".join(collected.text)
    return AnswerMessage(
        role="assistant",
        content=None if calls and not text else text,
        reasoning_content="".join(collected.reasoning) or None,
        tool_calls=calls or None,
    )


# Streamed


class _ChatStream:
    """Writes one event per token; its first one carries the role, its last one the finish reason."""

    def __init__(
        self, service: Service, call: Call, request: ChatRequest, conversation: Conversation, generation: Generation
    ) -> None:
        options = request.stream_options
        self._include_usage = options is not None and bool(options.include_usage)
        self._continuous = options is not None and bool(options.continuous_usage_stats)
        self._service = service
        self._call = call
        self._request = request
        self._conversation = conversation
        self._generation = generation
        self._answers = [conversation.new_answer(sample) for sample in generation.samples]
        self._begun = [False] * len(self._answers)
        self._plain = conversation.plain and conversation.num_top_logprobs is None and not request.return_token_ids
        self._writer = ChunkWriter(
            b'"delta":{"content":',
            call.id,
            "chat.completion.chunk",
            int(time.time()),
            service.model,
            usage=self._include_usage,
            continuous=self._continuous,
        )

    async def run(self) -> None:
        generation, call = self._generation, self._call
        steps = await generation.next()
        await call.start_stream(generation.headers())
        event = self._event
        while not generation.done:
            if any(step.finish for step in steps):
                await generation.settle()
            await call.write(b"".join([event(step) for step in steps]))
            steps = await generation.next()
        await generation.settle()
        await call.end_stream(b"".join([*[event(step) for step in steps], *self._end()]))

    def _end(self) -> list[bytes]:
        if not self._include_usage:
            return [DONE]
        usage = [self._writer.usage(_usage(self._generation, self._answers), as_extra(self._generation.provenance()))]
        return [*usage, DONE]

    def _event(self, step: Step) -> bytes:
        index = step.sample.index
        usage = _usage(self._generation, self._answers) if self._continuous else None
        if self._plain and self._begun[index] and (step.finish is None or not self._generation.says_more):
            return self._writer.text(index, step.text, b"}", step.finish, usage)
        return self._rich_event(step, usage)

    def _rich_event(self, step: Step, usage: Usage | None) -> bytes:
        index = step.sample.index
        answer = self._answers[index]
        deltas = answer.push(step.text, last=step.finish is not None)
        delta = _delta(deltas)
        choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": self._logprobs(step)}
        choice["finish_reason"] = None if step.finish is None else answer.finish_reason()
        if self._request.return_token_ids:
            choice["token_ids"] = [] if step.token is None else [step.token]
        if not self._begun[index]:
            self._begun[index] = True
            choice["delta"] = {"role": "assistant", "content": "", **delta}
            if self._request.return_token_ids:
                choice["prompt_token_ids"] = shown_prompt(self._service, self._conversation.work)
        elif not delta and step.finish is None and choice["logprobs"] is None and not self._conversation.plain:
            return b""  # markup that shows nothing
        extra = self._generation.last_words(step, choice)
        return self._writer.choice(choice, usage, extra)

    def _logprobs(self, step: Step) -> ChatLogprobs | None:
        num_top = self._conversation.num_top_logprobs
        if num_top is None or step.token is None or step.logprobs is None:
            return None
        return ChatLogprobs(content=[chat_logprob(self._service.tokenizer, step.token, step.logprobs, num_top)])


def _delta(deltas: list[Delta]) -> dict[str, Any]:
    """Several deltas of one token, as one."""
    merged: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        match delta:
            case Text(text):
                merged["content"] = merged.get("content", "") + text
            case Reasoning(text):
                merged["reasoning_content"] = merged.get("reasoning_content", "") + text
            case CallStart(index, call_id, name):
                calls[index] = {"index": index, "id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}
            case CallArguments(index, text):
                entry = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                entry["function"]["arguments"] += text
    if calls:
        merged["tool_calls"] = list(calls.values())
    return merged
