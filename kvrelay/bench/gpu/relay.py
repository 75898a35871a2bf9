"""Prefill and decode on one card, over HTTP, beside one worker that does both: a Llama-3.1-8B shape with random weights.

time to first token   one request at a time, of prompts never seen before
hand-over             from token 1 to token 2, beyond one decode step
late bytes            the share of the KV that moved when the prompt was computed
time between tokens   of 16 streams, while prompts of 8192 tokens arrive back to back

Prefill may use all multiprocessors (`ttft_1p1d_*`, `*_1p1d_all_sms`), or a part of them, behind decode
(`ttft_1p1d_part_*`, `*_1p1d`): a choice between prompts and tokens, of which both sides are shown.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import pathlib
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import tokenizers
import uvloop
from rich.console import Console

from kvrelay.bench.gpu.copies import measure_copies
from kvrelay.bench.gpu.speed import LLAMA_8B
from kvrelay.bench.harness.handover import beyond_steps, gaps_within, late_share, moved
from kvrelay.bench.harness.report import percentile
from kvrelay.bench.harness.scenario import Results
from kvrelay.bench.harness.server import Server, serve
from kvrelay.config import ModelOptions
from kvrelay.errors import BenchError

PROMPTS = (128, 512, 2048, 8192)
LATE_TOKENS = 2048
STREAMS, STREAM_TOKENS, LONG_TOKENS = 16, 128, 8192
_HANDOVER_TOKENS, _HANDED_OVER = 512, 9  # of the prompt; of the output, for the time of a step
_WARM = 2
_MOST_LONG_PER_S = 20  # more than any card computes
_ENDLESS = 20_000  # tokens: no stream ends before it is aborted
_SETTLE_S = 1.0
_ANSWER_S = 120.0
_MAX_LENGTH = 40_000


@dataclass(slots=True, eq=False)
class Stream:
    """One request, and when its tokens came."""

    began_at: float = 0.0
    tokens_at: list[float] = field(default_factory=list)

    @property
    def ttft_ms(self) -> float:
        return (self.tokens_at[0] - self.began_at) * 1e3


class Client:
    """Reads lines off a socket, since an HTTP library would take longer for a token than a decode step may."""

    def __init__(self, server: Server, vocabulary: int, seed: int = 1) -> None:
        url = httpx.URL(server.url)
        self._host, self._port = url.host, url.port or 80
        self._url = server.url
        self._random = random.Random(seed)
        self._vocabulary = vocabulary

    def body(self, num_tokens: int, max_tokens: int) -> bytes:
        prompt = [self._random.randrange(self._vocabulary) for _ in range(num_tokens)]
        asked = {"prompt": prompt, "max_tokens": max_tokens, "stream": True, "ignore_eos": True, "temperature": 0}
        return json.dumps(asked).encode()

    async def ask(self, num_tokens: int, max_tokens: int) -> Stream:
        return await self.answer(self.body(num_tokens, max_tokens), max_tokens)

    async def answer(self, body: bytes, max_tokens: int) -> Stream:
        stream = Stream()
        async with asyncio.timeout(_ANSWER_S):
            await self.follow(stream, body, max_tokens)
        if len(stream.tokens_at) != max_tokens:
            raise BenchError(f"a request had {len(stream.tokens_at)} tokens, not {max_tokens}")
        return stream

    async def follow(self, stream: Stream, body: bytes, max_tokens: int) -> None:
        """One event is one token: nothing is detokenised together."""
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\n"
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            stream.began_at = time.perf_counter()
            writer.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
            status = await reader.readline()
            if b" 200 " not in status:
                raise BenchError(f"the server answered {status.decode().strip()}: {(await reader.read(2000)).decode()}")
            async for line in reader:
                if line.startswith(b"data: {"):
                    if b'"error"' in line:
                        raise BenchError(f"a request failed: {line.decode().strip()}")
                    if len(stream.tokens_at) < max_tokens:
                        stream.tokens_at.append(time.perf_counter())
        finally:
            writer.close()

    async def workers(self) -> list[dict[str, Any]]:
        """Once nothing is open any more."""
        async with httpx.AsyncClient(base_url=self._url) as client:
            deadline = time.monotonic() + _ANSWER_S
            while time.monotonic() < deadline:
                workers: list[dict[str, Any]] = (await client.get("/cluster")).json()["workers"]
                if not any(worker[name] for worker in workers for name in ("running", "waiting", "transferring")):
                    return workers
                await asyncio.sleep(0.2)
        raise BenchError("the workers did not come to rest")


async def ttft(client: Client, name: str, rounds: int) -> Results:
    results = {}
    for length in PROMPTS:
        streams = [await client.ask(length, 2) for _ in range(_WARM + rounds)]
        results[f"ttft_{name}_{length}_ms"] = statistics.median(stream.ttft_ms for stream in streams[_WARM:])
    return results


async def handover(client: Client, rounds: int) -> Results:
    streams = [await client.ask(_HANDOVER_TOKENS, _HANDED_OVER) for _ in range(_WARM + 4 * rounds)]
    beyond, steps = beyond_steps([stream.tokens_at for stream in streams[_WARM:]])
    return {
        "handover_samples": float(len(beyond)),
        "handover_ms_p50": statistics.median(beyond) * 1e3,
        "decode_step_ms_p50": statistics.median(steps) * 1e3,
    }


async def late_bytes(client: Client, rounds: int) -> Results:
    before = moved(await client.workers())
    for _ in range(rounds):
        await client.ask(LATE_TOKENS, 2)
    return {"late_samples": float(rounds), "late_bytes_share": late_share(before, moved(await client.workers()))}


async def gaps(client: Client, name: str, seconds: int) -> Results:
    """The next long prompt comes when the last one is answered. All are written before the first is sent: meanwhile this
    process reads no tokens, which would look like a gap."""
    bodies = [client.body(LONG_TOKENS, 2) for _ in range(seconds * _MOST_LONG_PER_S)]
    streams = [Stream() for _ in range(STREAMS)]
    tasks = [asyncio.create_task(client.follow(stream, client.body(STREAM_TOKENS, _ENDLESS), _ENDLESS)) for stream in streams]
    try:
        while any(len(stream.tokens_at) < 2 for stream in streams):
            _check(tasks)
            await asyncio.sleep(0.05)
        await asyncio.sleep(_SETTLE_S)
        began_at, prompts = time.perf_counter(), 0
        for body in bodies:
            await client.answer(body, 2)
            prompts += 1
            if time.perf_counter() - began_at > seconds:
                break
        ended_at = time.perf_counter()
        _check(tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    lengths = [length for _, length in gaps_within([stream.tokens_at for stream in streams], began_at, ended_at)]
    shares = {"p50": 50, "p99": 99, "max": 100}
    results = {f"itl_samples_{name}": float(len(lengths)), f"prompts_per_min_{name}": prompts * 60 / (ended_at - began_at)}
    return results | {f"itl_{figure}_ms_{name}": percentile(lengths, share) * 1e3 for figure, share in shares.items()}


def _check(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        if task.done():
            task.result()
            raise BenchError("a running request ended early")


@contextlib.contextmanager
def model_folder(shape: dict[str, Any]) -> Iterator[pathlib.Path]:
    """With a tokenizer of as many words as the model knows."""
    with tempfile.TemporaryDirectory(prefix="kvrelay-gpu-") as base:
        folder = pathlib.Path(base)
        (folder / "config.json").write_text(json.dumps(shape), encoding="utf-8")
        words = {f"w{index}": index for index in range(shape["vocab_size"])}
        tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
        yield folder


async def _apart(server: Server, shape: dict[str, Any], rounds: int, seconds: int) -> Results:
    client = Client(server, shape["vocab_size"])
    results = await ttft(client, "1p1d", rounds)
    results |= await handover(client, rounds)
    results |= await late_bytes(client, rounds)
    return results | await gaps(client, "1p1d_all_sms", seconds)


async def _parted(server: Server, shape: dict[str, Any], rounds: int, seconds: int) -> Results:
    client = Client(server, shape["vocab_size"])
    return await ttft(client, "1p1d_part", rounds) | await gaps(client, "1p1d", seconds)


async def _whole(server: Server, shape: dict[str, Any], rounds: int, seconds: int) -> Results:
    client = Client(server, shape["vocab_size"])
    return await ttft(client, "whole", rounds) | await gaps(client, "whole", seconds)


def measure_servers(
    rounds: int, seconds: int, settings: dict[str, object], console: Console, prefill_sms: int, shape: dict[str, Any] = LLAMA_8B
) -> Results:
    """`settings` are options of `kvrelay serve`. Prefill has the whole card first, then `prefill_sms` percent of it, behind
    decode."""
    results: Results = {"ttft_samples": float(rounds)}
    with model_folder(shape) as folder:
        model = ModelOptions(model=str(folder), load="dummy")
        common = {"max-model-len": min(_MAX_LENGTH, shape["max_position_embeddings"]), **settings}
        for share, priority, measure in ((100, "normal", _apart), (prefill_sms, "low", _parted)):
            parted = {**common, "prefill-sms": share, "prefill-priority": priority}
            with console.status(f"1 prefill with {share} % + 1 decode"), serve(model, parted, prefill=1, decode=1) as server:
                results |= uvloop.run(measure(server, shape, rounds, seconds))
        with console.status("1 whole"), serve(model, common, whole=1) as server:
            results |= uvloop.run(_whole(server, shape, rounds, seconds))
    for length in PROMPTS:
        results[f"ttft_excess_{length}_ms"] = results[f"ttft_1p1d_{length}_ms"] - results[f"ttft_whole_{length}_ms"]
    return results


def measure_relay(rounds: int, seconds: int, prefill_sms: int, console: Console) -> Results:
    results = measure_copies(console)
    return results | measure_servers(rounds, seconds, {"device": "cuda"}, console, prefill_sms)
