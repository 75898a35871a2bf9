"""Tool calling: what the model is told about tools, and what a grammar makes it write.

    tool_choice none      the model does not learn of any tool
    tool_choice auto      it may call tools; arguments of functions marked `strict` are constrained to their schemas
    required, a name      a grammar makes it call, with arguments that fit the functions' schemas

If the chat template has no variable for tools, a system message in the style of Hermes models lists them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from kvrelay.errors import InvalidRequestError
from kvrelay.frontend.prompt.types import FunctionDefinition, FunctionTool, NamedToolChoice, ToolChoice
from kvrelay.sampling import Grammar, GrammarKind
from kvrelay.text.chat_template import Message
from kvrelay.text.tokenizer import Tokenizer

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
_ANY_ARGUMENTS: dict[str, Any] = {"type": "object"}
_HERMES = (
    "You may call functions to help with the user's request. Their signatures are inside <tools></tools>:\n"
    "<tools>\n{tools}\n</tools>\n"
    "For each call, write a JSON object with the function's name and arguments inside <tool_call></tool_call>:\n"
    '<tool_call>\n{{"name": <function name>, "arguments": <arguments object>}}\n</tool_call>'
)


class Tags(msgspec.Struct, frozen=True):
    """The tags around a call, as a grammar writes them: as text, or as single tokens where the tokenizer has them."""

    open: str
    close: str

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Tags:
        if tokenizer.has_own_token(OPEN) and tokenizer.has_own_token(CLOSE):
            return cls(OPEN, CLOSE)
        return cls(_quoted(OPEN), _quoted(CLOSE))

    @property
    def are_tokens(self) -> bool:
        return self.open == OPEN


class ToolPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How the tools of one request are handled."""

    tools: list[FunctionTool]  # that the model learns of; empty if none
    parse: bool  # whether calls are read from the output
    forced: bool  # whether the output must be calls
    grammar: Grammar | None
    one_call: bool  # parallel_tool_calls is false


NO_TOOLS = ToolPlan(tools=[], parse=False, forced=False, grammar=None, one_call=False)


def plan_tools(
    tools: list[FunctionTool] | None,
    choice: ToolChoice | None,
    parallel: bool | None,
    shape: Grammar | None,
    *,
    reads_calls: bool,
    tags: Tags,
) -> ToolPlan:
    """`shape` is the grammar that the answer itself must follow."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequestError("tool_choice needs tools", param="tool_choice")
        return NO_TOOLS
    _check_names(tools)
    if choice == "none":
        return NO_TOOLS
    one_call = parallel is False
    if choice in (None, "auto"):
        grammar = _optional_calls(tools, shape, tags) if reads_calls else None
        return ToolPlan(tools=tools, parse=reads_calls, forced=False, grammar=grammar, one_call=one_call)
    if shape is not None:
        raise InvalidRequestError("tool_choice cannot be combined with a response format or grammar", param="tool_choice")
    called = [_named(tools, choice)] if isinstance(choice, NamedToolChoice) else tools
    one_call = one_call or isinstance(choice, NamedToolChoice)
    grammar = _forced_calls(called, one_call, tags)
    return ToolPlan(tools=tools, parse=True, forced=True, grammar=grammar, one_call=one_call)


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


def _forced_calls(tools: list[FunctionTool], one_call: bool, tags: Tags) -> Grammar:
    start = "start: call" if one_call else 'start: call ("\\n" call)*'
    return _lark([start, _call_rule(tags), *_bodies(tools, strict_only=False)])


def _call_rule(tags: Tags) -> str:
    return f'call: {tags.open} "\\n" body "\\n" {tags.close}'


def _optional_calls(tools: list[FunctionTool], shape: Grammar | None, tags: Tags) -> Grammar | None:
    """For `auto`: text or calls. Only needed if the text has a grammar of its own, or arguments must fit a schema."""
    strict = any(tool.function.strict for tool in tools)
    if shape is not None:
        if shape.kind not in (GrammarKind.JSON_OBJECT, GrammarKind.JSON_SCHEMA):
            raise InvalidRequestError("tools cannot be combined with this grammar", param="tools")
        schema = '{"type": "object"}' if shape.kind is GrammarKind.JSON_OBJECT else _one_line(shape.source)
        start = ['start: answer | call ("\\n" call)*', f"answer: %json {schema}"]
        return _lark([*start, _call_rule(tags), *_bodies(tools, strict_only=True)])
    if not strict:
        return None
    # Text up to a call: everything before the tag's token, or (lazily) everything up to the tag's letters.
    start = ["start: (TEXT? <tool_call> rest)* TEXT?"] if tags.are_tokens else ["start: (lead rest)* TEXT?"]
    lead = [] if tags.are_tokens else [f"lead[lazy]: /(?s:.*){OPEN}/"]
    text = f"TEXT: /(?s:.+)/ & ~/(?s:.*){OPEN}(?s:.*)/"
    return _lark([*start, *lead, text, f"rest: /\\n?/ body /\\n?/ {tags.close}", *_bodies(tools, strict_only=True)])


def _bodies(tools: list[FunctionTool], *, strict_only: bool) -> list[str]:
    """One rule per function: {"name": ..., "arguments": what its schema allows}."""
    rules = ["body: " + " | ".join(f"body_{place}" for place in range(len(tools)))]
    for place, tool in enumerate(tools):
        head = f'{{"name": {json.dumps(tool.function.name)}, "arguments": '
        schema = _arguments_schema(tool.function, strict_only)
        rules.append(f"body_{place}: {_quoted(head)} arguments_{place} {_quoted('}')}")
        rules.append(f"arguments_{place}: %json {_encoded(schema)}")
    return rules


def _arguments_schema(function: FunctionDefinition, strict_only: bool) -> dict[str, Any]:
    if function.parameters is None or (strict_only and not function.strict):
        return _ANY_ARGUMENTS
    return {"type": "object", **function.parameters}


def _lark(rules: list[str]) -> Grammar:
    return Grammar(kind=GrammarKind.LARK, source="\n".join(rules) + "\n")


def _quoted(text: str) -> str:
    return json.dumps(text)


def _encoded(schema: dict[str, Any]) -> str:
    try:
        return json.dumps(schema)
    except (RecursionError, ValueError) as error:
        raise InvalidRequestError("the parameters of a tool are nested too deeply", param="tools") from error


def _one_line(source: str) -> str:
    try:
        return json.dumps(msgspec.json.decode(source))
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequestError(f"the schema is not JSON: {error}", param="guided_json") from error


# Prompts


def tools_for_template(tools: Sequence[FunctionTool]) -> list[dict[str, Any]]:
    """As clients wrote them, without the fields they left out."""
    return [msgspec.to_builtins(tool) for tool in tools]


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
    written = [f"{OPEN}\n{_encoded(_call_body(call))}\n{CLOSE}" for call in calls]
    return {"role": "assistant", "content": "\n".join([*([message["content"]] if message["content"] else []), *written])}


def _call_body(call: dict[str, Any]) -> dict[str, Any]:
    return {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
