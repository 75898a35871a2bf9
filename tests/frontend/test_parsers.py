"""Tool calls and reasoning are read the same way whatever the cuts between tokens."""

from __future__ import annotations

import itertools
import json

import llguidance
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.errors import InvalidRequestError
from kvrelay.frontend.answer.deltas import Collected, Parser
from kvrelay.frontend.answer.reasoning import ReasoningParser
from kvrelay.frontend.answer.tool_parser import ToolCallParser
from kvrelay.frontend.prompt.tools import Tags, hermes_messages, plan_tools, tools_for_template
from kvrelay.frontend.prompt.types import FunctionDefinition, FunctionName, FunctionTool, NamedToolChoice
from kvrelay.sampling import Grammar, GrammarKind
from kvrelay.text.grammar_check import check_grammar, to_definition
from tests.frontend.serving import TOKENIZER
from tests.text.tiny_tokenizers import folder_of

CALL = '<tool_call>\n{"name": "f", "arguments": {"city": "Paris", "deep": [{"}": "\\"]"}]}}\n</tool_call>'
OTHER = '<tool_call>{"arguments": {"b": 1}, "name": "g"}</tool_call>'
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}


def read(parser: Parser, text: str, cuts: list[int]) -> Collected:
    collected = Collected()
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    for start, end in itertools.pairwise(places):
        collected.add(parser.push(text[start:end]))
    collected.add(parser.finish())
    return collected


def calls_of(collected: Collected) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in collected.calls.values()]


CUTS = st.lists(st.integers(0, 500), max_size=40)


@given(CUTS)
def test_calls_are_read_whatever_the_cuts(cuts: list[int]) -> None:
    collected = read(ToolCallParser(), f"Let me see. \n{CALL}\n{OTHER} \n", cuts)
    assert "".join(collected.text).rstrip() == "Let me see."
    assert calls_of(collected) == [("f", '{"city": "Paris", "deep": [{"}": "\\"]"}]}'), ("g", '{"b": 1}')]
    assert len({call.id for call in collected.calls.values()}) == 2


@given(
    CUTS,
    st.sampled_from(["no calls at all", "a < b <tool <tool_call", " <tool_call>oops</tool_call> ", "<tool_call>{", "x\n\n"]),
)
def test_what_is_no_call_stays_text(cuts: list[int], text: str) -> None:
    collected = read(ToolCallParser(), text, cuts)
    assert calls_of(collected) == []
    assert "".join("".join(collected.text).split()) == "".join(text.split())


def test_a_call_is_announced_before_its_arguments_are_complete() -> None:
    parser = ToolCallParser()
    parser.push("<tool_call>")
    begun = Collected()
    begun.add(parser.push('{"name": "f", "arguments": {"ci'))
    assert calls_of(begun) == [("f", '{"ci')]
    begun.add(parser.push('ty": 1}}</tool_call>'))
    assert calls_of(begun) == [("f", '{"city": 1}')]
    assert parser.finish() == []


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ('<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', [("f", '{"a": 1}')]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [("f", '{"a": 1}')]),
        ('<tool_call>{"name": "f"}</tool_call>', [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>', [("f", '{"a": "</tool_call>"}')]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}', [("f", '{"a": 1}')]),
        ('<tool_call>{"name": "f", "arguments": {"a": ', [("f", '{"a": ')]),
    ],
)
def test_other_ways_to_write_a_call(written: str, expected: list[tuple[str, str]]) -> None:
    assert calls_of(read(ToolCallParser(), written, [])) == expected


@given(CUTS)
def test_reasoning_is_split_off_whatever_the_cuts(cuts: list[int]) -> None:
    collected = read(ReasoningParser(ToolCallParser(), opened=False), f" <think>\nhm </thin </think>\n\nyes{CALL}", cuts)
    assert "".join(collected.reasoning).lstrip("\n") == "hm </thin "
    assert "".join(collected.text) == "yes"
    assert [name for name, _ in calls_of(collected)] == ["f"]


@given(CUTS)
def test_reasoning_that_the_prompt_opened(cuts: list[int]) -> None:
    collected = read(ReasoningParser(None, opened=True), "hm</think>yes", cuts)
    assert ("".join(collected.reasoning), "".join(collected.text)) == ("hm", "yes")
    cut_off = read(ReasoningParser(None, opened=True), "hm</thi", cuts)
    assert ("".join(cut_off.reasoning), "".join(cut_off.text)) == ("hm</thi", "")


