"""A server with an encode, a prefill and a decode process: OpenAI's SDK, counts, and an encode worker that is killed."""

from __future__ import annotations

import base64
import concurrent.futures
import os
import pathlib
import signal
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import tokenizers
from devices import DEVICES, on
from documented import metric_names
from patience import PATIENCE_S, until
from server import Server, serve
from vision_models import make_prompt, reference_output, tiny_vl

TRANSPORTS = {"cpu": "shm", "cuda": "cuda_ipc"}
SMALL, LARGE = (70, 50), (140, 120)
ROOM = 8  # tokens: more than a small image has, and fewer than a large one


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def server(device: str) -> Iterator[Server]:
    """On a card both embeddings and KV stay on it."""
    folder: pathlib.Path = tiny_vl("qwen3_vl")
    with serve(
        str(folder), "--encode", "1", "--prefill", "1", "--decode", "1", "--local-prefill-tokens", "0", "--kv-blocks", "300",
        "--served-model-name", "tiny", "--threads", "1", "--check-invariants", "--failover-wait-s", str(PATIENCE_S),
        "--embedding-buffer-tokens", str(ROOM), *on(device),
    ) as running:  # fmt: skip
        yield running


def ask(server: Server, seed: int, text: str = "What is it?", size: tuple[int, int] = SMALL) -> tuple[str, dict[str, str], int]:
    """Text, headers, prompt tokens; the image comes before the text, as in `make_prompt`."""
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)
    data = base64.b64encode(make_prompt("qwen3_vl", [size], "", seed).images[0].data).decode()
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    answer = client.chat.completions.with_raw_response.create(
        model="tiny",
        messages=[{"role": "user", "content": [image, {"type": "text", "text": text}]}],  # type: ignore[list-item,misc]
        temperature=0,
        max_tokens=6,
        extra_body={"ignore_eos": True},
    )
    reply = answer.parse()
    assert reply.usage is not None
    return reply.choices[0].message.content or "", dict(answer.headers), reply.usage.prompt_tokens


def encoded(server: Server) -> int:
    return sum(worker["images"]["encoded"] for worker in server.idle_workers())


def test_images_over_http_give_what_transformers_gives(server: Server) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(tiny_vl("qwen3_vl") / "tokenizer.json"))
    for seed in range(2):
        prompt = make_prompt("qwen3_vl", [SMALL], "What is it?", seed)
        text, headers, num_tokens = ask(server, seed)
        assert text == tokenizer.decode(reference_output("qwen3_vl", prompt, 6)[0])
        assert num_tokens == len(prompt.tokens)
        assert headers["x-kvrelay-encode"].startswith("encode-")
    assert encoded(server) == 2
    assert ask(server, 0, "Is it?")[2] == len(make_prompt("qwen3_vl", [SMALL], "Is it?").tokens)
    assert encoded(server) == 2


def test_embeddings_move_as_kv_does_and_those_of_a_card_do_not_pass_through_its_host(server: Server, device: str) -> None:
    """One that fits into the room that is made for it, and one that comes in several rounds."""
    tokenizer = tokenizers.Tokenizer.from_file(str(tiny_vl("qwen3_vl") / "tokenizer.json"))
    for size, said in ((SMALL, "embedding taken over"), (LARGE, "an embedding came in several rounds")):
        prompt = make_prompt("qwen3_vl", [size], "What is it?", 3)
        assert ask(server, 3, size=size)[0] == tokenizer.decode(reference_output("qwen3_vl", prompt, 6)[0])
        until(lambda said=said: any(said in line for line in server.lines), lambda: server.lines[-20:])  # type: ignore[misc]
        taken = [line for line in server.lines if said in line]
        assert all(f"transport={TRANSPORTS[device]} " in line for line in taken), taken
    assert not [line for line in server.lines if "embedding copied to the host" in line or "through host memory" in line]


def test_a_worker_of_several_ranks_gives_the_same_for_images(device: str) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(tiny_vl("qwen3_vl") / "tokenizer.json"))
    flags = ("--kv-blocks", "300", "--served-model-name", "tiny", "--threads", "1", *on(device))
    with serve(str(tiny_vl("qwen3_vl")), "--whole", "1", "--tp", "2", *flags) as whole:
        prompt = make_prompt("qwen3_vl", [LARGE], "What is it?", 3)
        assert ask(whole, 3, size=LARGE)[0] == tokenizer.decode(reference_output("qwen3_vl", prompt, 6)[0])
        whole.idle_workers()


def test_a_scrape_has_every_documented_metric_and_every_figure_of_each_worker(server: Server) -> None:
    ask(server, 0)
    families = {family.name: family for family in server.metrics()}
    assert set(families) == {name.removesuffix("_total") for name in metric_names()}
    workers = {sample.labels["worker"] for sample in families["kvrelay_worker_up"].samples}
    assert len(workers) >= 3
    for name, family in families.items():
        if name.startswith("kvrelay_worker_"):
            assert family.samples, name
            assert {sample.labels.get("worker") for sample in family.samples} in (workers, {None}), name


def test_a_killed_encode_worker_is_replaced_and_its_request_goes_on(server: Server) -> None:
    """The worker stands still, so that the request is there when it is killed."""
    before = ask(server, 5)[0]
    tokenizer = tokenizers.Tokenizer.from_file(str(tiny_vl("qwen3_vl") / "tokenizer.json"))
    expected = tokenizer.decode(reference_output("qwen3_vl", make_prompt("qwen3_vl", [SMALL], "What is it?", 7), 6)[0])
    (worker,) = encode_workers(server)
    os.kill(worker["pid"], signal.SIGSTOP)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        answer = pool.submit(ask, server, 7)
        until(lambda: encode_workers(server)[0]["in_flight"] == 1)
        os.kill(worker["pid"], signal.SIGKILL)
        text, headers, _ = answer.result()
    assert text == expected
    assert headers["x-kvrelay-encode"] != worker["id"]
    assert ask_until_served(server, 5)[0] == before
    text, headers = ask_until_served(server, 6)
    assert text
    assert headers["x-kvrelay-encode"].startswith("encode-")
    assert headers["x-kvrelay-encode"] != worker["id"]
    (crashes,) = (family for family in server.metrics() if family.name == "kvrelay_worker_crashes")
    assert {sample.labels["outcome"]: sample.value for sample in crashes.samples} == {"restarted": 1.0, "given_up": 0.0}


def encode_workers(server: Server) -> list[dict[str, Any]]:
    return [worker for worker in server.get("/cluster")["workers"] if worker["role"] == "encode"]


def ask_until_served(server: Server, seed: int) -> tuple[str, dict[str, str]]:
    """A request that comes when no encode worker is up is told so at once; when one is starting, it waits."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return ask(server, seed)[:2]
        except openai.InternalServerError:
            assert time.monotonic() < deadline
            time.sleep(0.1)
