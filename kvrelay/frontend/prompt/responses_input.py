"""A request to /v1/responses as the equivalent chat request."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from kvrelay.errors import InvalidRequestError
from kvrelay.frontend.http.errors import missing
from kvrelay.frontend.prompt import types as chat
from kvrelay.frontend.prompt.responses_types import (
    InputImage,
    InputItem,
    InputPart,
    JsonSchemaText,
    ResponsesRequest,
    ResponsesTool,
)

T = TypeVar("T")
Messages = Sequence[chat.ChatMessage]
_TOOL = re.compile(r"tools\[\d+\]\.function\.")
_MESSAGE = re.compile(r"messages\[(\d+)\]")

# Fields that have another name here: of a chat, of a response.
_NAMES = (
    ("messages", "input"),
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("max_completion_tokens", "max_output_tokens"),
    ("tool_choice.function.name", "tool_choice.name"),
)


def own_names(error: InvalidRequestError, request: ResponsesRequest, history: Messages) -> InvalidRequestError:
    """The error with the field names of this endpoint."""
    place = _MESSAGE.match(error.param or "")
    sources = [] if place is None else _read_input(request, history)[1]
    names = [(place.group(), sources[int(place.group(1))])] if place is not None and sources else []
    if (tool := _TOOL.match(error.param or "")) is not None:
        names.append((tool.group(), tool.group().removesuffix("function.")))
    for of_chat, own in (*names, *_NAMES):
        if error.param is not None and error.param.startswith(of_chat):
            param = own + error.param.removeprefix(of_chat)
            return InvalidRequestError(error.message.replace(error.param, param), param=param, code=error.code)
    return error


def chat_request(request: ResponsesRequest, history: Messages) -> chat.ChatRequest:
    """`history` is the conversation before the input, without the instructions of then."""
    if request.background:
        raise InvalidRequestError(
            "background: true is not supported: a response is generated while its client waits",
            param="background",
            code="unsupported_parameter",
        )
    shows_logprobs = bool(request.include) or request.top_logprobs is not None
    return chat.ChatRequest(
        model=request.model,
        messages=_read_input(request, history)[0],
        keep_kv=_keep_kv(request),
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        seed=request.seed,
        stop=request.stop,
        chat_template_kwargs=request.chat_template_kwargs,
        max_completion_tokens=request.max_output_tokens,
        logprobs=shows_logprobs,
        top_logprobs=(request.top_logprobs or 0) if shows_logprobs else None,
        tools=None if request.tools is None else [_tool(tool) for tool in request.tools],
        tool_choice=_tool_choice(request),
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=_format(request),
    )


def _tool(tool: ResponsesTool) -> chat.FunctionTool:
    definition = chat.FunctionDefinition(
        name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
    )
    return chat.FunctionTool(function=definition)


def _tool_choice(request: ResponsesRequest) -> chat.ToolChoice | None:
    choice = request.tool_choice
    if choice == "none" or choice == "auto" or choice == "required" or choice is None:
        return choice
    return chat.NamedToolChoice(function=choice)


def _format(request: ResponsesRequest) -> chat.ResponseFormat | None:
    wanted = None if request.text is None else request.text.format
    if isinstance(wanted, JsonSchemaText):
        return chat.JsonSchemaFormat(json_schema=chat.JsonSchema(name=wanted.name, schema=wanted.schema, strict=wanted.strict))
    return wanted


def _keep_kv(request: ResponsesRequest) -> bool | None:
    """Whether the next response is likely to continue from this one; None: the server decides."""
    if request.store or (request.store is None and request.previous_response_id is not None):
        return True
    return None


def input_messages(request: ResponsesRequest) -> list[chat.ChatMessage]:
    """What this request adds to the conversation."""
    messages = _read_input(request, ())[0]
    return messages if request.instructions is None else messages[1:]


def output_messages(items: list[dict[str, Any]]) -> list[chat.ChatMessage]:
    """The items of an answer, as messages of the conversation that goes on."""
    reader = _ItemReader()
    for item in msgspec.convert(items, list[InputItem]):
        reader.read(item, "output")
    reader.end()
    return reader.messages


def _read_input(request: ResponsesRequest, history: Messages) -> tuple[list[chat.ChatMessage], list[str]]:
    """The messages, and for each the field that it comes from."""
    reader = _ItemReader()
    if request.instructions is not None:
        reader.add(chat.SystemMessage(content=request.instructions), "instructions")
    for message in history:
        reader.add(message, "previous_response_id")
    if isinstance(request.input, str):
        reader.add(chat.UserMessage(content=request.input), "input")
        return reader.messages, reader.fields
    for place, item in enumerate(request.input):
        reader.read(item, f"input[{place}]")
    reader.end()
    if not reader.messages:
        raise InvalidRequestError("input holds no message", param="input")
    return reader.messages, reader.fields


class _ItemReader:
    """Reads items one by one. What an assistant thought, said and called in a row is one message of a chat."""

    def __init__(self) -> None:
        self.messages: list[chat.ChatMessage] = []
        self.fields: list[str] = []
        self._last_field = ""  # of the assistant's turn
        self._reasoning: str | None = None
        self._said: str | None = None
        self._calls: list[chat.ToolCall] = []

    def read(self, item: InputItem, field: str) -> None:
        readers: dict[str, Callable[[InputItem, str], None]] = {
            "message": self._message,
            "function_call": self._call,
            "function_call_output": self._result,
            "reasoning": self._think,
        }
        readers[item.type](item, field)
        self._last_field = field

    def add(self, message: chat.ChatMessage, field: str) -> None:
        self.messages.append(message)
        self.fields.append(field)

    def end(self) -> None:
        """The assistant's turn is over."""
        if self._said is not None or self._calls or self._reasoning is not None:
            message = chat.AssistantMessage(
                content=self._said or "", tool_calls=self._calls or None, reasoning_content=self._reasoning
            )
            self.add(message, self._last_field)
        self._reasoning, self._said, self._calls = None, None, []

    def _message(self, item: InputItem, field: str) -> None:
        if item.content is None:
            raise missing(f"{field}.content")
        match _needed(item.role, f"{field}.role"):
            case "assistant":
                if self._said is not None or self._calls:
                    self.end()
                self._said = _text(item.content, f"{field}.content")
            case "user":
                self.end()
                self.add(chat.UserMessage(content=_text_and_images(item.content, f"{field}.content")), field)
            case _:
                self.end()
                self.add(chat.SystemMessage(content=_text(item.content, f"{field}.content")), field)

    def _call(self, item: InputItem, field: str) -> None:
        function = chat.CalledFunction(
            name=_needed(item.name, f"{field}.name"), arguments=_needed(item.arguments, f"{field}.arguments")
        )
        self._calls.append(chat.ToolCall(id=_needed(item.call_id, f"{field}.call_id"), function=function))

    def _result(self, item: InputItem, field: str) -> None:
        self.end()
        if item.output is None:
            raise missing(f"{field}.output")
        output = _text(item.output, f"{field}.output")
        self.add(chat.ToolMessage(content=output, tool_call_id=_needed(item.call_id, f"{field}.call_id")), field)

    def _think(self, item: InputItem, field: str) -> None:
        self.end()
        thought: str | Sequence[InputPart] = item.content or item.summary or ""
        self._reasoning = _text(thought, f"{field}.content")


def _needed(value: T | None, field: str) -> T:
    if value is None:
        raise missing(field)
    return value


def _text(content: str | Sequence[InputPart], field: str) -> str:
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for place, part in enumerate(content):
        if isinstance(part, InputImage):
            where = f"{field}[{place}]"
            raise InvalidRequestError(f"{where}: only user messages may have images", param=where)
        texts.append(part.refusal if isinstance(part, chat.RefusalPart) else part.text)
    return "\n".join(texts)


def _text_and_images(content: str | Sequence[InputPart], field: str) -> str | list[chat.TextPart | chat.ImagePart]:
    if isinstance(content, str) or not any(isinstance(part, InputImage) for part in content):
        return _text(content, field)
    return [
        chat.ImagePart(image_url=chat.ImageUrl(url=part.image_url, detail=part.detail))
        if isinstance(part, InputImage)
        else chat.TextPart(text=_text([part], field))
        for part in content
    ]
