"""A real server with a prefill and a decode process: clients that leave, workers that are killed, every transport.

On a card both workers share it, and KV moves by cuda_ipc."""

from __future__ import annotations

import json
import os
import pathlib
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import torch
import transformers
from devices import DEVICES, ON_A_CARD, on
from parity import assert_parity, reference_tokens
from patience import PATIENCE_S, until
from server import Server, is_idle, serve
from tiny_models import VOCAB_SIZE, write_tokenizer

from kvrelay.checkpoint.fetch import resolve
from kvrelay.config import read_environment
from kvrelay.progress import Silent

MAX_LEN = 2048
LONG_PROMPT = [3 + number * 7 % (VOCAB_SIZE - 3) for number in range(1500)]  # computed in some fifty steps
MID_PROMPT_S = 0.3  # usually in the middle of it; nothing depends on that
SHAPE = {"hidden_size": 192, "intermediate_size": 384, "num_hidden_layers": 6, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def model() -> Iterator[str]:
    """Small enough to start quickly, large enough that prompts and answers take a while."""
    with tempfile.TemporaryDirectory(prefix="kvrelay-relay-") as folder:
        torch.manual_seed(3)
        config = transformers.LlamaConfig(
            **SHAPE,
            vocab_size=VOCAB_SIZE,
            num_key_value_heads=2,
            max_position_embeddings=MAX_LEN,
            initializer_range=0.3,
            bos_token_id=0,
            eos_token_id=2,
            pad_token_id=0,
        )
        transformers.LlamaForCausalLM(config).float().save_pretrained(folder)
        write_tokenizer(pathlib.Path(folder))
        yield folder


def options(*more: str) -> list[str]:
    pool = ["--kv-blocks", "400", "--token-budget", "32", "--threads", "1", "--served-model-name", "tiny"]
    return [*pool, "--local-prefill-tokens", "0", "--failover-wait-s", "60", "--check-invariants", *more]


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def server(model: str, device: str) -> Iterator[Server]:
    with serve(model, *options(*on(device))) as running:
        yield running


@pytest.fixture(autouse=True)
def _idle_again(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "server" in request.fixturenames:
        request.getfixturevalue("server").idle_workers()


@dataclass
class Streamed:
    """A streamed answer as a client sees it."""

    text: str = ""
    num_tokens: int = 0
    finish: str | None = None
    error: dict[str, Any] | None = None
    complete: bool = False  # [DONE] came
    headers: dict[str, str] = field(default_factory=dict)


def body(prompt: Any, **changes: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": 40, "ignore_eos": True, **changes}


def ask(server: Server, prompt: Any, **changes: Any) -> httpx.Response:
    return httpx.post(server.url + "/v1/completions", json=body(prompt, **changes), timeout=PATIENCE_S)


def text_of(server: Server, prompt: Any, **changes: Any) -> str:
    text: str = ask(server, prompt, **changes).raise_for_status().json()["choices"][0]["text"]
    return text


def stream(server: Server, prompt: Any, *, on_token: Callable[[int], bool | None] = lambda _: True, **changes: Any) -> Streamed:
    """`on_token` is told how many tokens have come; False leaves."""
    seen = Streamed()
    with httpx.stream(
        "POST", server.url + "/v1/completions", json=body(prompt, stream=True, **changes), timeout=PATIENCE_S
    ) as response:
        seen.headers = dict(response.headers)
        if response.status_code != 200:
            seen.error = json.loads(response.read())["error"]
            return seen
        for line in response.iter_lines():
            if line == "data: [DONE]":
                seen.complete = True
            elif line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    seen.error = event["error"]
                    continue
                seen.text += event["choices"][0]["text"]
                seen.finish = event["choices"][0]["finish_reason"]
                seen.num_tokens += 1
                if on_token(seen.num_tokens) is False:
                    break
    return seen


def newest(server: Server) -> str:
    """Of the requests that it has taken."""
    name: str = server.get("/requests?limit=1")["data"][0]["id"]
    return name


def worker(server: Server, role: str) -> dict[str, Any]:
    """The one that is up, once it is alone: one that was killed is listed until its registration ends."""
    found: list[dict[str, Any]] = []

    def is_alone() -> bool:
        found[:] = [entry for entry in server.get("/cluster")["workers"] if entry["role"] == role]
        return [entry["state"] for entry in found] == ["ready"]

    until(is_alone)
    return found[0]


def kill(server: Server, role: str) -> str:
    """Kills the worker process as nothing else does; returns its id."""
    killed = worker(server, role)
    os.kill(killed["pid"], signal.SIGKILL)
    name: str = killed["id"]
    return name


def wait_for_both(server: Server, gone: str) -> None:
    """Until another worker has taken the killed one's place."""

    def is_whole() -> bool:
        workers = server.get("/cluster")["workers"]
        return sorted(w["role"] for w in workers if w["state"] == "ready" and w["id"] != gone) == ["decode", "prefill"]

    until(is_whole)


def fresh() -> dict[str, Any]:
    """No prefix cache of an earlier request helps this one."""
    return {"cache_salt": f"{random.getrandbits(64):x}"}


def test_the_answer_names_both_workers_and_the_transfer(server: Server) -> None:
    answer = ask(server, "The quick brown fox", max_tokens=4)
    assert answer.headers["x-kvrelay-transfer-id"].startswith("xfer-")
    assert answer.headers["x-kvrelay-prefill"] == worker(server, "prefill")["id"]
    assert answer.headers["x-kvrelay-decode"] == worker(server, "decode")["id"]


def test_a_list_of_prompts_and_two_samples_and_one_token(server: Server) -> None:
    """Each of the things that proxies in front of two servers are known to get wrong."""
    prompts = ["def add(a, b):", "print('hello", LONG_PROMPT[:200]]
    alone = [text_of(server, prompt) for prompt in prompts]
    answer = ask(server, prompts[:2]).json()
    assert [choice["text"] for choice in answer["choices"]] == alone[:2]
    tokens = [LONG_PROMPT[:200], LONG_PROMPT[:100]]
    both = ask(server, tokens).json()["choices"]
    assert [choice["text"] for choice in both] == [alone[2], text_of(server, tokens[1])]
    pair = {"n": 2, "temperature": 1, "seed": 7}
    two = ask(server, prompts[0], **pair).json()
    assert two["usage"]["completion_tokens"] == 80
    assert [choice["text"] for choice in ask(server, prompts[0], **pair).json()["choices"]] == [
        choice["text"] for choice in two["choices"]
    ]
    assert two["choices"][0]["text"] != two["choices"][1]["text"]
    for count in (1, 2):
        cut = ask(server, prompts[0], max_tokens=count, return_token_ids=True).json()
        assert cut["usage"]["completion_tokens"] == count == len(cut["choices"][0]["token_ids"])
        assert alone[0].startswith(cut["choices"][0]["text"].rstrip("\ufffd"))
    streamed = stream(server, prompts[0], max_tokens=1)
    assert (streamed.num_tokens, streamed.finish, streamed.complete) == (1, "length", True)
    server.idle_workers()


def test_mistakes_are_told_with_their_names_and_break_nothing(server: Server) -> None:
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        for wrong, status, param in [
            (body(LONG_PROMPT * 2), 400, "prompt"),
            (body("x", max_tokens=0), 400, "max_tokens"),
            (body("x", model="another"), 404, "model"),
            (body([[1, 2], [3, 99_999]]), 400, "prompt[1]"),
        ]:
            for streamed in (False, True):
                answer = client.post("/v1/completions", json={**wrong, "stream": streamed})
                assert answer.status_code == status, answer.text
                assert answer.json()["error"]["param"] == param
        assert client.post("/v1/completions", json=body("x", max_tokens=2)).status_code == 200


def test_a_stop_string_in_the_very_first_token(server: Server) -> None:
    first = text_of(server, "The capital of France is", max_tokens=1)
    assert first
    for stop in (first, [first, "never"]):
        answer = ask(server, "The capital of France is", stop=stop).json()
        assert answer["choices"][0]["text"] == ""
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("count", [20, pytest.param(300, marks=pytest.mark.long)])
def test_clients_that_leave_at_random_points(server: Server, count: int) -> None:
    rng = random.Random(1)
    expected = text_of(server, LONG_PROMPT[:300], max_tokens=60)

    def leave(index: int) -> None:
        enough, patience_s = rng.choice([0, 1, 2, 5, 20]), rng.random() * 0.4
        prompt = LONG_PROMPT[: rng.choice([40, 300, 900])]
        if enough:
            stream(server, prompt, on_token=lambda seen: seen < enough, max_tokens=60, **fresh())
            return
        with httpx.Client(timeout=httpx.Timeout(PATIENCE_S, read=0.01 + patience_s)) as client:
            try:  # before the first token, if it does not come first
                client.post(server.url + "/v1/completions", json=body(prompt, max_tokens=60, **fresh()))
            except httpx.ReadTimeout:
                return

    def stay(_: int) -> None:
        assert text_of(server, LONG_PROMPT[:300], max_tokens=60, **fresh()) == expected

    with ThreadPoolExecutor(8) as pool:
        for result in [pool.submit(stay if index % 5 == 0 else leave, index) for index in range(count * 5 // 4)]:
            result.result()
    server.idle_workers()


def test_a_prefill_worker_killed_in_the_middle_of_prompts_and_of_streams(server: Server) -> None:
    """The decode worker computes the prompts itself; whoever was past the hand-over does not notice."""
    short, long = LONG_PROMPT[:50], LONG_PROMPT
    expected = [text_of(server, short, max_tokens=300), text_of(server, long)]
    flowing = threading.Event()

    def flow() -> Streamed:
        return stream(server, short, on_token=lambda seen: flowing.set() if seen == 3 else None, max_tokens=300, **fresh())

    with ThreadPoolExecutor(3) as pool:
        decoding = pool.submit(flow)
        assert flowing.wait(PATIENCE_S)
        prefilling = [pool.submit(stream, server, long, **fresh()) for _ in range(2)]
        time.sleep(MID_PROMPT_S)
        gone = kill(server, "prefill")
        answers = [decoding.result(), *(answer.result() for answer in prefilling)]
    for answer, text in zip(answers, [expected[0], expected[1], expected[1]], strict=True):
        assert answer.error is None
        assert answer.complete
        assert answer.text == text
    decode = worker(server, "decode")
    assert is_idle(decode), decode  # at once: nothing is kept for a lease
    assert text_of(server, short, max_tokens=300) == expected[0]  # with or without a prefill worker
    wait_for_both(server, gone)
    assert text_of(server, long, **fresh()) == expected[1]
    assert worker(server, "prefill")["transfers"]["done"] > 0


def test_a_decode_worker_killed_in_the_middle_is_replaced_and_nobody_notices(server: Server) -> None:
    """There is no other: the streams wait until it has been started again, and go on where they were."""
    short = LONG_PROMPT[:50]
    expected = [text_of(server, short, max_tokens=400), text_of(server, LONG_PROMPT, max_tokens=100)]
    flowing = threading.Event()

    def flow() -> Streamed:
        return stream(server, short, on_token=lambda seen: flowing.set() if seen == 3 else None, max_tokens=400, **fresh())

    with ThreadPoolExecutor(2) as pool:
        decoding = pool.submit(flow)
        assert flowing.wait(PATIENCE_S)
        before = newest(server)
        prefilling = pool.submit(ask, server, LONG_PROMPT, max_tokens=100, **fresh())
        until(lambda: newest(server) != before)  # a request that comes while there is no worker for it is refused
        time.sleep(MID_PROMPT_S)
        gone = kill(server, "decode")
        streamed, answer = decoding.result(), prefilling.result()
    assert streamed.error is None
    assert streamed.complete
    assert (streamed.text, streamed.num_tokens, streamed.finish) == (expected[0], 400, "length")
    answered = answer.raise_for_status().json()
    assert answered["choices"][0]["text"] == expected[1]
    assert answered["usage"]["completion_tokens"] == 100
    wait_for_both(server, gone)
    server.idle_workers()


@pytest.mark.long
@pytest.mark.parametrize(("transfer", "mode"), [("nixl", "read"), ("mooncake", "write")])
def test_other_transports_and_read_mode(server: Server, model: str, device: str, transfer: str, mode: str) -> None:
    """The same texts, also after the prefill worker was killed in the middle of a prompt."""
    prompts = [LONG_PROMPT[:length] for length in (1, 17, 200, 900)]
    expected = [text_of(server, prompt) for prompt in prompts]
    with serve(model, *options(*on(device), "--transfer", transfer, "--mode", mode)) as other:
        assert [text_of(other, prompt) for prompt in prompts] == expected
        assert worker(other, "decode")["transfers"]["done"] == 4
        with ThreadPoolExecutor(4) as pool:
            leaving = [pool.submit(stream, other, p, on_token=lambda seen: seen < 2, **fresh()) for p in prompts]
            assert all(left.result().error is None for left in leaving)
            other.idle_workers()
            dying = pool.submit(stream, other, prompts[3], **fresh())
            time.sleep(MID_PROMPT_S)
            gone = kill(other, "prefill")
            assert dying.result().text == expected[3]
        wait_for_both(other, gone)
        assert text_of(other, prompts[3], **fresh()) == expected[3]


@pytest.mark.long
def test_a_frozen_decode_worker_is_given_up_and_used_again_when_it_wakes(server: Server) -> None:
    expected = text_of(server, LONG_PROMPT[:300])
    frozen = worker(server, "decode")["pid"]
    flowing = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        decoding = pool.submit(
            stream,
            server,
            LONG_PROMPT[:50],
            on_token=lambda seen: flowing.set() if seen == 3 else None,
            max_tokens=1500,
            **fresh(),
        )
        assert flowing.wait(PATIENCE_S)
        os.kill(frozen, signal.SIGSTOP)
        try:
            assert decoding.result().error is not None
            until(lambda: not server.get("/cluster")["ready"])
            refused = ask(server, "x")
            assert refused.status_code == 503
            assert "decode" in refused.json()["error"]["message"]
        finally:
            os.kill(frozen, signal.SIGCONT)
    until(lambda: bool(server.get("/cluster")["ready"]))
    assert text_of(server, LONG_PROMPT[:300], **fresh()) == expected


ON_EVERY_TRANSPORT = [
    *(("cpu", transfer) for transfer in ("shm", "nixl", "mooncake")),
    pytest.param("cuda", "cuda_ipc", marks=ON_A_CARD),
]


@pytest.mark.long
@pytest.mark.parametrize(("where", "transfer"), ON_EVERY_TRANSPORT)
def test_a_prompt_on_a_frozen_prefill_worker_is_computed_by_the_decode_worker(model: str, where: str, transfer: str) -> None:
    """When its lease is over. What it might still write when it wakes stays out of use until it has let go."""
    with serve(model, *options(*on(where), "--transfer", transfer, "--transfer-lease-s", "5")) as other:
        expected = text_of(other, LONG_PROMPT)
        frozen = worker(other, "prefill")["pid"]
        with ThreadPoolExecutor(2) as pool:
            waiting = [pool.submit(stream, other, LONG_PROMPT, **fresh()) for _ in range(2)]
            time.sleep(MID_PROMPT_S)
            os.kill(frozen, signal.SIGSTOP)
            try:
                for answer in waiting:
                    assert answer.result().error is None
                    assert answer.result().text == expected
                assert text_of(other, LONG_PROMPT, **fresh()) == expected  # planned around it
            finally:
                os.kill(frozen, signal.SIGCONT)
        until(lambda: len([w for w in other.get("/cluster")["workers"] if w["state"] == "ready"]) == 2)
        assert text_of(other, LONG_PROMPT, **fresh()) == expected


@pytest.mark.long
@pytest.mark.parametrize("mode", ["write", "read"])
def test_smollm2_over_nixl_equals_transformers(mode: str) -> None:
    folder = resolve("smollm2", read_environment(), Silent())
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    story = "Once upon a time there was a small village by the sea, and in that village lived a clockmaker. " * 6
    size = ["--max-model-len", "1024", "--kv-blocks", "200", "--local-prefill-tokens", "0"]
    with serve("smollm2", *size, "--transfer", "nixl", "--mode", mode, "--served-model-name", "tiny") as other:
        for prompt in ("The quick brown fox", "def fibonacci(n):", story):
            ids = tokenizer(prompt)["input_ids"]
            answer = ask(other, prompt, max_tokens=24, ignore_eos=False, return_token_ids=True).raise_for_status().json()
            got = answer["choices"][0]["token_ids"]
            assert_parity(got, *reference_tokens(reference, ids, 24, frozenset({2}), got), prompt[:20])
        assert worker(other, "decode")["transfers"]["done"] == 3
