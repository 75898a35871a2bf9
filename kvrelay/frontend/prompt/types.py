"""What clients may send, field by field. A field that is not defined here is refused by name.

Three kinds of fields:

- implemented ones, with their limits;
- harmless ones (`HARMLESS_FIELDS`), which cannot change the output: accepted and not used;
- fields of OpenAI's API that we do not implement, typed `None`: null is accepted, anything else is refused by name.

Defaults are OpenAI's (temperature 1, top_p 1), whatever a checkpoint's generation_config.json says. `model` may be absent,
since a server serves one model. Extensions of vLLM and SGLang (`top_k`, `guided_regex`, ...) are fields like any other.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvrelay.sampling import MAX_BAD_WORDS, MAX_BIAS, MAX_LOGPROB_TOKENS, MAX_LOGPROBS, MAX_SAMPLES, MAX_STOP_STRINGS

MAX_COUNT = 2**31 - 1
MAX_TIMEOUT_S = 86_400.0
TokenId = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Positive = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
NumSamples = Annotated[int, Meta(ge=1, le=MAX_SAMPLES)]
NumLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
NotEmpty = Annotated[str, Meta(min_length=1)]
Identifier = Annotated[str, Meta(min_length=1, max_length=256)]
Schema = dict[str, Any]
_BIASES = {"additionalProperties": {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS}}


class Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of everything that comes in a request's body."""


# Messages


class Replayed(Body, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """Part of a conversation. Clients send back what they were given, with additions of their own: these are not used."""


class TextPart(Replayed, frozen=True, kw_only=True, tag_field="type", tag="text"):
    text: str


class RefusalPart(Replayed, frozen=True, kw_only=True, tag_field="type", tag="refusal"):
    refusal: str


class ImageUrl(Replayed, frozen=True, kw_only=True):
    url: str
    detail: Literal["auto", "low", "high"] | None = None


class ImagePart(Replayed, frozen=True, kw_only=True, tag_field="type", tag="image_url"):
    """The bounds are beside the URL, as in Qwen's own API."""

    image_url: ImageUrl
    min_pixels: Positive | None = None
    max_pixels: Positive | None = None


class CalledFunction(Replayed, frozen=True, kw_only=True):
    name: str
    arguments: str  # JSON


class ToolCall(Replayed, frozen=True, kw_only=True, tag_field="type", tag="function"):
    id: str
    function: CalledFunction


class SystemMessage(Replayed, frozen=True, kw_only=True, tag_field="role", tag="system"):
    content: str | list[TextPart]
    name: str | None = None


class DeveloperMessage(SystemMessage, frozen=True, kw_only=True, tag="developer"):
    """Rendered as a system message: no template of the models served here knows the role."""


class UserMessage(Replayed, frozen=True, kw_only=True, tag_field="role", tag="user"):
    content: str | list[TextPart | ImagePart]
    name: str | None = None


class AssistantMessage(Replayed, frozen=True, kw_only=True, tag_field="role", tag="assistant"):
    content: str | list[TextPart | RefusalPart] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    audio: None = None
    function_call: CalledFunction | None = None  # of old clients, as the role `function`


class FunctionMessage(Replayed, frozen=True, kw_only=True, tag_field="role", tag="function"):
    """The result of a call, as old clients write it."""

    name: str
    content: str | list[TextPart] | None = None


class ToolMessage(Replayed, frozen=True, kw_only=True, tag_field="role", tag="tool"):
    content: str | list[TextPart]
    tool_call_id: str
    name: str | None = None


ChatMessage = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage | FunctionMessage


# Tools


class FunctionDefinition(Body, frozen=True, kw_only=True, omit_defaults=True):
    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None
    cache_control: Any = None


class FunctionTool(Body, frozen=True, kw_only=True, tag_field="type", tag="function"):
    function: FunctionDefinition
    cache_control: Any = None


class FunctionName(Body, frozen=True, kw_only=True):
    name: str


class NamedToolChoice(Body, frozen=True, kw_only=True, tag_field="type", tag="function"):
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


# Shapes of the output


class TextFormat(Body, frozen=True, kw_only=True, tag_field="type", tag="text"):
    pass


class JsonObjectFormat(Body, frozen=True, kw_only=True, tag_field="type", tag="json_object"):
    pass


class JsonSchema(Body, frozen=True, kw_only=True):
    name: str = "response"
    schema: Schema | None = None
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(Body, frozen=True, kw_only=True, tag_field="type", tag="json_schema"):
    json_schema: JsonSchema


class TagStructure(Body, frozen=True, kw_only=True):
    begin: NotEmpty
    schema: Schema | None = None
    end: str


class StructuralTagFormat(Body, frozen=True, kw_only=True, tag_field="type", tag="structural_tag"):
    """Text in which certain tags have contents of a certain shape: the older form (`structures` and `triggers`), or `format`,
    which `structural_tags` reads."""

    structures: Annotated[list[TagStructure], Meta(min_length=1)] | None = None
    triggers: Annotated[list[NotEmpty], Meta(min_length=1)] | None = None
    at_least_one: bool = False
    format: Schema | None = None


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat


class StructuredOutputs(Body, frozen=True, kw_only=True):
    """vLLM's form of `response_format` and `guided_*`."""

    json: Schema | str | None = None
    regex: str | None = None
    choice: Annotated[list[NotEmpty], Meta(min_length=1)] | None = None
    grammar: str | None = None  # Lark or GBNF
    json_object: bool | None = None
    structural_tag: StructuralTagFormat | str | None = None


class ProcessorOptions(Body, frozen=True, kw_only=True):
    """Bounds for every image of a request, under vLLM's name. They are areas of the resized image."""

    min_pixels: Positive | None = None
    max_pixels: Positive | None = None


class StreamOptions(Body, frozen=True, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


# Requests


class HarmlessFields(Body, frozen=True, kw_only=True):
    """They cannot change the output, and are not used."""

    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None


HARMLESS_FIELDS = (*HarmlessFields.__struct_fields__, "include_obfuscation", "cache_control")


class SamplingFields(HarmlessFields, frozen=True, kw_only=True):
    """What chat and legacy completions have in common."""

    model: str | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_COUNT)] | None = None  # 0 and -1 are off
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=10.0)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Any], Meta(extra_json_schema=_BIASES)] | None = None  # `params` checks what is in it
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    n: NumSamples | None = None
    use_beam_search: bool | None = None
    beam_width: NumSamples | None = None  # default: n
    length_penalty: Annotated[float, Meta(ge=-10.0, le=10.0)] | None = None
    early_stopping: bool | Literal["never"] | None = None
    min_tokens: Count | None = None
    stop: NotEmpty | Annotated[list[NotEmpty], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1)] | None = None
    bad_words: Annotated[list[NotEmpty], Meta(max_length=MAX_BAD_WORDS)] | None = None
    prompt_logprobs: NumLogprobs | None = None
    logprob_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_LOGPROB_TOKENS)] | None = None
    truncate_prompt_tokens: Positive | None = None  # keeps that many, the last ones
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    guided_json: Schema | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[NotEmpty], Meta(min_length=1)] | None = None
    guided_grammar: str | None = None  # Lark or GBNF
    json_schema: Schema | str | None = None  # SGLang's and llama.cpp's names, up to `structural_tag`
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    structural_tag: StructuralTagFormat | str | None = None
    structured_outputs: StructuredOutputs | None = None
    return_token_ids: bool = False
    priority: Annotated[int, Meta(ge=-(2**31), le=MAX_COUNT)] = 0
    data_parallel_rank: Annotated[int, Meta(ge=0, le=MAX_COUNT)] | None = None  # of the worker that is to generate
    timeout: Annotated[float, Meta(gt=0.0, le=MAX_TIMEOUT_S)] | None = None  # seconds from arrival to the last token
    cache_salt: Identifier | None = None
    continuation_of: Identifier | None = None  # an earlier request, instead of a prompt
    continuation_suffix: str | None = None
    continuation_token_ids: list[TokenId] | None = None
    keep_kv: bool | Annotated[float, Meta(gt=0.0)] | None = None  # for a continuation: seconds, or true for the server's time
    request_id: Identifier | None = None  # shown in logs, echoed as x-request-id
    rid: Identifier | None = None  # SGLang's name for it


