"""Requests of clients from before tools: `functions`, `function_call` and the role `function`, as the tools of today.

Such a request gets one call, as `function_call` of its message.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from kvrelay.errors import InvalidRequestError
from kvrelay.frontend.http.errors import missing
from kvrelay.frontend.prompt import types

_OLD_NAMES = (
    (re.compile(r"tools\[(\d+)\]\.function"), r"functions[\1]"),
    (re.compile(r"tool_choice\.function\.name"), "function_call.name"),
    (re.compile(r"tool_choice"), "function_call"),
    (re.compile(r"tools"), "functions"),
)


def with_tools(request: types.ChatRequest) -> types.ChatRequest:
    """The same request with `tools`; itself if it has no functions."""
    if request.functions is None and request.function_call is None:
        return request
    for field, value in (("tools", request.tools), ("tool_choice", request.tool_choice)):
        if value is not None:
            raise InvalidRequestError(f"{field} cannot be combined with functions and function_call", param=field)
    if request.functions is None:
        raise missing("functions")
    choice = request.function_call
    return msgspec.structs.replace(
        request,
        tools=[types.FunctionTool(function=function) for function in request.functions],
        tool_choice=types.NamedToolChoice(function=choice) if isinstance(choice, types.FunctionName) else choice,
        parallel_tool_calls=False,
    )


def old_names(error: InvalidRequestError, request: types.ChatRequest) -> InvalidRequestError:
    """The error with the field names that the client used."""
    if request.functions is None or request.tools is not None:
        return error
    for name, old in _OLD_NAMES:
        if name.match(error.param or ""):
            return InvalidRequestError(name.sub(old, error.message), param=name.sub(old, error.param or ""), code=error.code)
    return error


def with_tool_calls(messages: Sequence[types.ChatMessage]) -> list[types.ChatMessage]:
    """A result belongs to the call before it."""
    read: list[types.ChatMessage] = []
    num_calls = 0
    for message in messages:
        if isinstance(message, types.AssistantMessage) and message.function_call is not None:
            num_calls += 1
            call = types.ToolCall(id=f"call_{num_calls}", function=message.function_call)
            read.append(msgspec.structs.replace(message, function_call=None, tool_calls=[*(message.tool_calls or ()), call]))
        elif isinstance(message, types.FunctionMessage):
            read.append(types.ToolMessage(content=message.content or "", tool_call_id=f"call_{num_calls}", name=message.name))
        else:
            read.append(message)
    return read
