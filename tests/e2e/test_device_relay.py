"""Prefill and decode of a real server on each device: the tokens of one whole worker, and no block left by aborts.

On a card both workers share it, and KV moves by cuda_ipc; there it is also held in fp8."""

from __future__ import annotations

import pathlib
import random
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import httpx
import pytest
import torch
import transformers
from devices import ON_A_CARD, on
from parity import assert_parity, reference_tokens
from patience import PATIENCE_S
from server import Server, serve
from tiny_models import VOCAB_SIZE, write_tokenizer

from kvrelay.bench.harness.engine import build_engine
from kvrelay.config import EngineOptions, ModelOptions
from kvrelay.engine.engine import Engine
from kvrelay.ids import new_request_id
from kvrelay.sampling import SamplingParams
from kvrelay.wire.serving import Submit

MAX_LEN = 1024
AT_ONCE = 32
OUTPUT_TOKENS = 24
FP8_TIE = 0.05  # nats between the two best: what a rounding that falls otherwise may change


@dataclass(frozen=True)
class Case:
    """KV that rounds differently in another batch is another number in fp8. So its tokens are those of one worker where every
    prompt is computed alone and from its beginning, by kernels that were chosen for the whole card."""

    device: Literal["cpu", "cuda"]
    kv_dtype: Literal["auto", "fp8"] = "auto"

    @property
    def is_fp8(self) -> bool:
        return self.kv_dtype == "fp8"

    @property
    def at_once(self) -> int:
        return 1 if self.is_fp8 else AT_ONCE

    @property
    def num_prompts(self) -> int:
        return 12 if self.device == "cpu" else 60 if self.is_fp8 else 200

    @property
    def num_aborts(self) -> int:
        return 8 if self.device == "cpu" else 100

    @property
    def options(self) -> list[str]:
        alone = ["--kv-dtype", "fp8", "--no-prefix-cache", "--mps", "off"] if self.is_fp8 else []
        return [*on(self.device), *alone]


CASES = [
    pytest.param(Case("cpu"), id="cpu"),
    pytest.param(Case("cuda"), id="cuda", marks=ON_A_CARD),
    pytest.param(Case("cuda", "fp8"), id="cuda-fp8", marks=ON_A_CARD),
]


@pytest.fixture(scope="module")
def model() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="kvrelay-device-") as folder:
        torch.manual_seed(5)
        config = transformers.LlamaConfig(
            vocab_size=VOCAB_SIZE, hidden_size=256, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=MAX_LEN, initializer_range=0.3, bos_token_id=0, eos_token_id=2,
            pad_token_id=0,
        )  # fmt: skip
        transformers.LlamaForCausalLM(config).float().save_pretrained(folder)
        write_tokenizer(pathlib.Path(folder))
        yield folder


def options(case: Case, *more: str) -> list[str]:
    """Small chunks, so that several passes of a prompt are under way at once."""
    pool = ["--kv-blocks", "2048", "--token-budget", "96", "--threads", "1", "--served-model-name", "tiny"]
    return [*pool, *case.options, "--local-prefill-tokens", "0", "--check-invariants", *more]


def prompts(count: int) -> list[list[int]]:
    """Of all lengths; every fourth begins as another one does."""
    draw = random.Random(7)
    drawn: list[list[int]] = []
    for number in range(count):
        tokens = [draw.randrange(3, VOCAB_SIZE) for _ in range(draw.randrange(1, 700))]
        if number % 4 == 3:
            shared = draw.choice(drawn)
            tokens = shared[: draw.randrange(1, len(shared) + 1)] + tokens[:100]
        drawn.append(tokens)
    return drawn


def complete(server: Server, prompt: list[int], num_tokens: int = OUTPUT_TOKENS) -> list[int]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/completions", json={**body, "return_token_ids": True}, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


def complete_all(server: Server, asked: list[list[int]], at_once: int, num_tokens: int = OUTPUT_TOKENS) -> list[list[int]]:
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda prompt: complete(server, prompt, num_tokens), asked))


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    made: Case = request.param
    return made


@pytest.fixture(scope="module")
def expected(model: str, case: Case) -> list[list[int]]:
    with serve(model, *options(case, "--whole", "1")) as server:
        return complete_all(server, prompts(case.num_prompts), case.at_once)


def counted(server: Server, name: str) -> float:
    """Of all decode workers together."""
    lines = httpx.get(f"{server.url}/metrics", timeout=PATIENCE_S).text.splitlines()
    found = [line for line in lines if line.startswith(f"kvrelay_worker_{name}_total") and 'role="decode"' in line]
    return sum(float(line.split()[-1]) for line in found)


