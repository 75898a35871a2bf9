"""Linear layers of few rows, whose time is that of reading the weights once.

One row: a program takes a few rows of the weight and sums products in float32, without tensor cores; its first tile is loaded
before the kernel waits for the one before it. Several rows: the rows of x are padded to a tile of tensor cores. GATED does
silu(gate) * up in the same pass, for a weight that stacks gate over up. SCALED is for weights in fp8, whose outputs have a
scale each: tiles are widened on their way to the product, so x keeps its precision.

Many rows with fp8 (`scaled_linear`): x is brought to fp8 too, with a scale per row, for the card's own product.

Tried on an H200 and not faster: the norm before and the sum with the residual after in the same kernel, and prefetching more
of the weight into the L2 cache before the wait, line by line or in bulk: what the small kernels between load comes later then.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvrelay.kernels.cuda.launch import INTERPRETED, options, power_of_2
from kvrelay.kernels.cuda.table import LinearChoice, choose_linear
from kvrelay.kernels.fp8 import FP8, quantise


@dataclass(frozen=True, slots=True)
class CudaPacked:
    """Weights as the checkpoint has them."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    scale: torch.Tensor | None = None  # [out] float32, of a weight in fp8

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
def _finished(sums, scale, bias, lines, real, SCALED: tl.constexpr, BIAS: tl.constexpr):
    """Sums in float32 of those outputs, scaled and with their bias."""
    if SCALED:
        sums *= tl.load(scale + lines, mask=real, other=0.0)
    if BIAS:
        sums += tl.load(bias + lines, mask=real, other=0.0).to(tl.float32)
    return sums


