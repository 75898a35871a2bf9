"""Continuation over HTTP, with a backend that keeps what it is asked to keep: fields, answers, streams, handles, owners."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx
import pytest

from kvrelay.config import RouterOptions
from kvrelay.errors import InternalError
from kvrelay.frontend.fake_backend import FakeBackend
from kvrelay.metrics import Metrics
from tests.frontend.serving import fake_backend, http_client, make_app, says

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = "the quick brown fox"
ANSWER = "jumps over"


def own_prompt(path: str) -> dict[str, Any]:
    return {"prompt": PROMPT} if path == COMPLETIONS else {"messages": [{"role": "user", "content": PROMPT}]}


async def post(client: httpx.AsyncClient, path: str, status: int = 200, **fields: Any) -> Any:
    answer = await client.post(path, json={"max_tokens": 64, **fields})
    assert answer.status_code == status, answer.text
    return answer.json() if status == 200 else answer.json()["error"]


def events_of(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_child_has_its_parents_tokens_and_the_suffix_for_a_prompt(path: str) -> None:
    backend = fake_backend(ANSWER)
    async with http_client(make_app(backend)) as client:
        parent = await post(client, path, keep_kv=30, **own_prompt(path))
        kept = parent["choices"][0]["continuation"]
        assert kept["kept"] is True
        assert kept["id"].startswith("kv-")
        assert 0 <= time.time() + 30 - kept["expires_at"] < 5
        assert 25 < kept["expires_in_s"] <= 30
        assert "kvrelay" not in parent
        child = await post(client, path, continuation_of=kept["id"], continuation_suffix=" the dog")
        first, second = backend.submitted
        expected = [*first.prompt, *says(ANSWER), 2, *says(" the dog")]
        assert list(second.prompt) == expected
        assert child["usage"]["prompt_tokens"] == len(expected)
        assert child["usage"]["prompt_tokens_details"]["cached_tokens"] == len(expected) - len(says(" the dog")) - 1
        told = child["kvrelay"]["continuation"]
        assert told == {
            "of": kept["id"],
            "source": "lease",
            "inherited_tokens": len(expected) - len(says(" the dog")) - 1,
            "computed_tokens": len(says(" the dog")) + 1,
        }
        assert "continuation" not in child["choices"][0]


@pytest.mark.parametrize("name", ["chosen", "header", "answer", "lease"])
async def test_a_parent_is_found_under_each_of_its_names(name: str) -> None:
    backend = fake_backend(ANSWER)
    async with http_client(make_app(backend)) as client:
        fields = {"request_id": "mine"} if name == "chosen" else {}
        headers = {"x-request-id": "from-a-header"} if name == "header" else {}
        answer = await client.post(COMPLETIONS, json={"prompt": PROMPT, "keep_kv": True, **fields}, headers=headers)
        lease = answer.json()["choices"][0]["continuation"]["id"]
        assert answer.headers["x-kvrelay-continuation"] == lease
        handle = {"chosen": "mine", "header": "from-a-header", "answer": answer.json()["id"], "lease": lease}[name]
        child = await post(client, COMPLETIONS, continuation_of=handle)
        assert child["kvrelay"]["continuation"]["of"] == handle
        assert child["kvrelay"]["continuation"]["computed_tokens"] == 1  # the last token alone
        shown = (await client.get(f"/v1/continuations/{handle}")).json()
        assert shown["id"] == lease
        assert shown["state"] == "held"


NOT_USED: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": ""}),
    (COMPLETIONS, {"prompt": []}),
    (COMPLETIONS, {"prompt": "of no use"}),
    (CHAT, {"messages": []}),
    (CHAT, {"messages": [{"role": "user", "content": "of no use"}], "add_generation_prompt": True}),
]


@pytest.mark.parametrize(("path", "prompt"), NOT_USED)
async def test_a_prompt_beside_a_parent_that_is_known_is_not_used(path: str, prompt: dict[str, Any]) -> None:
    backend = fake_backend(ANSWER)
    async with http_client(make_app(backend)) as client:
        await post(client, COMPLETIONS, prompt=PROMPT, request_id="mine")
        answer = await client.post(path, json={"continuation_of": "mine", "continuation_suffix": "!", **prompt})
        assert answer.json()["kvrelay"]["continued"] == "parent"
        assert answer.headers["x-kvrelay-continued"] == "parent"
        assert list(backend.submitted[1].prompt) == [*backend.submitted[0].prompt, *says(ANSWER), 2, *says("!")]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_beside_a_parent_that_is_gone_is_computed_instead(path: str, stream: bool) -> None:
    backend, metrics = fake_backend(ANSWER), Metrics()
    async with http_client(make_app(backend, metrics=metrics)) as client:
        await post(client, path, **own_prompt(path))
        asked = {"continuation_of": "gone", "continuation_suffix": "!", "max_tokens": 64, "stream": stream}
        answer = await client.post(path, json={**asked, **own_prompt(path)})
        body = events_of(answer.text)[-1] if stream else answer.json()
        told = body["kvrelay"]["continuation"]
        assert body["kvrelay"]["continued"] == "prefill"
        assert (told["of"], told["source"], told["inherited_tokens"]) == ("gone", "prompt", 0)
        assert answer.headers["x-kvrelay-continued"] == "prefill"
        assert list(backend.submitted[1].prompt) == list(backend.submitted[0].prompt)
        assert backend.submitted[1].parent is None
    assert 'kvrelay_continuations_total{source="prompt"} 1.0' in metrics.render().decode()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "prompt", "field"),
    [
        (COMPLETIONS, {"prompt": "x " * 600}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": "x " * 600}]}, "messages"),
    ],
)
async def test_of_what_is_too_long_the_field_is_named(path: str, prompt: dict[str, Any], field: str, stream: bool) -> None:
    async with http_client(make_app(fake_backend(ANSWER))) as client:
        await post(client, COMPLETIONS, prompt=PROMPT, request_id="known")
        suffix = {"continuation_suffix": "x " * 600, "stream": stream}
        for handle, blamed in (("gone", field), ("known", "continuation_of")):
            error = await post(client, path, 400, continuation_of=handle, **suffix, **prompt)
            assert (error["param"], error["code"]) == (blamed, "context_length_exceeded")


@pytest.mark.parametrize(("path", "prompt"), [(COMPLETIONS, {"prompt": ""}), (CHAT, {"messages": []}), (CHAT, {})])
async def test_an_empty_prompt_does_not_stand_for_a_parent_that_is_gone(path: str, prompt: dict[str, Any]) -> None:
    async with http_client(make_app(fake_backend(ANSWER))) as client:
        error = await post(client, path, 404, continuation_of="gone", **prompt)
        assert error["code"] == "continuation_not_found"


async def test_the_client_of_the_two_stage_design_runs_as_it_is_written() -> None:
    """Stage 1 streams under an id of the client's; stage 2 is a beam search with an empty prompt beside that id."""
    backend = fake_backend(ANSWER)

    async def run(prompt: str, output_len: int, request_id: str, extra_body: dict[str, Any]) -> list[str]:
        payload = {
            "model": "tiny", "prompt": prompt, "repetition_penalty": 1.0, "max_tokens": output_len, "logprobs": None,
            "stream": True, "stream_options": {"include_usage": True}, **extra_body,
        }  # fmt: skip
        headers = {"Authorization": "Bearer None", "x-request-id": request_id}
        answer = await client.post(COMPLETIONS, json=payload, headers=headers)
        assert answer.status_code == 200, answer.text
        texts: dict[int, str] = {}
        for chunk in events_of(answer.text):
            for choice in chunk["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        return [texts[index] for index in sorted(texts)]

    async with http_client(make_app(backend)) as client:
        (thinking,) = await run(PROMPT, 200, "req-s1", {})
        suffix = thinking + "</think>\n" + "<|sid_begin|>"
        s2_extra_body = {
            "n": 2,
            "use_beam_search": True,
            "temperature": 0.0,
            "continuation_of": "req-s1",
            "continuation_suffix": suffix,
        }
        beams = await run("", 3, "req-s2", s2_extra_body)
        assert len(beams) == 2
        first, second = backend.submitted
        assert list(second.prompt) == [*first.prompt, *says(ANSWER), 2, *says(suffix)]
        assert second.parent is not None


async def test_token_ids_are_appended_as_they_are() -> None:
    backend = fake_backend(ANSWER)
    async with http_client(make_app(backend)) as client:
        parent = await post(client, COMPLETIONS, prompt=PROMPT)
        child = await post(client, COMPLETIONS, continuation_of=parent["id"], continuation_token_ids=[7, 8])
        assert list(backend.submitted[1].prompt)[-2:] == [7, 8]
        assert child["kvrelay"]["continuation"]["source"] == "prefill"  # nobody asked to keep it
        assert child["kvrelay"]["continuation"]["inherited_tokens"] == 0


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_stream_says_it_in_the_last_chunk_of_each_choice_and_in_the_usage(path: str) -> None:
    backend = fake_backend(ANSWER)
    async with http_client(make_app(backend)) as client:
        body = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 64}
        answer = await client.post(path, json={**body, **own_prompt(path), "n": 2, "keep_kv": True})
        chunks = events_of(answer.text)
        last = [chunk["choices"][0] for chunk in chunks if chunk["choices"] and chunk["choices"][0]["finish_reason"]]
        leases = [choice["continuation"]["id"] for choice in sorted(last, key=lambda choice: choice["index"])]
        assert all(choice["continuation"]["kept"] for choice in last)
        assert answer.headers["x-kvrelay-continuation"].split(",") == leases
        child = await client.post(path, json={**body, "continuation_of": leases[1], "continuation_suffix": " and"})
        chunks = events_of(child.text)
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["prompt_tokens"] == len(backend.submitted[1].prompt)
        for chunk in (chunks[-1], chunks[-2]):
            assert chunk["kvrelay"]["continuation"]["source"] == "lease"
        assert not any("kvrelay" in chunk for chunk in chunks[:-2])


