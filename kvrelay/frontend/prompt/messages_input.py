"""A request to /v1/messages as the equivalent chat request."""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from kvrelay.errors import InvalidRequestError
from kvrelay.frontend.http.errors import missing
from kvrelay.frontend.prompt import types as chat
from kvrelay.frontend.prompt.messages_types import (
    AnyBlock,
    Base64Source,
    ImageBlock,
    MessagesBody,
    MessagesRequest,
    TextBlock,
    ThinkingBlock,
    Tool,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
)

# Places that have another name here: of a chat, of this API. The first that fits counts.
_NAMES = (
    (re.compile(r"^(tools\[\d+\])\.function\.parameters"), r"\1.input_schema"),
    (re.compile(r"^(tools\[\d+\])\.function\."), r"\1."),
    (re.compile(r"^tool_choice\.function\.name"), "tool_choice.name"),
    (re.compile(r"^stop\b"), "stop_sequences"),
)
_MESSAGE = re.compile(r"^messages\[(\d+)\](?:\.content\[(\d+)\])?")
_Parts = list[chat.TextPart | chat.ImagePart]


def own_names(error: InvalidRequestError, request: MessagesBody) -> InvalidRequestError:
    """The error with the field names of this endpoint."""
    if error.param is None:
        return error
    param = error.param
    if (place := _MESSAGE.match(param)) is not None:
        field, blocks = _read(request)[int(place.group(1))][1:]
        inner = "" if place.group(2) is None else blocks[int(place.group(2))]
        param = field + inner + param[place.end() :]
    else:
        for pattern, name in _NAMES:
            if pattern.match(param):
                param = pattern.sub(name, param)
                break
    return InvalidRequestError(error.message.replace(error.param, param), param=param, code=error.code)


def prompt_request(request: MessagesBody) -> chat.ChatRequest:
    """What makes the prompt. An assistant's message at the end is continued."""
    messages = [message for message, _, _ in _read(request)]
    if not messages:
        raise InvalidRequestError("messages holds no content", param="messages")
    last = messages[-1]
    return chat.ChatRequest(
        model=request.model,
        messages=messages,
        continue_final_message=isinstance(last, chat.AssistantMessage) and not last.tool_calls,
        tools=None if request.tools is None else [_tool(tool) for tool in request.tools],
        tool_choice=_tool_choice(request.tool_choice),
        parallel_tool_calls=False
        if request.tool_choice is not None and request.tool_choice.disable_parallel_tool_use
        else None,
    )


def chat_request(request: MessagesRequest) -> chat.ChatRequest:
    return msgspec.structs.replace(
        prompt_request(request),
        max_tokens=request.max_tokens,
        stop=request.stop_sequences,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
    )


def _tool(tool: Tool) -> chat.FunctionTool:
    definition = chat.FunctionDefinition(
        name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
    )
    return chat.FunctionTool(function=definition)


def _tool_choice(choice: ToolChoice | None) -> chat.ToolChoice | None:
    if choice is None:
        return None
    match choice.type:
        case "any":
            return "required"
        case "tool":
            if choice.name is None:
                raise missing("tool_choice.name")
            return chat.NamedToolChoice(function=chat.FunctionName(name=choice.name))
        case "auto" | "none":
            return choice.type


_Source = tuple[chat.ChatMessage, str, list[str]]  # a message, the field it comes from, and where in it its parts are


def _read(request: MessagesBody) -> list[_Source]:
    read: list[_Source] = []
    if request.system:
        text = request.system if isinstance(request.system, str) else _joined(request.system)
        read.append((chat.SystemMessage(content=text), "system", []))
    for place, message in enumerate(request.messages):
        field = f"messages[{place}]"
        if isinstance(message.content, str):
            role = chat.UserMessage if message.role == "user" else chat.AssistantMessage
            read.append((role(content=message.content), field, []))
        elif message.role == "user":
            read += _user(message.content, field)
        else:
            read.append((_assistant(message.content, field), field, []))
    return read


def _user(content: list[AnyBlock], field: str) -> list[_Source]:
    """Results of tools are messages of their own, before what the user says. Their images begin what the user says: templates
    have no place for them in a result."""
    results: list[_Source] = []
    shown: _Parts = []
    shown_places: list[str] = []
    parts: _Parts = []
    places: list[str] = []
    for place, block in enumerate(content):
        match block:
            case TextBlock():
                parts.append(chat.TextPart(text=block.text))
            case ImageBlock():
                parts.append(_image(block))
            case ToolResultBlock():
                inner = [] if block.content is None or isinstance(block.content, str) else block.content
                text = block.content if isinstance(block.content, str) else _joined(inner)
                results.append((chat.ToolMessage(content=text, tool_call_id=block.tool_use_id), field, []))
                images = [(number, one) for number, one in enumerate(inner) if isinstance(one, ImageBlock)]
                shown += [_image(one) for _, one in images]
                shown_places += [f".content[{place}].content[{number}]" for number, _ in images]
                continue
            case _:
                raise _misplaced(block, f"{field}.content[{place}]", "user")
        places.append(f".content[{place}]")
    said = chat.UserMessage(content=[*shown, *parts])
    return [*results, (said, field, [*shown_places, *places])] if said.content else results


def _assistant(content: list[AnyBlock], field: str) -> chat.AssistantMessage:
    texts: list[TextBlock] = []
    thoughts: list[str] = []
    calls: list[chat.ToolCall] = []
    for place, block in enumerate(content):
        match block:
            case TextBlock():
                texts.append(block)
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case ToolUseBlock():
                arguments = msgspec.json.encode(block.input).decode()
                function = chat.CalledFunction(name=block.name, arguments=arguments)
                calls.append(chat.ToolCall(id=block.id, function=function))
            case _:
                raise _misplaced(block, f"{field}.content[{place}]", "assistant")
    return chat.AssistantMessage(
        content=_joined(texts), tool_calls=calls or None, reasoning_content="\n".join(thoughts) if thoughts else None
    )


def _joined(blocks: Iterable[TextBlock | ImageBlock]) -> str:
    return "\n".join(block.text for block in blocks if isinstance(block, TextBlock))


def _image(block: ImageBlock) -> chat.ImagePart:
    source = block.source
    url = f"data:{source.media_type};base64,{source.data}" if isinstance(source, Base64Source) else source.url
    return chat.ImagePart(image_url=chat.ImageUrl(url=url))


def _misplaced(block: AnyBlock, field: str, role: str) -> InvalidRequestError:
    kind = block.__struct_config__.tag
    return InvalidRequestError(f"{field}: a message of the {role} has no {kind} blocks", param=field)
