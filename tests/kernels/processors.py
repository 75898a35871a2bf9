"""The kinds of processor that this one can stand for, by what the compiler is told of them."""

from __future__ import annotations

import pathlib

import pytest
from _pytest.mark.structures import ParameterSet

from kvrelay.config import read_environment
from kvrelay.kernels.native.build import load_library
from kvrelay.kernels.native.kernels import NativeKernels

TARGETS = {"this processor": ("-march=native",), "avx512f": ("-mavx512f",), "avx2": ("-mavx2", "-mfma"), "plain": ()}


def targets() -> list[ParameterSet]:
    """A processor with AVX-512 runs the same lines as `avx512f`, so that `make test` takes it alone."""
    return [pytest.param(name, marks=pytest.mark.long if name == "avx512f" else ()) for name in TARGETS if _can_run(name)]


def _can_run(target: str) -> bool:
    if target not in ("avx512f", "avx2"):
        return True
    try:
        return target in pathlib.Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False


def built_for(target: str) -> NativeKernels:
    """From the user's cache, where each is built once for all tests and for good: their names tell their sources and flags."""
    return NativeKernels(load_library(read_environment().cache_dir, processor=TARGETS[target]))
