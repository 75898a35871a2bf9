"""The ways in which models write tool calls.

    hermes    <tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call>, again for each call: Hermes, Qwen
    llama     {"name": "f", "parameters": {...}}; {"name": ...}: Llama 3 and later
    mistral   [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...], or where the tokenizer has the token [ARGS],
              [TOOL_CALLS]f[ARGS]{...}, again for each call

A format here is what a grammar needs to make a model write calls; `answer/` reads them.
"""

from __future__ import annotations

import json
from typing import Literal

import msgspec

from kvrelay.text.tokenizer import Tokenizer

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
MARK = "[TOOL_CALLS]"
ARGS = "[ARGS]"
PYTHON_TAG = "<|python_tag|>"

Kind = Literal["hermes", "llama", "mistral"]


class CallFormat(msgspec.Struct, frozen=True, kw_only=True):
    """In Lark, where `body` is one of the functions with its arguments."""

    kind: Kind
    one: str  # exactly one call
    many: str  # one or more
    key: str  # of the arguments in a call's object; empty if a call is no object
    separator: str = ""  # between name and arguments, where a call is no object
    free: tuple[str, ...]  # rules for text and calls mixed, as far as this format allows it
    keeps_special: bool = False  # its marks are special tokens, which would otherwise not be shown

    def around(self, name: str) -> tuple[str, str]:
        """What a call of this function has before and behind its arguments."""
        if not self.key:
            return f"{quoted(name)} {self.separator}", ""
        return quoted(f'{{"name": {json.dumps(name)}, "{self.key}": '), quoted("}")


def hermes(tokenizer: Tokenizer) -> CallFormat:
    """The tags are single tokens where the tokenizer has them, else text."""
    tokens = tokenizer.has_own_token(OPEN) and tokenizer.has_own_token(CLOSE)
    opening, closing = (OPEN, CLOSE) if tokens else (quoted(OPEN), quoted(CLOSE))
    call = f'({opening} "\\n" body "\\n" {closing})'
    # Text up to a call: everything before the tag's token, or (lazily) everything up to the tag's letters.
    start = ["start: (TEXT? <tool_call> rest)* TEXT?"] if tokens else ["start: (lead rest)* TEXT?"]
    lead = [] if tokens else [f"lead[lazy]: /(?s:.*){OPEN}/"]
    text = f"TEXT: /(?s:.+)/ & ~/(?s:.*){OPEN}(?s:.*)/"
    return CallFormat(
        kind="hermes",
        one=call,
        many=f'{call} ("\\n" {call})*',
        key="arguments",
        free=(*start, *lead, text, f"rest: /\\n?/ body /\\n?/ {closing}"),
    )


def llama(tokenizer: Tokenizer) -> CallFormat:
    calls = 'body ("; " body)*'
    return CallFormat(
        kind="llama",
        one="body",
        many=calls,
        key="parameters",
        free=(f"start: TEXT? | {calls}", r"TEXT: /\s*[^\s{](?s:.*)/"),
        keeps_special=tokenizer.has_own_token(PYTHON_TAG),
    )


def mistral(tokenizer: Tokenizer) -> CallFormat:
    mark = _token(tokenizer, MARK)
    is_object = not tokenizer.has_own_token(ARGS)
    one, many = (
        (f'{mark} "[" body "]"', f'{mark} "[" body (", " body)* "]"') if is_object else (f"{mark} body", f"({mark} body)+")
    )
    text = "TEXT: /(?s:.+)/" if tokenizer.has_own_token(MARK) else r"TEXT: /(?s:.+)/ & ~/(?s:.*)\[TOOL_CALLS\](?s:.*)/"
    return CallFormat(
        kind="mistral",
        one=one,
        many=many,
        key="arguments" if is_object else "",
        separator="" if is_object else _token(tokenizer, ARGS),
        free=(f"start: TEXT? | TEXT? {many}", text),
        keeps_special=tokenizer.has_own_token(MARK),
    )


def format_of(tokenizer: Tokenizer, parser: str) -> tuple[CallFormat, bool]:
    """The format of a model's calls, and whether calls are read from answers that need not be calls. `auto` finds out from the
    chat template; what is told to a model whose template knows no tools is in the form of Hermes."""
    makers = {"hermes": hermes, "llama": llama, "mistral": mistral}
    if parser in makers:
        return makers[parser](tokenizer), True
    reads = parser == "auto"
    source = "" if tokenizer.template is None or not tokenizer.takes_tools else tokenizer.tool_template_source
    if not source or OPEN in source:
        return hermes(tokenizer), reads
    if MARK in source:
        return mistral(tokenizer), reads
    if PYTHON_TAG in source or tokenizer.has_own_token(PYTHON_TAG):
        return llama(tokenizer), reads
    return hermes(tokenizer), False


def quoted(text: str) -> str:
    return json.dumps(text)


def _token(tokenizer: Tokenizer, text: str) -> str:
    """As one token where the tokenizer has it, else as text."""
    return f"<[{tokenizer.token_id(text)}]>" if tokenizer.has_own_token(text) else quoted(text)
