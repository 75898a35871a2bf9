"""Anthropic's SDK against a real server: what it sends is understood, and what it gets it understands."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import httpx
import pytest

from kvrelay.config import RouterOptions
from kvrelay.errors import InternalError, QueueFullError, UnavailableError
from kvrelay.frontend.fake_backend import FakeBackend
from tests.frontend.serving import MODEL, TOKENIZER, fake_backend, make_app, running_server, says, wait_until_idle

ANSWER = "one two three four five"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: Any = {"name": "get_weather", "description": "the weather", "input_schema": SCHEMA}
USER: Any = [{"role": "user", "content": "What is the capital of France?"}]
USUAL: Any = {"model": MODEL, "max_tokens": 48}
SAMPLING = {"temperature": 0.5, "top_p": 0.9, "top_k": 5}  # not every release of the SDK has them

Server = Callable[..., tuple[anthropic.Anthropic, FakeBackend]]


@pytest.fixture
def server() -> Iterator[Server]:
    """Starts servers; at the end checks that none of their requests leaked."""
    started: list[tuple[Any, FakeBackend, anthropic.Anthropic]] = []

    def start(answer: str | None = ANSWER, options: RouterOptions | None = None) -> tuple[anthropic.Anthropic, FakeBackend]:
        backend = fake_backend(answer)
        context = running_server(make_app(backend, options))
        client = anthropic.Anthropic(base_url=context.__enter__(), api_key="key", max_retries=0)
        started.append((context, backend, client))
        return client, backend

    yield start
    for context, backend, client in started:
        client.close()
        wait_until_idle(backend)
        context.__exit__(None, None, None)


def prompt_of(backend: FakeBackend, number: int = -1) -> str:
    return TOKENIZER.decode(list(backend.submitted[number].prompt), skip_special_tokens=False)


def test_a_message(server: Server) -> None:
    client, backend = server()
    answer = client.messages.create(**USUAL, messages=USER, system="Be brief.", extra_body=SAMPLING)
    assert [block.text for block in answer.content if block.type == "text"] == [ANSWER]
    assert (answer.stop_reason, answer.stop_sequence, answer.role, answer.model) == ("end_turn", None, "assistant", MODEL)
    assert answer.id.startswith("msg_")
    prompt = backend.submitted[0].prompt
    assert answer.usage.cache_read_input_tokens == len(prompt) // 2
    assert answer.usage.input_tokens == len(prompt) - len(prompt) // 2
    assert answer.usage.output_tokens == len(says(ANSWER)) + 1
    params = backend.submitted[0].params
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.5, 0.9, 5, 48)
    assert "Be brief." in prompt_of(backend)
    assert "Be brief." in prompt_of(backend).split(USER[0]["content"])[0]


def test_a_stream_has_the_sdks_events_in_their_order(server: Server) -> None:
    client, _ = server()
    with client.messages.stream(**USUAL, messages=USER) as stream:
        names = [event.type for event in stream if event.type not in ("text", "input_json")]
        final = stream.get_final_message()
    inner = len(says(ANSWER))
    begin, end = ["message_start", "content_block_start"], ["content_block_stop", "message_delta", "message_stop"]
    assert [name for name in names if name != "content_block_delta"] == [*begin, *end]
    assert names[:2] == begin
    assert names.count("content_block_delta") == inner
    assert final.content[0].type == "text"
    assert final.content[0].text == ANSWER
    assert final.stop_reason == "end_turn"
    assert final.usage.output_tokens == inner + 1


def test_a_stop_sequence_is_named(server: Server) -> None:
    client, _ = server()
    answer = client.messages.create(**USUAL, messages=USER, stop_sequences=["never", " four"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", " four")
    assert answer.content[0].type == "text"
    assert answer.content[0].text == "one two three"


def test_the_length_limit(server: Server) -> None:
    client, _ = server()
    assert client.messages.create(model=MODEL, max_tokens=1, messages=USER).stop_reason == "max_tokens"


@pytest.mark.parametrize("streamed", [False, True])
def test_a_tool_call_and_its_result(server: Server, streamed: bool) -> None:
    client, backend = server(CALL)
    if streamed:
        with client.messages.stream(**USUAL, messages=USER, tools=[TOOL]) as stream:
            answer: Any = stream.get_final_message()
    else:
        answer = client.messages.create(**USUAL, messages=USER, tools=[TOOL])
    assert answer.stop_reason == "tool_use"
    (block,) = answer.content
    assert (block.type, block.name, block.input) == ("tool_use", "get_weather", {"city": "Paris"})
    result: Any = {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "18 degrees"}]}
    more: Any = [
        *USER,
        {"role": "assistant", "content": answer.content},
        {
            "role": "user",
            "content": [result, {"type": "text", "text": "And tomorrow?", "cache_control": {"type": "ephemeral"}}],
        },
    ]
    client.messages.create(**USUAL, messages=more, tools=[TOOL])
    prompt = prompt_of(backend)
    assert prompt.index("18 degrees") < prompt.index("And tomorrow?")
    assert '"city": "Paris"' in prompt


@pytest.mark.parametrize(
    ("choice", "forced"),
    [({"type": "any"}, True), ({"type": "tool", "name": "get_weather"}, True), ({"type": "auto"}, False)],
)
def test_a_tool_choice_is_a_grammar(server: Server, choice: Any, forced: bool) -> None:
    client, backend = server(CALL)
    client.messages.create(**USUAL, messages=USER, tools=[TOOL], tool_choice=choice)
    assert (backend.submitted[0].params.grammar is not None) is forced


def test_no_tool_choice_hides_the_tools(server: Server) -> None:
    client, backend = server()
    client.messages.create(**USUAL, messages=USER, tools=[TOOL], tool_choice={"type": "none"})
    assert "get_weather" not in prompt_of(backend)


def test_reasoning_is_a_thinking_block(server: Server) -> None:
    client, _ = server("<think>so it is</think>Paris", RouterOptions(reasoning_parser="think"))
    answer = client.messages.create(**USUAL, messages=USER, thinking={"type": "enabled", "budget_tokens": 1024})
    assert [block.type for block in answer.content] == ["thinking", "text"]
    assert answer.content[0].type == "thinking"
    assert answer.content[0].thinking == "so it is"
    again: Any = [*USER, {"role": "assistant", "content": answer.content}, *USER]
    client.messages.create(**USUAL, messages=again)


def test_an_assistants_message_at_the_end_is_continued(server: Server) -> None:
    client, backend = server()
    client.messages.create(**USUAL, messages=[*USER, {"role": "assistant", "content": "It is"}])
    assert prompt_of(backend).endswith("It is")


def test_tokens_are_counted_as_the_prompt_has_them(server: Server) -> None:
    client, backend = server()
    asked: Any = {"model": MODEL, "messages": USER, "system": "Be brief.", "tools": [TOOL]}
    count = client.messages.count_tokens(**asked)
    client.messages.create(**asked, max_tokens=8)
    assert count.input_tokens == len(backend.submitted[0].prompt)


def test_an_image_for_a_model_without_any_is_refused_by_its_place(server: Server) -> None:
    client, _ = server()
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(b"png").decode()}
    content: Any = [{"type": "text", "text": "What is"}, {"type": "image", "source": source}]
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[1\]\.content\[1\]: this model takes no images"):
        client.messages.create(
            **USUAL, system="s", messages=[{"role": "user", "content": "x"}, {"role": "user", "content": content}]
        )
    result: Any = [{"type": "text", "text": "seen"}, {"type": "tool_result", "tool_use_id": "a", "content": content}]
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.content\[1\]\.content\[1\]: this model takes no"):
        client.messages.create(**USUAL, messages=[{"role": "user", "content": result}])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"container": "c"}, "container is not supported"),
        ({"nonsense": 1}, "unknown field: nonsense"),
        ({"temperature": 1.5}, "temperature"),
        ({"messages": []}, "messages"),
        ({"max_tokens": 10**6}, "this model's maximum context length is 512 tokens"),
        ({"messages": [{"role": "user", "content": "x " * 2000}]}, "this model's maximum context length is 512 tokens"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [{**TOOL, "strict": True, "input_schema": {"type": "object", "not": {}}}]}, r"tools\[0\].input_schema"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]}, "tool_result"),
    ],
)
def test_what_cannot_be_is_refused_by_name(server: Server, fields: dict[str, Any], message: str) -> None:
    client, _ = server()
    with pytest.raises(anthropic.BadRequestError, match=message) as refused:
        client.messages.create(**{**USUAL, "messages": USER}, extra_body=fields)
    assert isinstance(refused.value.body, dict)
    assert refused.value.body["type"] == "error"
    assert refused.value.body["error"]["type"] == "invalid_request_error"


def test_errors_have_anthropics_shape(server: Server) -> None:
    client, backend = server(options=RouterOptions(api_key="secret"))
    with pytest.raises(anthropic.AuthenticationError):
        client.messages.create(**USUAL, messages=USER)
    client.api_key = "secret"
    client.messages.create(**USUAL, messages=USER)
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        client.messages.create(model="another", max_tokens=8, messages=USER)
    backend.refuse = QueueFullError("full", retry_after_s=1)
    with pytest.raises(anthropic.RateLimitError):
        client.messages.create(**USUAL, messages=USER)
    backend.refuse = UnavailableError("none is up")
    with pytest.raises(anthropic.APIStatusError) as failed:
        client.messages.create(**USUAL, messages=USER)
    assert isinstance(failed.value.body, dict)
    assert failed.value.body["error"]["type"] == "overloaded_error"
    answer = httpx.get(f"{str(client.base_url).rstrip('/')}/v1/messages", headers={"x-api-key": "secret"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (405, "invalid_request_error")


def test_an_error_in_a_stream_is_an_event(server: Server) -> None:
    client, backend = server()
    backend.fail_after = (2, InternalError("it broke"))
    with pytest.raises(anthropic.APIStatusError, match="it broke"), client.messages.stream(**USUAL, messages=USER) as stream:
        stream.until_done()