async def test_what_is_not_kept_is_said_with_the_reason() -> None:
    backend = fake_backend(ANSWER)
    async with http_client(make_app(backend)) as client:
        backend.keeps = False
        parent = await post(client, COMPLETIONS, prompt=PROMPT, keep_kv=True)
        kept = parent["choices"][0]["continuation"]
        assert kept == {"id": kept["id"], "kept": False, "reason": "the pool is full"}
        child = await post(client, COMPLETIONS, continuation_of=kept["id"])
        assert child["kvrelay"]["continuation"]["source"] == "prefill"


async def test_a_worker_that_says_nothing_does_not_hold_the_answer_back_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrelay.frontend.answer.generation._SETTLE_S", 0.05)
    backend = fake_backend(ANSWER)
    backend.keeps = None
    async with http_client(make_app(backend)) as client:
        parent = await post(client, COMPLETIONS, prompt=PROMPT, keep_kv=True)
        assert parent["choices"][0]["continuation"]["kept"] is False
        assert "not confirmed" in parent["choices"][0]["continuation"]["reason"]


async def test_the_server_may_keep_every_request_and_a_request_may_decline() -> None:
    backend = fake_backend(ANSWER)
    async with http_client(make_app(backend, RouterOptions(keep_kv_s=5.0))) as client:
        assert (await post(client, COMPLETIONS, prompt=PROMPT))["choices"][0]["continuation"]["kept"] is True
        declined = await post(client, COMPLETIONS, prompt=PROMPT, keep_kv=False)
        assert "continuation" not in declined["choices"][0]
        ranked = await post(client, COMPLETIONS, prompt=PROMPT, best_of=2)
        assert "continuation" not in ranked["choices"][0]
        assert [None if one.keep is None else one.keep.ttl_s for one in backend.submitted] == [5.0, None, None]