@given(CUTS, st.sampled_from(["plain", " <thinking> aloud", "<thi", "", "x <think>y</think>"]))
def test_an_answer_without_reasoning_is_untouched(cuts: list[int], text: str) -> None:
    collected = read(ReasoningParser(None, opened=False), text, cuts)
    assert ("".join(collected.reasoning), "".join(collected.text)) == ("", text)


# What the grammars allow


def tool(name: str, *, strict: bool | None = None) -> FunctionTool:
    return FunctionTool(function=FunctionDefinition(name=name, parameters=CITY, strict=strict))


def allows(grammar: Grammar | None, text: str) -> bool:
    assert grammar is not None
    assert check_grammar(grammar) is None
    tokenizer = llguidance.LLTokenizer((folder_of("byte_level") / "tokenizer.json").read_text(), eos_token=2)
    matcher = llguidance.LLMatcher(tokenizer, to_definition(grammar))
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def written(name: str, arguments: object) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


TAGS = Tags.of(TOKENIZER)
GOOD, BAD = {"city": "Paris"}, {"city": 1}


def test_required_forces_calls_that_fit() -> None:
    grammar = plan_tools([tool("f"), tool("g")], "required", None, None, reads_calls=True, tags=TAGS).grammar
    assert allows(grammar, written("f", GOOD))
    assert allows(grammar, written("f", GOOD) + "\n" + written("g", GOOD))
    assert not allows(grammar, written("f", BAD))
    assert not allows(grammar, written("h", GOOD))
    assert not allows(grammar, "hello")


def test_a_named_function_is_called_once() -> None:
    choice = NamedToolChoice(function=FunctionName(name="g"))
    grammar = plan_tools([tool("f"), tool("g")], choice, None, None, reads_calls=True, tags=TAGS).grammar
    assert allows(grammar, written("g", GOOD))
    assert not allows(grammar, written("f", GOOD))
    assert not allows(grammar, written("g", GOOD) + "\n" + written("g", GOOD))


def test_parallel_calls_can_be_forbidden() -> None:
    plan = plan_tools([tool("f")], "required", False, None, reads_calls=True, tags=TAGS)
    assert not allows(plan.grammar, written("f", GOOD) + "\n" + written("f", GOOD))


def test_auto_needs_a_grammar_only_for_strict_functions() -> None:
    assert plan_tools([tool("f")], "auto", None, None, reads_calls=True, tags=TAGS).grammar is None
    grammar = plan_tools([tool("f", strict=True), tool("g")], "auto", None, None, reads_calls=True, tags=TAGS).grammar
    assert allows(grammar, "just text, 1 < 2")
    assert allows(grammar, "well: " + written("f", GOOD) + written("f", GOOD) + " done")
    assert allows(grammar, written("g", BAD))
    assert not allows(grammar, "well: " + written("f", BAD))


def test_auto_with_a_format_allows_the_format_or_calls() -> None:
    shape = Grammar(kind=GrammarKind.JSON_SCHEMA, source=json.dumps(CITY))
    grammar = plan_tools([tool("f", strict=True)], None, None, shape, reads_calls=True, tags=TAGS).grammar
    assert allows(grammar, json.dumps(GOOD))
    assert allows(grammar, written("f", GOOD))
    assert not allows(grammar, "text")
    assert not allows(grammar, written("f", BAD))


def test_tools_nested_too_deeply_are_refused() -> None:
    deep: dict[str, object] = {}
    for _ in range(3000):
        deep = {"a": deep}
    nested = FunctionTool(function=FunctionDefinition(name="f", parameters=deep))
    with pytest.raises(InvalidRequestError):
        plan_tools([nested], "required", None, None, reads_calls=True, tags=TAGS)


# What models without a word for tools are told


def test_hermes_messages_tell_of_tools_calls_and_results() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": GOOD}}
    messages = [
        {"role": "user", "content": "where?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "there", "tool_call_id": "1"},
    ]
    told = hermes_messages(messages, tools_for_template([tool("f")]))
    assert [message["role"] for message in told] == ["system", "user", "assistant", "user"]
    assert '"name": "f"' in told[0]["content"]
    assert told[2]["content"] == written("f", GOOD)
    assert told[3]["content"] == "<tool_response>\nthere\n</tool_response>"
    kept = hermes_messages([{"role": "system", "content": "Be brief."}, messages[0]], tools_for_template([tool("f")]))
    assert kept[0]["content"].startswith("Be brief.\n\n")
