"""What clients may send to POST /v1/messages, Anthropic's form of a conversation. The rules of `types` hold."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from kvrelay.frontend.prompt.types import MAX_COUNT, Body, NotEmpty, Positive, Replayed, Schema
from kvrelay.sampling import MAX_STOP_STRINGS


class TextBlock(Replayed, frozen=True, kw_only=True, tag_field="type", tag="text"):
    text: str


class Base64Source(Replayed, frozen=True, kw_only=True, tag_field="type", tag="base64"):
    media_type: str
    data: str


class UrlSource(Replayed, frozen=True, kw_only=True, tag_field="type", tag="url"):
    url: str


class ImageBlock(Replayed, frozen=True, kw_only=True, tag_field="type", tag="image"):
    source: Base64Source | UrlSource


class ToolUseBlock(Replayed, frozen=True, kw_only=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Replayed, frozen=True, kw_only=True, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | list[TextBlock | ImageBlock] | None = None
    is_error: bool | None = None


class ThinkingBlock(Replayed, frozen=True, kw_only=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str | None = None


AnyBlock = TextBlock | ImageBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock


class Message(Replayed, frozen=True, kw_only=True):
    role: Literal["user", "assistant"]
    content: str | list[AnyBlock]


class Tool(Body, frozen=True, kw_only=True):
    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    input_schema: Schema
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None


class ToolChoice(Body, frozen=True, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class MessagesBody(Body, frozen=True, kw_only=True):
    """What makes the prompt."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    model: str | None = None
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[Tool], Meta(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: dict[str, Any] | None = None  # not used: whether reasoning is shown, the server's reasoning parser decides
    context_management: None = None
    mcp_servers: None = None
    output_config: None = None


class CountTokensRequest(MessagesBody, frozen=True, kw_only=True):
    """POST /v1/messages/count_tokens."""


class MessagesRequest(MessagesBody, frozen=True, kw_only=True):
    """POST /v1/messages."""

    max_tokens: Positive
    stop_sequences: Annotated[list[NotEmpty], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_COUNT)] | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None  # not used
    service_tier: str | None = None  # not used
    container: None = None
    inference_geo: None = None