@triton.jit
def _one_row_kernel(
    x, weight, scale, bias, out, num_lines, width,
    BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, EVEN_OUT: tl.constexpr, EVEN_IN: tl.constexpr,
    GATED: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """With STAGES above 1 so many tiles are under way to shared memory; else a tile is loaded when it is wanted."""
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
    for start in tl.range(BLOCK_IN, width, BLOCK_IN, num_stages=STAGES):
        columns = start + tl.arange(0, BLOCK_IN)
        tile = _tile(weight, lines, columns, num_lines, width, EVEN_OUT, EVEN_IN)
        values = tl.load(x + columns, mask=columns < width, other=0.0).to(tl.float32)[None, :]
        sums += tile.to(tl.float32) * values
        if GATED:
            up_tile = _tile(upper, lines, columns, num_lines, width, EVEN_OUT, EVEN_IN)
            up_sums += up_tile.to(tl.float32) * values
    real = lines < num_lines
    result = _finished(tl.sum(sums, axis=1), scale, bias, lines, real, SCALED, BIAS)
    if GATED:
        up = _finished(tl.sum(up_sums, axis=1), scale, bias, num_lines + lines, real, SCALED, BIAS)
        result = result / (1.0 + tl.exp(-result)) * up
    tl.store(out + lines, result.to(out.dtype.element_ty), mask=real)


@triton.jit
def _row_tile(x, rows, columns, num_rows, width, EVEN_IN: tl.constexpr, SCALED: tl.constexpr):
    """A tile of x, transposed. Beside weights in fp8, which one instruction widens to float16 and several to bfloat16, values
    of 16 bits become float16; what exceeds its range, which activations hardly do, is clamped."""
    values = tl.trans(_tile(x, rows, columns, num_rows, width, False, EVEN_IN))
    if SCALED and x.dtype.element_ty != tl.float32:
        values = tl.clamp(values.to(tl.float32), -65504.0, 65504.0).to(tl.float16)
    return values


@triton.jit(do_not_specialize=["num_rows"])
def _few_rows_kernel(
    x, weight, scale, bias, out, num_rows, num_lines, width,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, EVEN_OUT: tl.constexpr, EVEN_IN: tl.constexpr,
    GATED: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr, EARLY: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The weight is the left factor, whose tile has the 64 rows that Hopper's instructions want, or 16 where tiles of 64 would
    be too few; x is the right one. With EARLY the first tile of the weight is loaded before the wait, into registers."""
    if PDL:
        gdc_launch_dependents()
    lines = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    rows = tl.arange(0, BLOCK_ROWS)
    upper = weight + tl.cast(num_lines, tl.int64) * width
    columns = tl.arange(0, BLOCK_IN)
    sums = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
    up_sums = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
    first: tl.constexpr = BLOCK_IN if EARLY else 0
    if EARLY:
        tile = _tile(weight, lines, columns, num_lines, width, EVEN_OUT, EVEN_IN)
        if GATED:
            up_tile = _tile(upper, lines, columns, num_lines, width, EVEN_OUT, EVEN_IN)
    if PDL:
        gdc_wait()
    if EARLY:
        values = _row_tile(x, rows, columns, num_rows, width, EVEN_IN, SCALED)
        sums = tl.dot(tile.to(values.dtype), values, sums, input_precision=PRECISION)
        if GATED:
            up_sums = tl.dot(up_tile.to(values.dtype), values, up_sums, input_precision=PRECISION)
    for start in range(first, width, BLOCK_IN):
        columns = start + tl.arange(0, BLOCK_IN)
        tile = _tile(weight, lines, columns, num_lines, width, EVEN_OUT, EVEN_IN)
        values = _row_tile(x, rows, columns, num_rows, width, EVEN_IN, SCALED)
        sums = tl.dot(tile.to(values.dtype), values, sums, input_precision=PRECISION)
        if GATED:
            up_tile = _tile(upper, lines, columns, num_lines, width, EVEN_OUT, EVEN_IN)
            up_sums = tl.dot(up_tile.to(values.dtype), values, up_sums, input_precision=PRECISION)
    real_line = lines < num_lines
    sums = _finished(sums, scale, bias, lines[:, None], real_line[:, None], SCALED, BIAS)
    if GATED:
        up_sums = _finished(up_sums, scale, bias, num_lines + lines[:, None], real_line[:, None], SCALED, BIAS)
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
    scaled = packed.scale is not None
    choice = choice or choose_linear(rows, lines, gated, scaled)
    out = x.new_empty(rows, lines)
    block_out, block_in = choice.block_out, min(choice.block_in * 2 // x.element_size(), power_of_2(width, 16))
    arguments = {
        "BLOCK_OUT": block_out, "BLOCK_IN": block_in, "EVEN_OUT": lines % block_out == 0, "EVEN_IN": width % block_in == 0,
        "GATED": gated, "SCALED": scaled, "BIAS": packed.bias is not None, **options(choice.num_warps, choice.num_stages),
    }  # fmt: skip
    grid = (triton.cdiv(lines, block_out),)
    scale, bias = x if packed.scale is None else packed.scale, x if packed.bias is None else packed.bias
    if rows == 1 and not choice.tensor_cores:
        stages = choice.num_stages if choice.pipelined else 1
        _one_row_kernel[grid](x, packed.weight, scale, bias, out, lines, width, STAGES=stages, **arguments)
    else:
        precision = "ieee" if x.dtype is torch.float32 else "tf32"
        _few_rows_kernel[grid](
            x, packed.weight, scale, bias, out, rows, lines, width,
            BLOCK_ROWS=power_of_2(rows, 16), EARLY=choice.early, PRECISION=precision, **arguments,
        )  # fmt: skip
    return out


@triton.jit
def _quantise_kernel(x, out, scales, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One row a program."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    values = tl.load(x + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(values), axis=0)
    scale = tl.where(largest > 0.0, largest / 448.0, 1.0)
    tl.store(out + row * width + columns, (values / scale).to(out.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [tokens, in] in fp8, and the scale of each row."""
    if INTERPRETED:  # there 7.9 becomes 4 in fp8
        return quantise(x)
    rows, width = x.shape
    assert x.is_contiguous()
    out, scales = torch.empty_like(x, dtype=FP8), x.new_empty(rows, dtype=torch.float32)
    block = power_of_2(width)
    _quantise_kernel[(rows,)](x, out, scales, width, BLOCK=block, **options(num_warps=min(16, max(1, block // 512))))
    return out, scales


def scaled_linear(x: torch.Tensor, packed: CudaPacked, out: torch.Tensor | None = None) -> torch.Tensor:
    """x [tokens, in] -> [tokens, out] with a weight in fp8, in tensor cores of fp8."""
    assert packed.scale is not None
    narrow, scales = quantise_rows(x)
    if out is None:
        out = x.new_empty(x.shape[0], packed.out_features)
    torch._scaled_mm(
        narrow, packed.weight.T, scale_a=scales[:, None], scale_b=packed.scale[None, :], out_dtype=out.dtype,
        use_fast_accum=True, out=out,
    )  # fmt: skip
    return out if packed.bias is None else out.add_(packed.bias)
