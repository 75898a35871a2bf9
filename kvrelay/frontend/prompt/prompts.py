"""From what clients send to token ids: conversations through the chat template, and the four forms of a legacy prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvrelay.errors import InvalidRequestError
from kvrelay.frontend.prompt.images import template_parts
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
    """`messages` as the template sees them, and how to render them."""

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
    """Checked; a generation prompt is added unless the last message is to be continued."""
    if continue_final_message and add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
        )
    reserved = RESERVED_VARIABLES.intersection(variables or ())
    if reserved:
        field = f"chat_template_kwargs.{min(reserved)}"
        raise InvalidRequestError(f"{field} is not the client's to set", param=field)
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
    """Content as one text, arguments of calls as objects: what templates are written for."""
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
            raise InvalidRequestError(f"{field}: an assistant says something or calls tools", param=field)
        elif message.content is None:
            rendered["content"] = message.refusal
    return rendered


def _content(content: str | Sequence[TextPart | RefusalPart | ImagePart] | None) -> str | list[dict[str, Any]]:
    """One text, or parts where there are images between texts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for part in content:
        if isinstance(part, ImagePart):
            return template_parts(content)
        texts.append(part.text if isinstance(part, TextPart) else part.refusal)
    return "\n".join(texts)


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
        raise InvalidRequestError(f"{field}: not a JSON object in text: {error}", param=field) from error


# Legacy prompts


async def legacy_prompts(
    service: Service, prompt: str | list[str | int | list[int]], *, add_special_tokens: bool
) -> list[list[int]]:
    """One list of token ids per prompt."""
    if isinstance(prompt, str):
        return [_checked(service, await service.encode(prompt, add_special_tokens=add_special_tokens), "prompt")]
    if isinstance(prompt[0], int):
        return [_tokens(service, prompt, "prompt")]
    texts = [entry for entry in prompt if isinstance(entry, str)]
    if len(texts) == len(prompt):
        encoded = await service.off_loop_if_long(
            sum(map(len, texts)), lambda: service.tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)
        )
        return [_checked(service, tokens, f"prompt[{place}]") for place, tokens in enumerate(encoded)]
    lists: list[list[int]] = []
    for place, entry in enumerate(prompt):
        if not isinstance(entry, list):
            raise _mixed(f"prompt[{place}]")
        lists.append(_tokens(service, entry, f"prompt[{place}]"))
    return lists


def _tokens(service: Service, entries: Sequence[str | int | list[int]], field: str) -> list[int]:
    tokens = [entry for entry in entries if isinstance(entry, int)]
    if len(tokens) != len(entries):
        raise _mixed(field)
    service.check_tokens(tokens, field)
    return _checked(service, tokens, field)


def _checked(service: Service, tokens: list[int], field: str) -> list[int]:
    if not tokens:
        raise InvalidRequestError(f"{field} is empty", param=field, code="empty_prompt")
    if service.media is not None and service.media.spec.image_token_id in tokens:
        raise InvalidRequestError(f"{field} may not hold the token that stands for an image", param=field)
    return tokens


def _mixed(field: str) -> InvalidRequestError:
    return InvalidRequestError(f"{field}: a prompt is a text, a list of texts, of token ids, or of such lists", param=field)
