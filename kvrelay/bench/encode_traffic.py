"""What encode workers are good for: text while images are encoded, and images that were seen before.

text     short prompts come at a steady rate while images, never the same, are asked about without a pause: to one whole
         worker, and to an encode, a prefill and a decode worker, one cluster after the other on the same cores
cache    an image is asked about for the first time, and then again behind another text, so that none of its KV is cached: the
         second time it is neither encoded nor transferred, which is counted
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import msgspec
from rich.console import Console

from kvrelay.bench.encode_model import ImageModel
from kvrelay.bench.live_cluster import LiveCluster, ask, live_cluster, wait_until
from kvrelay.bench.report import Target, percentile
from kvrelay.config import ClusterOptions, EngineOptions
from kvrelay.sampling import SamplingParams

TEXT_TARGETS = {"text_ttft_p99_split_over_whole": Target("<=", 1.0)}
CACHE_TARGETS = {"hit_tower_calls": Target("<=", 0), "hit_bytes": Target("<=", 0), "bytes_over_embeddings": Target("<=", 1.02)}

_ENGINE = EngineOptions(kv_blocks=1024, max_model_len=2048)
_SPLIT = ClusterOptions(encode=1, prefill=1, decode=1, registration_s=30.0)
_WHOLE = ClusterOptions(whole=1, registration_s=30.0)
_TEXT_TOKENS = 96  # more than a decode worker computes itself
_TEXT_EVERY_S = 0.15
_IMAGES_AT_ONCE = 2
_ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
_IDLE_S = 30.0


class TextFigures(msgspec.Struct, frozen=True, kw_only=True):
    quiet_p50_ms: float
    p50_ms: float
    p99_ms: float
    images_per_s: float


def measure_text(model: ImageModel, num_requests: int, console: Console) -> dict[str, float]:
    results: dict[str, float] = {}
    for name, options in (("whole", _WHOLE), ("split", _SPLIT)):
        with console.status(f"{name}: text beside images"):
            figures = asyncio.run(_text(model, options, num_requests))
        results |= {f"text_ttft_{key}_{name}": value for key, value in msgspec.structs.asdict(figures).items()}
    results["text_ttft_p99_split_over_whole"] = results["text_ttft_p99_ms_split"] / results["text_ttft_p99_ms_whole"]
    return results


async def _text(model: ImageModel, options: ClusterOptions, num_requests: int) -> TextFigures:
    async with live_cluster(model.options, _ENGINE, options, "least_loaded") as cluster:
        await _ask_image(cluster, model, 1)  # opens connections
        quiet = await _texts(cluster, model, num_requests // 4 + 1, first_seed=0)
        async with _images(cluster, model) as answered:
            begun = time.perf_counter()
            busy = await _texts(cluster, model, num_requests, first_seed=num_requests)
            seconds = time.perf_counter() - begun
        return TextFigures(
            quiet_p50_ms=1e3 * statistics.median(quiet),
            p50_ms=1e3 * statistics.median(busy),
            p99_ms=1e3 * percentile(busy, 99),
            images_per_s=len(answered) / seconds,
        )


async def _texts(cluster: LiveCluster, model: ImageModel, count: int, first_seed: int) -> list[float]:
    """Times to the first token. They come when they come, whether the one before was answered or not."""
    tasks = []
    for seed in range(first_seed, first_seed + count):
        tasks.append(asyncio.create_task(ask(cluster.router, model.text(seed, _TEXT_TOKENS), _ONE_TOKEN)))
        await asyncio.sleep(_TEXT_EVERY_S)
    return [(await task).ttft_s for task in tasks]


@asynccontextmanager
async def _images(cluster: LiveCluster, model: ImageModel) -> AsyncIterator[list[float]]:
    """Keeps the tower busy; the list has the time of each answer."""
    answered: list[float] = []

    async def ask_on(number: int) -> None:
        seed = 1000 * (1 + number)
        while True:
            seed += 1
            await _ask_image(cluster, model, seed)
            answered.append(time.perf_counter())

    tasks = [asyncio.create_task(ask_on(number)) for number in range(_IMAGES_AT_ONCE)]
    await asyncio.sleep(_TEXT_EVERY_S)
    try:
        yield answered
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task


async def _ask_image(cluster: LiveCluster, model: ImageModel, seed: int, text_seed: int = 0) -> float:
    """The time to the first token."""
    prompt, images = model.prompt(seed, text_seed or seed)
    return (await ask(cluster.router, prompt, _ONE_TOKEN, images=images)).ttft_s


def measure_cache(model: ImageModel, num_images: int, console: Console) -> dict[str, float]:
    with console.status("images that were seen before"):
        return asyncio.run(_cache(model, num_images))


async def _cache(model: ImageModel, num_images: int) -> dict[str, float]:
    async with live_cluster(model.options, _ENGINE, _SPLIT, "least_loaded") as cluster:
        await _ask_image(cluster, model, 1)  # opens connections
        before = await _counted(cluster)
        cold = [await _ask_image(cluster, model, 2 + seed) for seed in range(num_images)]
        between = await _counted(cluster)
        hits = [await _ask_image(cluster, model, 2 + seed, 500 + seed) for seed in range(num_images)]
        after = await _counted(cluster)
    num_tokens = model.prompt(2, 2)[1][0].num_tokens
    row_bytes = model.spec.hidden_size * (1 + model.spec.num_deepstack) * 4
    return {
        "cold_ttft_ms": 1e3 * statistics.median(cold),
        "hit_ttft_ms": 1e3 * statistics.median(hits),
        "hit_over_cold_ttft": statistics.median(hits) / statistics.median(cold),
        "cold_tower_calls": between["encoded"] - before["encoded"],
        "hit_tower_calls": after["encoded"] - between["encoded"],
        "hit_bytes": after["bytes"] - between["bytes"],
        "bytes_over_embeddings": (between["bytes"] - before["bytes"]) / (num_images * num_tokens * row_bytes),
    }


async def _counted(cluster: LiveCluster) -> dict[str, int]:
    """Of all workers together, once nothing is under way."""
    await wait_until(
        lambda: not any(worker["images"]["in_flight"] or worker["in_flight"] for worker in cluster.workers()),
        "workers at rest",
        _IDLE_S,
    )
    await asyncio.sleep(0.3)  # what the last of them counted is on its way
    workers = cluster.workers()
    return {name: sum(worker["images"][name] for worker in workers) for name in ("encoded", "bytes")}
