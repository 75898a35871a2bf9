"""A real model behind a real server, asked through the official OpenAI SDK."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
import torch
from collector import Collector
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from parity import assert_parity, reference_tokens
from patience import PATIENCE_S, until
from server import Server

from kvrelay.checkpoint.fetch import resolve
from kvrelay.config import read_environment
from kvrelay.progress import Silent

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Current weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 20}, "celsius": {"type": "boolean"}},
                "required": ["city", "celsius"],
                "additionalProperties": False,
            },
        },
    }
]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def reference() -> tuple[Any, Any]:
    transformers = pytest.importorskip("transformers")
    folder = resolve("smollm2", read_environment(), Silent())
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return transformers.AutoTokenizer.from_pretrained(folder), model


def test_a_trace_is_in_the_spans_and_in_the_log_lines_of_both_workers(
    client: openai.OpenAI, smol: Server, collector: Collector
) -> None:
    trace_id, parent = f"{random.getrandbits(128):032x}", "b7ad6b7169203331"
    headers = {"traceparent": f"00-{trace_id}-{parent}-01"}
    client.chat.completions.create(model="smollm2", messages=FRANCE, max_tokens=5, extra_headers=headers)

    def spans() -> dict[str, Span]:
        return {span.name: span for span in collector.spans if span.trace_id.hex() == trace_id}

    until(lambda: {"request", "prefill", "hand_over", "decode"} <= spans().keys())
    assert spans()["request"].parent_span_id.hex() == parent
    for words in ("KV handed over", "KV taken over"):
        until(lambda said=words: any(said in line and trace_id in line for line in smol.lines), lambda: smol.lines[-20:])  # type: ignore[misc]


def test_the_capital_of_france(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="smollm2", messages=FRANCE, temperature=0, max_tokens=20)
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_streamed_chat_says_the_same_and_reports_usage(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="smollm2", messages=FRANCE, temperature=0, max_tokens=20)
    stream = client.chat.completions.create(
        model="smollm2", messages=FRANCE, temperature=0, max_tokens=20, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens_details is not None
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens


def test_the_same_tokens_as_transformers(smol: Server, reference: tuple[Any, Any]) -> None:
    tokenizer, model = reference
    story = "Once upon a time there was a small village by the sea, and in that village lived a clockmaker. " * 6
    for prompt in ("The quick brown fox", "def fibonacci(n):", "Dear Sir or Madam,\n\nI am writing", story):
        ids = tokenizer(prompt)["input_ids"]
        body = {"model": "smollm2", "prompt": prompt, "temperature": 0, "max_tokens": 24, "return_token_ids": True}
        answer = httpx.post(smol.url + "/v1/completions", json=body, timeout=PATIENCE_S).raise_for_status().json()
        assert answer["usage"]["prompt_tokens"] == len(ids)
        got = answer["choices"][0]["token_ids"]
        assert_parity(got, *reference_tokens(model, ids, 24, frozenset({2}), got), prompt[:20])


def test_every_form_of_prompt(client: openai.OpenAI, reference: tuple[Any, Any]) -> None:
    tokenizer, _ = reference
    texts = ["One, two, three,", "The opposite of hot is"]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    alone = [
        client.completions.create(model="smollm2", prompt=text, temperature=0, max_tokens=8).choices[0].text for text in texts
    ]
    forms: list[Any] = [texts, ids]
    for form in forms:
        answer = client.completions.create(model="smollm2", prompt=form, temperature=0, max_tokens=8)
        assert [choice.text for choice in answer.choices] == alone
        assert [choice.index for choice in answer.choices] == [0, 1]
    single = client.completions.create(model="smollm2", prompt=ids[1], temperature=0, max_tokens=8)
    assert single.choices[0].text == alone[1]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_forced_tool_calls_are_valid(client: openai.OpenAI, choice: Any, stream: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": "How warm is it in Paris?"}]
    request: dict[str, Any] = {
        "model": "smollm2",
        "messages": messages,
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_tokens": 80,
    }
    if stream:
        deltas = [c.choices[0] for c in client.chat.completions.create(**request, stream=True) if c.choices]
        calls = [call for delta in deltas for call in delta.delta.tool_calls or []]
        name = "".join(call.function.name or "" for call in calls)
        arguments = "".join(call.function.arguments or "" for call in calls)
        reason = deltas[-1].finish_reason
    else:
        answer = client.chat.completions.create(**request).choices[0]
        (call,) = answer.message.tool_calls
        name, arguments, reason = call.function.name, call.function.arguments, answer.finish_reason
    assert name == "get_weather"
    assert set(json.loads(arguments)) == {"city", "celsius"}
    assert reason in ("tool_calls", "stop")


def test_json_schema_and_json_object_and_regex(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "Invent a person. Answer in JSON."}]
    schema: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    answer = client.chat.completions.create(model="smollm2", messages=messages, response_format=schema, max_tokens=60, seed=1)
    person = json.loads(answer.choices[0].message.content or "")
    assert set(person) == {"name", "age"}
    assert 0 <= person["age"] <= 120
    guided = client.completions.create(
        model="smollm2", prompt="My phone number is ", max_tokens=20, seed=2, extra_body={"guided_regex": r"[0-9]{3}-[0-9]{4}"}
    )
    first, second = guided.choices[0].text.split("-")
    assert (len(first), len(second)) == (3, 4)
    assert (first + second).isdigit()


def test_four_samples_with_a_seed_are_reproducible_and_differ(client: openai.OpenAI) -> None:
    def sample() -> list[str]:
        answer = client.completions.create(model="smollm2", prompt="My favourite animal is", n=4, seed=11, max_tokens=10)
        return [choice.text for choice in answer.choices]

    first = sample()
    assert sample() == first
    assert len(set(first)) > 1


def test_logprobs_in_both_shapes(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model="smollm2", messages=FRANCE, temperature=0, max_tokens=5, logprobs=True, top_logprobs=3
    )
    content = chat.choices[0].logprobs.content  # type: ignore[union-attr]
    assert content is not None
    assert len(content) == 5
    for entry in content:
        assert entry.logprob == entry.top_logprobs[0].logprob  # greedy took the best
        assert len(entry.top_logprobs) == 3
    legacy = client.completions.create(
        model="smollm2", prompt="Paris is the capital of", temperature=0, max_tokens=3, logprobs=2, echo=True
    )
    logprobs = legacy.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[0] is None
    assert all(isinstance(value, float) for value in logprobs.token_logprobs[1:])
    assert "".join(logprobs.tokens or []) == legacy.choices[0].text


def test_stop_strings_cut_the_text_and_count_only_what_was_kept(client: openai.OpenAI) -> None:
    prompt = "Count: one, two, three, four,"
    free = client.completions.create(model="smollm2", prompt=prompt, temperature=0, max_tokens=20)
    text = free.choices[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    cut = client.completions.create(model="smollm2", prompt=prompt, temperature=0, max_tokens=20, stop=[stop])
    assert cut.choices[0].text == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    assert cut.usage is not None
    assert free.usage is not None
    assert cut.usage.completion_tokens < free.usage.completion_tokens


def test_responses_whole_and_streamed(client: openai.OpenAI) -> None:
    answer = client.responses.create(
        model="smollm2", input="What is the capital of France?", temperature=0, max_output_tokens=20
    )
    assert "Paris" in answer.output_text
    stream = client.responses.create(
        model="smollm2", input="What is the capital of France?", temperature=0, max_output_tokens=20, stream=True
    )
    text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert text == answer.output_text


def test_64_concurrent_streams_with_random_aborts_equal_their_solo_runs(smol: Server, client: openai.OpenAI) -> None:
    rng = random.Random(5)
    topics = ["ships", "bread", "the moon", "chess", "rivers", "bees", "glass", "trains"]
    prompts = [f"A short note about {topics[i % 8]}, part {i // 8}:" for i in range(64)]
    lengths = [rng.randrange(4, 14) for _ in prompts]
    cuts = [rng.randrange(1, 6) if rng.random() < 0.4 else None for _ in prompts]

    def run(index: int, cut: int | None) -> list[str]:
        pieces = []
        with client.completions.create(
            model="smollm2", prompt=prompts[index], temperature=0, max_tokens=lengths[index], stream=True
        ) as stream:
            for chunk in stream:
                pieces.append(chunk.choices[0].text)
                if cut is not None and len(pieces) >= cut:
                    break
        return pieces

    with ThreadPoolExecutor(64) as pool:
        together = list(pool.map(run, range(64), cuts))
    smol.idle_workers()
    with ThreadPoolExecutor(4) as pool:
        alone = list(pool.map(run, range(64), [None] * 64))
    for index, (pieces, whole) in enumerate(zip(together, alone, strict=True)):
        text = "".join(whole)
        if cuts[index] is None:
            assert "".join(pieces) == text, f"stream {index}"
        else:
            assert text.startswith("".join(pieces)), f"cut stream {index}"
