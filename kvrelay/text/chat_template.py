"""Renders a conversation to the text a model was trained on, with the Jinja template its checkpoint carries.

The result equals that of `apply_chat_template` in transformers for the same template and messages. Templates come
with checkpoints and are not trusted: they run in Jinja's immutable sandbox and see plain JSON data only.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from kvrelay.errors import InvalidRequestError, ModelError

Message = dict[str, Any]

# Names that the renderer sets itself; `chat_template_kwargs` must not replace them.
RESERVED_VARIABLES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now", "namespace", "dict"}
)
# A message's reasoning has had several names; templates read one of the first two.
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
# Marks the end of the message to be continued. Templates that trim messages drop its trailing space.
_CONTINUE_MARK = "KVRELAY_CONTINUES_HERE "


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks what an assistant wrote, for training. Here its content is simply rendered."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class ChatTemplate:
    """One compiled template. `special_tokens` (bos_token, eos_token, ...) are variables of every rendering."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            self._template.globals = dict(
                self._template.globals
            )  # every rendering copies it: a ChainMap takes ten times longer
            self._variables = jinja2.meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            raise ModelError(f"the model's chat template does not compile: {error}") from error
        self._special_tokens = dict(special_tokens)

    @property
    def takes_tools(self) -> bool:
        """Whether the template has a variable for tools."""
        return "tools" in self._variables

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt as text. Raises InvalidRequestError for `messages` that the template refuses."""
        prepared = [_with_reasoning_aliases(message) for message in messages]
        if continue_final_message:
            _mark_final_message(prepared)
        try:
            text = self._template.render(
                messages=prepared,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **{**self._special_tokens, **(variables or {})},
            )
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            KeyError,
            AttributeError,
            RecursionError,
            ArithmeticError,
        ) as error:
            raise InvalidRequestError(f"the model's chat template refuses the messages: {error}", param="messages") from error
        return _cut_at_mark(text) if continue_final_message else text


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which models have not seen."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _with_reasoning_aliases(message: Message) -> Message:
    for name in _REASONING_FIELDS:
        reasoning = message.get(name)
        if reasoning is not None:
            return {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


def _mark_final_message(messages: list[Message]) -> None:
    content = messages[-1].get("content")
    if not isinstance(content, str):
        raise InvalidRequestError("continue_final_message needs a last message whose content is text", param="messages")
    messages[-1] = {**messages[-1], "content": content + _CONTINUE_MARK}


def _cut_at_mark(text: str) -> str:
    end = text.rfind(_CONTINUE_MARK.strip())
    if end < 0:
        raise InvalidRequestError("the chat template drops the message that is to be continued", param="messages")
    kept = text[:end]
    return kept if text.startswith(_CONTINUE_MARK, end) else kept.rstrip()
