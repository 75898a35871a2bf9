"""Linear layers of few rows, whose time is that of reading the weights once.

One row: a program takes a few rows of the weight and sums products in float32, without tensor cores. Several rows: the rows
of x are padded to a tile of tensor cores. Either way the first tile of the weight is loaded before the kernel waits for the
one before it. What comes before and after goes into the same pass: NORM of x (the rows' factor is applied to the sums),
GATED silu(gate) * up for a weight that stacks gate over up, ADD to the residual in place.
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


@dataclass(frozen=True, slots=True)
class Norm:
    """A root-mean-square norm of the rows of x."""

    weight: torch.Tensor
    eps: float


@triton.jit
def _tile(weight, lines, columns, num_lines, width, EVEN_OUT: tl.constexpr, EVEN_IN: tl.constexpr):
    """A tile of the weight; what lies outside is 0."""
    places = weight + lines[:, None].to(tl.int64) * width + columns[None, :]
    if EVEN_OUT and EVEN_IN:
        return tl.load(places)
    return tl.load(places, mask=(lines < num_lines)[:, None] & (columns < width)[None, :], other=0.0)


@triton.jit
def _one_row_kernel(
    x, weight, bias, norm, out, num_lines, width, eps,
    BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, EVEN_OUT: tl.constexpr, EVEN_IN: tl.constexpr,
    GATED: tl.constexpr, NORM: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    lines = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    columns = tl.arange(0, BLOCK_IN)
    upper = weight + num_lines.to(tl.int64) * width
    tile = _tile(weight, lines, columns, num_lines, width, EVEN_OUT, EVEN_IN)
    if GATED:
        up_tile = _tile(upper, lines, columns, num_lines, width, EVEN_OUT, EVEN_IN)
    if PDL:
        gdc_wait()
    values = tl.load(x + columns, mask=columns < width, other=0.0).to(tl.float32)
    if NORM:
        squares = values * values
        values *= tl.load(norm + columns, mask=columns < width, other=0.0).to(tl.float32)
    sums = tile.to(tl.float32) * values[None, :]
    if GATED:
        up_sums = up_tile.to(tl.float32) * values[None, :]
    for start in range(BLOCK_IN, width, BLOCK_IN):
        columns = start + tl.arange(0, BLOCK_IN)
        tile = _tile(weight, lines, columns, num_lines, width, EVEN_OUT, EVEN_IN)
        values = tl.load(x + columns, mask=columns < width, other=0.0).to(tl.float32)
        if NORM:
            squares += values * values
            values *= tl.load(norm + columns, mask=columns < width, other=0.0).to(tl.float32)
        sums += tile.to(tl.float32) * values[None, :]
        if GATED:
            up_tile = _tile(upper, lines, columns, num_lines, width, EVEN_OUT, EVEN_IN)
            up_sums += up_tile.to(tl.float32) * values[None, :]
    result = tl.sum(sums, axis=1)
    if NORM:
        inverse = tl.rsqrt(tl.sum(squares, axis=0) / width + eps)
        result *= inverse
    real = lines < num_lines
    if BIAS:
        result += tl.load(bias + lines, mask=real, other=0.0).to(tl.float32)
    if GATED:
        up = tl.sum(up_sums, axis=1)
        if NORM:
            up *= inverse
        if BIAS:
            up += tl.load(bias + num_lines + lines, mask=real, other=0.0).to(tl.float32)
        result = result / (1.0 + tl.exp(-result)) * up
    if ADD:
        result += tl.load(out + lines, mask=real, other=0.0).to(tl.float32)
    tl.store(out + lines, result.to(out.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["num_rows"])
def _few_rows_kernel(
    x, weight, bias, norm, out, num_rows, num_lines, width, eps,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, EVEN_OUT: tl.constexpr, EVEN_IN: tl.constexpr,
    GATED: tl.constexpr, NORM: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    lines = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    rows = tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK_IN)
    upper = weight + num_lines.to(tl.int64) * width
    tile = _tile(weight, lines, columns, num_lines, width, EVEN_OUT, EVEN_IN)
    if GATED:
        up_tile = _tile(upper, lines, columns, num_lines, width, EVEN_OUT, EVEN_IN)
    if PDL:
        gdc_wait()
    values = _tile(x, rows, columns, num_rows, width, False, EVEN_IN)
    if NORM:
        wide = values.to(tl.float32)
        squares = tl.sum(wide * wide, axis=1)
        factor = tl.load(norm + columns, mask=columns < width, other=0.0).to(tl.float32)
        values = (wide * factor[None, :]).to(values.dtype)
    sums = tl.dot(values, tl.trans(tile), input_precision=PRECISION)
    if GATED:
        up_sums = tl.dot(values, tl.trans(up_tile), input_precision=PRECISION)
    for start in range(BLOCK_IN, width, BLOCK_IN):
        columns = start + tl.arange(0, BLOCK_IN)
        tile = _tile(weight, lines, columns, num_lines, width, EVEN_OUT, EVEN_IN)
        values = _tile(x, rows, columns, num_rows, width, False, EVEN_IN)
        if NORM:
            wide = values.to(tl.float32)
            squares += tl.sum(wide * wide, axis=1)
            factor = tl.load(norm + columns, mask=columns < width, other=0.0).to(tl.float32)
            values = (wide * factor[None, :]).to(values.dtype)
        sums = tl.dot(values, tl.trans(tile), sums, input_precision=PRECISION)
        if GATED:
            up_tile = _tile(upper, lines, columns, num_lines, width, EVEN_OUT, EVEN_IN)
            up_sums = tl.dot(values, tl.trans(up_tile), up_sums, input_precision=PRECISION)
    if NORM:
        inverse = tl.rsqrt(squares / width + eps)[:, None]
        sums *= inverse
    real_line = lines < num_lines
    if BIAS:
        sums += tl.load(bias + lines, mask=real_line, other=0.0).to(tl.float32)[None, :]
    if GATED:
        if NORM:
            up_sums *= inverse
        if BIAS:
            up_sums += tl.load(bias + num_lines + lines, mask=real_line, other=0.0).to(tl.float32)[None, :]
        sums = sums / (1.0 + tl.exp(-sums)) * up_sums
    places = out + rows[:, None].to(tl.int64) * num_lines + lines[None, :]
    real = (rows < num_rows)[:, None] & real_line[None, :]
    if ADD:
        sums += tl.load(places, mask=real, other=0.0).to(tl.float32)
    tl.store(places, sums.to(out.dtype.element_ty), mask=real)


def small_linear(
    x: torch.Tensor,
    packed: CudaPacked,
    *,
    gated: bool = False,
    norm: Norm | None = None,
    add_to: torch.Tensor | None = None,
    choice: LinearChoice | None = None,
) -> torch.Tensor:
    """x [a few tokens, in] -> [tokens, out], or with `gated` silu of the first half times the second [tokens, out / 2].
    `norm` is applied to x before, and the result added to `add_to`, in place, which is returned."""
    rows, width = x.shape
    assert x.is_contiguous()
    assert width == packed.in_features
    lines = packed.out_features // 2 if gated else packed.out_features
    assert add_to is None or (add_to.shape == (rows, lines) and add_to.is_contiguous())
    choice = choice or choose_linear(rows, packed.out_features, width)
    out = x.new_empty(rows, lines) if add_to is None else add_to
    block_out, block_in = choice.block_out, min(choice.block_in * 2 // x.element_size(), power_of_2(width, 16))
    pointers = (
        x, packed.weight, x if packed.bias is None else packed.bias, x if norm is None else norm.weight, out,
    )  # fmt: skip
    arguments = {
        "BLOCK_OUT": block_out, "BLOCK_IN": block_in, "EVEN_OUT": lines % block_out == 0, "EVEN_IN": width % block_in == 0,
        "GATED": gated, "NORM": norm is not None, "ADD": add_to is not None, "BIAS": packed.bias is not None,
        **options(choice.num_warps, choice.num_stages),
    }  # fmt: skip
    grid, eps = (triton.cdiv(lines, block_out),), 0.0 if norm is None else norm.eps
    if rows == 1:
        _one_row_kernel[grid](*pointers, lines, width, eps, **arguments)
    else:
        precision = "ieee" if x.dtype is torch.float32 else "tf32"
        _few_rows_kernel[grid](
            *pointers, rows, lines, width, eps, BLOCK_ROWS=power_of_2(rows, 16), PRECISION=precision, **arguments
        )
    return out