async def test_a_child_may_be_a_parent_and_a_parent_may_have_many_children() -> None:
    backend = fake_backend(ANSWER)
    async with http_client(make_app(backend)) as client:
        handle = (await post(client, CHAT, keep_kv=True, **own_prompt(CHAT)))["choices"][0]["continuation"]["id"]
        for turn in range(3):
            children = [
                post(client, CHAT, continuation_of=handle, continuation_suffix=f"<{turn}{number}>", keep_kv=True)
                for number in range(3)
            ]
            answers = await asyncio.gather(*children)
            assert {answer["kvrelay"]["continuation"]["source"] for answer in answers} == {"lease"}
            handle = answers[turn]["choices"][0]["continuation"]["id"]
        assert len(backend.submitted) == 10


async def test_several_choices_need_the_name_of_one() -> None:
    async with http_client(make_app(fake_backend(ANSWER))) as client:
        parent = await post(client, COMPLETIONS, prompt=[PROMPT, "another"], keep_kv=True)
        error = await post(client, COMPLETIONS, 400, continuation_of=parent["id"])
        assert error["param"] == "continuation_of"
        assert "2 choices" in error["message"]
        for choice in parent["choices"]:
            await post(client, COMPLETIONS, continuation_of=choice["continuation"]["id"])
        assert (await client.get(f"/v1/continuations/{parent['id']}")).status_code == 400


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_child_waits_for_a_parent_that_runs(path: str) -> None:
    backend = fake_backend(ANSWER, tick_s=0.005)
    async with http_client(make_app(backend)) as client:
        parent = asyncio.create_task(post(client, path, request_id="mine", keep_kv=True, **own_prompt(path)))
        while not backend.submitted:
            await asyncio.sleep(0.001)
        child = await post(client, path, continuation_of="mine", continuation_suffix="!")
        assert child["kvrelay"]["continuation"]["source"] == "lease"
        assert (await parent)["choices"][0]["continuation"]["kept"] is True


