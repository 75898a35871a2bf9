"""Linear layers of few rows, whose time is that of reading the weights once.

- One row: a program takes a few rows of the weight and sums products in float32, without tensor cores; its first tiles are on
  their way to registers before the kernel waits for the one before it.
- Several rows: the rows of x are padded to a tile of tensor cores.
- GATED: silu(gate) * up in the same pass, for a weight that stacks gate over up.
- DIM: the outputs are queries, keys and values of heads of so many values, which are turned and stored in the same pass.
- SCALED: the weight is in fp8, and its outputs have a scale each. One row of x is multiplied as it is. Tensor cores multiply
  fp8 by fp8 alone, and widening a weight takes longer than reading it. So a few rows are cut into two parts each, in fp8, that
  add up to the row; more are rounded to fp8, and many are left to the library (`scaled_linear`). Hopper sums products of fp8
  with fewer digits than float32 has: on an H200 outputs were off by 0.2 to 0.3 %, where rounding them to bfloat16 makes 0.16 %
  and rounded rows make 2.7 %.

Tried on an H200 and not faster: the norm before and the sum with the residual after in the same kernel, and prefetching more
of the weight into the L2 cache before the wait, line by line or in bulk: what the small kernels between load comes later then.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvrelay.kernels.base import ForwardBatch, HeadShape
from kvrelay.kernels.cuda.elementwise import UNALIGNED, store_turned
from kvrelay.kernels.cuda.launch import INTERPRETED, kernel, options, power_of_2, stages_that_fit
from kvrelay.kernels.cuda.table import MAX_CUT_ROWS, LinearChoice, choose_linear
from kvrelay.kernels.fp8 import FP8, quantise

_REST_FACTOR = tl.constexpr(16.0)  # the second part of a row holds what the first left over, times this


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
def _tiles(
    found, weight, lines, columns, num_lines, width,
    BLOCK_IN: tl.constexpr, EVEN_OUT: tl.constexpr, EVEN_IN: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """`found`, a tuple, and the first COUNT tiles."""
    for step in tl.static_range(COUNT):
        found += (_tile(weight, lines, step * BLOCK_IN + columns, num_lines, width, EVEN_OUT, EVEN_IN),)
    return found


@triton.jit
def _lines(DIM: tl.constexpr, BLOCK_OUT: tl.constexpr):
    """A program's outputs. Where heads of DIM values are to be turned, both values of a pair are neighbours."""
    place = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    if DIM == 0:
        return place
    half: tl.constexpr = DIM // 2
    return place // DIM * DIM + place // 2 % half + place % 2 * half


