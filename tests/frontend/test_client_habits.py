"""What clients send by habit: additions inside messages, hints, old names. And errors as they recognise them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from kvrelay.config import RouterOptions
from kvrelay.frontend.fake_backend import FakeBackend
from tests.frontend.serving import TOKENIZER, fake_backend, http_client, make_app
from tests.frontend.test_parsers import written

CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
USER = {"role": "user", "content": "hello"}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "f", "parameters": CITY}
CALL = written("f", {"city": "Paris"})


async def post(path: str, body: dict[str, Any], backend: FakeBackend | None = None, **options: Any) -> httpx.Response:
    app = make_app(backend or fake_backend("hello"), RouterOptions(**options))
    async with http_client(app) as client:
        return await client.post(path, json=body)


async def prompt_of(body: dict[str, Any], path: str = CHAT) -> str:
    """What the workers were asked."""
    backend = fake_backend("hello")
    reply = await post(path, body, backend)
    assert reply.status_code == 200, reply.text
    return TOKENIZER.decode(backend.submitted[0].prompt)


# Messages that come back


def with_additions(value: Any) -> Any:
    """With fields of the client's own in every object, but in those that are a tool's."""
    if isinstance(value, list):
        return [with_additions(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    inner = {name: entry if name == "input" else with_additions(entry) for name, entry in value.items()}
    return {**inner, "provider_data": {"model": "x"}, "format": "png", "cache_control": {"type": "ephemeral"}}


async def test_additions_inside_messages_change_nothing() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {**USER, "content": [{"type": "text", "text": "hello"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "x"},
    ]
    assert await prompt_of({"messages": with_additions(messages)}) == await prompt_of({"messages": messages})


async def test_additions_inside_items_change_nothing() -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "x"},
    ]
    added = with_additions(items)
    assert added[0]["content"][0]["provider_data"]
    assert await prompt_of({"input": added}, RESPONSES) == await prompt_of({"input": items}, RESPONSES)


async def test_additions_inside_blocks_change_nothing() -> None:
    said = [
        {"type": "thinking", "thinking": "hm"},
        {"type": "text", "text": "so"},
        {"type": "tool_use", "id": "c", "name": "f"},
    ]
    body = {
        "max_tokens": 8,
        "system": [{"type": "text", "text": "be brief"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hello"}]},
            {"role": "assistant", "content": [*said[:2], {**said[2], "input": {}}]},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "x"}]}],
            },
        ],
    }
    added = {**body, "system": with_additions(body["system"]), "messages": with_additions(body["messages"])}
    assert await prompt_of(added, MESSAGES) == await prompt_of(body, MESSAGES)


@pytest.mark.parametrize(
    ("path", "part"),
    [
        (CHAT, {"type": "image_url", "image_url": {"url": "data:,x"}}),
        (RESPONSES, {"type": "input_image", "image_url": "data:,x"}),
        (MESSAGES, {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "eA=="}}),
        (MESSAGES, {"type": "image", "source": {"type": "url", "url": "http://a.test/x"}}),
    ],
)
async def test_additions_inside_images_are_not_what_is_refused(path: str, part: dict[str, Any]) -> None:
    messages = with_additions([{"role": "user", "content": [part]}])
    reply = await post(path, {"input": messages} if path == RESPONSES else {"messages": messages, "max_tokens": 8})
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].endswith("[0].content[0]: this model takes no images")


@pytest.mark.parametrize(("path", "prompt"), [(CHAT, "messages"), (RESPONSES, "input"), (MESSAGES, "messages")])
async def test_additions_beside_messages_are_refused(path: str, prompt: str) -> None:
    reply = await post(path, {prompt: [USER], "provider_data": 1})
    assert reply.status_code == 400
    assert reply.json()["error"]["message"] == "unknown field: provider_data"


async def test_hints_for_the_cache_are_not_told_to_the_model() -> None:
    hint = {"cache_control": {"type": "ephemeral"}}
    tool = {"type": "function", "function": FUNCTION}
    hinted = {"type": "function", "function": {**FUNCTION, **hint}, **hint}
    assert await prompt_of({"messages": [USER], "tools": [hinted]}) == await prompt_of({"messages": [USER], "tools": [tool]})


@pytest.mark.parametrize(
    ("path", "hints"),
    [
        (CHAT, {"reasoning_effort": "low", "verbosity": "high", "include_reasoning": True}),
        (RESPONSES, {"reasoning": {"effort": "low", "summary": "auto"}, "text": {"verbosity": "low"}}),
    ],
)
async def test_hints_change_nothing(path: str, hints: dict[str, Any]) -> None:
    body: dict[str, Any] = {"messages": [USER]} if path == CHAT else {"input": "hello"}
    assert await prompt_of({**body, **hints}, path) == await prompt_of(body, path)


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_can_be_left_out(stream: bool) -> None:
    for shown in (True, False):
        body = {"messages": [USER], "include_reasoning": shown, "stream": stream}
        reply = await post(CHAT, body, fake_backend("<think>deep</think>yes"), reasoning_parser="think")
        assert ("reasoning_content" in reply.text) is shown
        assert '"content":' in reply.text


# Old names


@pytest.mark.parametrize("choice", [{"name": "f"}, "auto", None])
async def test_functions_of_old_clients(choice: Any) -> None:
    body = {"messages": [USER], "functions": [FUNCTION]} | ({} if choice is None else {"function_call": choice})
    today: dict[str, Any] = {"messages": [USER], "tools": [{"type": "function", "function": FUNCTION}]}
    backend = fake_backend(CALL)
    reply = (await post(CHAT, body, backend)).json()["choices"][0]
    assert reply["finish_reason"] == "function_call"
    assert "tool_calls" not in reply["message"]
    called = reply["message"]["function_call"]
    assert (called["name"], json.loads(called["arguments"])) == ("f", {"city": "Paris"})
    assert TOKENIZER.decode(backend.submitted[0].prompt) == await prompt_of(today)
    assert (backend.submitted[0].params.grammar is not None) == isinstance(choice, dict)


async def test_old_clients_may_hide_their_functions() -> None:
    body = {"messages": [USER], "functions": [FUNCTION], "function_call": "none"}
    backend = fake_backend(CALL)
    choice = (await post(CHAT, body, backend)).json()["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", CALL)
    assert "function_call" not in choice["message"]
    assert backend.submitted[0].params.grammar is None
    assert TOKENIZER.decode(backend.submitted[0].prompt) == await prompt_of({"messages": [USER]})


async def test_functions_of_old_clients_streamed() -> None:
    body = {"messages": [USER], "functions": [FUNCTION], "stream": True}
    reply = await post(CHAT, body, fake_backend(CALL))
    choices = [json.loads(line[6:])["choices"][0] for line in reply.text.splitlines() if line.startswith("data: {")]
    parts = [choice["delta"]["function_call"] for choice in choices if "function_call" in choice["delta"]]
    assert [part["name"] for part in parts if "name" in part] == ["f"]
    assert json.loads("".join(part["arguments"] for part in parts)) == {"city": "Paris"}
    assert choices[-1]["finish_reason"] == "function_call"


async def test_a_round_trip_of_an_old_client_reads_as_one_of_today() -> None:
    called = {"name": "f", "arguments": '{"city": "Paris"}'}
    old = [USER, {"role": "assistant", "content": None, "function_call": called},
           {"role": "function", "name": "f", "content": "sunny"}]  # fmt: skip
    call = {"id": "call_1", "type": "function", "function": called}
    today = [USER, {"role": "assistant", "content": None, "tool_calls": [call]},
             {"role": "tool", "tool_call_id": "call_1", "name": "f", "content": "sunny"}]  # fmt: skip
    assert await prompt_of({"messages": old}) == await prompt_of({"messages": today})


# Errors


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": [{**USER, "content": "x " * 2000}]}, "messages"),
        (CHAT, {"messages": [USER], "max_tokens": 10_000}, "max_tokens"),
        (TEXT, {"prompt": "x " * 2000}, "prompt"),
        (RESPONSES, {"input": "x " * 2000}, "input"),
    ],
)
async def test_a_prompt_that_is_too_long(path: str, body: dict[str, Any], param: str) -> None:
    error = (await post(path, body)).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert "this model's maximum context length is 512 tokens" in error["message"]


@pytest.mark.parametrize(
    ("bias", "named", "code"),
    [
        ({"x": 1}, "'x'", "invalid_value"),
        ({"-1": 1}, "'-1'", "invalid_value"),
        ({"5": 1, "999999": 1}, "'999999'", "invalid_value"),
        ({"1" * 5000: 1}, "'1111", "invalid_value"),
        ({"5": 101}, "'5'", "decimal_above_max_value"),
        ({"5": 1, "6": -101.5}, "'6'", "decimal_below_min_value"),
        ({"7": "much"}, "'7'", "invalid_type"),
        ({"7": True}, "'7'", "invalid_type"),
    ],
)
async def test_errors_of_biases_name_the_key(bias: dict[str, Any], named: str, code: str) -> None:
    error = (await post(TEXT, {"prompt": "x", "logit_bias": bias})).json()["error"]
    assert (error["param"], error["code"]) == ("logit_bias", code)
    assert named in error["message"]


# The tokenizer


async def test_tokenizer_info() -> None:
    async with http_client(make_app(fake_backend())) as client:
        info = (await client.get("/tokenizer_info")).json()
    assert info["tokenizer_class"]
    assert info["vocab_size"] == TOKENIZER.vocab_size
    assert info["model_max_length"] == 512
    assert TOKENIZER.template is not None
    assert info["chat_template"] == TOKENIZER.template.source
    assert info["eos_token"] == TOKENIZER.special_tokens["eos_token"]
