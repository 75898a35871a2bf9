"""The official SDK against a real server: what it sends is understood, and what it gets it understands."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from kvrelay.config import RouterOptions
from kvrelay.errors import InternalError, QueueFullError, UnavailableError
from kvrelay.frontend.fake_backend import FakeBackend
from kvrelay.sampling import GrammarKind
from tests.frontend.serving import MODEL, fake_backend, make_app, running_server, says, wait_until_idle

ANSWER = "one two three four five"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}
TOOL: Any = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
USER: Any = [{"role": "user", "content": "What is the capital of France?"}]

Server = Callable[..., tuple[openai.OpenAI, FakeBackend]]


@pytest.fixture
def server() -> Iterator[Server]:
    """Starts servers; at the end checks that none of their requests leaked."""
    started: list[tuple[Any, FakeBackend, openai.OpenAI]] = []

    def start(answer: str | None = ANSWER, options: RouterOptions | None = None) -> tuple[openai.OpenAI, FakeBackend]:
        backend = fake_backend(answer)
        context = running_server(make_app(backend, options))
        url = context.__enter__()
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0)
        started.append((context, backend, client))
        return client, backend

    yield start
    for context, backend, client in started:
        client.close()
        wait_until_idle(backend)
        context.__exit__(None, None, None)


def test_chat(server: Server) -> None:
    client, backend = server()
    answer = client.chat.completions.create(model=MODEL, messages=USER, temperature=0, seed=7)
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert answer.id.startswith("chatcmpl-")
    assert answer.usage is not None
    prompt = backend.submitted[0].prompt
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == len(says(ANSWER)) + 1
    assert answer.usage.total_tokens == len(prompt) + len(says(ANSWER)) + 1
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == len(prompt) // 2
    params = backend.submitted[0].params
    assert (params.temperature, params.top_p, params.seed) == (0.0, 1.0, 7)
    assert params.max_tokens == backend.max_model_len - len(prompt)


def test_streamed_chat_is_one_event_per_token(server: Server) -> None:
    client, _ = server()
    chunks = list(
        client.chat.completions.create(model=MODEL, messages=USER, stream=True, stream_options={"include_usage": True})
    )
    *tokens, usage = chunks
    assert len(tokens) == len(says(ANSWER)) + 1
    assert "".join(chunk.choices[0].delta.content or "" for chunk in tokens) == ANSWER
    assert [chunk.choices[0].delta.role for chunk in tokens] == ["assistant"] + [None] * (len(tokens) - 1)
    assert [chunk.choices[0].finish_reason for chunk in tokens] == [None] * (len(tokens) - 1) + ["stop"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.completion_tokens == len(tokens)


def test_usage_can_come_with_every_event(server: Server) -> None:
    client, _ = server()
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(client.chat.completions.create(model=MODEL, messages=USER, stream=True, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
    assert counts == [*range(1, len(chunks)), len(chunks) - 1]


def test_several_choices_whole_and_streamed(server: Server) -> None:
    client, _ = server()
    whole = client.chat.completions.create(model=MODEL, messages=USER, n=3)
    tokens = says(ANSWER)
    texts = {choice.index: choice.message.content for choice in whole.choices}
    assert len(texts) == 3
    assert texts[0] == ANSWER
    assert ANSWER.endswith(texts[2] or "?")
    assert whole.usage is not None
    assert whole.usage.completion_tokens == sum(len(tokens) - sample + 1 for sample in range(3))
    streamed = dict.fromkeys(range(3), "")
    for chunk in client.chat.completions.create(model=MODEL, messages=USER, n=3, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts


def test_completions_of_every_prompt_form(server: Server) -> None:
    client, backend = server()
    for prompt in ("Hello", ["Hello", "you"], [5, 6, 7], [[5, 6], [7]]):
        answer = client.completions.create(model=MODEL, prompt=prompt, n=2, max_tokens=3)
        count = len(prompt) if isinstance(prompt[0], list) or prompt == ["Hello", "you"] else 1
        assert [choice.index for choice in answer.choices] == list(range(2 * count))
        assert all(choice.finish_reason == "length" for choice in answer.choices)
    assert [list(request.prompt) for request in backend.submitted[-2:]] == [[5, 6], [7]]
    assert client.completions.create(model=MODEL, prompt="x").usage.completion_tokens <= 16  # type: ignore[union-attr]


def test_streamed_completions_equal_whole_ones(server: Server) -> None:
    client, _ = server()
    whole = client.completions.create(model=MODEL, prompt=["Hello", "you"], max_tokens=4, n=2)
    streamed = dict.fromkeys(range(4), "")
    for chunk in client.completions.create(model=MODEL, prompt=["Hello", "you"], max_tokens=4, n=2, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == {choice.index: choice.text for choice in whole.choices}


def test_chat_logprobs(server: Server) -> None:
    client, _ = server("naïve 🙂")
    answer = client.chat.completions.create(model=MODEL, messages=USER, logprobs=True, top_logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    raw = b"".join(bytes(entry.bytes or []) for entry in logprobs.content[:-1])
    assert raw.decode() == "naïve 🙂"
    assert all(len(entry.top_logprobs) == 2 and entry.top_logprobs[0].token == entry.token for entry in logprobs.content)
    chunks = list(client.chat.completions.create(model=MODEL, messages=USER, logprobs=True, top_logprobs=2, stream=True))
    streamed = [entry for chunk in chunks for entry in (chunk.choices[0].logprobs.content or [])]  # type: ignore[union-attr]
    assert streamed == logprobs.content


def test_completion_logprobs_with_echo(server: Server) -> None:
    client, _ = server()
    answer = client.completions.create(model=MODEL, prompt="Paris is", echo=True, logprobs=1, max_tokens=2)
    choice = answer.choices[0]
    logprobs = choice.logprobs
    assert choice.text.startswith("Paris is")
    assert logprobs is not None
    assert "".join(logprobs.tokens or []) == choice.text
    assert logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[0] is None
    assert logprobs.text_offset == [
        len("".join((logprobs.tokens or [])[:place])) for place in range(len(logprobs.tokens or []))
    ]
    scored = client.completions.create(model=MODEL, prompt="Paris is", echo=True, logprobs=1, max_tokens=0)
    assert scored.choices[0].text == "Paris is"
    assert scored.usage is not None
    assert scored.usage.completion_tokens == 0
    streamed = "".join(
        chunk.choices[0].text
        for chunk in client.completions.create(model=MODEL, prompt="Paris is", echo=True, logprobs=1, max_tokens=2, stream=True)
    )
    assert streamed == choice.text


def test_best_of_keeps_the_likeliest(server: Server) -> None:
    client, backend = server()
    answer = client.completions.create(model=MODEL, prompt="x", n=2, best_of=4, max_tokens=3)
    assert len(answer.choices) == 2
    assert backend.submitted[0].params.n == 4
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_the_text_and_the_request(server: Server, stream: bool) -> None:
    client, backend = server()
    if stream:
        chunks = list(client.chat.completions.create(model=MODEL, messages=USER, stop=["wo th"], stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        finish = chunks[-1].choices[0].finish_reason
    else:
        answer = client.chat.completions.create(model=MODEL, messages=USER, stop=["wo th"])
        text, finish = answer.choices[0].message.content or "", answer.choices[0].finish_reason
        assert answer.usage is not None
        assert answer.usage.completion_tokens == backend.finished[0][1]
    assert (text, finish) == ("one t", "stop")
    (sample, kept), *_ = backend.finished
    assert sample == 0
    assert 0 < kept < len(says(ANSWER))
    included = client.chat.completions.create(
        model=MODEL, messages=USER, stop="wo th", extra_body={"include_stop_str_in_output": True}
    )
    assert included.choices[0].message.content == "one two th"


def test_tool_calls_whole_and_streamed(server: Server) -> None:
    client, backend = server(f"I will look. {CALL}")
    answer = client.chat.completions.create(model=MODEL, messages=USER, tools=[TOOL])
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    assert message.content == "I will look."
    assert message.tool_calls is not None
    call: Any = message.tool_calls[0]
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
    assert backend.submitted[0].params.grammar is None
    with client.chat.completions.stream(model=MODEL, messages=USER, tools=[TOOL]) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    assert final.message.tool_calls is not None
    streamed: Any = final.message.tool_calls[0]
    assert (streamed.function.name, streamed.function.arguments) == (call.function.name, call.function.arguments)
    assert final.message.content == "I will look."
    # And the conversation goes on.
    result: Any = [*USER, message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    assert client.chat.completions.create(model=MODEL, messages=result, tools=[TOOL]).choices


def test_forced_tool_calls_go_through_a_grammar(server: Server) -> None:
    client, backend = server(CALL)
    choices: list[Any] = ["required", {"type": "function", "function": {"name": "get_weather"}}]
    for choice in choices:
        answer = client.chat.completions.create(model=MODEL, messages=USER, tools=[TOOL], tool_choice=choice)
        assert answer.choices[0].finish_reason == "tool_calls"
        assert answer.choices[0].message.content is None
        grammar = backend.submitted[-1].params.grammar
        assert grammar is not None
        assert grammar.kind is GrammarKind.LARK
        assert '"city"' in grammar.source
    plain = client.chat.completions.create(model=MODEL, messages=USER, tools=[TOOL], tool_choice="none")
    assert plain.choices[0].message.content == CALL


def test_one_call_only_if_parallel_calls_are_forbidden(server: Server) -> None:
    client, _ = server(CALL + CALL)
    both = client.chat.completions.create(model=MODEL, messages=USER, tools=[TOOL])
    assert len(both.choices[0].message.tool_calls or []) == 2
    one = client.chat.completions.create(model=MODEL, messages=USER, tools=[TOOL], parallel_tool_calls=False)
    assert len(one.choices[0].message.tool_calls or []) == 1
    assert one.choices[0].finish_reason == "tool_calls"


def test_formats_become_grammars(server: Server) -> None:
    client, backend = server()
    formats: list[tuple[Any, GrammarKind]] = [
        ({"type": "json_object"}, GrammarKind.JSON_OBJECT),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": PARAMETERS, "strict": True}}, GrammarKind.JSON_SCHEMA),
    ]
    for wanted, kind in formats:
        client.chat.completions.create(model=MODEL, messages=USER, response_format=wanted)
        grammar = backend.submitted[-1].params.grammar
        assert grammar is not None
        assert grammar.kind is kind
    for extra, kind in (
        ({"guided_regex": "a+"}, GrammarKind.REGEX),
        ({"guided_choice": ["a", "b"]}, GrammarKind.CHOICE),
        ({"guided_json": PARAMETERS}, GrammarKind.JSON_SCHEMA),
        ({"guided_grammar": 'start: "a"'}, GrammarKind.LARK),
        ({"structured_outputs": {"json": PARAMETERS}}, GrammarKind.JSON_SCHEMA),
    ):
        client.completions.create(model=MODEL, prompt="x", extra_body=extra)
        grammar = backend.submitted[-1].params.grammar
        assert grammar is not None
        assert grammar.kind is kind
    client.chat.completions.create(model=MODEL, messages=USER, response_format={"type": "text"})
    assert backend.submitted[-1].params.grammar is None


def test_reasoning_is_told_apart(server: Server) -> None:
    client, _ = server("<think>one two</think>\n\nthree four", RouterOptions(reasoning_parser="think"))
    answer = client.chat.completions.create(model=MODEL, messages=USER)
    assert answer.choices[0].message.content == "three four"
    assert answer.choices[0].message.model_extra is not None
    assert answer.choices[0].message.model_extra["reasoning_content"] == "one two"
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens
    parts: dict[str, str] = {"content": "", "reasoning_content": ""}
    for chunk in client.chat.completions.create(model=MODEL, messages=USER, stream=True):
        delta = chunk.choices[0].delta.model_dump()
        for name in parts:
            parts[name] += delta.get(name) or ""
    assert parts == {"content": "three four", "reasoning_content": "one two"}


def test_extras_that_other_servers_know(server: Server) -> None:
    client, backend = server()
    extra = {
        "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2, "stop_token_ids": [9], "ignore_eos": True,
        "priority": -3, "cache_salt": "mine", "return_token_ids": True, "prompt_logprobs": 1,
    }  # fmt: skip
    answer = client.chat.completions.create(model=MODEL, messages=USER, max_tokens=4, extra_body=extra)
    request = backend.submitted[0]
    params = request.params
    assert (params.top_k, params.min_p, params.repetition_penalty, params.min_tokens) == (5, 0.1, 1.1, 2)
    assert (params.stop_token_ids, params.ignore_eos, request.priority, request.cache_salt) == ([9], True, -3, "mine")
    assert answer.model_extra is not None
    assert answer.model_extra["prompt_token_ids"] == list(request.prompt)
    assert len(answer.model_extra["prompt_logprobs"]) == len(request.prompt)
    assert answer.choices[0].model_extra == {"token_ids": says(ANSWER)[:4], "stop_reason": None}


def test_responses(server: Server) -> None:
    client, backend = server()
    answer = client.responses.create(model=MODEL, input="Hello", instructions="Be brief.", max_output_tokens=40)
    assert answer.output_text == ANSWER
    assert answer.status == "completed"
    assert answer.usage is not None
    assert answer.usage.input_tokens == len(backend.submitted[0].prompt)
    cut = client.responses.create(model=MODEL, input=[{"role": "user", "content": "Hello"}], max_output_tokens=2)
    assert cut.status == "incomplete"
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"
    parts: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        *(item.model_dump() for item in answer.output),
        {"role": "user", "content": "again"},
    ]
    assert client.responses.create(model=MODEL, input=parts).output_text == ANSWER


def test_streamed_responses(server: Server) -> None:
    client, _ = server()
    events = list(client.responses.create(model=MODEL, input="Hello", stream=True))
    names = [event.type for event in events]
    assert names[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert names[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == ANSWER
    with client.responses.stream(model=MODEL, input="Hello") as stream:
        assert stream.get_final_response().output_text == ANSWER


def test_responses_call_functions(server: Server) -> None:
    client, backend = server(CALL)
    tool: Any = {"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": True}
    answer = client.responses.create(model=MODEL, input="Hello", tools=[tool])
    call: Any = answer.output[0]
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "get_weather", {"city": "Paris"})
    assert backend.submitted[0].params.grammar is not None
    events = list(client.responses.create(model=MODEL, input="Hello", tools=[tool], stream=True))
    deltas = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    assert deltas == call.arguments
    follow_up: Any = [
        {"role": "user", "content": "Hello"},
        call.model_dump(exclude_none=True),
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
    ]
    assert client.responses.create(model=MODEL, input=follow_up, tools=[tool]).status == "completed"


def test_responses_with_a_schema(server: Server) -> None:
    client, backend = server('{"city": "Paris"}')
    wanted: Any = {"format": {"type": "json_schema", "name": "x", "schema": PARAMETERS, "strict": True}}
    answer = client.responses.create(model=MODEL, input="Hello", text=wanted, temperature=0)
    assert json.loads(answer.output_text) == {"city": "Paris"}
    grammar = backend.submitted[0].params.grammar
    assert grammar is not None
    assert grammar.kind is GrammarKind.JSON_SCHEMA


def test_models(server: Server) -> None:
    client, backend = server()
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert client.models.retrieve(MODEL).id == MODEL
    assert model.model_extra is not None
    assert model.model_extra["max_model_len"] == backend.max_model_len
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/model")


def test_errors_have_their_sdk_classes(server: Server) -> None:
    client, backend = server()
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=USER, temperature=9)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=USER)
    backend.refuse = QueueFullError("full", retry_after_s=7)
    with pytest.raises(openai.RateLimitError) as full:
        client.chat.completions.create(model=MODEL, messages=USER, stream=True)
    assert full.value.response.headers["retry-after"] == "7"
    backend.refuse = UnavailableError("no worker")
    with pytest.raises(openai.InternalServerError) as unavailable:
        client.chat.completions.create(model=MODEL, messages=USER)
    assert unavailable.value.status_code == 503


def test_an_error_in_the_middle_of_a_stream_is_raised(server: Server) -> None:
    client, backend = server()
    backend.fail_after = (2, InternalError("the worker broke"))
    chunks = client.chat.completions.create(model=MODEL, messages=USER, stream=True)
    assert [next(chunks).choices[0].finish_reason for _ in range(2)] == [None, None]
    with pytest.raises(openai.APIError, match="the worker broke"):
        next(chunks)
    with pytest.raises(openai.APIError, match="the worker broke"):
        list(client.responses.create(model=MODEL, input="Hello", stream=True))
    with pytest.raises(openai.InternalServerError):
        client.chat.completions.create(model=MODEL, messages=USER)
    with pytest.raises(openai.InternalServerError):
        client.completions.create(model=MODEL, prompt=["a", "b", "c"])


def test_api_keys(server: Server) -> None:
    client, _ = server(options=RouterOptions(api_key="secret, key"))
    assert client.chat.completions.create(model=MODEL, messages=USER).choices
    with pytest.raises(openai.AuthenticationError) as caught:
        client.with_options(api_key="wrong").models.list()
    assert caught.value.code == "invalid_api_key"
