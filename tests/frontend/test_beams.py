"""Beam search over HTTP: its fields, what is refused beside them, and its results, whole and streamed."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from kvrelay.frontend.fake_backend import FakeBackend
from kvrelay.sampling import BeamSearch
from tests.frontend.serving import MODEL, fake_backend, http_client, make_app, running_server

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PATHS = [CHAT, TEXT]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
ANSWER = "one two three four five six seven eight"


def body(path: str, **fields: Any) -> dict[str, Any]:
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": "hi"}
    return {"model": MODEL, **prompt, "use_beam_search": True, "max_tokens": 3, **fields}


def post(path: str, sent: dict[str, Any], backend: FakeBackend | None = None) -> tuple[int, Any]:
    async def main() -> tuple[int, Any]:
        async with http_client(make_app(backend or fake_backend(ANSWER))) as client:
            answer = await client.post(path, json=sent)
            return answer.status_code, answer.json()

    return asyncio.run(main())


def events(path: str, sent: dict[str, Any]) -> list[Any]:
    async def main() -> str:
        async with http_client(make_app(fake_backend(ANSWER))) as client:
            answer = await client.post(path, json={**sent, "stream": True})
            assert answer.status_code == 200
            return answer.text

    lines = [line.removeprefix("data: ") for line in asyncio.run(main()).split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("path", PATHS)
def test_a_search_is_handed_on_as_it_was_asked_for(path: str) -> None:
    backend = fake_backend(ANSWER)
    sent = body(path, beam_width=4, n=2, length_penalty=0.5, early_stopping="never", seed=7)
    assert post(path, sent, backend)[0] == 200
    params = backend.submitted[0].params
    assert params.beam == BeamSearch(width=4, length_penalty=0.5, early_stopping="never")
    assert (params.n, params.temperature, params.max_tokens) == (2, 0.0, 3)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, BeamSearch(width=1)),
        ({"n": 3}, BeamSearch(width=3)),
        ({"beam_width": 3}, BeamSearch(width=3)),
        ({"n": 2, "beam_width": 2, "early_stopping": True}, BeamSearch(width=2, early_stopping=True)),
        ({"temperature": 0, "top_p": 1, "top_k": -1, "early_stopping": False, "n": 2}, BeamSearch(width=2)),
    ],
)
def test_what_is_absent_has_a_default(fields: dict[str, Any], expected: BeamSearch) -> None:
    backend = fake_backend(ANSWER)
    assert post(TEXT, body(TEXT, **fields), backend)[0] == 200
    assert backend.submitted[0].params.beam == expected


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 129}, "beam_width"),
        ({"beam_width": 2.5}, "beam_width"),
        ({"beam_width": "4"}, "beam_width"),
        ({"n": 3, "beam_width": 2}, "n"),
        ({"early_stopping": "sometimes"}, "early_stopping"),
        ({"early_stopping": 1}, "early_stopping"),
        ({"length_penalty": "long"}, "length_penalty"),
        ({"length_penalty": 11}, "length_penalty"),
        ({"use_beam_search": "yes"}, "use_beam_search"),
        ({"temperature": 0.7}, "temperature"),
        ({"top_p": 0.9}, "top_p"),
        ({"top_k": 5}, "top_k"),
        ({"min_p": 0.1}, "min_p"),
        ({"repetition_penalty": 1.2}, "repetition_penalty"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"stop": "x"}, "stop"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_regex": "a+"}, "guided_regex"),
        ({"keep_kv": True}, "keep_kv"),
        ({"keep_kv": 30}, "keep_kv"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "structured_outputs.choice"),
        ({"use_beam_search": False, "beam_width": 2}, "beam_width"),
        ({"use_beam_search": None, "length_penalty": 2.0}, "length_penalty"),
        ({"use_beam_search": None, "early_stopping": False}, "early_stopping"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_by_name(path: str, fields: dict[str, Any], param: str) -> None:
    backend = fake_backend(ANSWER)
    status, answer = post(path, body(path, **fields), backend)
    assert (status, answer["error"]["param"]) == (400, param)
    assert not backend.submitted


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (TEXT, {"best_of": 2}, "best_of"),
        (TEXT, {"max_tokens": 0, "echo": True}, "max_tokens"),
        (TEXT, {"echo": True, "logprobs": 1}, "echo"),
        (CHAT, {"tools": [TOOL], "tool_choice": "required"}, "tools"),
        (CHAT, {"tools": [TOOL], "parallel_tool_calls": False}, "parallel_tool_calls"),
    ],
)
def test_what_only_one_of_the_two_knows_is_refused_by_name(path: str, fields: dict[str, Any], param: str) -> None:
    status, answer = post(path, body(path, **fields))
    assert (status, answer["error"]["param"]) == (400, param)


def texts(path: str, answer: Any) -> list[str]:
    return [choice["message"]["content"] if path == CHAT else choice["text"] for choice in answer["choices"]]


@pytest.mark.parametrize("path", PATHS)
def test_each_choice_carries_its_scores(path: str) -> None:
    logprobs = {"logprobs": True, "top_logprobs": 2} if path == CHAT else {"logprobs": 2}
    status, answer = post(path, body(path, n=2, beam_width=4, return_token_ids=True, **logprobs))
    assert status == 200
    assert [choice["cumulative_logprob"] for choice in answer["choices"]] == [-0.25, -0.5]
    assert [choice["beam_score"] for choice in answer["choices"]] == pytest.approx([-0.25 / 3, -0.5 / 3])
    assert [len(choice["token_ids"]) for choice in answer["choices"]] == [3, 3]
    assert answer["usage"]["completion_tokens"] == 6
    assert all(choice["logprobs"] for choice in answer["choices"])
    assert len(set(texts(path, answer))) == 2


def test_a_sampled_choice_has_no_scores() -> None:
    _, answer = post(TEXT, {"prompt": "hi", "max_tokens": 3})
    assert not {"cumulative_logprob", "beam_score"} & set(answer["choices"][0])


def test_every_prompt_has_a_search_of_its_own() -> None:
    status, answer = post(TEXT, body(TEXT, prompt=["hi", "ho"], n=2, echo=True))
    assert status == 200
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["cumulative_logprob"] for choice in answer["choices"]] == [-0.25, -0.5] * 2
    assert [text[:2] for text in texts(TEXT, answer)] == ["hi", "hi", "ho", "ho"]


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_brings_each_choice_whole(path: str) -> None:
    sent = body(path, n=3, beam_width=4, stream_options={"include_usage": True})
    chunks = events(path, sent)
    del sent["stream_options"]
    _, whole = post(path, sent)
    shown = [chunk["choices"][0] for chunk in chunks[:-1]]
    assert [choice["index"] for choice in shown] == [0, 1, 2]
    for streamed, choice, text in zip(shown, whole["choices"], texts(path, whole), strict=True):
        assert (streamed["delta"]["content"] if path == CHAT else streamed["text"]) == text
        for field in ("finish_reason", "cumulative_logprob", "beam_score"):
            assert streamed[field] == choice[field]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk" if path == CHAT else "text_completion"}


def test_the_sdk_reads_a_streamed_search() -> None:
    with running_server(make_app(fake_backend(ANSWER))) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        stream = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hi"}],
            n=2,
            max_tokens=2,
            stream=True,
            extra_body={"use_beam_search": True, "beam_width": 4},
        )
        choices = [chunk.choices[0] for chunk in stream]
    assert [choice.delta.role for choice in choices] == ["assistant", "assistant"]
    assert all(choice.delta.content and choice.finish_reason == "length" for choice in choices)
