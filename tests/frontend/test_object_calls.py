"""Tool calls in the formats of Llama and Mistral: read whatever the cuts between tokens, and written by grammars."""

from __future__ import annotations

import functools
import itertools
import json
import shutil
from typing import Any

import llguidance
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from scratch import scratch_folder

from kvrelay.config import RouterOptions
from kvrelay.frontend.answer.deltas import Collected
from kvrelay.frontend.answer.object_calls import ObjectCallParser
from kvrelay.frontend.app import create_app
from kvrelay.frontend.fake_backend import FakeBackend
from kvrelay.frontend.prompt.call_formats import CallFormat, format_of, llama, mistral
from kvrelay.frontend.prompt.tools import plan_tools
from kvrelay.frontend.prompt.types import FunctionDefinition, FunctionName, FunctionTool, NamedToolChoice
from kvrelay.metrics import Metrics
from kvrelay.sampling import Grammar
from kvrelay.text.grammar_check import check_grammar, to_definition
from kvrelay.text.tokenizer import Tokenizer
from tests.frontend.serving import http_client
from tests.text.tiny_tokenizers import CHATML, RICH, folder_of

CUTS = st.lists(st.integers(0, 500), max_size=40)
DEEP = '{"city": "Paris", "deep": [{"}": "\\"]"}]}'
F, G = f'{{"name": "f", "parameters": {DEEP}}}', '{"parameters": {"b": 1}, "name": "g"}'
MF, MG = F.replace("parameters", "arguments"), '{"name": "g", "arguments": {"b": 1}, "id": "abc"}'
BOTH = [("f", DEEP), ("g", '{"b": 1}')]
LLAMA, MISTRAL = (functools.partial(ObjectCallParser, is_mistral=each) for each in (False, True))


def read(parser: ObjectCallParser, text: str, cuts: list[int], *, cut: bool = False) -> tuple[str, list[tuple[str, str]]]:
    collected = Collected()
    places = [0, *sorted(place % (len(text) + 1) for place in cuts), len(text)]
    for start, end in itertools.pairwise(places):
        collected.add(parser.push(text[start:end]))
    collected.add(parser.finish(cut=cut))
    return "".join(collected.text), [(call.name, call.arguments) for call in collected.calls.values()]


@given(
    CUTS,
    st.sampled_from(
        [
            (LLAMA, f"{F}; {G}", ""),
            (LLAMA, f"\n{F}\n{G}\n", ""),
            (LLAMA, f"<|python_tag|>{F};{G}", ""),
            (LLAMA, f"Well. <|python_tag|>{F}; {G}", "Well."),
            (MISTRAL, f"[TOOL_CALLS][{MF}, {MG}]", ""),
            (MISTRAL, f"Well. [TOOL_CALLS] [{MF},{MG}] ", "Well."),
            (MISTRAL, f'[TOOL_CALLS]f[ARGS]{DEEP}[TOOL_CALLS]g[CALL_ID]abc[ARGS]{{"b": 1}}', ""),
            (MISTRAL, f'[TOOL_CALLS]f{DEEP}\n[TOOL_CALLS]g {{"b": 1}}', ""),
        ]
    ),
)
def test_calls_are_read_whatever_the_cuts(cuts: list[int], case: Any) -> None:
    make, text, shown = case
    assert read(make(), text, cuts) == (shown, BOTH)
    assert read(make(one_call=True), text, cuts) == (shown, BOTH[:1])


@given(
    CUTS,
    st.sampled_from(
        [
            (LLAMA, "no calls at all"),
            (LLAMA, '{"answer": {"name": "f"}} and more'),
            (LLAMA, '{"name": "Tom"}'),
            (LLAMA, f"see {F}"),
            (LLAMA, "{"),
            (LLAMA, "a <|python"),
            (MISTRAL, f"no calls: {MF}"),
            (MISTRAL, "a [TOOL"),
        ]
    ),
)
def test_what_is_no_call_stays_text(cuts: list[int], case: Any) -> None:
    make, text = case
    assert read(make(), text, cuts) == (text, [])


@given(
    CUTS,
    st.sampled_from(
        [
            (LLAMA, '{"name": "ge'),
            (LLAMA, f'{F}; {{"na'),
            (LLAMA, '<|python_tag|>{"'),
            (LLAMA, "<|pyth"),
            (MISTRAL, '[TOOL_CALLS][{"name"'),
            (MISTRAL, "[TOOL_CALLS]get_wea"),
            (MISTRAL, f"[TOOL_CALLS][{MF}, {{"),
            (MISTRAL, "[TOOL_C"),
        ]
    ),
)
def test_a_call_that_was_cut_off_is_not_text(cuts: list[int], case: Any) -> None:
    make, text = case
    shown, calls = read(make(), text, cuts, cut=True)
    assert (shown, calls) == ("", BOTH[:1] if DEEP in text else [])


def test_ids_of_mistral_have_nine_characters() -> None:
    (start, *_) = MISTRAL().push(f"[TOOL_CALLS][{MF}]")
    assert len(start.id) == 9
    assert start.id.isalnum()


# What the grammars allow

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
GOOD, BAD = '{"city": "Paris"}', '{"city": 1}'


@functools.cache
def special_tokenizer(*added: str, template: str = RICH) -> tuple[Tokenizer, str]:
    """The tiny tokenizer with more special tokens, and its tokenizer.json."""
    folder = scratch_folder("tokenizer-")
    shutil.copytree(folder_of("byte_level", template), folder, dirs_exist_ok=True)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens(list(added))
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer.load(folder), (folder / "tokenizer.json").read_text()


