"""Stored responses: had again, deleted, forgotten, and continued from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from kvrelay.config import RouterOptions
from kvrelay.frontend.fake_backend import FakeBackend
from kvrelay.metrics import Metrics
from kvrelay.router.continuations import Continuations
from kvrelay.wire.registry import Adapter
from tests.frontend.serving import (
    EOS,
    MODEL,
    TOKENIZER,
    fake_backend,
    http_client,
    make_app,
    running_server,
    says,
    wait_until_idle,
)

ANSWER = "one two three"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}
TOOL = {"type": "function", "name": "get_weather", "parameters": SCHEMA}


async def respond(client: httpx.AsyncClient, status: int = 200, **fields: Any) -> Any:
    answer = await client.post("/v1/responses", json={"input": "hello", "max_output_tokens": 40, **fields})
    assert answer.status_code == status, answer.text
    return answer.json() if status == 200 else answer.json()["error"]


def prompt_of(backend: FakeBackend, number: int = -1) -> str:
    return TOKENIZER.decode(list(backend.submitted[number].prompt), skip_special_tokens=False)


async def test_a_stored_response_is_had_again_until_it_is_deleted() -> None:
    backend = fake_backend(ANSWER)
    async with http_client(make_app(backend)) as client:
        made = await respond(client, store=True)
        assert made["store"] is True
        path = f"/v1/responses/{made['id']}"
        assert (await client.get(path)).json() == made
        assert (await client.delete(path)).json() == {"id": made["id"], "object": "response", "deleted": True}
        assert len(backend.released) == 1
        for method in ("GET", "DELETE"):
            answer = await client.request(method, path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "response_not_found")
        error = await respond(client, 400, previous_response_id=made["id"])
        assert (error["param"], error["code"]) == ("previous_response_id", "previous_response_not_found")


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("stream=true", "stream"),
        ("include[]=message.output_text.logprobs", "include"),
        ("starting_after=3&x", "starting_after"),
    ],
)
async def test_a_query_parameter_of_a_stored_response_is_refused_by_name(query: str, param: str) -> None:
    async with http_client(make_app(fake_backend(ANSWER))) as client:
        made = await respond(client)
        answer = await client.get(f"/v1/responses/{made['id']}?{query}")
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (400, param, "unsupported_parameter")
        assert error["message"].startswith(param)


async def test_what_is_not_stored_cannot_be_had() -> None:
    async with http_client(make_app(fake_backend(ANSWER))) as client:
        made = await respond(client, store=False)
        assert made["store"] is False
        assert (await client.get(f"/v1/responses/{made['id']}")).status_code == 404
        await respond(client, 400, previous_response_id=made["id"])


async def test_responses_belong_to_the_key_that_made_them() -> None:
    async with http_client(make_app(fake_backend(ANSWER), RouterOptions(api_key="one,two"))) as client:
        client.headers["authorization"] = "Bearer one"
        made = await respond(client)
        client.headers["authorization"] = "Bearer two"
        assert (await client.get(f"/v1/responses/{made['id']}")).status_code == 404
        await respond(client, 400, previous_response_id=made["id"])


@pytest.mark.parametrize("stream", [False, True])
async def test_the_next_response_continues_from_the_kv_of_the_one_before(stream: bool) -> None:
    backend = fake_backend(ANSWER)
    async with http_client(make_app(backend)) as client:
        first = await respond(client, store=True, instructions="Be brief.")
        fields = {"input": "and then?", "previous_response_id": first["id"], "instructions": "Be brief."}
        second = await client.post("/v1/responses", json={**fields, "stream": stream})
        assert second.status_code == 200, second.text
        assert second.headers["x-kvrelay-continued"] == "parent"
        parent, child = backend.submitted
        given = [*parent.prompt, *says(ANSWER), EOS]
        assert list(child.prompt)[: len(given)] == given
        assert child.parent is not None
        whole = rendered([("system", "Be brief."), ("user", "hello"), ("assistant", ANSWER), ("user", "and then?")])
        assert prompt_of(backend) == whole
        third_id = (await client.get("/v1/continuations")).json()["data"][-1]["request_id"] if stream else second.json()["id"]
        third = await respond(client, input="and?", previous_response_id=third_id, instructions="Be brief.")
        assert third["kvrelay"]["continuation"]["source"] == "lease"
        assert third["kvrelay"]["continuation"]["computed_tokens"] < 30
        assert third["previous_response_id"] == third_id
        assert len(backend.submitted[2].prompt) > len(child.prompt)


async def test_without_store_the_next_response_continues_from_tokens_whose_kv_was_not_kept() -> None:
    backend = fake_backend(ANSWER)
    async with http_client(make_app(backend)) as client:
        first = await respond(client)
        assert first["store"] is True
        assert (await client.get("/v1/continuations")).json()["data"] == []
        second = await respond(client, input="and then?", previous_response_id=first["id"])
        parent, child = backend.submitted
        assert (parent.keep, child.keep is None) == (None, False)
        given = [*parent.prompt, *says(ANSWER), EOS]
        assert list(child.prompt)[: len(given)] == given
        assert prompt_of(backend) == rendered([("user", "hello"), ("assistant", ANSWER), ("user", "and then?")])
        assert second["output"][0]["content"][0]["text"] == ANSWER
        told = second["kvrelay"]["continuation"]
        assert (told["source"], told["inherited_tokens"]) == ("prefill", 0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("before", "after"), [(MODEL, "sql"), ("sql", MODEL), ("sql", "poems")])
async def test_with_another_adapter_the_conversation_is_rendered_anew(stream: bool, before: str, after: str) -> None:
    backend = fake_backend(ANSWER)
    backend.adapters = {name: Adapter(name=name, digest=f"of-{name}", path="/x") for name in ("sql", "poems")}
    async with http_client(make_app(backend)) as client:
        first = await respond(client, store=True, model=before)
        fields = {"input": "and then?", "previous_response_id": first["id"], "model": after}
        second = await client.post("/v1/responses", json={**fields, "stream": stream})
        assert second.status_code == 200, second.text
        assert "x-kvrelay-continued" not in second.headers
        assert ANSWER in second.text
        child = backend.submitted[1]
        assert (child.adapter, child.parent) == ("" if after == MODEL else f"of-{after}", None)
        assert prompt_of(backend) == rendered([("user", "hello"), ("assistant", ANSWER), ("user", "and then?")])


def rendered(messages: list[tuple[str, str]]) -> str:
    text: str = TOKENIZER.render_chat(
        [{"role": role, "content": content} for role, content in messages],
        tools=None,
        add_generation_prompt=True,
        continue_final_message=False,
        variables={},
    )
    return text


@pytest.mark.parametrize("changed", [{"instructions": "Be long."}, {"tools": [TOOL]}])
async def test_with_another_beginning_the_conversation_is_rendered_anew(changed: dict[str, Any]) -> None:
    backend = fake_backend(ANSWER)
    async with http_client(make_app(backend, RouterOptions())) as client:
        first = await respond(client, store=True)
        second = await respond(client, input="and then?", previous_response_id=first["id"], max_output_tokens=8, **changed)
        assert "kvrelay" not in second
        assert backend.submitted[1].parent is None
        prompt = prompt_of(backend)
        assert prompt.index("hello") < prompt.index(ANSWER) < prompt.index("and then?")
        assert "Be long." in prompt or "get_weather" in prompt


async def test_the_result_of_a_call_continues_from_the_call() -> None:
    backend = fake_backend(CALL, max_model_len=2048)
    async with http_client(make_app(backend)) as client:
        first = await respond(client, store=True, tools=[TOOL], max_output_tokens=100)
        (call,) = first["output"]
        assert call["type"] == "function_call"
        result = [{"type": "function_call_output", "call_id": call["call_id"], "output": "18 degrees"}]
        second = await respond(client, input=result, previous_response_id=first["id"], tools=[TOOL], max_output_tokens=100)
        assert second["kvrelay"]["continuation"]["source"] == "lease"
        assert "18 degrees" in prompt_of(backend).split(CALL)[-1]


async def test_tools_together_with_a_format_are_one_grammar() -> None:
    backend = fake_backend('{"city": "Paris"}', max_model_len=2048)
    text = {"format": {"type": "json_schema", "name": "place", "schema": SCHEMA, "strict": True}}
    async with http_client(make_app(backend)) as client:
        made = await respond(client, tools=[TOOL], text=text)
        assert made["output"][0]["content"][0]["text"] == '{"city": "Paris"}'
        grammar = backend.submitted[0].params.grammar
        assert grammar is not None
        assert "get_weather" in grammar.source
        assert made["text"]["format"]["name"] == "place"


async def test_the_store_is_bounded_and_its_time_ends() -> None:
    backend = fake_backend(ANSWER)
    now = 0.0
    backend.continuations = Continuations(Metrics(), max_stored=2, stored_s=10.0, clock=lambda: now)
    async with http_client(make_app(backend)) as client:
        made = [(await respond(client))["id"] for _ in range(3)]
        found = [(await client.get(f"/v1/responses/{one}")).status_code for one in made]
        assert found == [404, 200, 200]
        now = 11.0
        assert (await client.get(f"/v1/responses/{made[2]}")).status_code == 404


@pytest.fixture
def server() -> Iterator[tuple[openai.OpenAI, FakeBackend]]:
    backend = fake_backend(ANSWER)
    with running_server(make_app(backend)) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0) as client:
        yield client, backend
        wait_until_idle(backend)


def test_the_official_sdk(server: tuple[openai.OpenAI, FakeBackend]) -> None:
    client, backend = server
    first = client.responses.create(model=MODEL, input="hello", store=True)
    second = client.responses.create(model=MODEL, input="and then?", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert backend.submitted[1].parent is not None
    assert client.responses.retrieve(second.id).output_text == ANSWER
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
