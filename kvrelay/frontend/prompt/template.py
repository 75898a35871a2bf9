"""From a conversation's messages to the text of its prompt, through the model's chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from kvrelay.errors import InvalidRequestError
from kvrelay.frontend.prompt import types
from kvrelay.frontend.prompt.images import template_parts, text_of
from kvrelay.frontend.prompt.old_functions import with_tool_calls
from kvrelay.frontend.prompt.tools import hermes_messages, tools_for_template
from kvrelay.frontend.service import Service
from kvrelay.text.chat_template import RESERVED_VARIABLES, Message


async def render(
    service: Service,
    request: types.ChatRequest | types.TokenizeRequest,
    messages: Sequence[types.ChatMessage],
    tools: Sequence[types.FunctionTool],
) -> str:
    """Off the event loop if it is long. A generation prompt is added unless the last message is to be continued."""
    if request.continue_final_message and request.add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message cannot be combined with add_generation_prompt", param="continue_final_message"
        )
    variables = request.chat_template_kwargs or {}
    reserved = RESERVED_VARIABLES.intersection(variables)
    if reserved:
        field = f"chat_template_kwargs.{min(reserved)}"
        raise InvalidRequestError(f"{field} cannot be set by clients", param=field)
    shown = [template_message(message, place) for place, message in enumerate(with_tool_calls(messages))]
    add_prompt = not request.continue_final_message if request.add_generation_prompt is None else request.add_generation_prompt

    def work() -> str:
        functions = tools_for_template(tools)
        knows_tools = service.tokenizer.takes_tools
        return service.tokenizer.render_chat(
            shown if knows_tools else hermes_messages(shown, functions),
            tools=functions or None if knows_tools else None,
            add_generation_prompt=add_prompt,
            continue_final_message=request.continue_final_message,
            variables=variables,
        )

    return await service.off_loop_if_long(sum(_length(message["content"]) for message in shown), work)


def _length(content: str | list[dict[str, Any]]) -> int:
    return len(content) if isinstance(content, str) else sum(len(part.get("text", "")) for part in content)


def template_message(message: types.ChatMessage, place: int) -> Message:
    """Content as one text, arguments of calls as objects, as templates expect them."""
    role = "system" if isinstance(message, types.DeveloperMessage) else str(message.__struct_config__.tag)
    rendered: Message = {"role": role, "content": _content(message.content)}
    if message.name is not None:
        rendered["name"] = message.name
    if isinstance(message, types.ToolMessage):
        rendered["tool_call_id"] = message.tool_call_id
    elif isinstance(message, types.AssistantMessage):
        reasoning = message.reasoning_content or message.reasoning
        if reasoning is not None:
            rendered["reasoning_content"] = reasoning
        if message.tool_calls:
            rendered["tool_calls"] = [_call(call) for call in message.tool_calls]
        elif message.content is None and message.refusal is None:
            field = f"messages[{place}].content"
            raise InvalidRequestError(f"{field}: an assistant message needs content or tool_calls", param=field)
        elif message.content is None:
            rendered["content"] = message.refusal
    return rendered


def _content(
    content: str | Sequence[types.TextPart | types.RefusalPart | types.ImagePart] | None,
) -> str | list[dict[str, Any]]:
    """One text; in parts if there are images among the texts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = [text_of(part) for part in content if not isinstance(part, types.ImagePart)]
    return "\n".join(texts) if len(texts) == len(content) else template_parts(content)


def _call(call: types.ToolCall) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
    }


def _arguments(text: str) -> dict[str, Any] | str:
    """An object, as templates expect it. What is none, such as a call that was cut off, stays the text that it is."""
    if not text.strip():
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return text
