"""Stands before vLLM's servers with its NIXL connector, as the proxy of vLLM's own examples does: asks the one for a single
token, then the other for the answer, and tells it where the KV lies.

    KVRELAY_BENCH_PREFILL=URL KVRELAY_BENCH_DECODE=URL uvicorn kvrelay.bench.vllm.proxy:app
"""

from __future__ import annotations

import os
import uuid
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

PREFILL, DECODE = "KVRELAY_BENCH_PREFILL", "KVRELAY_BENCH_DECODE"
_ASKED = {"do_remote_decode": True, "do_remote_prefill": False} | dict.fromkeys(
    ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
)
_client = httpx.AsyncClient(timeout=600.0, limits=httpx.Limits(max_connections=None))


def of_one_token(body: dict[str, Any]) -> dict[str, Any]:
    """What the prefill server is asked."""
    kept = {name: value for name, value in body.items() if name != "stream_options"}
    return kept | {"stream": False, "max_tokens": 1, "kv_transfer_params": _ASKED}


async def complete(request: Request) -> Response:
    body, path, headers = await request.json(), request.url.path, {"X-Request-Id": uuid.uuid4().hex}
    first = await _client.post(os.environ[PREFILL] + path, json=of_one_token(body), headers=headers)
    if first.status_code != httpx.codes.OK:
        return Response(first.content, first.status_code)
    second = body | {"kv_transfer_params": first.json()["kv_transfer_params"]}
    sent = _client.build_request("POST", os.environ[DECODE] + path, json=second, headers=headers)
    answer = await _client.send(sent, stream=True)
    kind, end = answer.headers["content-type"], BackgroundTask(answer.aclose)
    return StreamingResponse(answer.aiter_raw(), answer.status_code, media_type=kind, background=end)


async def models(request: Request) -> Response:
    return JSONResponse((await _client.get(os.environ[DECODE] + request.url.path)).json())


app = Starlette(routes=[Route("/v1/models", models), Route("/v1/chat/completions", complete, methods=["POST"])])