def tool(name: str, *, strict: bool | None = None) -> FunctionTool:
    return FunctionTool(function=FunctionDefinition(name=name, parameters=CITY, strict=strict))


def allows(grammar: Grammar | None, text: str, tokenizer: Tokenizer, source: str) -> bool:
    assert grammar is not None
    assert check_grammar(grammar) is None
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer(source, eos_token=2), to_definition(grammar))
    tokens = tokenizer.encode(text, add_special_tokens=False)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


@pytest.mark.parametrize(
    ("make", "added", "one", "many"),
    [
        (llama, (), '{"name": "%s", "parameters": %s}', "; "),
        (llama, ("<|python_tag|>",), '{"name": "%s", "parameters": %s}', "; "),
        (mistral, (), '[TOOL_CALLS][{"name": "%s", "arguments": %s}]', ""),
        (mistral, ("[TOOL_CALLS]",), '[TOOL_CALLS][{"name": "%s", "arguments": %s}]', ""),
        (mistral, ("[TOOL_CALLS]", "[ARGS]"), "[TOOL_CALLS]%s[ARGS]%s", ""),
    ],
)
def test_grammars(make: Any, added: tuple[str, ...], one: str, many: str) -> None:
    tokenizer, source = special_tokenizer(*added)
    form: CallFormat = make(tokenizer)
    ok = functools.partial(allows, tokenizer=tokenizer, source=source)
    tools = [tool("f"), tool("g")]
    forced = plan_tools(tools, "required", None, None, reads_calls=True, form=form).grammar
    assert ok(forced, one % ("f", GOOD))
    assert not ok(forced, one % ("f", BAD))
    assert not ok(forced, one % ("h", GOOD))
    assert not ok(forced, "text")
    if many or "[ARGS]" in one:
        assert ok(forced, one % ("f", GOOD) + many + one % ("g", GOOD))
    else:
        first, second = (f'{{"name": "{name}", "arguments": {GOOD}}}' for name in "fg")
        assert ok(forced, f"[TOOL_CALLS][{first}, {second}]")
    named = NamedToolChoice(function=FunctionName(name="g"))
    single = plan_tools(tools, named, None, None, reads_calls=True, form=form).grammar
    assert ok(single, one % ("g", GOOD))
    assert not ok(single, one % ("f", GOOD))
    assert not ok(single, one % ("g", GOOD) + many + one % ("g", GOOD))
    strict = plan_tools([tool("f", strict=True)], "auto", None, None, reads_calls=True, form=form).grammar
    assert ok(strict, "just text")
    assert ok(strict, one % ("f", GOOD))
    assert not ok(strict, one % ("f", BAD))


# Which format a model has


@pytest.mark.parametrize(
    ("parser", "template", "added", "kind", "reads"),
    [
        ("auto", CHATML, (), "hermes", True),
        ("auto", "{{ tools }}<tool_call>", (), "hermes", True),
        ("auto", "{{ tools }}[TOOL_CALLS]", ("[TOOL_CALLS]",), "mistral", True),
        ("auto", "{{ tools }}<|python_tag|>", ("<|python_tag|>",), "llama", True),
        ("auto", RICH, ("<|python_tag|>",), "llama", True),
        ("auto", RICH, (), "hermes", False),
        ("none", "{{ tools }}<tool_call>", (), "hermes", False),
        ("llama", RICH, (), "llama", True),
        ("mistral", RICH, (), "mistral", True),
        ("hermes", RICH, (), "hermes", True),
    ],
)
def test_the_format_of_a_model(parser: str, template: str, added: tuple[str, ...], kind: str, reads: bool) -> None:
    tokenizer, _ = special_tokenizer(*added, template=template)
    form, reads_calls = format_of(tokenizer, parser)
    assert (form.kind, reads_calls) == (kind, reads)


@pytest.mark.parametrize(
    ("parser", "added", "answer"),
    [
        ("llama", ("<|python_tag|>",), f"<|python_tag|>{F}"),
        ("llama", (), F),
        ("mistral", ("[TOOL_CALLS]",), f"[TOOL_CALLS][{MF}]"),
        ("mistral", ("[TOOL_CALLS]", "[ARGS]"), f"[TOOL_CALLS]f[ARGS]{DEEP}"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_over_http(parser: Any, added: tuple[str, ...], answer: str, stream: bool) -> None:
    tokenizer, _ = special_tokenizer(*added)
    tokens = tokenizer.encode(answer, add_special_tokens=False)
    backend = FakeBackend(eos_token_id=2, vocab_size=tokenizer.vocab_size, answer=lambda _: tokens, max_model_len=512)
    app = create_app(backend, tokenizer, metrics=Metrics(), options=RouterOptions(tool_parser=parser), model="tiny")
    functions = [{"type": "function", "function": {"name": "f", "parameters": CITY}}]
    body = {"messages": [{"role": "user", "content": "hello"}], "tools": functions, "stream": stream}
    async with http_client(app) as client:
        reply = await client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    if not stream:
        choice = reply.json()["choices"][0]
        function = choice["message"]["tool_calls"][0]["function"]
        assert (function["name"], function["arguments"]) == ("f", DEEP)
        assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
        return
    events = [json.loads(line[6:])["choices"][0] for line in reply.text.splitlines() if line.startswith("data: {")]
    calls = [call for event in events for call in event["delta"].get("tool_calls", ())]
    assert calls[0]["function"]["name"] == "f"
    assert "".join(call["function"]["arguments"] for call in calls) == DEEP
    assert events[-1]["finish_reason"] == "tool_calls"
    assert "".join(event["delta"].get("content") or "" for event in events) == ""
