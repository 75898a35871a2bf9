"""A tool call that the length limit cut off is never content: whole, streamed, as a response, and beside a finished call. And
it can be sent back as part of the history."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.frontend.serving import TOKENIZER, fake_backend, http_client, make_app, says
from tests.text.tiny_tokenizers import CHATML, RICH

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
TOOL = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
CUT_AFTER = ("<tool_call>", '<tool_call>\n{"name": "', CALL + '\n<tool_call>\n{"na')


async def ask(path: str, text: str, **body: Any) -> str:
    async with http_client(make_app(fake_backend(text + " and more"))) as client:
        answer = await client.post(path, json={"tool_choice": "required", **body})
        assert answer.status_code == 200, answer.text
        return answer.text


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize("text", CUT_AFTER)
async def test_chat(text: str) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "tools": [{"type": "function", "function": TOOL}]}
    limit = len(says(text))
    choice = json.loads(await ask("/v1/chat/completions", text, max_tokens=limit, **body))["choices"][0]
    assert not choice["message"]["content"]
    assert choice["finish_reason"] == "length"
    calls = [call["function"]["name"] for call in choice["message"].get("tool_calls") or ()]
    assert calls == (["f"] if text.startswith(CALL) else [])
    streamed = events(await ask("/v1/chat/completions", text, max_tokens=limit, stream=True, **body))
    assert "".join(each["choices"][0]["delta"].get("content") or "" for each in streamed) == ""


@pytest.mark.parametrize("text", CUT_AFTER)
async def test_responses(text: str) -> None:
    body = {"input": "hello", "tools": [{"type": "function", **TOOL}], "max_output_tokens": len(says(text))}
    response = json.loads(await ask("/v1/responses", text, **body))
    assert response["status"] == "incomplete"
    parts = [part for item in response["output"] for part in item.get("content", ())]
    assert "".join(part["text"] for part in parts) == ""
    streamed = events(await ask("/v1/responses", text, stream=True, **body))
    assert [each["delta"] for each in streamed if each["type"] == "response.output_text.delta"] == []


# Such a call in the history


@pytest.mark.parametrize("arguments", ['{"city": "Par', "[1]", "not JSON", '"text"', "{" * 5000])
@pytest.mark.parametrize("template", [CHATML, RICH])
async def test_arguments_that_are_no_object_are_text(arguments: str, template: str) -> None:
    backend = fake_backend("hello", max_model_len=50_000)
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    items = [
        {"role": "user", "content": "hello"},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": arguments},
    ]
    async with http_client(make_app(backend, template=template)) as client:
        for path, body in (("/v1/chat/completions", {"messages": turns}), ("/v1/responses", {"input": items})):
            answer = await client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            prompt = TOKENIZER.decode(backend.submitted[-1].prompt)
            assert (arguments if template == CHATML else json.dumps(arguments)) in prompt
