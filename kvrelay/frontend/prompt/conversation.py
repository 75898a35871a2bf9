"""A chat request made ready: its prompt as tokens, its parameters, and how its answers are read. Responses use it too."""

from __future__ import annotations

import dataclasses

import msgspec

from kvrelay.errors import InvalidRequestError
from kvrelay.frontend.http.call import Call
from kvrelay.frontend.http.errors import missing, too_short
from kvrelay.frontend.prompt.beams import check_chat
from kvrelay.frontend.prompt.call_formats import CLOSE
from kvrelay.frontend.prompt.continuation import keep_s, origin_of
from kvrelay.frontend.prompt.images import image_parts, shifted
from kvrelay.frontend.prompt.params import check_stream, output_tokens, sampling_params
from kvrelay.frontend.prompt.shapes import shape_of
from kvrelay.frontend.prompt.template import render
from kvrelay.frontend.prompt.tools import ToolPlan, arguments_schema, plan_tools
from kvrelay.frontend.prompt.types import ChatRequest
from kvrelay.frontend.prompt.work import Origin, Work
from kvrelay.frontend.service import Service
from kvrelay.sampling import Grammar, GrammarKind, SamplingParams
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


async def prepare_conversation(
    service: Service, call: Call, request: ChatRequest, origin: Origin | None = None
) -> Conversation:
    """Refuses all that can be refused, before a worker sees the request. With an `origin` it continues from that one."""
    field, shape = shape_of(request, service.tokenizer) or (None, None)
    if field is not None and shape is not None:
        await service.check_grammar(shape, field)
    tools = _tools(service, request, shape)
    if tools.grammar is not None:
        field, shape = "tools", tools.grammar
        await _check_tools(service, tools, shape)
    check_chat(request, tools, field)
    seconds = keep_s(service, request, obstacle="use_beam_search" if request.use_beam_search else "")
    found = origin or await origin_of(service, call, request)
    reasons = service.options.reasoning_parser == "think"
    if isinstance(found, Origin):
        tokens, images = found.prompt, list(found.parent.images)
        opened = reasons and _left_open(service, tokens)
    else:
        text, tokens, images = await _prompt(service, request, tools)
        opened = reasons and text.rstrip().endswith("<think>")
    prompt_field = "continuation_of" if isinstance(found, Origin) and origin is None else "messages"
    params = _params(service, request, tokens, shape, tools, prompt_field)
    return Conversation(
        work=Work(request, [tokens], [params], seconds, found, images),
        tools=tools,
        reasons=reasons,
        opened=opened,
        num_top_logprobs=None if params.logprobs is None else max(params.logprobs, len(params.logprob_token_ids)),
    )


async def count_prompt(service: Service, request: ChatRequest) -> int:
    """Tokens of its prompt."""
    tools = _tools(service, request, None)
    return len((await _prompt(service, request, tools))[1])


def _tools(service: Service, request: ChatRequest, shape: Grammar | None) -> ToolPlan:
    return plan_tools(
        request.tools,
        request.tool_choice,
        request.parallel_tool_calls,
        shape,
        reads_calls=service.reads_tool_calls,
        form=service.call_format,
    )


async def _check_tools(service: Service, tools: ToolPlan, grammar: Grammar) -> None:
    """Refuses tools whose grammar cannot be compiled, naming the function that is the reason."""
    try:
        await service.check_grammar(grammar, "tools")
    except InvalidRequestError:
        for place, tool in enumerate(tools.tools):
            field = f"tools[{place}].function.parameters"
            schema = msgspec.json.encode(arguments_schema(tool.function)).decode()
            try:
                await service.check_grammar(Grammar(kind=GrammarKind.JSON_SCHEMA, source=schema), field)
            except InvalidRequestError as error:
                raise InvalidRequestError(f"{error.message} (function {tool.function.name!r})", param=field) from None
        raise InvalidRequestError("tools: each can be used, but not all of them together: they are too many or too large",
                                  param="tools") from None  # fmt: skip


async def _prompt(service: Service, request: ChatRequest, tools: ToolPlan) -> tuple[str, list[int], list[Image]]:
    """As text, and as tokens with placeholders for images."""
    if request.messages is None:
        raise missing("messages")
    if not request.messages:
        raise too_short("messages", request.messages)
    parts = image_parts(service.images, request)
    text = await render(service, request, request.messages, tools.tools)
    if request.add_special_tokens:
        tokens = await service.encode(text, add_special_tokens=True)
    else:
        tokens = await service.encode_chat(text)
    tokens, images = await service.images.place(parts, request.mm_processor_kwargs, tokens)
    if request.truncate_prompt_tokens is not None:
        images = shifted(images, len(tokens) - request.truncate_prompt_tokens)
        tokens = tokens[-request.truncate_prompt_tokens :]
    if not tokens:
        raise InvalidRequestError("the prompt made of the messages is empty", param="messages", code="empty_prompt")
    return text, tokens, images


def _left_open(service: Service, tokens: list[int]) -> bool:
    """Whether reasoning was begun and not ended. Placeholders of images are not in the vocabulary and have no text."""
    known = [token for token in tokens if token < service.tokenizer.vocab_size]
    text = service.tokenizer.decode(known, skip_special_tokens=False)
    return text.rfind("<think>") > text.rfind("</think>")


def _params(
    service: Service, request: ChatRequest, tokens: list[int], grammar: Grammar | None, tools: ToolPlan, prompt_field: str
) -> SamplingParams:
    field = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    requested = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    check_stream(request)
    return sampling_params(
        service,
        request,
        samples=request.n or 1,
        max_tokens=output_tokens(service, requested, None, len(tokens), field=field, prompt_field=prompt_field),
        logprobs=_num_top_logprobs(request),
        prompt_logprobs=request.prompt_logprobs,
        grammar=grammar,
        extra_stop=(CLOSE,) if _ends_with_call(tools) else (),
        keeps_special=tools.parse and tools.form is not None and tools.form.keeps_special,
    )


def _ends_with_call(tools: ToolPlan) -> bool:
    """Whether the end of a call ends the answer: the model would go on, and no grammar stops it."""
    return tools.parse and tools.one_call and not tools.forced and tools.form is not None and tools.form.kind == "hermes"


def _num_top_logprobs(request: ChatRequest) -> int | None:
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs", param="top_logprobs")
    return (request.top_logprobs or 0) if request.logprobs else None
