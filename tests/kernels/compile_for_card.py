"""Compiles the Triton kernels for an NVIDIA card, on a machine that has none: nothing is launched.

    python compile_for_card.py CAPABILITY    # 80, 89 or 90

A process of its own, since Triton's interpreter and its compiler exclude each other. Prints what each kernel uses.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from kvrelay.kernels.base import AttentionBatch, ForwardBatch, HeadShape
from kvrelay.kernels.cuda import elementwise, ends, launch
from kvrelay.kernels.cuda.decode import decode_attention
from kvrelay.kernels.cuda.linear import CudaPacked, Turn, small_linear
from kvrelay.kernels.cuda.prefill import paged_attention
from kvrelay.kernels.fp8 import FP8
from kvrelay.transfer.engines.cuda.copy import Copies
from kvrelay.transfer.engines.ranges import scan

SHAPES = [HeadShape(32, 8, 128), HeadShape(9, 3, 64), HeadShape(32, 4, 256), HeadShape(24, 24, 96)]
CAPABILITY = int(sys.argv[1])
MAX_SHARED_BYTES = {80: 166912, 89: 101376, 90: 232448}[CAPABILITY]  # of one program


class NoCard:
    """Stands for Triton's driver: names a target, has no device."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", CAPABILITY, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_benchmarker(self) -> None: ...


def compile_only() -> list[Any]:
    """The kernels that will be called."""
    run, called = JITFunction.run, list[Any]()

    def compiled(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        assert warmup or self.fn.__name__ == "_copy_kernel", f"{self.fn.__name__} is to be compiled, not launched"
        called.append(run(self, *arguments, grid=grid, warmup=True, **options))
        return called[-1]

    JITFunction.run = compiled
    triton.runtime.driver.set_active(NoCard())
    launch.has_dependent_launch = lambda: CAPABILITY >= 90
    launch.shared_bytes = lambda: MAX_SHARED_BYTES
    return called


def batch_of(num_rows: int, count: int) -> ForwardBatch:
    tokens = torch.zeros(num_rows * count, dtype=torch.int64)
    rows = AttentionBatch(
        query_start=torch.zeros(num_rows + 1, dtype=torch.int32),
        context_lens=torch.zeros(num_rows, dtype=torch.int32),
        block_tables=torch.zeros(num_rows, 64, dtype=torch.int32),
        max_query=count,
        max_context=1024,
    )
    return ForwardBatch(tokens, tokens, tokens, rows, tokens)


def main() -> None:
    called = compile_only()
    with launch.compiling():
        call_all()
    for kernel in called:
        used = kernel.metadata
        assert used.shared <= MAX_SHARED_BYTES, (used.name, used.shared)
        print(f"{used.name}: {used.num_warps} warps, {used.shared} bytes shared")


def call_all() -> None:
    for multiple in (16, 8, 1):
        ranges = scan(np.array([[multiple, 2 * multiple, 3 * multiple]], dtype=np.int64))
        Copies(torch.device("cpu")).launch(1 << 40, 1 << 41, ranges)
    columns, tables = torch.zeros(6, 8, dtype=torch.int32), torch.zeros(8, 300, dtype=torch.int32)
    ends.step_inputs(columns, columns[0].long(), tables, tables)
    kinds = [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32)]
    for dtype, kv_dtype in kinds if CAPABILITY == 80 else [(torch.bfloat16, FP8), *kinds]:
        for shape in SHAPES if dtype is torch.bfloat16 and CAPABILITY == 90 else SHAPES[:2]:
            kv = torch.empty(2, 64, 16, shape.num_kv_heads, shape.head_dim, dtype=kv_dtype)
            heads = shape.num_heads + 2 * shape.num_kv_heads
            norm = torch.empty(shape.head_dim, dtype=dtype)
            cos_sin = torch.empty(16, shape.head_dim)
            for num_rows, count in ((1, 1), (8, 1), (64, 1), (256, 1), (1, 8), (1, 16), (2, 300), (1, 5000)):
                batch = batch_of(num_rows, count)
                qkv = torch.empty(num_rows * count, heads * shape.head_dim, dtype=dtype)
                q = elementwise.rope_and_store(qkv, shape, cos_sin, batch, kv, norm, norm, 1e-5, keep=count > 1)
                out = torch.empty(q.shape[0], shape.num_heads * shape.head_dim, dtype=dtype)
                if len(q) <= 64:
                    packed = CudaPacked(torch.empty(qkv.shape[1], 4096, dtype=dtype), None)
                    small_linear(torch.empty(len(q), 4096, dtype=dtype), packed, turn=Turn(shape, cos_sin, batch, kv))
                if count > 1:
                    paged_attention(q, shape, batch.attention, kv, 0.1, out, mixed=True)
                decode_attention(q, shape, batch.attention, kv, 0.1, out, mixed=count > 1)
        x = torch.empty(64, 4096, dtype=dtype)
        elementwise.rms_norm(x, x, x[0], 1e-5)
        elementwise.silu_mul(x)
        ends.take_rows(x, torch.zeros(8, dtype=torch.int64))
        ends.keep_likeliest(x, x, torch.zeros(64, dtype=torch.int64))
        packed = CudaPacked(torch.empty(28672, 4096, dtype=dtype), None)
        if dtype is torch.bfloat16:
            small_linear(torch.empty(128, 4096, dtype=dtype), packed, gated=True)
        for num_rows in (1, 8, 32, 64):
            small_linear(x[:num_rows], packed, gated=True)
            small_linear(x[:num_rows], packed)
            small_linear(x[:num_rows], CudaPacked(packed.weight[:4096], None))
            small_linear(torch.empty(num_rows, 14336, dtype=dtype), CudaPacked(packed.weight.view(8192, 14336)[:4096], None))
    if CAPABILITY == 80:
        return
    x = x.bfloat16()
    packed = CudaPacked(torch.empty(28672, 4096, dtype=FP8), None, torch.empty(28672))
    for num_rows in (1, 8, 32, 64):
        small_linear(x[:num_rows], packed, gated=True)
        small_linear(x[:num_rows], packed)
        small_linear(x[:num_rows], CudaPacked(packed.weight[:4096], None, packed.scale))
        turn = Turn(SHAPES[0], torch.empty(16, 128), batch_of(num_rows, 1), torch.empty(2, 64, 16, 8, 128, dtype=FP8))
        small_linear(x[:num_rows], CudaPacked(packed.weight[:6144], None, packed.scale), turn=turn)


if __name__ == "__main__":
    main()