async def test_waiting_for_a_parent_ends_with_the_time_that_was_given() -> None:
    backend = fake_backend(ANSWER, tick_s=30.0)
    async with http_client(make_app(backend)) as client:
        parent = asyncio.create_task(post(client, COMPLETIONS, request_id="mine", prompt=PROMPT))
        while not backend.submitted:
            await asyncio.sleep(0.001)
        error = await post(client, COMPLETIONS, 504, continuation_of="mine", timeout=0.02)
        assert "still being generated" in error["message"]
        parent.cancel()


async def test_a_parent_that_failed_says_so_to_those_who_wait_and_those_who_come_later() -> None:
    backend = fake_backend(ANSWER, tick_s=0.01)
    async with http_client(make_app(backend)) as client:
        backend.fail_after = (2, InternalError("it broke"))
        parent = asyncio.create_task(post(client, COMPLETIONS, 500, request_id="mine", prompt=PROMPT))
        while not backend.submitted:
            await asyncio.sleep(0.001)
        for _ in range(2):
            error = await post(client, COMPLETIONS, 404, continuation_of="mine")
            assert error["code"] == "continuation_not_found"
            assert "it broke" in error["message"]
            await asyncio.gather(parent)


async def test_an_aborted_parent_is_continued_from_what_it_had() -> None:
    backend = fake_backend("one two three four five six", tick_s=0.002)
    async with http_client(make_app(backend)) as client:
        request = client.build_request("POST", COMPLETIONS, json={"prompt": PROMPT, "stream": True, "request_id": "mine"})
        sending = asyncio.create_task(client.send(request))
        while not (backend.submitted and backend.continuations.find("mine", "").worker_id):
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        child = await post(client, COMPLETIONS, continuation_of="mine", continuation_suffix="!")
        given = list(backend.submitted[1].prompt)
        whole = [*backend.submitted[0].prompt, *says("one two three four five six")]
        assert given[: len(backend.submitted[0].prompt)] == list(backend.submitted[0].prompt)
        assert given[: -len(says("!"))] == whole[: len(given) - len(says("!"))]
        assert child["usage"]["prompt_tokens"] == len(given)


