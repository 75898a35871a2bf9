"""Clients that leave, pages, headers, metrics; and a fuzzer over the OpenAPI description."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from patience import PATIENCE_S
from schemathesis.checks import not_a_server_error

from kvrelay.config import RouterOptions
from kvrelay.errors import UnavailableError
from kvrelay.frontend.http.call import Call
from kvrelay.frontend.pages.openapi import openapi
from kvrelay.frontend.prompt.types import HARMLESS_FIELDS, ChatRequest, FunctionTool, StreamOptions
from kvrelay.ids import new_transfer_id
from kvrelay.metrics import Metrics
from tests.frontend.serving import MODEL, fake_backend, http_client, make_app, running_server, says, wait_until_idle

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}
ENDLESS = {"messages": [USER], "ignore_eos": True, "max_tokens": 400}


# Clients that leave


def raw_request(path: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    return b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (path.encode(), len(content), content)


def leave_after(url: str, request: bytes, *, read_first: bool) -> None:
    address = httpx.URL(url)
    with socket.create_connection((address.host, address.port)) as connection:
        connection.sendall(request)
        if read_first:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        else:
            time.sleep(0.1)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, ENDLESS),
        (CHAT, {**ENDLESS, "n": 3}),
        ("/v1/completions", {"prompt": ["a", "b", "c"], "ignore_eos": True, "max_tokens": 400}),
        ("/v1/responses", {"input": "one two three four five six"}),
    ],
)
def test_a_client_that_leaves_is_aborted(stream: bool, path: str, body: dict[str, Any]) -> None:
    backend = fake_backend("one two three " * 60, tick_s=0.02)  # seconds, if nobody aborts it
    metrics = Metrics()
    with running_server(make_app(backend, metrics=metrics)) as url:
        leave_after(url, raw_request(path, {**body, "stream": stream}), read_first=stream)
        wait_until_idle(backend)
        assert backend.num_aborted == len(backend.submitted) > 0
        page = httpx.get(f"{url}/metrics").text
    assert "kvrelay_aborted_total 1.0" in page
    assert "kvrelay_requests_in_flight 1.0" in page  # the scrape itself


def test_a_client_that_leaves_in_its_body_costs_nothing() -> None:
    backend = fake_backend()
    with running_server(make_app(backend)) as url:
        leave_after(url, raw_request(CHAT, ENDLESS)[:-10], read_first=False)
        assert httpx.get(f"{url}/health").status_code == 200
    assert backend.submitted == []


def test_many_streams_at_once_do_not_mix_and_do_not_leak() -> None:
    backend = fake_backend()
    texts: dict[int, str] = {}

    def one(number: int, url: str) -> None:
        prompt = f"number {number} of many: {'x' * number}"
        body = {"prompt": prompt, "stream": True, "max_tokens": 60, "add_special_tokens": False}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE_S) as answer:
            if number % 4 == 3:
                next(answer.iter_lines())
                return  # leaves
            lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        assert lines[-1] == "[DONE]"
        texts[number] = "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1])

    with running_server(make_app(backend)) as url:
        threads = [threading.Thread(target=one, args=(number, url)) for number in range(32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wait_until_idle(backend)
    assert texts == {n: f"number {n} of many: {'x' * n}" for n in range(32) if n % 4 != 3}


async def test_one_failing_prompt_aborts_the_others() -> None:
    backend = fake_backend(tick_s=0.01)
    original = backend.submit

    def submit(request: Any) -> Any:
        if len(backend.submitted) == 2:
            raise RuntimeError("a bug")
        return original(request)

    backend.submit = submit  # type: ignore[method-assign]
    async with http_client(make_app(backend)) as client:
        answer = await client.post("/v1/completions", json={"prompt": ["a", "b", "c"]})
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "internal_error"
    assert backend.num_open == 0


# Pages and headers


async def test_pages() -> None:
    backend = fake_backend()
    async with http_client(make_app(backend)) as client:
        assert (await client.get("/health")).json() == {"status": "ok"}
        assert (await client.get("/cluster")).json()["workers"] == []
        assert "version" in (await client.get("/version")).json()
        assert (await client.get("/")).json()["model"] == MODEL
        assert (await client.head("/health")).status_code == 200
        metrics = await client.get("/metrics")
        assert metrics.headers["content-type"].startswith("text/plain")
        style = await client.get("/assets/style.css")
        methods = {method for path in openapi()["paths"].values() for method in path}
        assert [method for method in methods if f".{method} {{ background" not in style.text] == []
        assert (await client.get("/docs")).headers["content-type"] == "text/html; charset=utf-8"
        backend.ready = False
        unready = await client.get("/health")
        assert unready.status_code == 503
        assert unready.json()["error"]["code"] == "not_ready"


async def test_health_and_metrics_need_no_key() -> None:
    metrics = Metrics()
    async with http_client(make_app(fake_backend(), RouterOptions(api_key="secret"), metrics=metrics)) as client:
        for path in ("/health", "/metrics"):
            assert (await client.get(path)).status_code == 200
        for path in ("/v1/models", "/cluster", "/docs", "/nowhere"):
            answer = await client.get(path)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
        for wrong in ("secret", "Basic secret", "Bearer", "Bearer secre", "Bearer secrets", "Bearer \xff"):
            headers = {"authorization": wrong.encode("latin-1")}
            assert (await client.get("/v1/models", headers=headers)).status_code == 401
        right = {"authorization": "bearer secret"}
        assert (await client.get("/v1/models", headers=right)).status_code == 200
        assert (await client.get("/nowhere", headers=right)).status_code == 404
        assert [metrics.requests.labels("none", status)._value.get() for status in ("401", "404")] == [10, 1]


@pytest.mark.parametrize("stream", [False, True])
async def test_headers_name_workers_and_request(stream: bool) -> None:
    body = {"messages": [USER], "max_tokens": 2, "stream": stream}
    backend = fake_backend()
    async with http_client(make_app(backend)) as client:
        answer = await client.post(CHAT, json=body, headers={"x-request-id": "from-header"})
        assert "x-kvrelay-transfer-id" not in answer.headers
        assert answer.headers["x-request-id"] == "from-header"
        assert answer.headers["x-kvrelay-prefill"] == answer.headers["x-kvrelay-decode"] == "whole-fake"
        assert answer.headers["content-type"].split(";")[0] == ("text/event-stream" if stream else "application/json")
        named = await client.post(CHAT, json={**body, "request_id": "from-body"})
        assert named.headers["x-request-id"] == "from-body"
        unnamed = await client.post(CHAT, json={**body, "request_id": "two\r\nlines: 1"})
        assert unnamed.headers["x-request-id"].startswith("chatcmpl-")
        backend.transfer_id = new_transfer_id()
        moved = await client.post(CHAT, json=body)
        assert moved.headers["x-kvrelay-transfer-id"] == backend.transfer_id


async def test_trace_headers_and_request_id_reach_the_backend() -> None:
    backend = fake_backend()
    async with http_client(make_app(backend)) as client:
        headers = {"traceparent": f"00-{'a1' * 16}-{'b2' * 8}-01", "tracestate": "vendor=1", "x-request-id": "mine"}
        await client.post(CHAT, json={"messages": [USER], "max_tokens": 1}, headers=headers)
        unknown = await client.post(CHAT, json={"messages": [USER], "max_tokens": 1}, headers={"traceparent": "00-1-2-01"})
    known, made = (request.trace["traceparent"].split("-") for request in backend.submitted)
    assert known[:2] == ["00", "a1" * 16]
    assert known[2] != "b2" * 8  # the parent of what workers do is what this server does
    assert known[3] == "01"
    assert backend.submitted[0].trace["tracestate"] == "vendor=1"
    assert backend.submitted[0].external_id == "mine"
    assert "-".join(made) == unknown.headers["traceparent"], "a trace that cannot be read is replaced, and the client told"
    assert made[3] == "00"


async def test_metrics_count_requests_and_tokens() -> None:
    metrics = Metrics()
    async with http_client(make_app(fake_backend("one two"), metrics=metrics)) as client:
        await client.post(CHAT, json={"messages": [USER]})
        await client.post(CHAT, json={"messages": []})
        page = (await client.get("/metrics")).text
    assert f'kvrelay_requests_total{{endpoint="{CHAT}",status="200"}} 1.0' in page
    assert f'kvrelay_requests_total{{endpoint="{CHAT}",status="400"}} 1.0' in page
    assert f"kvrelay_generation_tokens_total {len(says('one two')) + 1}.0" in page
    assert "kvrelay_time_to_first_token_seconds_count 1.0" in page
    assert f"kvrelay_inter_token_latency_seconds_count {len(says('one two'))}.0" in page


@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, {"messages": [USER]}), ("/v1/completions", {"prompt": "hi"}), ("/v1/responses", {"input": "hi"})]
)
async def test_a_stream_that_fails_counts_under_the_status_of_its_error(path: str, body: dict[str, Any]) -> None:
    backend, metrics = fake_backend("one two three"), Metrics()
    backend.fail_after = (2, UnavailableError("the worker broke"))
    async with http_client(make_app(backend, metrics=metrics)) as client:
        answer = await client.post(path, json={**body, "stream": True})
        page = (await client.get("/metrics")).text
    assert answer.status_code == 200, "it was sent with the first token"
    assert '"error":{"message":"the worker broke"' in answer.text.splitlines()[-2]
    assert f'kvrelay_requests_total{{endpoint="{path}",status="503"}} 1.0' in page


async def test_requests_are_logged_if_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="kvrelay"):
        async with http_client(make_app(fake_backend(), RouterOptions(log_requests=True))) as client:
            await client.post(CHAT, json={"messages": [USER], "max_tokens": 1})
    (record,) = [record for record in caplog.records if record.name == "kvrelay.frontend"]
    assert record.__dict__["fields"]["status"] == 200


async def test_tokenize_and_detokenize() -> None:
    async with http_client(make_app(fake_backend())) as client:
        answer = (await client.post("/tokenize", json={"prompt": "one two", "return_token_strs": True})).json()
        assert answer["tokens"] == says("one two")
        assert "".join(answer["token_strs"]) == "one two"
        assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 512)
        back = await client.post("/detokenize", json={"tokens": answer["tokens"]})
        assert back.json() == {"prompt": "one two"}
        chat = (await client.post("/tokenize", json={"messages": [USER]})).json()
        assert chat["tokens"] == says("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
        plain = (await client.post("/tokenize", json={"messages": [USER], "add_generation_prompt": False})).json()
        assert plain["tokens"] == says("<|im_start|>user\nhi<|im_end|>\n")


async def test_long_prompts_do_not_block_the_loop() -> None:
    """They are tokenised in a thread: other requests are answered meanwhile."""
    async with http_client(make_app(fake_backend(max_model_len=10**6))) as client:
        long = asyncio.create_task(client.post("/tokenize", json={"prompt": "word " * 100_000}))
        answered = 0
        while not long.done():
            assert (await client.get("/health")).status_code == 200
            answered += 1
            await asyncio.sleep(0.001)
        assert (await long).json()["count"] >= 100_000
    assert answered > 1


async def test_a_final_message_can_be_continued() -> None:
    backend = fake_backend()
    messages = [USER, {"role": "assistant", "content": "Well, "}]
    async with http_client(make_app(backend)) as client:
        await client.post(CHAT, json={"messages": messages, "continue_final_message": True, "max_tokens": 1})
    assert list(backend.submitted[0].prompt) == says("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nWell, ")


async def test_a_body_in_many_pieces_is_read() -> None:
    content = json.dumps({"messages": [USER], "max_tokens": 1}).encode()
    pieces = [content[start : start + 7] for start in range(0, len(content), 7)]
    messages = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    messages.append({"type": "http.request", "body": b"", "more_body": False})

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        raise AssertionError

    assert await Call({"path": "/", "headers": []}, receive, send).body(10_000) == content


def test_harmless_fields_exist() -> None:
    known = {*ChatRequest.__struct_fields__, *StreamOptions.__struct_fields__, *FunctionTool.__struct_fields__}
    assert known.issuperset(HARMLESS_FIELDS)


# The fuzzer

_fuzz_backend = fake_backend("one two three", max_model_len=256)
_fuzz_schema = schemathesis.openapi.from_asgi("/openapi.json", make_app(_fuzz_backend))


@_fuzz_schema.parametrize()
@settings(
    max_examples=25,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
def test_no_request_breaks_the_server(case: schemathesis.Case) -> None:
    answer = case.call()
    case.validate_response(answer, checks=[not_a_server_error])
    assert answer.status_code != 422
    assert _fuzz_backend.num_open == 0
