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

from rich.console import Console

from kvrelay.bench.encode.model import EncodeBench, ImageModel, open_model
from kvrelay.bench.harness.cluster import LiveCluster, ask, finish, live_cluster, start
from kvrelay.bench.harness.report import Target, percentile
from kvrelay.bench.harness.scenario import Part, Results
from kvrelay.bench.harness.workload import greedy, traffic
from kvrelay.config import ClusterOptions, EngineOptions

_ENGINE = EngineOptions(kv_blocks=1024, max_model_len=2048)
_SPLIT = ClusterOptions(encode=1, prefill=1, decode=1, registration_s=30.0)
_WHOLE = ClusterOptions(whole=1, registration_s=30.0)
_TEXT_TOKENS = 96  # more than a decode worker computes itself
_TEXT_EVERY_S = 0.15
_IMAGES_AT_ONCE = 2
_FIRST_TOKEN = greedy(2)  # of one token alone, a decode worker would not be asked


def measure_text(options: EncodeBench, console: Console) -> Results:
    results: Results = {"text_ttft_samples": float(options.requests)}
    for name, cluster in (("whole", _WHOLE), ("split", _SPLIT)):
        with open_model(options.model) as model, console.status(f"{name}: text beside images"):
            figures = asyncio.run(_text(model, cluster, options.requests))
        results |= {f"text_ttft_{key}_{name}": value for key, value in figures.items()}
    results["text_ttft_p99_split_over_whole"] = results["text_ttft_p99_ms_split"] / results["text_ttft_p99_ms_whole"]
    return results


async def _text(model: ImageModel, options: ClusterOptions, num_requests: int) -> Results:
    async with live_cluster(model.options, _ENGINE, options, "least_loaded") as cluster:
        await _ask_image(cluster, model, 1)  # opens connections
        quiet = await _texts(cluster, model, num_requests // 4 + 1, first_seed=0)
        async with traffic(lambda seed: _ask_image(cluster, model, seed), _IMAGES_AT_ONCE) as answered:
            await asyncio.sleep(_TEXT_EVERY_S)
            begun = time.perf_counter()
            busy = await _texts(cluster, model, num_requests, first_seed=num_requests)
            seconds, num_images = time.perf_counter() - begun, len(answered)
    return {
        "quiet_p50_ms": 1e3 * statistics.median(quiet),
        "p50_ms": 1e3 * statistics.median(busy),
        "p99_ms": 1e3 * percentile(busy, 99),
        "images_per_s": num_images / seconds,
    }


async def _texts(cluster: LiveCluster, model: ImageModel, count: int, first_seed: int) -> list[float]:
    """Times to the first token. They come when they come, whether the one before was answered or not."""
    answers = []
    for seed in range(first_seed, first_seed + count):
        answers.append(start(cluster.router, model.text(seed, _TEXT_TOKENS), _FIRST_TOKEN))
        await asyncio.sleep(_TEXT_EVERY_S)
    return [(await finish(answer)).ttft_s for answer in answers]


async def _ask_image(cluster: LiveCluster, model: ImageModel, seed: int, text_seed: int = 0) -> float:
    """The time to the first token."""
    prompt, images = model.prompt(seed, text_seed or seed)
    return (await ask(cluster.router, prompt, _FIRST_TOKEN, images=images)).ttft_s


def measure_cache(options: EncodeBench, console: Console) -> Results:
    with open_model(options.model) as model, console.status("images that were seen before"):
        return asyncio.run(_cache(model, max(1, options.requests // 8)))


async def _cache(model: ImageModel, num_images: int) -> Results:
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
        "cache_samples": float(num_images),
        "cold_ttft_ms": 1e3 * statistics.median(cold),
        "hit_ttft_ms": 1e3 * statistics.median(hits),
        "hit_over_cold_ttft": statistics.median(hits) / statistics.median(cold),
        "cold_tower_calls": between["encoded"] - before["encoded"],
        "hit_tower_calls": after["encoded"] - between["encoded"],
        "hit_bytes": after["bytes"] - between["bytes"],
        "bytes_over_embeddings": (between["bytes"] - before["bytes"]) / (num_images * num_tokens * row_bytes),
    }


async def _counted(cluster: LiveCluster) -> dict[str, int]:
    """Of all workers together."""
    workers = await cluster.at_rest()
    return {name: sum(worker["images"][name] for worker in workers) for name in ("encoded", "bytes")}


TEXT_PART = Part("requests beside images", measure_text, {"text_ttft_p99_split_over_whole": Target("<=", 1.0)})
CACHE_PART = Part(
    "an image seen before",
    measure_cache,
    {"hit_tower_calls": Target("<=", 0), "hit_bytes": Target("<=", 0), "bytes_over_embeddings": Target("<=", 1.02)},
)
