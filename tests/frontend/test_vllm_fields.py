"""Fields beside OpenAI's, as clients of vLLM expect them: token ids, offsets, ranks, usage in streams, stop_reason."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvrelay.config import RouterOptions
from kvrelay.frontend.answer.logprobs import prompt_logprobs
from kvrelay.frontend.app import create_app
from kvrelay.frontend.fake_backend import FakeBackend
from kvrelay.metrics import Metrics
from kvrelay.text.tokenizer import Tokenizer
from kvrelay.wire.serving import TokenLogprobs
from tests.frontend.serving import MODEL, TOKENIZER, fake_backend, http_client, make_app, says
from tests.text.tiny_tokenizers import folder_of

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hello"}]


async def ask(path: str, answer: str = "one two three", **body: Any) -> Any:
    asked = {"messages": MESSAGES} if path == CHAT else {"prompt": "hello"}
    async with http_client(make_app(fake_backend(answer))) as client:
        reply = await client.post(path, json={**asked, **body})
        assert reply.status_code == 200, reply.text
        if not body.get("stream"):
            return reply.json()
        return [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]


# Token ids


@pytest.mark.parametrize("settings", [{}, {"n": 2}, {"use_beam_search": True, "n": 2, "max_tokens": 4}])
async def test_the_prompts_tokens_stand_beside_the_choices_of_a_chat(settings: dict[str, Any]) -> None:
    whole = await ask(CHAT, return_token_ids=True, **settings)
    first, *rest = await ask(CHAT, return_token_ids=True, stream=True, **settings)
    assert first["prompt_token_ids"] == whole["prompt_token_ids"]
    assert all("prompt_token_ids" not in event for event in rest)
    assert all("prompt_token_ids" not in choice for event in (first, *rest) for choice in event["choices"])


# Offsets


def sentence_piece_app(answer: str) -> Any:
    tokenizer = Tokenizer.load(folder_of("sentence_piece"))
    tokens = tokenizer.encode(answer, add_special_tokens=False)
    backend = FakeBackend(eos_token_id=2, vocab_size=tokenizer.vocab_size, answer=lambda _: tokens, max_model_len=512)
    return create_app(backend, tokenizer, metrics=Metrics(), options=RouterOptions(), model=MODEL)


def assert_agrees(choice: dict[str, Any], specials: set[str]) -> None:
    """Every token is in the text at its offset, except those that the text does not show."""
    logprobs, text = choice["logprobs"], choice["text"]
    offsets = logprobs["text_offset"]
    assert offsets == sorted(offsets)
    for token, offset in zip(logprobs["tokens"], offsets, strict=True):
        if token not in specials and "\ufffd" not in token and offset < len(text):
            assert text[offset:].lstrip().startswith(token.strip()), (token, offset)
    assert offsets[-1] <= len(text)


@pytest.mark.parametrize("prompt", ["The lazy dog", "What is Paris?", "The é dog", "<s>The dog"])
@pytest.mark.parametrize("skip", [True, False])
async def test_offsets_with_a_token_before_the_prompt(prompt: str, skip: bool) -> None:
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 4, "skip_special_tokens": skip}
    async with http_client(sentence_piece_app("The quick fox")) as client:
        choice = (await client.post(COMPLETIONS, json=body)).json()["choices"][0]
        assert choice["text"].startswith(prompt)
        assert choice["logprobs"]["tokens"][0] == "<s>"
        assert choice["logprobs"]["text_offset"][:2] == ([0, 3] if prompt.startswith("<s>") else [0, 0])
        assert_agrees(choice, {"<s>", "</s>"} if skip else {"<s>"})
        streamed = await client.post(COMPLETIONS, json={**body, "stream": True})
        events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
        pieces = [event["choices"][0]["logprobs"] for event in events]
        assert [place for piece in pieces if piece for place in piece["text_offset"]] == choice["logprobs"]["text_offset"]


@pytest.mark.parametrize("prompt", ["<|im_start|>user\nhello", "naïve 東京 🙂 end", "a<|im_end|>b"])
@pytest.mark.parametrize("as_tokens", [True, False])
async def test_offsets_with_special_tokens_and_parts_of_characters(prompt: str, as_tokens: bool) -> None:
    sent = says(prompt) if as_tokens else prompt
    answer = await ask(COMPLETIONS, "🙂 fox", prompt=sent, echo=True, logprobs=0, max_tokens=20)
    choice = answer["choices"][0]
    assert_agrees(choice, {"<|im_start|>", "<|im_end|>"} if as_tokens else {"<|im_end|>"})
    after = len(says(prompt))
    assert choice["logprobs"]["text_offset"][after] == len(choice["text"]) - len("🙂 fox")


# Ranks


def test_a_prompt_token_outside_the_alternatives_has_its_rank() -> None:
    entries = [None, TokenLogprobs(-9.0, [(5, -0.1), (6, -0.2)], 40), TokenLogprobs(-0.1, [(8, -0.1)], 1)]
    shown = prompt_logprobs(TOKENIZER, [3, 7, 8], entries)
    assert shown[1] is not None
    assert shown[2] is not None
    assert {token: entry["rank"] for token, entry in shown[1].items()} == {"5": 1, "6": 2, "7": 40}
    assert {token: entry["rank"] for token, entry in shown[2].items()} == {"8": 1}


# Usage in streams


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"continuous_usage_stats": True}, "none"),
        ({"continuous_usage_stats": True, "include_usage": False}, "none"),
        ({"continuous_usage_stats": True, "include_usage": True}, "every"),
        ({"include_usage": True}, "last"),
    ],
)
async def test_usage_in_events(path: str, options: dict[str, bool], expected: str) -> None:
    events = await ask(path, stream=True, stream_options=options)
    shown = [event.get("usage") is not None for event in events]
    wanted = {"none": [False] * len(events), "every": [True] * len(events), "last": [False] * (len(events) - 1) + [True]}
    assert shown == wanted[expected]


# stop_reason


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("settings", "finish", "reason"),
    [
        ({"stop": ["three", "two"]}, "stop", "two"),
        ({"stop": "two"}, "stop", "two"),
        ({"stop_token_ids": [says("one two")[-1]]}, "stop", says("one two")[-1]),
        ({"stop_token_ids": [2]}, "stop", None),
        ({"max_tokens": 1}, "length", None),
        ({}, "stop", None),
        ({"logprobs": 1, "stop": "two"}, "stop", "two"),
    ],
)
async def test_stop_reason(path: str, settings: dict[str, Any], finish: str, reason: str | int | None) -> None:
    if path == CHAT and "logprobs" in settings:
        settings = {**settings, "logprobs": True}
    choice = (await ask(path, **settings))["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == (finish, reason)
    *rest, last = await ask(path, stream=True, **settings)
    assert (last["choices"][0]["finish_reason"], last["choices"][0]["stop_reason"]) == (finish, reason)
    assert all(event["choices"][0].get("stop_reason") is None for event in rest)


# Logprobs and limits on tokens


@pytest.mark.parametrize("stream", [False, True])
async def test_a_completion_without_alternatives_shows_the_chosen_tokens(stream: bool) -> None:
    answer = await ask(COMPLETIONS, logprobs=0, stream=stream, max_tokens=2)
    for event in answer if stream else [answer]:
        logprobs = event["choices"][0]["logprobs"]
        assert [list(top) for top in logprobs["top_logprobs"]] == [[token] for token in logprobs["tokens"]]


async def test_prompt_logprobs_are_there_also_if_nobody_asked() -> None:
    assert (await ask(CHAT))["prompt_logprobs"] is None
    assert (await ask(CHAT, prompt_logprobs=1))["prompt_logprobs"][0] is None
    assert (await ask(COMPLETIONS))["choices"][0]["prompt_logprobs"] is None
    assert len((await ask(COMPLETIONS, prompt_logprobs=1))["choices"][0]["prompt_logprobs"]) == len(says("hello"))


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_limits_on_tokens_reach_the_workers(path: str) -> None:
    body = {"allowed_token_ids": [5, 6], "bad_words": ["fox"], "logprob_token_ids": [7], "logprobs": 1}
    if path == CHAT:
        body["logprobs"] = True
    backend = fake_backend("one")
    asked = {"messages": MESSAGES} if path == CHAT else {"prompt": "hello"}
    async with http_client(make_app(backend)) as client:
        reply = await client.post(path, json={**asked, **body})
    assert reply.status_code == 200, reply.text
    params = backend.submitted[0].params
    assert (params.allowed_token_ids, params.logprob_token_ids) == ([5, 6], [7])
    assert params.bad_tokens == [says("fox"), says(" fox")]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"logprob_token_ids": [5]}, "logprob_token_ids"),
        ({"logprob_token_ids": [10**6], "logprobs": 1}, "logprob_token_ids"),
        ({"use_beam_search": True, "bad_words": ["a"]}, "bad_words"),
    ],
)
async def test_limits_on_tokens_that_cannot_be(body: dict[str, Any], param: str) -> None:
    async with http_client(make_app(fake_backend("one"))) as client:
        reply = await client.post(COMPLETIONS, json={"prompt": "hello", **body})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"].startswith(param)