def assert_same(got: list[list[int]], expected: list[list[int]], model: str, case: Case) -> None:
    """Another batch may round otherwise: where the two differ, the reference says whether that was a tie."""
    if case.is_fp8:
        assert got == expected[: len(got)]
        return
    different = [number for number, tokens in enumerate(got) if tokens != expected[number]]
    if different:
        reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        asked = prompts(len(expected))
        for number in different:
            wanted = reference_tokens(reference, asked[number], OUTPUT_TOKENS, guess=got[number])
            assert_parity(got[number], *wanted, f"prompt {number}")


@pytest.mark.parametrize("mode", ["write", "read"])
def test_many_prompts_give_the_tokens_of_a_whole_worker(model: str, case: Case, expected: list[list[int]], mode: str) -> None:
    with serve(model, *options(case, "--prefill", "1", "--decode", "1", "--mode", mode)) as server:
        assert_same(complete_all(server, prompts(case.num_prompts), case.at_once), expected, model, case)
        moved = [worker["transfers"] for worker in server.idle_workers()]
        assert sum(each["bytes"] for each in moved) > 0
        assert not any(each["failed"] for each in moved)


@pytest.mark.parametrize("mode", ["write", "read"])
def test_aborts_at_random_points_leave_no_block(model: str, case: Case, expected: list[list[int]], mode: str) -> None:
    draw = random.Random(11)
    points = [draw.random() * 0.3 for _ in range(case.num_aborts)]
    asked = prompts(case.num_prompts)

    def abort(number: int) -> None:
        body = {"model": "tiny", "prompt": asked[number % len(asked)], "max_tokens": 300, "stream": True, "ignore_eos": True}
        try:
            with httpx.Client(timeout=httpx.Timeout(60.0, read=points[number])) as client:
                client.post(f"{server.url}/v1/completions", json=body)
        except httpx.TimeoutException:
            return  # the client has left

    with serve(model, *options(case, "--prefill", "1", "--decode", "1", "--mode", mode)) as server:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(abort, range(len(points))))
        server.idle_workers()
        assert_same(complete_all(server, asked[:AT_ONCE], case.at_once), expected, model, case)


def test_a_decode_pool_too_small_for_its_streams_is_swapped_and_changes_no_token(model: str, case: Case) -> None:
    """Two of them fit, and not three: what was handed over goes to host memory and comes back."""
    asked, num_tokens = [prompt[:60] for prompt in prompts(AT_ONCE) if len(prompt) >= 60][:6], 100
    small = ("--decode-kv-blocks", "24", "--decode-swap-blocks", "100", "--max-model-len", "176")
    with serve(model, *options(case, "--prefill", "1", "--decode", "1", *small)) as server:
        got = complete_all(server, asked, AT_ONCE, num_tokens)
        server.idle_workers()
        assert counted(server, "host_swapped_out") > 0
        assert counted(server, "host_swapped_in") > 0
    for number, (found, wanted) in enumerate(zip(got, without_preemption(model, case, asked, num_tokens, got), strict=True)):
        assert_parity(found, *wanted, f"prompt {number}")


def without_preemption(
    model: str, case: Case, asked: list[list[int]], num_tokens: int, got: list[list[int]]
) -> list[tuple[list[int], list[bool]]]:
    """Tokens, and which of them were ties. Of transformers; it has no KV in fp8, so there of one worker with room for all."""
    if not case.is_fp8:
        reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        return [reference_tokens(reference, prompt, num_tokens, guess=guess) for prompt, guess in zip(asked, got, strict=True)]
    engine, _ = build_engine(
        ModelOptions(model=model, device=case.device, dtype="float32", threads=1, kv_dtype=case.kv_dtype),
        EngineOptions(kv_blocks=64, token_budget=96, max_model_len=176, prefix_cache=False),
    )
    try:
        return [tokens_and_ties(engine, prompt, num_tokens) for prompt in asked]
    finally:
        engine.close()


def tokens_and_ties(engine: Engine, prompt: list[int], num_tokens: int) -> tuple[list[int], list[bool]]:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, logprobs=2)
    engine.submit(Submit(request_id=new_request_id(), external_id="", prompt=prompt, params=params))
    tokens: list[int] = []
    ties: list[bool] = []
    while engine.has_work:
        for output in engine.step().outputs:
            tokens += output.tokens
            ties += [entry.top[0][1] - entry.top[1][1] < FP8_TIE for entry in output.logprobs or []]
    assert len(tokens) == len(ties) == num_tokens
    return tokens, ties
