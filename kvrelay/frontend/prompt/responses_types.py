"""What clients may send to POST /v1/responses. The rules of `types` hold."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from kvrelay.frontend.prompt.types import (
    MAX_COUNT,
    Body,
    FunctionDefinition,
    FunctionName,
    HarmlessFields,
    Identifier,
    JsonObjectFormat,
    NotEmpty,
    NumLogprobs,
    Penalty,
    Positive,
    RefusalPart,
    Replayed,
    Schema,
    TextFormat,
)
from kvrelay.sampling import MAX_STOP_STRINGS


class InputText(Replayed, frozen=True, kw_only=True, tag_field="type", tag="input_text"):
    text: str


class InputImage(Replayed, frozen=True, kw_only=True, tag_field="type", tag="input_image"):
    image_url: str
    detail: Literal["auto", "low", "high"] | None = None
    file_id: None = None


class OutputText(Replayed, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class SummaryText(Replayed, frozen=True, kw_only=True, tag_field="type", tag="summary_text"):
    text: str


class ReasoningText(Replayed, frozen=True, kw_only=True, tag_field="type", tag="reasoning_text"):
    text: str


InputPart = InputText | InputImage | OutputText | RefusalPart | SummaryText | ReasoningText


class InputItem(Replayed, frozen=True, kw_only=True):
    """A message, a call, the result of one, or reasoning. One struct, because `type` may be absent for messages."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[InputPart] | None = None
    name: str | None = None
    arguments: str | None = None
    call_id: str | None = None
    output: str | list[InputText] | None = None
    summary: list[SummaryText] | None = None
    encrypted_content: None = None
    # Parts of an answer that clients send back unchanged.
    id: str | None = None
    status: str | None = None
    phase: str | None = None
    parsed: Any = None
    parsed_arguments: Any = None
    namespace: None = None
    caller: None = None


class JsonSchemaText(Body, frozen=True, kw_only=True, tag_field="type", tag="json_schema"):
    name: str
    schema: Schema
    description: str | None = None
    strict: bool | None = None


class TextOptions(Body, frozen=True, kw_only=True):
    format: TextFormat | JsonObjectFormat | JsonSchemaText | None = None
    verbosity: str | None = None  # a hint that is not used


class ReasoningOptions(Body, frozen=True, kw_only=True):
    """Hints that are not used."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesTool(FunctionDefinition, frozen=True, kw_only=True, omit_defaults=False, tag_field="type", tag="function"):
    pass


class ResponsesNamedTool(FunctionName, frozen=True, kw_only=True, tag_field="type", tag="function"):
    pass


class ResponsesStreamOptions(Body, frozen=True, kw_only=True):
    include_obfuscation: bool | None = None


class ResponsesRequest(HarmlessFields, frozen=True, kw_only=True):
    """POST /v1/responses."""

    input: str | Annotated[list[InputItem], Meta(min_length=1)]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_COUNT)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=10.0)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: NotEmpty | Annotated[list[NotEmpty], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    top_logprobs: NumLogprobs | None = None
    previous_response_id: Identifier | None = None
    store: bool | None = None  # default true
    include: list[Literal["message.output_text.logprobs"]] | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    text: TextOptions | None = None
    tools: Annotated[list[ResponsesTool], Meta(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponsesNamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    truncation: Literal["disabled"] | None = None
    background: bool | None = None  # true is refused
    access_programs: None = None
    context_management: None = None
    conversation: None = None
    image: None = None
    max_tool_calls: None = None
    moderation: None = None
    prompt: None = None
