"""The kinds of processor that this one can stand for, by what the compiler is told of them."""

from __future__ import annotations

import pathlib

TARGETS = {"this processor": ("-march=native",), "avx512f": ("-mavx512f",), "avx2": ("-mavx2", "-mfma"), "plain": ()}


def can_run(target: str) -> bool:
    if target not in ("avx512f", "avx2"):
        return True
    try:
        return target in pathlib.Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False
