"""`kvrelay bench encode`: what encode workers and the relay of their embeddings cost and give. In parts:

transfer    the relay alone: what resuming costs, and how near it comes to its transport     transfer.py
text        text requests while images are encoded, with and without encode workers          traffic.py
cache       an image that was seen before                                                    traffic.py
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta
from rich.console import Console

from kvrelay.bench.encode import traffic, transfer
from kvrelay.bench.encode.model import open_model
from kvrelay.bench.harness.report import Target
from kvrelay.bench.harness.scenario import BenchOptions, Part, Results, Scenario
from kvrelay.config import Positive


class EncodeBench(BenchOptions, frozen=True, kw_only=True):
    """What is measured, and how much of it."""

    model: Annotated[str, Meta(description="folder or hub id of a Qwen-VL checkpoint; default is one with random weights")] = ""
    requests: Annotated[Positive, Meta(description="text requests per cluster")] = 80
    transports: Annotated[str, Meta(description="of the part transfer: some of shm,nixl,mooncake")] = "shm"


def _transfer(options: EncodeBench, console: Console) -> Results:
    results: Results = {}
    for transport in options.transports.split(","):
        with console.status(f"{transport}: {transfer.TOKENS} tokens"):
            results |= transfer.measure(transport)
    return results


def _text(options: EncodeBench, console: Console) -> Results:
    with open_model(options.model) as model:
        return traffic.measure_text(model, options.requests, console)


def _cache(options: EncodeBench, console: Console) -> Results:
    with open_model(options.model) as model:
        return traffic.measure_cache(model, max(1, options.requests // 8), console)


_TRANSFER_TARGETS = {
    f"{transport}_{name}": target
    for transport in ("shm", "nixl", "mooncake")
    for name, target in (("resumed_over_once", Target("<=", 1.15)), ("rate_of_raw", Target(">=", 0.9)))
}
SCENARIO = Scenario(
    EncodeBench,
    {
        "transfer": Part("the embedding relay alone", _transfer, _TRANSFER_TARGETS),
        "text": Part("requests beside images", _text, traffic.TEXT_TARGETS),
        "cache": Part("an image seen before", _cache, traffic.CACHE_TARGETS),
    },
)