async def test_a_stop_string_ends_the_parent_where_the_client_saw_it_end() -> None:
    backend = fake_backend("one two three four")
    async with http_client(make_app(backend)) as client:
        parent = await post(
            client,
            COMPLETIONS,
            prompt=PROMPT,
            stop="three",
            keep_kv=True,
            return_token_ids=True,
            include_stop_str_in_output=True,
        )
        choice = parent["choices"][0]
        await post(client, COMPLETIONS, continuation_of=choice["continuation"]["id"])
        assert list(backend.submitted[1].prompt) == [*backend.submitted[0].prompt, *choice["token_ids"]]


# What is refused

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"echo": True}, "echo"),
    (CHAT, {"add_generation_prompt": True}, "add_generation_prompt"),
    (CHAT, {"continue_final_message": True}, "continue_final_message"),
    (CHAT, {"add_special_tokens": True}, "add_special_tokens"),
    (CHAT, {"chat_template_kwargs": {}}, "chat_template_kwargs"),
    *(
        (path, fields, field)
        for path in (COMPLETIONS, CHAT)
        for fields, field in (
            ({"prompt_logprobs": 1}, "prompt_logprobs"),
            ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
            ({"cache_salt": "another"}, "cache_salt"),
            ({"continuation_suffix": "a", "continuation_token_ids": [1]}, "continuation_token_ids"),
            ({"continuation_token_ids": [10**6]}, "continuation_token_ids"),
            ({"continuation_token_ids": [-1]}, "continuation_token_ids"),
            ({"continuation_token_ids": ["a"]}, "continuation_token_ids"),
            ({"continuation_token_ids": "a"}, "continuation_token_ids"),
            ({"continuation_suffix": 1}, "continuation_suffix"),
            ({"continuation_of": ""}, "continuation_of"),
            ({"continuation_of": 7}, "continuation_of"),
            ({"continuation_of": "x" * 300}, "continuation_of"),
            ({"continuation_suffix": "a" * 4000}, "continuation_of"),
            ({"keep_kv": "yes"}, "keep_kv"),
            ({"keep_kv": 0}, "keep_kv"),
            ({"keep_kv": -1}, "keep_kv"),
            ({"keep_kv": 3601}, "keep_kv"),
            ({"keep_kv": [1]}, "keep_kv"),
            ({"keep_kv": True, "use_beam_search": True, "beam_width": 2}, "keep_kv"),
        )
    ),
]


@pytest.mark.parametrize(("path", "fields", "param"), REFUSED)
async def test_what_cannot_be_is_refused_by_name(path: str, fields: dict[str, Any], param: str) -> None:
    backend = fake_backend(ANSWER)
    async with http_client(make_app(backend)) as client:
        await post(client, COMPLETIONS, prompt=PROMPT, request_id="mine")
        error = await post(client, path, 400, **{"continuation_of": "mine", **fields})
        assert error["param"].partition("[")[0] == param
        assert len(backend.submitted) == 1


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {}, "prompt"),
        (CHAT, {}, "messages"),
        (COMPLETIONS, {"prompt": ""}, "prompt"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (CHAT, {"messages": []}, "messages"),
        (COMPLETIONS, {"prompt": "x", "continuation_suffix": "a"}, "continuation_suffix"),
        (COMPLETIONS, {"prompt": "x", "continuation_token_ids": []}, "continuation_token_ids"),
        (COMPLETIONS, {"prompt": "x", "keep_kv": True, "best_of": 2}, "keep_kv"),
        (COMPLETIONS, {"prompt": "x", "keep_kv": True, "max_tokens": 0, "echo": True}, "keep_kv"),
    ],
)
async def test_without_a_parent(path: str, fields: dict[str, Any], param: str) -> None:
    async with http_client(make_app(fake_backend(ANSWER))) as client:
        assert (await post(client, path, 400, **fields))["param"] == param


async def test_a_different_cache_salt_is_refused_and_the_same_is_not() -> None:
    async with http_client(make_app(fake_backend(ANSWER))) as client:
        await post(client, COMPLETIONS, prompt=PROMPT, request_id="mine", cache_salt="salt")
        assert (await post(client, COMPLETIONS, 400, continuation_of="mine"))["param"] == "cache_salt"
        await post(client, COMPLETIONS, continuation_of="mine", cache_salt="salt")