@triton.jit
def _pairs(DIM: tl.constexpr, BLOCK_OUT: tl.constexpr):
    """The head of each pair of a program, and its number there, as columns."""
    place = (tl.program_id(0) * (BLOCK_OUT // 2) + tl.arange(0, BLOCK_OUT // 2))[:, None]
    half: tl.constexpr = DIM // 2
    return place // half, place % half


@triton.jit
def _turn(cos_sin, positions, slots, rows, is_row, DIM: tl.constexpr, BLOCK_OUT: tl.constexpr):
    """Cosines and sines [pairs, rows], and the slots of rows."""
    _, pair = _pairs(DIM, BLOCK_OUT)
    places = cos_sin + tl.load(positions + rows, mask=is_row, other=0) * DIM + pair
    return tl.load(places), tl.load(places + DIM // 2), tl.load(slots + rows, mask=is_row, other=-1)


@triton.jit
def _store_pairs(
    sums, cos, sin, slot, rows, is_row, out, kv, value_offset,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """Sums [outputs, rows] are queries, keys and values before they are turned."""
    head, pair = _pairs(DIM, BLOCK_OUT)
    both = tl.reshape(sums.to(out.dtype.element_ty), [BLOCK_OUT // 2, 2, BLOCK_ROWS])
    first, second = tl.split(tl.permute(both, (0, 2, 1)))
    store_turned(
        first, second, first.to(tl.float32), second.to(tl.float32), cos, sin, head, pair, rows.to(tl.int64), slot,
        is_row & (head < HEADS + 2 * KV_HEADS), out, HEADS * DIM, kv, value_offset, HEADS, KV_HEADS, DIM, HEADS,
    )  # fmt: skip


@triton.jit
def _finished(sums, scale, bias, lines, real, SCALED: tl.constexpr, BIAS: tl.constexpr):
    """Sums in float32 of those outputs, scaled and with their bias."""
    if SCALED:
        sums *= tl.load(scale + lines, mask=real, other=0.0)
    if BIAS:
        sums += tl.load(bias + lines, mask=real, other=0.0).to(tl.float32)
    return sums


@triton.jit
def _row(x, columns, width, EVEN_IN: tl.constexpr):
    """Values of the only row, in float32."""
    if EVEN_IN:
        return tl.load(x + columns).to(tl.float32)[None, :]
    return tl.load(x + columns, mask=columns < width, other=0.0).to(tl.float32)[None, :]


@kernel(do_not_specialize_on_alignment=UNALIGNED)
def _one_row_kernel(
    x, weight, scale, bias, out, num_lines, width, cos_sin, positions, slots, kv, value_offset,
    BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, EVEN_OUT: tl.constexpr, EVEN_IN: tl.constexpr,
    GATED: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, AHEAD: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """AHEAD tiles are loaded before the wait, into registers. Of the others, with STAGES above 1 so many are under way to
    shared memory; else a tile is loaded when it is wanted."""
    if PDL:
        gdc_launch_dependents()
    lines = _lines(DIM, BLOCK_OUT)
    columns = tl.arange(0, BLOCK_IN)
    upper = weight + tl.cast(num_lines, tl.int64) * width
    tiles = _tiles((), weight, lines, columns, num_lines, width, BLOCK_IN, EVEN_OUT, EVEN_IN, AHEAD)
    if GATED:
        up_tiles = _tiles((), upper, lines, columns, num_lines, width, BLOCK_IN, EVEN_OUT, EVEN_IN, AHEAD)
    if DIM > 0:
        row = tl.arange(0, 1)[None, :]
        cos, sin, slot = _turn(cos_sin, positions, slots, row, row == 0, DIM, BLOCK_OUT)
    if PDL:
        gdc_wait()
    sums = tl.zeros([BLOCK_OUT, BLOCK_IN], tl.float32)
    up_sums = tl.zeros([BLOCK_OUT, BLOCK_IN], tl.float32)
    for step in tl.static_range(AHEAD):
        values = _row(x, step * BLOCK_IN + columns, width, EVEN_IN)
        sums += tiles[step].to(tl.float32) * values
        if GATED:
            up_sums += up_tiles[step].to(tl.float32) * values
    for start in tl.range(AHEAD * BLOCK_IN, width, BLOCK_IN, num_stages=STAGES):
        columns = start + tl.arange(0, BLOCK_IN)
        tile = _tile(weight, lines, columns, num_lines, width, EVEN_OUT, EVEN_IN)
        values = _row(x, columns, width, EVEN_IN)
        sums += tile.to(tl.float32) * values
        if GATED:
            up_tile = _tile(upper, lines, columns, num_lines, width, EVEN_OUT, EVEN_IN)
            up_sums += up_tile.to(tl.float32) * values
    real = lines < num_lines
    result = _finished(tl.sum(sums, axis=1), scale, bias, lines, real, SCALED, BIAS)
    if GATED:
        up = _finished(tl.sum(up_sums, axis=1), scale, bias, num_lines + lines, real, SCALED, BIAS)
        result = result / (1.0 + tl.exp(-result)) * up
    if DIM > 0:
        result = result[:, None]
        _store_pairs(result, cos, sin, slot, row, row == 0, out, kv, value_offset, HEADS, KV_HEADS, DIM, BLOCK_OUT, 1)
    else:
        tl.store(out + lines, result.to(out.dtype.element_ty), mask=real)


@triton.jit
def _joined(sums, row_scale, num_rows, BLOCK_OUT: tl.constexpr, BLOCK_ROWS: tl.constexpr, PARTS: tl.constexpr):
    """Sums [outputs, parts of rows] -> [outputs, rows]: see `narrow_rows`."""
    if PARTS == 2:
        first, second = tl.split(tl.reshape(sums, [BLOCK_OUT, BLOCK_ROWS, 2]))
        sums = first + second * (1.0 / _REST_FACTOR)
    rows = tl.arange(0, BLOCK_ROWS)
    return sums * tl.load(row_scale + rows, mask=rows < num_rows, other=0.0)[None, :]


@kernel(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=UNALIGNED)
def _few_rows_kernel(
    x, row_scale, weight, scale, bias, out, num_rows, num_lines, width, cos_sin, positions, slots, kv, value_offset,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, EVEN_OUT: tl.constexpr, EVEN_IN: tl.constexpr,
    GATED: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, EARLY: tl.constexpr, PRECISION: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The weight is the left factor, whose tile has the 64 rows that Hopper's instructions want, or 16 where tiles of 64 would
    be too few; x is the right one. With EARLY the first tile of the weight is loaded before the wait, into registers. SCALED: x
    is in fp8, has PARTS parts for each row, and the row's scale."""
    if PDL:
        gdc_launch_dependents()
    lines = _lines(DIM, BLOCK_OUT)
    rows = tl.arange(0, BLOCK_ROWS)[None, :]
    is_row = rows < num_rows
    x_parts = tl.arange(0, PARTS * BLOCK_ROWS)
    upper = weight + tl.cast(num_lines, tl.int64) * width
    columns = tl.arange(0, BLOCK_IN)
    sums = tl.zeros([BLOCK_OUT, PARTS * BLOCK_ROWS], tl.float32)
    up_sums = tl.zeros([BLOCK_OUT, PARTS * BLOCK_ROWS], tl.float32)
    first: tl.constexpr = BLOCK_IN if EARLY else 0
    if EARLY:
        tile = _tile(weight, lines, columns, num_lines, width, EVEN_OUT, EVEN_IN)
        if GATED:
            up_tile = _tile(upper, lines, columns, num_lines, width, EVEN_OUT, EVEN_IN)
    if DIM > 0:
        cos, sin, slot = _turn(cos_sin, positions, slots, rows, is_row, DIM, BLOCK_OUT)
    if PDL:
        gdc_wait()
    if EARLY:
        values = tl.trans(_tile(x, x_parts, columns, PARTS * num_rows, width, False, EVEN_IN))
        sums = tl.dot(tile, values, sums, input_precision=PRECISION)
        if GATED:
            up_sums = tl.dot(up_tile, values, up_sums, input_precision=PRECISION)
    for start in range(first, width, BLOCK_IN):
        columns = start + tl.arange(0, BLOCK_IN)
        tile = _tile(weight, lines, columns, num_lines, width, EVEN_OUT, EVEN_IN)
        values = tl.trans(_tile(x, x_parts, columns, PARTS * num_rows, width, False, EVEN_IN))
        sums = tl.dot(tile, values, sums, input_precision=PRECISION)
        if GATED:
            up_tile = _tile(upper, lines, columns, num_lines, width, EVEN_OUT, EVEN_IN)
            up_sums = tl.dot(up_tile, values, up_sums, input_precision=PRECISION)
    real_line = lines < num_lines
    if SCALED:
        sums = _joined(sums, row_scale, num_rows, BLOCK_OUT, BLOCK_ROWS, PARTS)
        if GATED:
            up_sums = _joined(up_sums, row_scale, num_rows, BLOCK_OUT, BLOCK_ROWS, PARTS)
    sums = _finished(sums, scale, bias, lines[:, None], real_line[:, None], SCALED, BIAS)
    if GATED:
        up_sums = _finished(up_sums, scale, bias, num_lines + lines[:, None], real_line[:, None], SCALED, BIAS)
        sums = sums / (1.0 + tl.exp(-sums)) * up_sums
    if DIM > 0:
        _store_pairs(sums, cos, sin, slot, rows, is_row, out, kv, value_offset, HEADS, KV_HEADS, DIM, BLOCK_OUT, BLOCK_ROWS)
    else:
        places = out + rows.to(tl.int64) * num_lines + lines[:, None]
        tl.store(places, sums.to(out.dtype.element_ty), mask=is_row & real_line[:, None])


@dataclass(frozen=True, slots=True)
class Turn:
    """What becomes of queries, keys and values: both first are turned, both last stored."""

    shape: HeadShape
    cos_sin: torch.Tensor
    batch: ForwardBatch
    kv: torch.Tensor


def small_linear(
    x: torch.Tensor, packed: CudaPacked, *, gated: bool = False, turn: Turn | None = None, choice: LinearChoice | None = None
) -> torch.Tensor:
    """x [a few tokens, in] -> [tokens, out], or with `gated` silu of the first half times the second [tokens, out / 2], or with
    `turn` the turned queries [tokens, heads, dim]."""
    rows, width = x.shape
    assert x.is_contiguous()
    assert width == packed.in_features
    lines = packed.out_features // 2 if gated else packed.out_features
    scaled = packed.scale is not None
    is_given, choice = choice is not None, choice or choose_linear(rows, lines, width, gated, scaled)
    out = x.new_empty(rows, lines if turn is None else turn.shape.num_heads * turn.shape.head_dim)
    block_out, block_in = choice.block_out, min(choice.block_in * 2 // x.element_size(), power_of_2(width, 32))
    parts = 2 if scaled and 1 < rows <= MAX_CUT_ROWS else 1
    block_rows = 1 if rows == 1 else power_of_2(rows, 16 // parts)
    weight_bytes = block_out * (2 if gated else 1) * packed.weight.element_size()
    x_bytes = block_rows * (parts if scaled and rows > 1 else x.element_size())
    num_stages = choice.num_stages if is_given else stages_that_fit(choice.num_stages, (weight_bytes + x_bytes) * block_in)
    arguments = {
        "BLOCK_OUT": block_out, "BLOCK_IN": block_in, "EVEN_OUT": lines % block_out == 0, "EVEN_IN": width % block_in == 0,
        "GATED": gated, "SCALED": scaled, "BIAS": packed.bias is not None, **_turning(turn, x),
        **options(choice.num_warps, num_stages),
    }  # fmt: skip
    grid = (triton.cdiv(lines, block_out),)
    scale, bias = x if packed.scale is None else packed.scale, x if packed.bias is None else packed.bias
    if rows == 1:
        stages = num_stages if choice.pipelined else 1
        ahead = min(choice.ahead, triton.cdiv(width, block_in))
        _one_row_kernel[grid](x, packed.weight, scale, bias, out, lines, width, AHEAD=ahead, STAGES=stages, **arguments)
        return _heads(out, turn)
    x_parts, row_scale = narrow_rows(x, parts) if scaled else (x, x)
    precision = "ieee" if x.dtype is torch.float32 else "tf32"
    _few_rows_kernel[grid](
        x_parts, row_scale, packed.weight, scale, bias, out, rows, lines, width,
        BLOCK_ROWS=block_rows, EARLY=choice.early, PRECISION=precision, PARTS=parts, **arguments,
    )  # fmt: skip
    return _heads(out, turn)


def _turning(turn: Turn | None, x: torch.Tensor) -> dict[str, object]:
    """Arguments of the kernels; `x` stands for tensors that are not read."""
    if turn is None:
        tensors, sizes = (x,) * 4, (0,) * 4
    else:
        shape, batch, kv = turn.shape, turn.batch, turn.kv
        assert turn.cos_sin.is_contiguous()
        assert kv.is_contiguous()
        tensors = (turn.cos_sin, batch.positions, batch.slots, kv)
        sizes = (kv.stride(0), shape.num_heads, shape.num_kv_heads, shape.head_dim)
    names = ("cos_sin", "positions", "slots", "kv", "value_offset", "HEADS", "KV_HEADS", "DIM")
    return dict(zip(names, tensors + sizes, strict=True))


def _heads(out: torch.Tensor, turn: Turn | None) -> torch.Tensor:
    return out if turn is None else out.view(out.shape[0], turn.shape.num_heads, turn.shape.head_dim)


@kernel()
def _quantise_kernel(x, out, scales, width, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
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
    if PARTS == 2:
        power = ((scale.to(tl.int32, bitcast=True) & 0x7F800000) + 0x00800000).to(tl.float32, bitcast=True)
        scale = tl.where(largest < float("inf"), power, largest)  # what is not finite stays so
    values = values / scale
    narrow = values.to(out.dtype.element_ty)
    tl.store(out + row * PARTS * width + columns, narrow, mask=inside)
    if PARTS == 2:
        rest = (values - narrow.to(tl.float32)) * _REST_FACTOR
        tl.store(out + (row * 2 + 1) * width + columns, rest.to(out.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)


def narrow_rows(x: torch.Tensor, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x [tokens, in] in fp8 [tokens * parts, in], and the scale of each row. Of two parts the first is the row, rounded, and
    the second what that leaves, at most a 16th, times 16; the scale is a power of 2. A value of bfloat16 has 8 digits and one
    of fp8 has 4, so nothing is lost then of values that are not small beside their row's largest."""
    rows, width = x.shape
    assert x.is_contiguous()
    if INTERPRETED:  # there 7.9 becomes 4 in fp8
        return quantise(x) if parts == 1 else _cut(x)
    out, scales = x.new_empty(rows * parts, width, dtype=FP8), x.new_empty(rows, dtype=torch.float32)
    block = power_of_2(width)
    warps = min(16, max(1, block // 512))
    _quantise_kernel[(rows,)](x, out, scales, width, PARTS=parts, BLOCK=block, **options(num_warps=warps))
    return out, scales


def _cut(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = torch.exp2(torch.frexp(quantise(x)[1]).exponent.float())
    values = x.float() / scales[:, None]
    first = values.to(FP8)
    rest = (values - first.float()) * _REST_FACTOR.value
    return torch.stack([first, rest.to(FP8)], dim=1).flatten(0, 1), scales


def scaled_linear(x: torch.Tensor, packed: CudaPacked, out: torch.Tensor | None = None) -> torch.Tensor:
    """x [tokens, in] -> [tokens, out] with a weight in fp8, in tensor cores of fp8."""
    assert packed.scale is not None
    narrow, scales = narrow_rows(x, 1)
    if out is None:
        out = x.new_empty(x.shape[0], packed.out_features)
    torch._scaled_mm(
        narrow, packed.weight.T, scale_a=scales[:, None], scale_b=packed.scale[None, :], out_dtype=out.dtype,
        use_fast_accum=True, out=out,
    )  # fmt: skip
    return out if packed.bias is None else out.add_(packed.bias)
