"""A server with LoRA adapters: chosen by model, beside each other and the base, handed over, continued, loaded and unloaded."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from devices import DEVICES, on
from lora_adapters import adapted_model, adapter_folder
from parity import assert_parity, reference_tokens
from patience import PATIENCE_S
from server import Server, serve
from tiny_models import VOCAB_SIZE, reference_model, tiny_model

MODEL = "mistral"
ADAPTERS = ("all", "queries")
PROMPTS = [[3 + (number * 7 + start) % (VOCAB_SIZE - 3) for number in range(40 + start)] for start in range(3)]
NUM_TOKENS = 12


@pytest.fixture(scope="module", params=DEVICES)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """The decode worker has an adapter that the prefill worker lacks."""
    lora = [f"--lora={name}={adapter_folder(MODEL, name)}" for name in ADAPTERS]
    lora += [f"--decode-lora={name}={adapter_folder(MODEL, name)}" for name in (*ADAPTERS, "some-layers")]
    small = [
        "--kv-blocks",
        "100",
        "--threads",
        "1",
        "--local-prefill-tokens",
        "0",
        "--check-invariants",
        "--failover-wait-s",
        str(PATIENCE_S),
    ]
    with serve(str(tiny_model(MODEL)), "--served-model-name", "tiny", *small, *lora, *on(request.param)) as running:
        yield running
        running.idle_workers()


@functools.cache
def expected(model: str, prompt: tuple[int, ...]) -> tuple[list[int], list[bool]]:
    reference = reference_model(MODEL) if model == "tiny" else adapted_model(MODEL, model)
    return reference_tokens(reference, list(prompt), NUM_TOKENS)


def post(server: Server, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=PATIENCE_S)


def complete(server: Server, model: str, **fields: Any) -> dict[str, Any]:
    common = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "return_token_ids": True}
    response = post(server, model=model, **common, **fields)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def check(answer: dict[str, Any], model: str, prompt: list[int]) -> None:
    assert answer["model"] == model
    assert_parity(answer["choices"][0]["token_ids"], *expected(model, tuple(prompt)), model)


def adapters_by_role(server: Server) -> dict[str, list[str]]:
    return {worker["role"]: worker["adapters"] for worker in server.get("/cluster")["workers"]}


def test_models_name_their_parent(server: Server) -> None:
    models = {model["id"]: model for model in server.get("/v1/models")["data"]}
    assert list(models) == ["tiny", *ADAPTERS, "some-layers"]
    assert models["tiny"]["parent"] is None
    assert models["all"]["parent"] == "tiny"
    assert models["all"]["root"] == str(adapter_folder(MODEL, "all"))
    assert server.get("/v1/models/queries") == models["queries"]
    assert adapters_by_role(server) == {"prefill": [*ADAPTERS], "decode": [*ADAPTERS, "some-layers"]}


def test_adapters_and_the_base_are_served_together(server: Server) -> None:
    work = [(model, prompt) for prompt in PROMPTS for model in ("all", "tiny", "queries")]
    with ThreadPoolExecutor(len(work)) as pool:
        answers = list(pool.map(lambda one: complete(server, one[0], prompt=one[1]), work))
    for (model, prompt), answer in zip(work, answers, strict=True):
        check(answer, model, prompt)
    again = complete(server, "all", prompt=PROMPTS[0])
    check(again, "all", PROMPTS[0])
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_a_decode_worker_computes_prompts_for_an_adapter_that_no_prefill_worker_has(server: Server) -> None:
    with ThreadPoolExecutor(6) as pool:
        work = [(model, prompt) for prompt in PROMPTS for model in ("some-layers", "all")]
        answers = list(pool.map(lambda one: complete(server, one[0], prompt=one[1]), work))
    for (model, prompt), answer in zip(work, answers, strict=True):
        check(answer, model, prompt)
    alone = post(server, model="some-layers", prompt=PROMPTS[0], max_tokens=1)
    assert (alone.headers["x-kvrelay-prefill"], "x-kvrelay-transfer-id" in alone.headers) == ("local", False)


def test_an_unknown_model_is_named_with_those_there_are(server: Server) -> None:
    response = post(server, model="other", prompt="x")
    assert response.status_code == 404
    assert "'tiny', 'all', 'queries'" in response.json()["error"]["message"]
    assert httpx.get(server.url + "/v1/models/other").status_code == 404


def test_a_continuation_keeps_its_adapter(server: Server) -> None:
    prompt = PROMPTS[1]
    parent = complete(server, "all", prompt=prompt, keep_kv=True)
    handle = parent["choices"][0]["continuation"]["id"]
    refused = post(server, model="queries", continuation_of=handle, max_tokens=1)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "model"
    assert "another LoRA adapter" in refused.json()["error"]["message"]
    assert post(server, continuation_of=handle, max_tokens=1).status_code == 400  # the base is another, too
    child = complete(server, "all", continuation_of=handle, continuation_token_ids=[5, 6, 7])
    assert child["kvrelay"]["continuation"]["source"] == "lease"
    check(child, "all", [*prompt, *parent["choices"][0]["token_ids"], 5, 6, 7])
    httpx.delete(f"{server.url}/v1/continuations/{handle}", timeout=PATIENCE_S)


def test_an_adapter_is_loaded_and_unloaded_at_run_time(server: Server) -> None:
    folder, prompt = str(adapter_folder(MODEL, "rslora")), PROMPTS[2]
    loaded = post(server, "/v1/load_lora_adapter", lora_name="rslora", lora_path=folder)
    assert loaded.status_code == 200, loaded.text
    assert len(loaded.json()["workers"]) == 2
    assert server.get("/v1/models/rslora")["root"] == folder
    check(complete(server, "rslora", prompt=prompt), "rslora", prompt)
    again = post(server, "/v1/load_lora_adapter", lora_name="rslora", lora_path=folder)
    assert (again.status_code, again.json()["error"]["param"]) == (409, "lora_name")
    replaced = {"lora_name": "rslora", "lora_path": str(adapter_folder(MODEL, "patterns")), "load_inplace": True}
    assert post(server, "/v1/load_lora_adapter", **replaced).status_code == 200
    answer = complete(server, "rslora", prompt=prompt)
    assert_parity(answer["choices"][0]["token_ids"], *expected("patterns", tuple(prompt)), "another adapter of the same name")
    assert post(server, "/v1/unload_lora_adapter", lora_name="rslora").status_code == 200
    assert post(server, model="rslora", prompt=prompt).status_code == 404
    assert post(server, "/v1/unload_lora_adapter", lora_name="rslora").status_code == 404
    assert [model["id"] for model in server.get("/v1/models")["data"]] == ["tiny", *ADAPTERS, "some-layers"]


def test_what_cannot_be_loaded_is_loaded_nowhere(server: Server) -> None:
    refused = post(server, "/v1/load_lora_adapter", lora_name="none", lora_path="/nowhere")
    assert refused.status_code == 400
    assert "adapter_config.json" in refused.json()["error"]["message"]
    taken = post(server, "/v1/load_lora_adapter", lora_name="tiny", lora_path="/nowhere")
    assert (taken.status_code, taken.json()["error"]["param"]) == (400, "lora_name")
    assert adapters_by_role(server) == {"prefill": [*ADAPTERS], "decode": [*ADAPTERS, "some-layers"]}


def decode_workers(server: Server) -> list[dict[str, Any]]:
    return [each for each in server.get("/cluster")["workers"] if each["role"] == "decode" and each["state"] == "ready"]


def until_caught_up(server: Server, killed: int) -> dict[str, Any]:
    """The worker in the place of the killed one, when it has tried to load what it had missed."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        found = [each for each in decode_workers(server) if each["pid"] != killed and "adapter_failures" in each]
        if found and "stays" in found[0]["adapters"]:
            return found[0]
        assert time.monotonic() < deadline, server.get("/cluster")
        time.sleep(0.1)


