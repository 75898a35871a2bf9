"""Tool calling: what the model is told about tools, and what a grammar makes it write.

    tool_choice none      the model does not learn of any tool
    tool_choice auto      it may call tools; arguments of functions marked `strict` are constrained to their schemas
    required, a name      a grammar makes it call, with arguments that fit the functions' schemas

A shape of the answer (`response_format`) is that of its text: an answer of calls has none.

If the chat template has no variable for tools, a system message in the style of Hermes models lists them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from kvrelay.errors import InvalidRequestError
from kvrelay.frontend.prompt.call_formats import CLOSE, OPEN, CallFormat
from kvrelay.frontend.prompt.types import FunctionDefinition, FunctionTool, NamedToolChoice, ToolChoice
from kvrelay.sampling import Grammar, GrammarKind
from kvrelay.text.chat_template import Message
from kvrelay.text.grammar_check import as_lark
from kvrelay.text.json_schema import SchemaError, prepare_schema

_ANY_ARGUMENTS: dict[str, Any] = {"type": "object"}
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}}
_HERMES = (
    "You may call functions to help with the user's request. Their signatures are inside <tools></tools>:\n"
    "<tools>\n{tools}\n</tools>\n"
    "For each call, write a JSON object with the function's name and arguments inside <tool_call></tool_call>:\n"
    '<tool_call>\n{{"name": <function name>, "arguments": <arguments object>}}\n</tool_call>'
)


class ToolPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How the tools of one request are handled."""

    tools: list[FunctionTool]  # that the model learns of; empty if none
    parse: bool  # whether calls are read from the output
    forced: bool  # whether the output must be calls
    grammar: Grammar | None
    one_call: bool  # parallel_tool_calls is false
    form: CallFormat | None  # how the model writes them; None without tools


NO_TOOLS = ToolPlan(tools=[], parse=False, forced=False, grammar=None, one_call=False, form=None)


def plan_tools(
    tools: list[FunctionTool] | None,
    choice: ToolChoice | None,
    parallel: bool | None,
    shape: Grammar | None,
    *,
    reads_calls: bool,
    form: CallFormat,
) -> ToolPlan:
    """`shape` is the grammar that the answer's text must follow, where there is one. It can be compiled."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequestError("tool_choice needs tools", param="tool_choice")
        return NO_TOOLS
    _check_names(tools)
    if choice == "none":
        return NO_TOOLS
    try:
        return _plan(tools, choice, parallel, shape, reads_calls=reads_calls, form=form)
    except FunctionError as error:
        raise error.among(tools) from error


def _plan(
    tools: list[FunctionTool],
    choice: ToolChoice | None,
    parallel: bool | None,
    shape: Grammar | None,
    *,
    reads_calls: bool,
    form: CallFormat,
) -> ToolPlan:
    one_call = parallel is False
    if choice in (None, "auto"):
        grammar = _optional_calls(tools, shape, one_call, form) if reads_calls else None
        return ToolPlan(tools=tools, parse=reads_calls, forced=False, grammar=grammar, one_call=one_call, form=form)
    called = [_named(tools, choice)] if isinstance(choice, NamedToolChoice) else tools
    one_call = one_call or isinstance(choice, NamedToolChoice)
    grammar = _forced_calls(called, one_call, form)
    return ToolPlan(tools=tools, parse=True, forced=True, grammar=grammar, one_call=one_call, form=form)


def _check_names(tools: list[FunctionTool]) -> None:
    seen: set[str] = set()
    for place, tool in enumerate(tools):
        if tool.function.name in seen:
            field = f"tools[{place}].function.name"
            raise InvalidRequestError(f"{field}: {tool.function.name!r} is defined twice", param=field)
        seen.add(tool.function.name)


def _named(tools: list[FunctionTool], choice: NamedToolChoice) -> FunctionTool:
    for tool in tools:
        if tool.function.name == choice.function.name:
            return tool
    raise InvalidRequestError(
        f"tool_choice names {choice.function.name[:100]!r}, which is not among the tools", param="tool_choice.function.name"
    )


# Grammars


def _forced_calls(tools: list[FunctionTool], one_call: bool, form: CallFormat) -> Grammar:
    return _lark([f"start: {form.one if one_call else form.many}", *_bodies(tools, form, strict_only=False)])


def _optional_calls(tools: list[FunctionTool], shape: Grammar | None, one_call: bool, form: CallFormat) -> Grammar | None:
    """For `auto`: text or calls. Only needed if the text has a grammar of its own, or arguments must fit a schema."""
    if shape is not None:
        start = [f"start: answer | {form.one if one_call else form.many}", f"answer: {as_lark(shape)}"]
        return _lark([*start, *_bodies(tools, form, strict_only=True)])
    if not any(tool.function.strict for tool in tools):
        return None
    return _lark([*form.free, *_bodies(tools, form, strict_only=True)])


def _bodies(tools: list[FunctionTool], form: CallFormat, *, strict_only: bool) -> list[str]:
    """One rule per function, with what its schema allows as arguments."""
    rules = ["body: " + " | ".join(f"body_{place}" for place in range(len(tools)))]
    for place, tool in enumerate(tools):
        head, tail = form.around(tool.function.name)
        rules.append(f"body_{place}: {head} arguments_{place} {tail}")
        rules.append(f"arguments_{place}: %json {_arguments(tool.function, strict_only)}")
    return rules


def _arguments(function: FunctionDefinition, strict_only: bool) -> str:
    """The schema of a function's arguments, as a grammar has it. Raises FunctionError."""
    free = strict_only and not function.strict
    try:
        return _encoded(prepare_schema(_ANY_ARGUMENTS if free else arguments_schema(function)))
    except SchemaError as error:
        raise FunctionError(function.name, error.path, error.problem) from error


