"""Measures the variants of each kernel on this card, in CUDA graphs over data larger than its cache: what `table.py` says.

    python -m kvrelay.kernels.cuda.tune [--rows 1,8,16] [--json tune.json]

Shapes are those of Llama-3.1-8B. Variants are compiled by many processes first, since compiling is what takes the time.
`library`: cuBLAS and cuDNN, and for attention over pages FlashInfer where it is installed.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import multiprocessing
import os
import pathlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F

try:
    import flashinfer  # type: ignore[import-not-found]
except ImportError:
    flashinfer = None

from kvrelay.kernels.base import AttentionBatch, HeadShape
from kvrelay.kernels.cuda import elementwise
from kvrelay.kernels.cuda.decode import decode_attention
from kvrelay.kernels.cuda.launch import power_of_2
from kvrelay.kernels.cuda.linear import CudaPacked, small_linear
from kvrelay.kernels.cuda.prefill import own_attention, paged_attention
from kvrelay.kernels.cuda.table import DecodeChoice, LinearChoice, PrefillChoice, choose_decode, choose_linear

SHAPE = HeadShape(32, 8, 128)
BLOCK_SIZE = 16
DTYPE = torch.bfloat16
CACHE_BYTES = 1 << 30  # weights or KV that a graph walks through, several times the card's L2
Choice = LinearChoice | DecodeChoice | PrefillChoice


@dataclass(frozen=True, slots=True)
class Linear:
    name: str
    out_features: int
    in_features: int
    gated: bool = False


LINEARS = [
    Linear("qkv", 6144, 4096),
    Linear("output", 4096, 4096),
    Linear("gate_up+silu", 28672, 4096, gated=True),
    Linear("down", 4096, 14336),
    Linear("head", 128256, 4096),
]
DECODES = [(1, 192), (1, 8192), (8, 1088), (32, 1088), (64, 1088), (256, 576)]  # rows, context
PREFILLS = [(512, 512), (2048, 2048), (8192, 8192), (2048, 8192)]  # queries, context


def linear_choices(rows: int) -> list[LinearChoice]:
    if rows == 1:
        tiles = [(4, 1024), (4, 2048), (8, 1024), (8, 2048), (16, 512), (16, 1024), (2, 1024), (2, 2048), (2, 4096), (4, 512)]
        ways = itertools.product(tiles, (4, 8), (1, 2, 3), (False, True))
        return [LinearChoice(*tile, warps, 3, ahead=ahead, pipelined=pipelined) for tile, warps, ahead, pipelined in ways]
    sizes = [(64, 128, 4), (64, 256, 4), (64, 128, 8), (128, 128, 4), (128, 64, 4), (128, 128, 8), (32, 256, 4), (16, 512, 2)]
    return [LinearChoice(*size, stages) for size, stages in itertools.product(sizes, (3, 4, 5))]


def decode_choices(rows: int, context: int) -> list[DecodeChoice]:
    programs = rows * SHAPE.num_kv_heads
    splits = [s for s in (1, 2, 4, 8, 16, 32, 64) if 256 <= s * programs <= 4096 or (programs < 64 and s >= 8)]
    shapes = [(16, 1, 4), (32, 1, 3), (32, 2, 3), (32, 4, 2), (32, 4, 3), (64, 2, 2), (64, 2, 3), (64, 4, 3), (128, 4, 2)]
    return [DecodeChoice(s, *shape) for s in splits for shape in shapes if s == 1 or s * shape[0] <= 8 * context]


PREFILL_CHOICES = [
    PrefillChoice(*choice)
    for choice in [(128, 64, 8, 3), (128, 64, 4, 3), (128, 128, 8, 2), (64, 64, 4, 3), (128, 32, 4, 4), (256, 64, 8, 2)]
]


def graph_us(calls: Iterable[Callable[[], object]], repeats: int = 5) -> float:
    """Microseconds a call, of calls captured one after another: the best of some replays."""
    calls = list(calls)
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    best = float("inf")
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end))
    return best * 1000 / len(calls)


class LinearBench:
    """Copies of one weight, so that none is found in the cache."""

    def __init__(self, linear: Linear, rows: int, copies: int) -> None:
        self.linear = linear
        self.weights = [
            CudaPacked(torch.randn(linear.out_features, linear.in_features, device="cuda", dtype=DTYPE) / 64, None)
            for _ in range(copies)
        ]
        self.x = torch.randn(rows, linear.in_features, device="cuda", dtype=DTYPE)

    def call(self, packed: CudaPacked, choice: LinearChoice) -> torch.Tensor:
        return small_linear(self.x, packed, gated=self.linear.gated, choice=choice)

    def library(self, packed: CudaPacked) -> torch.Tensor:
        x = F.linear(self.x, packed.weight)
        return elementwise.silu_mul(x) if self.linear.gated else x


def kv_batch(rows: int, queries: int, context: int, layers: int) -> tuple[torch.Tensor, AttentionBatch, torch.Tensor]:
    width = -(-context // BLOCK_SIZE)
    tables = torch.randperm(rows * width, device="cuda").view(rows, width).int()
    kv = torch.randn(layers, 2, rows * width, BLOCK_SIZE, 8, 128, device="cuda", dtype=DTYPE)
    batch = AttentionBatch(
        query_start=torch.arange(rows + 1, device="cuda", dtype=torch.int32) * queries,
        context_lens=torch.full((rows,), context, device="cuda", dtype=torch.int32),
        block_tables=tables,
        max_query=queries,
        max_context=context,
    )
    qkv = torch.randn(rows * queries, 48 * 128, device="cuda", dtype=DTYPE)
    return qkv, batch, kv


Job = tuple[tuple[Linear, int] | tuple[()], Choice]


def compile_all(jobs: list[Job]) -> None:
    """Each variant once, on small data with the same kinds of arguments, in other processes: the compiler keeps its results
    in files."""
    workers = min(len(os.sched_getaffinity(0)), 14)
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        pool.map(_compile, list(dict.fromkeys(jobs)), chunksize=2)


def _compiled_as(linear: Linear) -> Linear:
    return Linear("", 2048, 4096, linear.gated)


def _row_tile(rows: int) -> int:
    return 1 if rows == 1 else power_of_2(rows, 16)


def _compile(job: Job) -> None:
    key, choice = job
    try:
        if isinstance(choice, LinearChoice):
            assert key
            bench = LinearBench(*key, copies=1)
            bench.call(bench.weights[0], choice)
        else:
            queries = 1 if isinstance(choice, DecodeChoice) else 64
            qkv, batch, kv = kv_batch(1, queries, 64, 1)
            q, out = qkv.view(queries, 48, 128)[:, :32], torch.empty(queries, 4096, device="cuda", dtype=DTYPE)
            if isinstance(choice, DecodeChoice):
                decode_attention(q, SHAPE, batch, kv[0], 0.1, out, choice=choice)
            else:
                paged_attention(q, SHAPE, batch, kv[0], 0.1, out, choice=choice)
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - a variant that does not fit the card is left out
        print("left out", choice, type(error).__name__, flush=True)


def measured(choices: list[Choice], time: Callable[[Choice], float]) -> list[tuple[float, Choice]]:
    found = []
    for choice in choices:
        try:
            found.append((time(choice), choice))
        except Exception as error:  # noqa: BLE001 - as above
            print("left out", choice, type(error).__name__, flush=True)
    return sorted(found, key=lambda pair: pair[0])


def report(name: str, gigabytes: float, library_us: float, found: list[tuple[float, Choice]], now: Choice) -> dict[str, object]:
    best_us, best = found[0]
    now_us = next((us for us, choice in found if choice == now), float("nan"))
    rate = gigabytes / best_us * 1e6
    line = f"{name:26} library {library_us:8.2f} us  table {now_us:8.2f}  best {best_us:8.2f} {rate:6.0f} GB/s  {best}"
    print(line, flush=True)
    return {
        "name": name,
        "library_us": library_us,
        "table_us": now_us,
        "gigabytes": gigabytes,
        "variants": [{"us": us, **asdict(choice)} for us, choice in found],
    }


def tune_linear(linear: Linear, rows: int) -> dict[str, object]:
    size = linear.out_features * linear.in_features * 2
    bench = LinearBench(linear, rows, max(2, CACHE_BYTES // size))
    library_us = graph_us([lambda packed=packed: bench.library(packed) for packed in bench.weights])  # type: ignore[misc]
    found = measured(
        list(linear_choices(rows)),
        lambda choice: graph_us([lambda packed=packed: bench.call(packed, choice) for packed in bench.weights]),  # type: ignore[misc, arg-type]
    )
    num_lines = linear.out_features // (2 if linear.gated else 1)
    now = choose_linear(rows, num_lines, linear.in_features, linear.gated)
    return report(f"{linear.name} x {rows}", size / 1e9, library_us, found, now)


def flashinfer_us(q: torch.Tensor, batch: AttentionBatch, layers: Sequence[torch.Tensor]) -> float:
    """The faster of its two kernels for single queries, or its kernel for prompts. NaN where it is not installed."""
    if flashinfer is None:
        return float("nan")
    rows, width = batch.block_tables.shape
    starts = torch.arange(rows + 1, device="cuda", dtype=torch.int32) * width
    pages = (starts, batch.block_tables.flatten(), (batch.context_lens - 1) % BLOCK_SIZE + 1)
    sizes = (SHAPE.num_heads, SHAPE.num_kv_heads, SHAPE.head_dim, BLOCK_SIZE)
    kinds = {"q_data_type": DTYPE, "kv_data_type": DTYPE, "sm_scale": 0.1}
    workspace = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    if batch.max_query > 1:
        prompts = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace)
        prompts.plan(batch.query_start, *pages, *sizes, causal=True, **kinds)
        wrappers = [prompts]
    else:
        names = ("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer")
        buffers = {name: page.clone() for name, page in zip(names, pages, strict=True)}
        wrappers = [
            flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, use_cuda_graph=True, use_tensor_cores=tensor, **buffers)
            for tensor in (False, True)
        ]
    best = float("inf")
    for wrapper in wrappers:
        if batch.max_query == 1:
            wrapper.plan(*pages, *sizes, **kinds)
        best = min(best, graph_us([functools.partial(wrapper.run, q.contiguous(), tuple(layer)) for layer in layers]))
    return best


def tune_decode(rows: int, context: int) -> dict[str, object]:
    layer_bytes = rows * context * 4096
    layers = max(4, min(32, 2 * CACHE_BYTES // layer_bytes))
    qkv, batch, kv = kv_batch(rows, 1, context, layers)
    q, out = qkv.view(rows, 48, 128)[:, :32], torch.empty(rows, 4096, device="cuda", dtype=DTYPE)

    def time(choice: Choice) -> float:
        assert isinstance(choice, DecodeChoice)
        one = functools.partial(decode_attention, q, SHAPE, batch, scale=0.1, out=out, choice=choice)
        return graph_us([functools.partial(one, kv=layer) for layer in kv.unbind(0)])

    found = measured(list(decode_choices(rows, context)), time)
    now = choose_decode(rows * SHAPE.num_kv_heads, context, 256)
    return report(f"decode {rows} x {context}", layer_bytes / 1e9, flashinfer_us(q, batch, kv.unbind(0)), found, now)


def tune_prefill(queries: int, context: int) -> dict[str, object]:
    qkv, batch, kv = kv_batch(1, queries, context, 1)
    q = qkv.view(queries, 48, 128)[:, :32]
    out = torch.empty(queries, 4096, device="cuda", dtype=DTYPE)
    own = [lambda: own_attention(q, SHAPE, [queries], 0.1)] * 4
    library_us = graph_us(own) if queries == context else flashinfer_us(q, batch, [kv[0]] * 4)

    def time(choice: Choice) -> float:
        assert isinstance(choice, PrefillChoice)
        return graph_us([lambda: paged_attention(q, SHAPE, batch, kv[0], 0.1, out, choice=choice)] * 4)

    found = measured(list(PREFILL_CHOICES), time)
    work = 4 * 4096 * (queries * context - queries * queries / 2) / 1e12  # TFLOP: the column GB/s is TFLOP/s / 1000
    return report(f"prefill {queries} of {context}", work * 1000, library_us, found, found[0][1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,8,16", help="rows of linears")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    rows_of_linears = [int(rows) for rows in options.rows.split(",") if rows]
    linears = list(itertools.product(LINEARS, rows_of_linears))
    compile_all(
        [
            *[((_compiled_as(linear), _row_tile(rows)), choice) for linear, rows in linears for choice in linear_choices(rows)],
            *[((), choice) for case in DECODES for choice in decode_choices(*case)],
            *[((), choice) for choice in PREFILL_CHOICES],
        ]
    )
    results = [tune_linear(linear, rows) for linear, rows in linears]
    results += [tune_decode(*case) for case in DECODES]
    results += [tune_prefill(*case) for case in PREFILLS]
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
