"""The codes of errors, which programs read: a value outside its limits is not one of a wrong type."""

from __future__ import annotations

from typing import Any

import pytest

from tests.frontend.serving import fake_backend, http_client, make_app

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
FUNCTION = {"type": "function", "function": {"name": "not a name"}}


@pytest.mark.parametrize(
    ("path", "field", "value", "code"),
    [
        (CHAT, "temperature", 2.5, "decimal_above_max_value"),
        (CHAT, "temperature", -1, "decimal_below_min_value"),
        (CHAT, "temperature", "hot", "invalid_type"),
        (CHAT, "max_tokens", 0, "integer_below_min_value"),
        (CHAT, "max_tokens", 2**40, "integer_above_max_value"),
        (CHAT, "max_tokens", 1.5, "invalid_type"),
        (CHAT, "top_p", 0, "decimal_below_min_value"),
        (CHAT, "n", 1000, "integer_above_max_value"),
        (CHAT, "stop", ["x"] * 17, "array_above_max_length"),
        (CHAT, "stop", "", "string_below_min_length"),
        (CHAT, "request_id", "x" * 300, "string_above_max_length"),
        (CHAT, "messages", [], "array_below_min_length"),
        (CHAT, "tools", [FUNCTION], "invalid_value"),
        (COMPLETIONS, "logprobs", 21, "integer_above_max_value"),
        (COMPLETIONS, "prompt", [], "array_below_min_length"),
        (RESPONSES, "max_output_tokens", 0, "integer_below_min_value"),
        (RESPONSES, "temperature", 3, "decimal_above_max_value"),
        (RESPONSES, "truncation", "auto", "invalid_value"),
        (RESPONSES, "background", True, "unsupported_parameter"),
        (RESPONSES, "background", "yes", "invalid_type"),
        (RESPONSES, "previous_response_id", "resp_1", "previous_response_not_found"),
    ],
)
async def test_code(path: str, field: str, value: Any, code: str) -> None:
    asked: dict[str, Any] = {
        CHAT: {"messages": [{"role": "user", "content": "hello"}]},
        COMPLETIONS: {"prompt": "hello"},
        RESPONSES: {"input": "hello"},
    }[path]
    async with http_client(make_app(fake_backend("hello"))) as client:
        answer = await client.post(path, json={**asked, field: value})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, code), error
    assert error["param"].startswith(field)
    assert error["message"].startswith(field)


async def test_a_background_response_is_refused_with_the_reason() -> None:
    async with http_client(make_app(fake_backend("hello"))) as client:
        refused = await client.post(RESPONSES, json={"input": "hello", "background": True})
        assert "background: true is not supported" in refused.json()["error"]["message"]
        assert (await client.post(RESPONSES, json={"input": "hello", "background": False})).status_code == 200
