"""`kvrelay bench vllm` without vLLM: its proxy before two servers, and its figures."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kvrelay.bench.main import run
from kvrelay.bench.vllm import proxy
from kvrelay.bench.vllm.scenario import summarise

_CHAT = "/v1/chat/completions"


class Servers:
    """Both of them, told apart by their hosts."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any], str]] = []
        routes = [Route(_CHAT, self._answer, methods=["POST"])]
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(Starlette(routes=routes)))

    async def _answer(self, request: Request) -> Response:
        host, body = request.url.hostname or "", await request.json()
        self.asked.append((host, body, request.headers["x-request-id"]))
        if body["messages"] == []:
            return JSONResponse({"error": "no messages"}, 400)
        if host == "prefill":
            return JSONResponse({"kv_transfer_params": {"remote_block_ids": [1, 2]}})

        async def events() -> AsyncIterator[bytes]:
            yield b"data: one\n\n"
            yield b"data: two\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Servers:
    made = Servers()
    monkeypatch.setattr(proxy, "_client", made.client)
    monkeypatch.setenv(proxy.PREFILL, "http://prefill")
    monkeypatch.setenv(proxy.DECODE, "http://decode")
    return made


async def ask(body: dict[str, Any]) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(proxy.app), base_url="http://proxy") as client:
        return await client.post(_CHAT, json=body)


async def test_the_proxy_asks_one_for_a_token_and_tells_the_other_where_the_kv_lies(servers: Servers) -> None:
    body = {"messages": ["hi"], "max_tokens": 9, "stream": True, "stream_options": {"include_usage": True}}
    answer = await ask(body)
    assert answer.text == "data: one\n\ndata: two\n\n"
    (prefill, first, request_id), (decode, second, same_id) = servers.asked
    assert (prefill, decode, request_id) == ("prefill", "decode", same_id)
    assert (first["max_tokens"], first["stream"], "stream_options" in first) == (1, False, False)
    assert first["kv_transfer_params"]["do_remote_decode"]
    assert second == body | {"kv_transfer_params": {"remote_block_ids": [1, 2]}}


async def test_a_refusal_of_the_first_is_the_answer(servers: Servers) -> None:
    answer = await ask({"messages": []})
    assert (answer.status_code, json.loads(answer.content), len(servers.asked)) == (400, {"error": "no messages"}, 1)


def test_figures_are_medians_and_ratios_those_of_a_turn() -> None:
    turns = [
        {"kvrelay": {"ttft_ms": ours}, "nixl_connector": {"ttft_ms": theirs}}
        for ours, theirs in ((10.0, 20.0), (30.0, 40.0), (90.0, 100.0))  # a machine that becomes slower
    ]
    assert summarise(turns) == {
        "turns": 3,
        "ttft_ms_kvrelay": 30.0,
        "ttft_ms_nixl_connector": 40.0,
        "ttft_ms_over_nixl_connector": 0.75,
    }


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_what_is_missing_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["vllm"]) == 2
    assert "needs vllm" in capsys.readouterr().err