def arguments_schema(function: FunctionDefinition) -> dict[str, Any]:
    """A function without parameters takes no arguments."""
    return {"type": "object", **function.parameters} if function.parameters else _NO_ARGUMENTS


class FunctionError(Exception):
    """A function whose parameters cannot be used."""

    def __init__(self, name: str, path: str, problem: str) -> None:
        super().__init__(problem)
        self.name, self.path, self.problem = name, path, problem

    def among(self, tools: list[FunctionTool]) -> InvalidRequestError:
        place = [tool.function.name for tool in tools].index(self.name)
        field = f"tools[{place}].function.parameters"
        return InvalidRequestError(f"{field}{self.path}: {self.problem} (function {self.name!r})", param=field)


def _lark(rules: list[str]) -> Grammar:
    return Grammar(kind=GrammarKind.LARK, source="\n".join(rules) + "\n")


def _encoded(schema: dict[str, Any]) -> str:
    try:
        return json.dumps(schema)
    except (RecursionError, ValueError) as error:
        raise InvalidRequestError("the parameters of a tool are nested too deeply", param="tools") from error


# Prompts


def tools_for_template(tools: Sequence[FunctionTool]) -> list[dict[str, Any]]:
    """As clients wrote them, without the fields they left out, and without hints to servers."""
    functions = [msgspec.structs.replace(tool.function, cache_control=None) for tool in tools]
    return [{"type": "function", "function": msgspec.to_builtins(function)} for function in functions]


def hermes_messages(messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[Message]:
    """Writes tools, calls and results as plain messages, for templates that know no tools."""
    rendered = [_hermes_message(message) for message in messages]
    if not tools:
        return rendered
    told = _HERMES.format(tools="\n".join(_encoded(tool) for tool in tools))
    if rendered[0]["role"] == "system":
        first = {**rendered[0], "content": f"{rendered[0]['content']}\n\n{told}"}
        return [first, *rendered[1:]]
    return [{"role": "system", "content": told}, *rendered]


def _hermes_message(message: Message) -> Message:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = [f"{OPEN}\n{_call_body(call['function'])}\n{CLOSE}" for call in calls]
    return {"role": "assistant", "content": "\n".join([*([message["content"]] if message["content"] else []), *written])}


def _call_body(function: dict[str, Any]) -> str:
    arguments = function["arguments"]
    written = arguments if isinstance(arguments, str) else _encoded(arguments)
    return f'{{"name": {json.dumps(function["name"])}, "arguments": {written}}}'