class ChatRequest(SamplingFields, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] | None = None  # needed, and not empty, without continuation_of
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    add_special_tokens: bool = False  # the template writes them
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: ProcessorOptions | None = None
    modalities: list[Literal["text"]] | None = None
    include_reasoning: bool = True  # in answers
    reasoning_effort: str | None = None  # a hint, as the next: no model here knows of it
    verbosity: str | None = None
    functions: Annotated[list[FunctionDefinition], Meta(min_length=1, max_length=128)] | None = None  # old names of tools
    function_call: Literal["none", "auto"] | FunctionName | None = None
    audio: None = None
    chat_template: None = None
    documents: None = None
    moderation: None = None
    prediction: None = None
    web_search_options: None = None


class CompletionRequest(SamplingFields, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | TokenId | list[TokenId]] | None = None  # needed, and not empty, without continuation_of
    max_tokens: Count | None = None  # 0 only scores the prompt, and needs echo
    logprobs: NumLogprobs | None = None
    echo: bool | None = None
    best_of: NumSamples | None = None
    add_special_tokens: bool = True
    suffix: None = None


class TokenizeRequest(Body, frozen=True, kw_only=True):
    """POST /tokenize: a text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    tools: list[FunctionTool] | None = None
    add_special_tokens: bool | None = None  # default: true for a text, false for a conversation
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeRequest(Body, frozen=True, kw_only=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]
    skip_special_tokens: bool = False