# Handles


def keyed(backend: FakeBackend) -> Any:
    return http_client(make_app(backend, RouterOptions(api_key="one,two")))


async def test_handles_belong_to_the_key_that_made_them() -> None:
    async with keyed(fake_backend(ANSWER)) as client:
        client.headers["authorization"] = "Bearer one"
        parent = await post(client, COMPLETIONS, prompt=PROMPT, request_id="mine", keep_kv=True)
        lease = parent["choices"][0]["continuation"]["id"]
        client.headers["authorization"] = "Bearer two"
        foreign = [await post(client, COMPLETIONS, 404, continuation_of=handle) for handle in (lease, "mine", parent["id"])]
        never = await post(client, COMPLETIONS, 404, continuation_of="never")
        for error, handle in zip(foreign, (lease, "mine", parent["id"]), strict=True):
            assert error["message"] == never["message"].replace("never'", f"{handle}'", 1), "it gives away that it exists"
            assert error["code"] == "continuation_not_found"
        assert (await client.get("/v1/continuations")).json()["data"] == []
        for method in ("GET", "DELETE"):
            assert (await client.request(method, f"/v1/continuations/{lease}")).status_code == 404
        client.headers["authorization"] = "Bearer one"
        await post(client, COMPLETIONS, continuation_of=lease)
        assert [entry["id"] for entry in (await client.get("/v1/continuations")).json()["data"]] == [lease]
        client.headers["authorization"] = "Bearer three"
        assert (await client.get("/v1/continuations")).status_code == 401


async def test_a_handle_shows_what_is_held_until_it_is_deleted() -> None:
    backend = fake_backend(ANSWER)
    async with http_client(make_app(backend)) as client:
        parent = await post(client, COMPLETIONS, prompt=PROMPT, request_id="a/b?c", keep_kv=60)
        lease = parent["choices"][0]["continuation"]["id"]
        shown = (await client.get(f"/v1/continuations/{lease}")).json()
        assert shown == (await client.get("/v1/continuations/a/b%3Fc")).json()
        assert shown["object"] == "continuation"
        assert shown["request_id"] == "a/b?c"
        assert shown["tokens"] == parent["usage"]["total_tokens"]
        assert shown["blocks"] == 1
        assert shown["worker"] == "whole-fake"
        deleted = await client.delete(f"/v1/continuations/{lease}")
        assert deleted.json() == {"id": lease, "object": "continuation.deleted", "deleted": True}
        assert backend.released == [lease]
        assert (await client.get("/v1/continuations")).json()["data"] == []
        for handle in (lease, "a/b?c", parent["id"]):
            error = await post(client, COMPLETIONS, 404, continuation_of=handle)
            assert "deleted" in error["message"]
        assert (await client.delete(f"/v1/continuations/{lease}")).status_code == 404
        assert (await client.post("/v1/continuations")).headers["allow"] == "GET"
        assert (await client.put(f"/v1/continuations/{lease}")).headers["allow"] == "GET, DELETE"


async def test_metrics_tell_where_the_kv_of_children_came_from() -> None:
    metrics = Metrics()
    async with http_client(make_app(fake_backend(ANSWER), metrics=metrics)) as client:
        await post(client, COMPLETIONS, prompt=PROMPT, request_id="known")
        await post(client, COMPLETIONS, prompt=PROMPT, request_id="held", keep_kv=True)
        await post(client, COMPLETIONS, continuation_of="known")
        child = await post(client, COMPLETIONS, continuation_of="held")
    text = metrics.render().decode()
    assert 'kvrelay_continuations_total{source="lease"} 1.0' in text
    assert 'kvrelay_continuations_total{source="prefill"} 1.0' in text
    inherited = child["kvrelay"]["continuation"]["inherited_tokens"]
    assert f"kvrelay_inherited_tokens_total {float(inherited)}" in text
