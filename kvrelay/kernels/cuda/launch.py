"""How Triton kernels are launched here.

A kernel with `PDL` set takes part in programmatic dependent launch: its programs are started while the kernel before still
runs, load what does not depend on it (weights), and wait for its end in `gdc_wait()`. Every program of such a kernel waits
before it ends, so a kernel that has ended implies that all kernels before it have. Several kernels may wait in a row.

What may be read before the wait: weights, and the inputs of a pass (positions and their rotation, slots, lengths, block
tables), which are written before its first norm; that one is launched in the ordinary way (`after_all`), and all others follow
it.

Compiling a kernel takes up to two seconds, and many are needed at start. So passes are first run within `compiling`, which
compiles all kernels that they would launch, as many at a time as there are cores.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs

INTERPRETED = bool(knobs.runtime.interpret)  # TRITON_INTERPRET=1: kernels run in numpy, on the CPU
_FIRST_WITH_PDL = (9, 0)
_SHARED_BYTES_ON_HOPPER = 232448
_only_compiled: ContextVar[bool] = ContextVar("only_compiled", default=False)


def only_compiles() -> bool:
    return _only_compiled.get()


class Kernel:
    """A kernel of Triton; within `compiling` it is not launched."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        if only_compiles():
            return functools.partial(self._function.warmup, grid=grid)
        launched: Callable[..., object] = self._function[grid]
        return launched


def kernel(**options: object) -> Callable[[Callable[..., object]], Kernel]:
    """The decorator of a kernel that passes launch. Options are those of `triton.jit`."""
    return lambda function: Kernel(triton.jit(function, **options))


@contextlib.contextmanager
def compiling() -> Iterator[list[Future[Any]]]:
    """Kernels that are called within are compiled by threads instead of launched, and all of them are compiled when it ends.
    Tensors that they would have written hold anything. Yields the compilations."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool, triton.AsyncCompileMode(pool) as mode:
        token = _only_compiled.set(True)
        try:
            yield mode.raw_futures
        finally:
            _only_compiled.reset(token)


@functools.cache
def has_dependent_launch() -> bool:
    return not INTERPRETED and torch.cuda.get_device_capability() >= _FIRST_WITH_PDL


@functools.cache
def options(num_warps: int = 4, num_stages: int = 3, *, after_all: bool = False) -> dict[str, object]:
    """Keywords of a launch. The constexpr `PDL` of the kernel is among them."""
    if has_dependent_launch():
        return {"num_warps": num_warps, "num_stages": num_stages, "PDL": True, "launch_pdl": not after_all}
    return {"num_warps": num_warps, "num_stages": num_stages, "PDL": False}


@functools.cache
def shared_bytes() -> int:
    """Shared memory that a program may have. Tables are measured on Hopper; others may have less."""
    if INTERPRETED:
        return _SHARED_BYTES_ON_HOPPER
    return int(triton.runtime.driver.active.utils.get_device_properties(torch.cuda.current_device())["max_shared_mem"])


def fits(num_bytes: int) -> bool:
    return num_bytes <= shared_bytes()


def stages_that_fit(num_stages: int, stage_bytes: int) -> int:
    """As many of `num_stages` as fit into shared memory, at least 1."""
    return max(1, min(num_stages, shared_bytes() // stage_bytes))


@functools.cache
def power_of_2(size: int, least: int = 1) -> int:
    """The smallest one that is not below `size`."""
    return int(max(least, triton.next_power_of_2(size)))


@triton.jit
def beside_kv(query, kv):
    """A query for products with KV. One instruction widens fp8 to float16 and several to bfloat16, so beside KV in fp8 a query
    in bfloat16 becomes float16, which holds more digits; what is beyond its range becomes its largest value."""
    if kv.dtype.element_ty == tl.float8e4nv and query.dtype == tl.bfloat16:
        query = tl.minimum(tl.maximum(query.to(tl.float32), -65504.0), 65504.0).to(tl.float16)
    return query
