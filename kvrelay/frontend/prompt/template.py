"""From a conversation's messages to the text of its prompt, through the model's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvrelay.errors import InvalidRequestError
from kvrelay.frontend.prompt.images import template_parts, text_of
from kvrelay.frontend.prompt.tools import hermes_messages, tools_for_template
from kvrelay.frontend.prompt.types import (
    AssistantMessage,
    ChatMessage,
    DeveloperMessage,
    FunctionTool,
    ImagePart,
    RefusalPart,
    TextPart,
    ToolCall,
    ToolMessage,
)
from kvrelay.frontend.service import Service
from kvrelay.text.chat_template import RESERVED_VARIABLES, Message


class ChatPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """Messages as the template sees them, and how to render them."""

    messages: list[Message]
    tools: list[FunctionTool] = []
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = {}


def chat_prompt(
    messages: Sequence[ChatMessage],
    *,
    tools: list[FunctionTool],
    add_generation_prompt: bool | None,
    continue_final_message: bool,
    variables: Mapping[str, Any] | None,
) -> ChatPrompt:
    """Refuses what cannot be rendered. A generation prompt is added unless the last message is to be continued."""
    if continue_final_message and add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message cannot be combined with add_generation_prompt", param="continue_final_message"
        )
    reserved = RESERVED_VARIABLES.intersection(variables or ())
    if reserved:
        field = f"chat_template_kwargs.{min(reserved)}"
        raise InvalidRequestError(f"{field} cannot be set by clients", param=field)
    return ChatPrompt(
        messages=[template_message(message, place) for place, message in enumerate(messages)],
        tools=tools,
        add_generation_prompt=not continue_final_message if add_generation_prompt is None else add_generation_prompt,
        continue_final_message=continue_final_message,
        variables=variables or {},
    )


async def render(service: Service, prompt: ChatPrompt) -> str:
    length = sum(_length(message["content"]) for message in prompt.messages)
    return await service.off_loop_if_long(length, lambda: _render(service, prompt))


def _length(content: str | list[dict[str, Any]]) -> int:
    return len(content) if isinstance(content, str) else sum(len(part.get("text", "")) for part in content)


def _render(service: Service, prompt: ChatPrompt) -> str:
    messages: Sequence[Message] = prompt.messages
    tools = tools_for_template(prompt.tools) or None
    if not service.tokenizer.takes_tools:
        messages, tools = hermes_messages(messages, tools or []), None
    return service.tokenizer.render_chat(
        messages,
        tools=tools,
        add_generation_prompt=prompt.add_generation_prompt,
        continue_final_message=prompt.continue_final_message,
        variables=prompt.variables,
    )


def template_message(message: ChatMessage, place: int) -> Message:
    """Content as one text, arguments of calls as objects, as templates expect them."""
    role = "system" if isinstance(message, DeveloperMessage) else str(message.__struct_config__.tag)
    rendered: Message = {"role": role, "content": _content(message.content)}
    if message.name is not None:
        rendered["name"] = message.name
    if isinstance(message, ToolMessage):
        rendered["tool_call_id"] = message.tool_call_id
    elif isinstance(message, AssistantMessage):
        reasoning = message.reasoning_content or message.reasoning
        if reasoning is not None:
            rendered["reasoning_content"] = reasoning
        if message.tool_calls:
            rendered["tool_calls"] = [
                _call(call, f"messages[{place}].tool_calls[{n}]") for n, call in enumerate(message.tool_calls)
            ]
        elif message.content is None and message.refusal is None:
            field = f"messages[{place}].content"
            raise InvalidRequestError(f"{field}: an assistant message needs content or tool_calls", param=field)
        elif message.content is None:
            rendered["content"] = message.refusal
    return rendered


def _content(content: str | Sequence[TextPart | RefusalPart | ImagePart] | None) -> str | list[dict[str, Any]]:
    """One text; in parts if there are images among the texts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = [text_of(part) for part in content if not isinstance(part, ImagePart)]
    return "\n".join(texts) if len(texts) == len(content) else template_parts(content)


def _call(call: ToolCall, field: str) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {
            "name": call.function.name,
            "arguments": call_arguments(call.function.arguments, f"{field}.function.arguments"),
        },
    }


def call_arguments(text: str, field: str) -> dict[str, Any]:
    if not text.strip():
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise InvalidRequestError(f"{field}: not the text of a JSON object: {error}", param=field) from error
