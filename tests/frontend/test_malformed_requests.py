"""Every malformed request gets its exact status and names its field. Never 422, never 500."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvrelay.config import RouterOptions
from tests.frontend.serving import MODEL, fake_backend, http_client, make_app

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
USER = {"role": "user", "content": "hi"}
FLAT_TOOL = {"type": "function", "name": "f"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [USER], **fields}


def text(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "hi", **fields}


def response(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": "hi", **fields}


BROKEN_JSON: list[bytes] = [
    b"",
    b"{",
    b"null",
    b"[]",
    b'"text"',
    b'{"messages": [{"role": "user", "content": "hi"}]} x',
    b'{"messages": [{"role": "user", "content": "hi"}], "temperature": NaN}',
    b'{"messages": [{"role": "user", "content": "hi"}], "temperature": Infinity}',
    b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}',
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"messages": [{"role": "user", "content": "\\udc00x"}]}',
    b'{"messages": [{"role": "user", "content": "a\x00b"}]}',
    b'{"metadata": ' + b"[" * 100_000,
    b'{"messages": ' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}",
]

WRONG_FIELDS: list[tuple[str, dict[str, Any], str]] = [
    # chat: messages
    (CHAT, {"model": MODEL}, "messages"),
    (CHAT, chat(messages=[]), "messages"),
    (CHAT, chat(messages="hi"), "messages"),
    (CHAT, chat(messages=[None]), "messages[0]"),
    (CHAT, chat(messages=[{}]), "messages[0].role"),
    (CHAT, chat(messages=[USER, {"role": "wizard", "content": "x"}]), "messages[1].role"),
    (CHAT, chat(messages=[{"role": 3, "content": "x"}]), "messages[0].role"),
    (CHAT, chat(messages=[{"role": "user"}]), "messages[0].content"),
    (CHAT, chat(messages=[{"role": "user", "content": None}]), "messages[0].content"),
    (CHAT, chat(messages=[{"role": "user", "content": 3}]), "messages[0].content"),
    (CHAT, chat(messages=[{"role": "user", "content": [{"type": "input_audio"}]}]), "messages[0].content[0].type"),
    (CHAT, chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), "messages[0].content[0].image_url"),
    (CHAT, chat(messages=[{"role": "user", "content": [{"type": "text"}]}]), "messages[0].content[0].text"),
    (CHAT, chat(messages=[{"role": "assistant"}]), "messages[0].content"),
    (CHAT, chat(messages=[{"role": "tool", "content": "x"}]), "messages[0].tool_call_id"),
    (CHAT, chat(messages=[{**USER, "content": "x " * 2000}]), "messages"),
    # chat: sampling
    (CHAT, chat(temperature=-0.1), "temperature"),
    (CHAT, chat(temperature=2.1), "temperature"),
    (CHAT, chat(temperature="hot"), "temperature"),
    (CHAT, chat(temperature=True), "temperature"),
    (CHAT, chat(top_p=0), "top_p"),
    (CHAT, chat(top_p=1.1), "top_p"),
    (CHAT, chat(top_k=-2), "top_k"),
    (CHAT, chat(top_k=1.5), "top_k"),
    (CHAT, chat(min_p=1.5), "min_p"),
    (CHAT, chat(repetition_penalty=0), "repetition_penalty"),
    (CHAT, chat(presence_penalty=3), "presence_penalty"),
    (CHAT, chat(frequency_penalty=-3), "frequency_penalty"),
    (CHAT, chat(n=0), "n"),
    (CHAT, chat(n=129), "n"),
    (CHAT, chat(n=10**30), "n"),
    (CHAT, chat(max_tokens=0), "max_tokens"),
    (CHAT, chat(max_tokens=-1), "max_tokens"),
    (CHAT, chat(max_tokens=10**6), "max_tokens"),
    (CHAT, chat(max_tokens=10**40), "max_tokens"),
    (CHAT, chat(max_completion_tokens=10**6), "max_completion_tokens"),
    (CHAT, chat(min_tokens=9, max_tokens=8), "min_tokens"),
    (CHAT, chat(seed=2**63), "seed"),
    (CHAT, chat(seed=0.5), "seed"),
    (CHAT, chat(stop=""), "stop"),
    (CHAT, chat(stop=["a", ""]), "stop[1]"),
    (CHAT, chat(stop=["a"] * 17), "stop"),
    (CHAT, chat(stop=[1]), "stop[0]"),
    (CHAT, chat(stop_token_ids=[10**6]), "stop_token_ids"),
    (CHAT, chat(stop_token_ids=[-1]), "stop_token_ids[0]"),
    (CHAT, chat(logit_bias={"x": 1}), "logit_bias"),
    (CHAT, chat(logit_bias={"1": 101}), "logit_bias"),
    (CHAT, chat(logit_bias={"999999": 1}), "logit_bias"),
    (CHAT, chat(logprobs=3), "logprobs"),
    (CHAT, chat(logprobs=True, top_logprobs=21), "top_logprobs"),
    (CHAT, chat(top_logprobs=2), "top_logprobs"),
    (CHAT, chat(prompt_logprobs=21), "prompt_logprobs"),
    (CHAT, chat(prompt_logprobs=1, stream=True), "prompt_logprobs"),
    (CHAT, chat(stream="yes"), "stream"),
    (CHAT, chat(stream_options={"include_usage": True}), "stream_options"),
    (CHAT, chat(stream=True, stream_options={"usage": True}), "stream_options.usage"),
    # chat: formats and tools
    (CHAT, chat(response_format={"type": "xml"}), "response_format.type"),
    (CHAT, chat(response_format={"type": "json_schema"}), "response_format.json_schema"),
    (CHAT, chat(response_format={"type": "json_schema", "json_schema": {"name": "x"}}), "response_format.json_schema.schema"),
    (CHAT, chat(response_format={"type": "json_schema", "json_schema": {"schema": {"type": "cat"}}}), "response_format"),
    (CHAT, chat(guided_regex="("), "guided_regex"),
    (CHAT, chat(guided_json="{"), "guided_json"),
    (CHAT, chat(guided_choice=[]), "guided_choice"),
    (CHAT, chat(guided_grammar="start: nowhere"), "guided_grammar"),
    (CHAT, chat(guided_regex="a", guided_choice=["a"]), "guided_choice"),
    (CHAT, chat(structured_outputs={"regex": "("}), "structured_outputs.regex"),
    (CHAT, chat(structured_outputs={"magic": 1}), "structured_outputs.magic"),
    (CHAT, chat(tools=[{"type": "web_search"}]), "tools[0].type"),
    (CHAT, chat(tools=[{"type": "function", "function": {"name": "no spaces"}}]), "tools[0].function.name"),
    (CHAT, chat(tools=[TOOL, TOOL]), "tools[1].function.name"),
    (CHAT, chat(tool_choice="required"), "tool_choice"),
    (CHAT, chat(tools=[TOOL], tool_choice="perhaps"), "tool_choice"),
    (
        CHAT,
        chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "g"}}),
        "tool_choice.function.name",
    ),
    # chat: unsupported or unknown
    (CHAT, chat(audio={"voice": "x"}), "audio"),
    (CHAT, chat(modalities=["text", "audio"]), "modalities[1]"),
    (CHAT, chat(functions=[{}]), "functions[0].name"),
    (CHAT, chat(functions=[{"name": "f"}], function_call={"name": "g"}), "function_call.name"),
    (CHAT, chat(functions=[{"name": "f", "parameters": {"not": {}}}], function_call={"name": "f"}), "functions[0].parameters"),
    (CHAT, chat(functions=[{"name": "f"}], tools=[TOOL]), "tools"),
    (CHAT, chat(function_call="auto"), "functions"),
    (CHAT, chat(prediction={"type": "content"}), "prediction"),
    (CHAT, chat(web_search_options={}), "web_search_options"),
    (CHAT, chat(reasoning_effort=3), "reasoning_effort"),
    (CHAT, chat(cache_control={"type": "ephemeral"}), "cache_control"),
    (TEXT, text(verbosity="low"), "verbosity"),
    (CHAT, chat(chat_template="{{ messages }}"), "chat_template"),
    (CHAT, chat(temprature=1), "temprature"),
    (CHAT, chat(chat_template_kwargs={"messages": []}), "chat_template_kwargs.messages"),
    (CHAT, chat(continue_final_message=True, add_generation_prompt=True), "continue_final_message"),
    (CHAT, chat(cache_salt=""), "cache_salt"),
    (CHAT, chat(priority="high"), "priority"),
    (CHAT, chat(timeout=0), "timeout"),
    (CHAT, chat(timeout="soon"), "timeout"),
    # completions
    (TEXT, {"model": MODEL}, "prompt"),
    (TEXT, text(prompt=""), "prompt"),
    (TEXT, text(prompt=[]), "prompt"),
    (TEXT, text(prompt=None), "prompt"),
    (TEXT, text(prompt=[""]), "prompt[0]"),
    (TEXT, text(prompt=["a", 1]), "prompt[0]"),
    (TEXT, text(prompt=[1, "a"]), "prompt"),
    (TEXT, text(prompt=[[1], []]), "prompt[1]"),
    (TEXT, text(prompt=[[1], ["a"]]), "prompt[1][0]"),
    (TEXT, text(prompt=[1, -1]), "prompt[1]"),
    (TEXT, text(prompt=[10**6]), "prompt"),
    (TEXT, text(prompt=[[1], [10**6]]), "prompt[1]"),
    (TEXT, text(prompt=[5] * 600), "prompt"),
    (TEXT, text(prompt=["a"] * 20, n=128), "prompt"),
    (TEXT, text(max_tokens=0), "max_tokens"),
    (TEXT, text(max_tokens=600), "max_tokens"),
    (TEXT, text(logprobs=21), "logprobs"),
    (TEXT, text(logprobs=True), "logprobs"),
    (TEXT, text(best_of=1, n=2), "best_of"),
    (TEXT, text(best_of=2, stream=True), "best_of"),
    (TEXT, text(suffix="x"), "suffix"),
    (TEXT, text(messages=[USER]), "messages"),
    (TEXT, text(truncate_prompt_tokens=0), "truncate_prompt_tokens"),
    # responses
    (RESPONSES, {"model": MODEL}, "input"),
    (RESPONSES, response(input=[]), "input"),
    (RESPONSES, response(input=[{"content": "x"}]), "input[0].role"),
    (RESPONSES, response(input=[{"role": "user"}]), "input[0].content"),
    (RESPONSES, response(input=[{"role": "user", "content": [{"type": "input_file"}]}]), "input[0].content[0].type"),
    (RESPONSES, response(input=[{"role": "user", "content": [{"type": "input_image"}]}]), "input[0].content[0].image_url"),
    (RESPONSES, response(input=[{"type": "function_call", "name": "f", "call_id": "1"}]), "input[0].arguments"),
    (RESPONSES, response(input="x " * 2000), "input"),
    (RESPONSES, response(previous_response_id="resp_1"), "previous_response_id"),
    (RESPONSES, response(conversation="c"), "conversation"),
    (RESPONSES, response(background=True), "background"),
    (RESPONSES, response(truncation="auto"), "truncation"),
    (RESPONSES, response(max_output_tokens=10**6), "max_output_tokens"),
    (RESPONSES, response(include=["reasoning.encrypted_content"]), "include[0]"),
    (RESPONSES, response(tools=[{"type": "web_search"}]), "tools[0].type"),
    (RESPONSES, response(tool_choice={"type": "function", "name": "g"}, tools=[FLAT_TOOL]), "tool_choice.name"),
    (
        RESPONSES,
        response(text={"format": {"type": "json_schema", "name": "x", "schema": {"type": "cat"}}}),
        "text.format",
    ),
    # tokenize, detokenize
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "x", "messages": [USER]}, "prompt"),
    ("/tokenize", {"prompt": "x", "tools": [TOOL]}, "tools"),
    ("/tokenize", {"prompt": 3}, "prompt"),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": [10**6]}, "tokens"),
    ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
]  # fmt: skip


def assert_error(answer: Any, status: int, param: str | None) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    assert error["message"]
    return error


@pytest.mark.parametrize(("path", "body", "param"), WRONG_FIELDS, ids=lambda value: str(value)[:60])
async def test_a_wrong_field_is_named(path: str, body: dict[str, Any], param: str) -> None:
    backend = fake_backend()
    async with http_client(make_app(backend)) as client:
        answer = await client.post(path, content=json.dumps(body))
    error = assert_error(answer, 400, param)
    assert error["type"] == "invalid_request_error"
    assert backend.submitted == []


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES, "/tokenize", "/detokenize"])
@pytest.mark.parametrize("body", BROKEN_JSON, ids=lambda body: repr(body[:50]))
async def test_a_body_that_is_no_json_object_is_400(path: str, body: bytes) -> None:
    async with http_client(make_app(fake_backend())) as client:
        answer = await client.post(path, content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES, "/tokenize", "/detokenize"])
async def test_an_unknown_model_is_404(path: str) -> None:
    bodies = {CHAT: chat(), TEXT: text(), RESPONSES: response(), "/tokenize": {"prompt": "x"}, "/detokenize": {"tokens": [1]}}
    async with http_client(make_app(fake_backend())) as client:
        answer = await client.post(path, json={**bodies[path], "model": "gpt-\x00nothing"})
    assert assert_error(answer, 404, "model")["code"] == "model_not_found"


@pytest.mark.parametrize("path", ["/nowhere", "/v1/chat/completions/", "/v1", "/v1/embeddings", "/v1/modelss"])
async def test_an_unknown_path_is_404(path: str) -> None:
    async with http_client(make_app(fake_backend())) as client:
        for method in ("GET", "POST"):
            assert_error(await client.request(method, path), 404, None)


@pytest.mark.parametrize(
    ("method", "path", "allowed"), [("GET", CHAT, "POST"), ("PUT", TEXT, "POST"), ("POST", "/health", "GET")]
)
async def test_a_wrong_method_is_405(method: str, path: str, allowed: str) -> None:
    async with http_client(make_app(fake_backend())) as client:
        answer = await client.request(method, path)
    assert_error(answer, 405, None)
    assert answer.headers["allow"] == allowed


async def test_a_prompt_too_long_says_the_numbers() -> None:
    async with http_client(make_app(fake_backend(max_model_len=20))) as client:
        answer = await client.post(TEXT, json=text(prompt=[5] * 21))
        error = assert_error(answer, 400, "prompt")
        assert error["code"] == "context_length_exceeded"
        assert "20" in error["message"]
        assert "21" in error["message"]
        assert (await client.post(TEXT, json=text(prompt=[5] * 19))).json()["usage"]["completion_tokens"] == 1
        assert (await client.post(TEXT, json=text(prompt=[5] * 21, truncate_prompt_tokens=4))).status_code == 200


async def test_a_body_too_large_is_413_declared_or_not() -> None:
    app = make_app(fake_backend(), RouterOptions(max_body_bytes=1000))

    async def chunks() -> Any:
        for _ in range(100):
            yield b" " * 100

    async with http_client(app) as client:
        assert_error(await client.post(CHAT, content=b" " * 1001), 413, None)
        assert_error(await client.post(CHAT, content=chunks()), 413, None)
        assert_error(await client.post(CHAT, content=b" " * 1000), 400, None)


async def test_content_type_and_null_fields_do_not_matter() -> None:
    body = chat(temperature=None, stop=None, tools=None, audio=None, response_format=None, max_tokens=2)
    async with http_client(make_app(fake_backend())) as client:
        for content_type in ("text/plain", "application/json; charset=utf-8", "multipart/form-data"):
            headers = {"content-type": content_type}
            assert (await client.post(CHAT, content=json.dumps(body), headers=headers)).status_code == 200


async def test_harmless_fields_are_accepted() -> None:
    body = chat(
        user="me", metadata={"a": 1}, store=True, service_tier="auto", safety_identifier="x", prompt_cache_key="k",
        request_id="mine", verbosity="medium", modalities=["text"], parallel_tool_calls=True, max_tokens=2,
    )  # fmt: skip
    async with http_client(make_app(fake_backend())) as client:
        assert (await client.post(CHAT, json=body)).status_code == 200
        assert (await client.post(CHAT, json={"messages": [USER], "rid": "mine", "max_tokens": 1})).status_code == 200
