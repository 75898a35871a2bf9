"""What this machine can do at best: the limits that figures are compared with. PyTorch's own routines measure them, and our
matrix product, where that is the faster one.

Both measurements are one number per call, so that a scenario can interleave them with its own and take medians: on a shared
machine the limits move as much as the figures do.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Annotated

import torch
from msgspec import Meta
from rich.console import Console

from kvrelay.bench.harness.scenario import BenchOptions, Part, Results, Scenario
from kvrelay.config import Count, read_environment
from kvrelay.kernels.choose import choose_kernels
from kvrelay.kernels.native.kernels import NativeKernels

GEMV_ROWS, GEMV_COLUMNS = 65536, 1024  # 256 MiB in float32: no last-level cache holds it
GEMM_SIZE = 2048
ROUNDS = 5
_FLOAT32_BYTES = 4


class Machine:
    """Holds the operands, so that no measurement makes them."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self._matrix = torch.randn(GEMV_ROWS, GEMV_COLUMNS, generator=generator)
        self._vector = torch.randn(GEMV_COLUMNS, generator=generator)
        self._left = torch.randn(GEMM_SIZE, GEMM_SIZE, generator=generator)
        self._right = torch.randn(GEMM_SIZE, GEMM_SIZE, generator=generator)
        self._gemv_out = torch.empty(GEMV_ROWS)
        self._gemm_out = torch.empty(GEMM_SIZE, GEMM_SIZE)
        kernels = choose_kernels(torch.device("cpu"), torch.float32, read_environment())
        self._products: list[Callable[[], object]] = [lambda: torch.mm(self._left, self._right, out=self._gemm_out)]
        if isinstance(kernels, NativeKernels) and kernels.has_bulk:
            packed = kernels.pack(self._right, None)
            self._products.append(lambda: kernels.linear(self._left, packed, bulk=True))

    def gemv_bytes_per_s(self, repeats: int = 5) -> float:
        """Memory bandwidth as a matrix-vector product sees it, at the threads torch is set to."""
        seconds = best_seconds(lambda: torch.mv(self._matrix, self._vector, out=self._gemv_out), repeats)
        return GEMV_ROWS * GEMV_COLUMNS * _FLOAT32_BYTES / seconds

    def gemm_flops_per_s(self, repeats: int = 3) -> float:
        """Float32 arithmetic as a large matrix product sees it, at the threads torch is set to."""
        seconds = min(best_seconds(product, repeats) for product in self._products)
        return 2 * GEMM_SIZE**3 / seconds


class MachineBench(BenchOptions, frozen=True, kw_only=True):
    """What is measured."""

    threads: Annotated[Count, Meta(description="CPU threads; 0 uses all cores")] = 0


def measure(options: MachineBench, console: Console) -> Results:
    if options.threads:
        torch.set_num_threads(options.threads)
    machine = Machine()
    with console.status("measuring this machine"):
        rounds = [(machine.gemv_bytes_per_s(), machine.gemm_flops_per_s()) for _ in range(ROUNDS)]
    gemv, gemm = zip(*rounds, strict=True)
    return {"gemv_gb_per_s": statistics.median(gemv) / 1e9, "gemm_gflop_per_s": statistics.median(gemm) / 1e9}


def best_seconds(work: Callable[[], object], repeats: int) -> float:
    """The fastest of `repeats` runs: a slower one was disturbed by another process."""
    fastest = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        fastest = min(fastest, time.perf_counter() - start)
    return fastest


SCENARIO = Scenario(MachineBench, {"machine": Part("its limits", measure, {})})
