"""What this machine can do at best, measured with PyTorch's own routines: the limits that figures are compared with.

Both measurements are one number per call, so that a scenario can interleave them with its own and take medians: on a shared
machine the limits move as much as the figures do.
"""

from __future__ import annotations

import os
import pathlib
import platform
import statistics
import time
from collections.abc import Callable

import torch

GEMV_ROWS, GEMV_COLUMNS = 65536, 1024  # 256 MiB in float32: no last-level cache holds it
GEMM_SIZE = 2048
_FLOAT32_BYTES = 4


class Machine:
    """Holds the operands, so that a repeated measurement allocates nothing."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self._matrix = torch.randn(GEMV_ROWS, GEMV_COLUMNS, generator=generator)
        self._vector = torch.randn(GEMV_COLUMNS, generator=generator)
        self._left = torch.randn(GEMM_SIZE, GEMM_SIZE, generator=generator)
        self._right = torch.randn(GEMM_SIZE, GEMM_SIZE, generator=generator)
        self._gemv_out = torch.empty(GEMV_ROWS)
        self._gemm_out = torch.empty(GEMM_SIZE, GEMM_SIZE)

    def gemv_bytes_per_s(self, repeats: int = 5) -> float:
        """Memory bandwidth as a matrix-vector product sees it, at the threads torch is set to."""
        seconds = best_seconds(lambda: torch.mv(self._matrix, self._vector, out=self._gemv_out), repeats)
        return GEMV_ROWS * GEMV_COLUMNS * _FLOAT32_BYTES / seconds

    def gemm_flops_per_s(self, repeats: int = 3) -> float:
        """Float32 arithmetic as a large matrix product sees it, at the threads torch is set to."""
        seconds = best_seconds(lambda: torch.mm(self._left, self._right, out=self._gemm_out), repeats)
        return 2 * GEMM_SIZE**3 / seconds


def measure(threads: int, rounds: int = 5) -> dict[str, float]:
    """The scenario `machine`."""
    if threads:
        torch.set_num_threads(threads)
    machine = Machine()
    gemv, gemm = zip(*((machine.gemv_bytes_per_s(), machine.gemm_flops_per_s()) for _ in range(rounds)), strict=True)
    return {"gemv_gb_per_s": statistics.median(gemv) / 1e9, "gemm_gflop_per_s": statistics.median(gemm) / 1e9}


def best_seconds(work: Callable[[], object], repeats: int) -> float:
    """The fastest of `repeats` runs: what is slower was disturbed by somebody else."""
    fastest = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        fastest = min(fastest, time.perf_counter() - start)
    return fastest


def describe() -> str:
    """One line for the result file: processor, cores, memory, PyTorch, threads, GPU if there is one."""
    cores = len(os.sched_getaffinity(0))
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    card = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return (
        f"{_cpu_model()} ({platform.machine()}), {cores} cores, {memory_gib:.0f} GiB, Python {platform.python_version()}, "
        f"torch {torch.__version__}, {torch.get_num_threads()} threads{card}"
    )


def _cpu_model() -> str:
    """As the kernel names it. Arm kernels give part numbers only, so those are named here."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    if name := facts.get("model name") or facts.get("Model"):
        return name
    implementer, part = facts.get("CPU implementer", ""), facts.get("CPU part", "")
    return _ARM_PARTS.get((implementer, part)) or platform.processor() or "unknown processor"


_ARM_PARTS = {
    ("0x41", "0xd08"): "Arm Cortex-A72",
    ("0x41", "0xd0c"): "Arm Neoverse-N1",
    ("0x41", "0xd40"): "Arm Neoverse-V1",
    ("0x41", "0xd49"): "Arm Neoverse-N2",
    ("0x41", "0xd4f"): "Arm Neoverse-V2",
    ("0x41", "0xd84"): "Arm Neoverse-V3",
    ("0xc0", "0xac3"): "Ampere-1",
}
