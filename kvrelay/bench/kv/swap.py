"""KV blocks to the host and back, against memcpy of as many bytes in the same run, nothing else running.

The pool and the host pool have the model's shape, as a worker makes them. In order: blocks next to each other, as a fresh pool
gives them. Scattered: in no order at all, the worst there is. The better of the memcpys before and after counts.
"""

from __future__ import annotations

import pathlib
import random
import statistics
import time
from collections.abc import Sequence

import numpy as np
import torch
from rich.console import Console

from kvrelay.bench.harness.report import Target
from kvrelay.bench.harness.scenario import Part, Results
from kvrelay.bench.kv.scheduler import KVBench
from kvrelay.bench.machine import best_seconds
from kvrelay.checkpoint.spec import read_spec
from kvrelay.runner.host_pool import HostPool, make_host_pool
from kvrelay.runner.kv_pool import KVPool

_BLOCK_SIZE = 16
_MOVED_BYTES = 192 << 20  # several times any last-level cache
_MEMCPYS = 3


def measure(options: KVBench, console: Console) -> Results:
    spec = read_spec(pathlib.Path(options.local_model().model))
    block_bytes = 2 * spec.num_layers * _BLOCK_SIZE * spec.num_kv_heads * spec.head_dim * 4
    count = max(1, _MOVED_BYTES // block_bytes)
    cpu = torch.device("cpu")
    pool = KVPool(spec, num_blocks=count, block_size=_BLOCK_SIZE, dtype=torch.float32, device=cpu, allocate=None)
    pool.tensor.fill_(1.0)
    host = make_host_pool(pool, count)
    in_order = list(range(count))
    scattered = random.Random(0).sample(in_order, count)
    _round_trip_s(host, in_order, in_order)  # the host's pages are touched for the first time
    ratios: dict[str, list[float]] = {"": [], "_scattered": []}
    with console.status("KV to the host and back"):
        for _ in range(options.rounds):
            for name, blocks, host_blocks in (("", in_order, in_order), ("_scattered", scattered, scattered[::-1])):
                before = _memcpy_bytes_per_s()
                moved = 2 * count * block_bytes / _round_trip_s(host, blocks, host_blocks)
                ratios[name].append(moved / max(before, _memcpy_bytes_per_s()))
    host.close()
    medians = {f"swap_round_trip{name}_over_memcpy": statistics.median(values) for name, values in ratios.items()}
    return {"swap_samples": float(options.rounds), **medians}


def _round_trip_s(host: HostPool, blocks: Sequence[int], host_blocks: Sequence[int]) -> float:
    began = time.perf_counter()
    host.begin(list(zip(blocks, host_blocks, strict=True)), [])
    _wait(host)
    host.begin([], list(zip(host_blocks, blocks, strict=True)))
    _wait(host)
    return time.perf_counter() - began


def _wait(host: HostPool) -> None:
    while not host.finished(1.0):
        pass


def _memcpy_bytes_per_s() -> float:
    source, target = np.ones(_MOVED_BYTES, dtype=np.uint8), np.zeros(_MOVED_BYTES, dtype=np.uint8)
    target.fill(1)
    return _MOVED_BYTES / best_seconds(lambda: np.copyto(target, source), _MEMCPYS)


PART = Part("KV to the host and back", measure, {"swap_round_trip_over_memcpy": Target(">=", 0.6)})
