"""The client of design note 003 against a prefill and a decode process: stage 1 thinks, stage 2 searches from the thought.

What the note leaves to vLLM's benchmark is here: a request's id travels in `x-request-id`, fields besides the prompt come from
`extra_body`, and an answer is read as a stream.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from devices import DEVICES, on
from patience import PATIENCE_S
from server import Server, serve
from tiny_models import tiny_model

MAX_NEW_TOKENS, NUM_BEAMS = 3, 8


@dataclass(frozen=True)
class RequestFuncInput:
    model: str
    prompt: str
    api_url: str
    prompt_len: int
    output_len: int
    model_name: str
    request_id: str
    extra_body: dict[str, Any] = field(default_factory=dict)


@dataclass
class RequestFuncOutput:
    texts: dict[int, str] = field(default_factory=dict)  # by choice
    prompt: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # of all choices
    usage: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)


def request_openai_completions(given: RequestFuncInput) -> RequestFuncOutput:
    payload = {
        "model": given.model_name,
        "prompt": given.prompt,
        "repetition_penalty": 1.0,
        "max_tokens": given.output_len,
        "logprobs": None,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        **given.extra_body,
    }
    headers = {"Authorization": "Bearer none", "x-request-id": given.request_id}
    output = RequestFuncOutput()
    with httpx.stream("POST", given.api_url, json=payload, headers=headers, timeout=PATIENCE_S) as response:
        assert response.status_code == 200, response.read()
        output.headers = dict(response.headers)
        for line in response.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                output.usage = chunk.get("usage") or output.usage
                for choice in chunk["choices"]:
                    output.texts[choice["index"]] = output.texts.get(choice["index"], "") + choice["text"]
                    output.prompt += choice.get("prompt_token_ids") or []
                    output.tokens += choice.get("token_ids") or []
    return output


def run_pipelined_request(server: Server, request_id: str, prompt: str, prompt_token: str) -> tuple[Any, Any, str]:
    """Both outputs, and the suffix between them."""
    api_url, model = server.url + "/v1/completions", "tiny"
    req = RequestFuncInput(model, prompt, api_url, 0, 24, model, request_id, {"return_token_ids": True})
    stage_1 = request_openai_completions(req)
    thinking = stage_1.texts[0]
    s2_extra_body = {
        "n": NUM_BEAMS,
        "use_beam_search": True,
        "temperature": 0.0,
        "continuation_of": req.request_id,  # parent stage-1 request ID
        "continuation_suffix": thinking + "</think>\n" + prompt_token,
    }
    s2_input = RequestFuncInput(
        model=model,
        model_name=model,
        prompt="",  # ignored when continuation_of is set
        api_url=api_url,
        prompt_len=0,  # will be computed server-side
        output_len=MAX_NEW_TOKENS,
        request_id=f"{request_id}-s2",
        extra_body=s2_extra_body,
    )
    return stage_1, request_openai_completions(s2_input), s2_extra_body["continuation_suffix"]


def computed(server: Server) -> int:
    """Prompt tokens, by all workers."""
    return sum(worker["prompt_tokens"] for worker in server.idle_workers())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("keeps", [False, True], ids=["forgets", "keeps"])
def test_the_notes_client_thinks_and_searches_from_its_thought(device: str, keeps: bool) -> None:
    """Where the server keeps KV, the search computes its suffix and one token more."""
    folder = str(tiny_model("llama"))
    flags = ("--served-model-name", "tiny", "--kv-blocks", "200", "--threads", "1", "--local-prefill-tokens", "0")
    with serve(folder, *flags, "--keep-kv-s", "600" if keeps else "0", *on(device)) as server:
        for number, prompt in enumerate(("The quick brown fox jumps over", "What is the capital of France?")):
            before = computed(server)
            thought, found, suffix = run_pipelined_request(server, f"benchmark-{number}", prompt, "<|im_start|>")
            assert sorted(found.texts) == list(range(NUM_BEAMS))
            assert found.usage["completion_tokens"] == NUM_BEAMS * MAX_NEW_TOKENS
            assert found.headers["x-kvrelay-continued"] == "parent"
            body = {"prompt": suffix, "add_special_tokens": False}
            added = httpx.post(server.url + "/tokenize", json=body, timeout=PATIENCE_S).json()["tokens"]
            if keeps:
                assert computed(server) - before == len(thought.prompt) + len(added) + 1
            search = {"n": NUM_BEAMS, "use_beam_search": True, "max_tokens": MAX_NEW_TOKENS, "ignore_eos": True}
            whole = {"prompt": [*thought.prompt, *thought.tokens, *added], "temperature": 0, **search}
            answer = httpx.post(server.url + "/v1/completions", json=whole, timeout=PATIENCE_S).json()
            assert {choice["index"]: choice["text"] for choice in answer["choices"]} == found.texts
