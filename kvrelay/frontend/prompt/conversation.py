"""A chat request made ready: its prompt as tokens, its parameters, how its answers are read. Responses share it."""

from __future__ import annotations

import dataclasses

from kvrelay.errors import InvalidRequestError
from kvrelay.frontend.answer.deltas import Collected, Delta, Parser, Text
from kvrelay.frontend.answer.generation import Sample, Work
from kvrelay.frontend.answer.reasoning import ReasoningParser
from kvrelay.frontend.answer.tool_parser import CLOSE, ToolCallParser
from kvrelay.frontend.http.call import Call
from kvrelay.frontend.prompt.beams import check_chat
from kvrelay.frontend.prompt.continuation import keep_s, missing, origin_of
from kvrelay.frontend.prompt.images import image_parts, place_images, shifted
from kvrelay.frontend.prompt.params import output_tokens, sampling_params, shape_of
from kvrelay.frontend.prompt.prompts import chat_prompt, render
from kvrelay.frontend.prompt.tools import ToolPlan, plan_tools
from kvrelay.frontend.prompt.types import ChatRequest
from kvrelay.frontend.service import Service
from kvrelay.sampling import Grammar
from kvrelay.wire.serving import Image


@dataclasses.dataclass(frozen=True, slots=True)
class Conversation:
    """Ready to be generated."""

    work: Work
    tools: ToolPlan
    reasons: bool  # reasoning is split off
    opened: bool  # the prompt already opened the reasoning
    num_top_logprobs: int | None  # None: no logprobs are shown

    @property
    def plain(self) -> bool:
        """Whether answers are text and nothing else."""
        return not self.reasons and not self.tools.parse

    def new_answer(self, sample: Sample) -> Answer:
        tools = ToolCallParser() if self.tools.parse else None
        reasoning = ReasoningParser(tools, opened=self.opened) if self.reasons else None
        return Answer(sample, tools, reasoning)


class Answer:
    """One answer as it is read. `push` each step's text, with `last` for the last one."""

    __slots__ = ("_parser", "_reasoning", "_tools", "collected", "reasoning_tokens", "sample")

    def __init__(self, sample: Sample, tools: ToolCallParser | None, reasoning: ReasoningParser | None) -> None:
        self.sample = sample
        self._tools = tools
        self._reasoning = reasoning
        self._parser: Parser | None = reasoning or tools
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
        return "tool_calls" if calls and reason.value == "stop" else reason.value


async def prepare_conversation(service: Service, call: Call, request: ChatRequest) -> Conversation:
    """Everything that can be refused is refused here, before a worker sees the request."""
    shape = shape_of(request)
    tools = plan_tools(
        request.tools,
        request.tool_choice,
        request.parallel_tool_calls,
        None if shape is None else shape[1],
        reads_calls=service.reads_tool_calls,
        tags=service.tool_tags,
    )
    grammar, param = _grammar(tools, shape)
    check_chat(request, tools, param)
    if grammar is not None:
        await service.check_grammar(grammar, param)
    seconds = keep_s(service, request, obstacle="use_beam_search" if request.use_beam_search else "")
    origin = await origin_of(service, call, request)
    reasons = service.options.reasoning_parser == "think"
    if origin is None:
        text, tokens, images = await _prompt(service, request, tools)
        opened = reasons and text.rstrip().endswith("<think>")
    else:
        tokens, images = origin.prompt, list(origin.parent.images)
        opened = reasons and _left_open(service, tokens)
    work = _work(service, request, tokens, images, grammar, tools)
    return Conversation(
        work=dataclasses.replace(work, keep_s=seconds, origin=origin),
        tools=tools,
        reasons=reasons,
        opened=opened,
        num_top_logprobs=_num_top_logprobs(request),
    )


async def _prompt(service: Service, request: ChatRequest, tools: ToolPlan) -> tuple[str, list[int], list[Image]]:
    """As text, and as tokens with what stands for images among them."""
    if request.messages is None:
        raise missing("messages")
    parts = image_parts(service.media, request)
    prompt = chat_prompt(
        request.messages,
        tools=tools.tools,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        variables=request.chat_template_kwargs,
    )
    text = await render(service, prompt)
    if request.add_special_tokens:
        tokens = await service.encode(text, add_special_tokens=True)
    else:
        tokens = await service.encode_chat(text)
    tokens, images = await place_images(service.media, request, parts, tokens)
    if request.truncate_prompt_tokens is not None:
        images = shifted(images, len(tokens) - request.truncate_prompt_tokens)
        tokens = tokens[-request.truncate_prompt_tokens :]
    if not tokens:
        raise InvalidRequestError("the messages give an empty prompt", param="messages", code="empty_prompt")
    return text, tokens, images


def _left_open(service: Service, tokens: list[int]) -> bool:
    """Whether reasoning was begun and not ended. What stands for an image is no token of the vocabulary, and no text."""
    known = [token for token in tokens if token < service.tokenizer.vocab_size]
    text = service.tokenizer.decode(known, skip_special_tokens=False)
    return text.rfind("<think>") > text.rfind("</think>")


def _grammar(tools: ToolPlan, shape: tuple[str, Grammar] | None) -> tuple[Grammar | None, str]:
    if tools.grammar is not None:
        return tools.grammar, "tools"
    return (None, "") if shape is None else (shape[1], shape[0])


def shown_prompt(service: Service, work: Work) -> list[int]:
    """The prompt's tokens as clients may see them."""
    prompt = work.prompts[0]
    return prompt if service.media is None or not work.images else service.media.shown(prompt)


def _work(
    service: Service,
    request: ChatRequest,
    tokens: list[int],
    images: list[Image],
    grammar: Grammar | None,
    tools: ToolPlan,
) -> Work:
    field = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    requested = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    if request.stream and request.prompt_logprobs is not None:
        raise InvalidRequestError("prompt_logprobs cannot be streamed", param="prompt_logprobs")
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError("stream_options needs stream", param="stream_options")
    prompt_field = "messages" if request.continuation_of is None else "continuation_of"
    params = sampling_params(
        service,
        request,
        samples=request.n or 1,
        max_tokens=output_tokens(service, requested, None, len(tokens), field=field, prompt_field=prompt_field),
        logprobs=_num_top_logprobs(request),
        prompt_logprobs=request.prompt_logprobs,
        grammar=grammar,
        extra_stop=(CLOSE,) if tools.parse and tools.one_call and not tools.forced else (),
    )
    return Work(
        prompts=[tokens],
        params=[params],
        priority=request.priority,
        cache_salt=request.cache_salt or "",
        timeout_s=request.timeout,
        images=images,
    )


def _num_top_logprobs(request: ChatRequest) -> int | None:
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs", param="top_logprobs")
    return (request.top_logprobs or 0) if request.logprobs else None
