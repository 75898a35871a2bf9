"""`kvrelay bench encode`: what encode workers and the relay of their embeddings cost and give. In parts, each by itself with
`--only`.

transfer    the relay alone: what resuming costs, and how near it comes to its transport     embedding_transfer.py
text        text requests while images are encoded, with and without encode workers        encode_traffic.py
cache       an image that was seen before                                                    encode_traffic.py
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from rich.console import Console

from kvrelay.bench import embedding_transfer, encode_traffic
from kvrelay.bench.encode_model import open_model
from kvrelay.bench.parts import Part, all_targets, parse_parts, run_parts
from kvrelay.bench.report import Target


@dataclass(frozen=True, kw_only=True)
class EncodeBench:
    """What the command line asked for."""

    model: str
    requests: int
    transports: tuple[str, ...]
    only: tuple[str, ...]

    def measure(self, console: Console) -> dict[str, float]:
        return run_parts(PARTS, self.only, self, console)


def _transfer(bench: EncodeBench, console: Console) -> dict[str, float]:
    results: dict[str, float] = {}
    for transport in bench.transports:
        with console.status(f"{transport}: {embedding_transfer.TOKENS} tokens"):
            results |= embedding_transfer.measure(transport)
    return results


def _text(bench: EncodeBench, console: Console) -> dict[str, float]:
    with open_model(bench.model) as model:
        return encode_traffic.measure_text(model, bench.requests, console)


def _cache(bench: EncodeBench, console: Console) -> dict[str, float]:
    with open_model(bench.model) as model:
        return encode_traffic.measure_cache(model, max(1, bench.requests // 8), console)


PARTS: dict[str, Part[EncodeBench]] = {
    "transfer": Part(
        "transfer: the embedding relay alone",
        _transfer,
        {
            name: target
            for transport in ("shm", "nixl", "mooncake")
            for name, target in (
                (f"{transport}_resumed_over_once", Target("<=", 1.15)),
                (f"{transport}_rate_of_raw", Target(">=", 0.9)),
            )
        },
    ),
    "text": Part("text: requests beside images", _text, encode_traffic.TEXT_TARGETS),
    "cache": Part("cache: an image seen before", _cache, encode_traffic.CACHE_TARGETS),
}

TARGETS = all_targets(PARTS)
parse = functools.partial(parse_parts, PARTS)