def test_what_was_loaded_at_run_time_outlives_a_killed_worker(server: Server, tmp_path: pathlib.Path) -> None:
    """A stream goes on with its adapter; what was unloaded stays so; a folder that is gone is the new worker's loss alone."""
    moved, folder = tmp_path / "moved", adapter_folder(MODEL, "rslora")
    shutil.copytree(adapter_folder(MODEL, "patterns"), moved)
    for name, path in (("stays", folder), ("goes", folder), ("moved", moved)):
        assert post(server, "/v1/load_lora_adapter", lora_name=name, lora_path=str(path)).status_code == 200
    assert post(server, "/v1/unload_lora_adapter", lora_name="goes").status_code == 200
    shutil.rmtree(moved)
    prompt, num_tokens, killed = PROMPTS[0], 150, decode_workers(server)[0]["pid"]
    body = {"model": "stays", "prompt": prompt, "temperature": 0, "max_tokens": num_tokens, "ignore_eos": True}
    tokens: list[int] = []
    with httpx.stream(
        "POST", server.url + "/v1/completions", json={**body, "stream": True, "return_token_ids": True}, timeout=PATIENCE_S
    ) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            for choice in chunk["choices"]:
                tokens += choice.get("token_ids") or []
            if len(tokens) == 2:
                os.kill(killed, signal.SIGKILL)
    assert_parity(tokens, *reference_tokens(adapted_model(MODEL, "rslora"), prompt, num_tokens), "killed")
    worker = until_caught_up(server, killed)
    assert worker["adapters"] == [*ADAPTERS, "some-layers", "stays"]
    assert list(worker["adapter_failures"]) == ["moved"]
    missed = post(server, model="moved", prompt=prompt, max_tokens=2)
    assert (missed.status_code, missed.json()["error"]["code"]) == (503, "no_adapter")
    assert post(server, model="goes", prompt=prompt, max_tokens=2).status_code == 404
    check(complete(server, "all", prompt=prompt), "all", prompt)
    for name in ("stays", "moved"):
        assert post(server, "/v1/unload_lora_adapter", lora_name=name).status_code == 200
    assert [model["id"] for model in server.get("/v1/models")["data"]] == ["tiny", *ADAPTERS, "some-layers"]
