"""Linear layers of few rows, whose time is that of reading the weights once.

One row: a program takes a few rows of the weight and sums products in float32, without tensor cores; its first tile is loaded
before the kernel waits for the one before it. Several rows: the rows of x are padded to a tile of tensor cores. GATED does
silu(gate) * up in the same pass, for a weight that stacks gate over up.

Tried on an H200 and not faster: the norm before and the sum with the residual after in the same kernel, and prefetching more
of the weight into the L2 cache before the wait.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvrelay.kernels.cuda.launch import options, power_of_2
from kvrelay.kernels.cuda.table import LinearChoice, choose_linear


@dataclass(frozen=True, slots=True)
class CudaPacked:
    """Weights as the checkpoint has them."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]


@triton.jit
def _tile(weight, lines, columns, num_lines, width, EVEN_OUT: tl.constexpr, EVEN_IN: tl.constexpr):
    """A tile of the weight; what lies outside is 0."""
    places = weight + lines[:, None].to(tl.int64) * width + columns[None, :]
    if EVEN_OUT and EVEN_IN:
        return tl.load(places)
    return tl.load(places, mask=(lines < num_lines)[:, None] & (columns < width)[None, :], other=0.0)


@triton.jit
def _one_row_kernel(
    x, weight, bias, out, num_lines, width,
    BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, EVEN_OUT: tl.constexpr, EVEN_IN: tl.constexpr,
    GATED: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    lines = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    columns = tl.arange(0, BLOCK_IN)
    upper = weight + tl.cast(num_lines, tl.int64) * width
    tile = _tile(weight, lines, columns, num_lines, width, EVEN_OUT, EVEN_IN)
    if GATED:
        up_tile = _tile(upper, lines, columns, num_lines, width, EVEN_OUT, EVEN_IN)
    if PDL:
        gdc_wait()
    values = tl.load(x + columns, mask=columns < width, other=0.0).to(tl.float32)[None, :]
    sums = tile.to(tl.float32) * values
    if GATED:
        up_sums = up_tile.to(tl.float32) * values
    for start in range(BLOCK_IN, width, BLOCK_IN):
        columns = start + tl.arange(0, BLOCK_IN)
        tile = _tile(weight, lines, columns, num_lines, width, EVEN_OUT, EVEN_IN)
        values = tl.load(x + columns, mask=columns < width, other=0.0).to(tl.float32)[None, :]
        sums += tile.to(tl.float32) * values
        if GATED:
            up_tile = _tile(upper, lines, columns, num_lines, width, EVEN_OUT, EVEN_IN)
            up_sums += up_tile.to(tl.float32) * values
    result = tl.sum(sums, axis=1)
    real = lines < num_lines
    if BIAS:
        result += tl.load(bias + lines, mask=real, other=0.0).to(tl.float32)
    if GATED:
        up = tl.sum(up_sums, axis=1)
        if BIAS:
            up += tl.load(bias + num_lines + lines, mask=real, other=0.0).to(tl.float32)
        result = result / (1.0 + tl.exp(-result)) * up
    tl.store(out + lines, result.to(out.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["num_rows"])
def _few_rows_kernel(
    x, weight, bias, out, num_rows, num_lines, width,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, EVEN_OUT: tl.constexpr, EVEN_IN: tl.constexpr,
    GATED: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The weight is the left factor, whose tile has the 64 rows that Hopper's instructions want; x is the right one."""
    if PDL:
        gdc_launch_dependents()
    lines = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    rows = tl.arange(0, BLOCK_ROWS)
    upper = weight + tl.cast(num_lines, tl.int64) * width
    if PDL:
        gdc_wait()
    sums = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
    up_sums = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
    for start in range(0, width, BLOCK_IN):
        columns = start + tl.arange(0, BLOCK_IN)
        tile = _tile(weight, lines, columns, num_lines, width, EVEN_OUT, EVEN_IN)
        values = tl.trans(_tile(x, rows, columns, num_rows, width, False, EVEN_IN))
        sums = tl.dot(tile, values, sums, input_precision=PRECISION)
        if GATED:
            up_tile = _tile(upper, lines, columns, num_lines, width, EVEN_OUT, EVEN_IN)
            up_sums = tl.dot(up_tile, values, up_sums, input_precision=PRECISION)
    real_line = lines < num_lines
    if BIAS:
        sums += tl.load(bias + lines, mask=real_line, other=0.0).to(tl.float32)[:, None]
    if GATED:
        if BIAS:
            up_sums += tl.load(bias + num_lines + lines, mask=real_line, other=0.0).to(tl.float32)[:, None]
        sums = sums / (1.0 + tl.exp(-sums)) * up_sums
    places = out + rows[None, :].to(tl.int64) * num_lines + lines[:, None]
    tl.store(places, sums.to(out.dtype.element_ty), mask=(rows < num_rows)[None, :] & real_line[:, None])


def small_linear(
    x: torch.Tensor, packed: CudaPacked, *, gated: bool = False, choice: LinearChoice | None = None
) -> torch.Tensor:
    """x [a few tokens, in] -> [tokens, out], or with `gated` silu of the first half times the second [tokens, out / 2]."""
    rows, width = x.shape
    assert x.is_contiguous()
    assert width == packed.in_features
    lines = packed.out_features // 2 if gated else packed.out_features
    choice = choice or choose_linear(rows, lines, gated)
    out = x.new_empty(rows, lines)
    block_out, block_in = choice.block_out, min(choice.block_in * 2 // x.element_size(), power_of_2(width, 16))
    arguments = {
        "BLOCK_OUT": block_out, "BLOCK_IN": block_in, "EVEN_OUT": lines % block_out == 0, "EVEN_IN": width % block_in == 0,
        "GATED": gated, "BIAS": packed.bias is not None, **options(choice.num_warps, choice.num_stages),
    }  # fmt: skip
    grid = (triton.cdiv(lines, block_out),)
    bias = x if packed.bias is None else packed.bias
    if rows == 1:
        _one_row_kernel[grid](x, packed.weight, bias, out, lines, width, **arguments)
    else:
        precision = "ieee" if x.dtype is torch.float32 else "tf32"
        _few_rows_kernel[grid](
            x, packed.weight, bias, out, rows, lines, width,
            BLOCK_ROWS=power_of_2(rows, 16), PRECISION=precision, **arguments,
        )  # fmt: skip
    return out
