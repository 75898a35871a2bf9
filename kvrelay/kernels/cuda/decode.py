"""Paged attention of rows with one query each, at the rate of memory.

A program takes one row, one KV head and one split of the row's context. The query heads that share the KV head are one tile
(at least 16 rows, as tensor cores want), so keys and values are read once. The grid depends on shapes alone; lengths are read
on the device, where a row's own context is cut into splits. Where the choice names a least length of a split, a long row among
short ones has more of them, programs without one end at once, and the only split of a row is written without the second kernel,
which merges splits by their log-sum-exp. Elsewhere splits of a short row may be empty, and weigh nothing there. A row's
heads are neighbours in the grid, as they are in memory.

Tried on an H200 and not faster: a merge by the split that ends last, prefetching KV into the L2 cache before the wait, and
turning queries and keys in this kernel (3.86 ms a step became 3.92).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvrelay.kernels.base import AttentionBatch, HeadShape
from kvrelay.kernels.cuda.launch import beside_kv, kernel, options, power_of_2
from kvrelay.kernels.cuda.table import DecodeChoice, choose_decode, choose_mixed

_LOG2_E = 1.4426950408889634


@triton.jit
def _kv_tile(
    kv, value_offset, table, kv_head, start, end, dim,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Keys and values of TILE tokens from `start` on, 0 from `end` on; and which of them are before it."""
    place = start + tl.arange(0, TILE)
    inside = place < end
    block = tl.load(table + place // BLOCK_SIZE, mask=inside, other=0)
    slot = block.to(tl.int64) * BLOCK_SIZE + place % BLOCK_SIZE
    source = kv + ((slot * KV_HEADS + kv_head) * DIM)[:, None] + dim[None, :]
    loaded = inside[:, None]
    if DIM != DIM_PAD:
        loaded = loaded & (dim < DIM)[None, :]
    return tl.load(source, mask=loaded, other=0.0), tl.load(source + value_offset, mask=loaded, other=0.0), inside


@triton.jit
def _attend(query, keys, values, inside, scale, top, total, sums, PRECISION: tl.constexpr):
    """One tile more of a running softmax: its maximum, its sum and the weighted values. KV in fp8 is widened to the query's
    dtype."""
    scores = tl.dot(query, tl.trans(keys.to(query.dtype)), input_precision=PRECISION) * scale
    scores = tl.where(inside[None, :], scores, float("-inf"))
    peak = tl.maximum(top, tl.max(scores, axis=1))
    safe = tl.where(peak > float("-inf"), peak, 0.0)  # the tile may be empty
    ratio = tl.exp2(top - safe)
    weights = tl.exp2(scores - safe[:, None])
    sums = tl.dot(weights.to(query.dtype), values.to(query.dtype), sums * ratio[:, None], input_precision=PRECISION)
    return peak, total * ratio + tl.sum(weights, axis=1), sums


@triton.jit
def _tokens_of_split(context, SPLITS: tl.constexpr, LEAST: tl.constexpr, GRAIN: tl.constexpr):
    num_splits = SPLITS
    if LEAST > 0:
        num_splits = tl.minimum(tl.maximum(context // LEAST, 1), SPLITS)
    return tl.cdiv(tl.cdiv(context, GRAIN), num_splits) * GRAIN


@kernel(do_not_specialize=["table_stride"])
def _decode_kernel(
    q, q_stride, kv, value_offset, tables, table_stride, contexts, query_start, out, partial, lse, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr, GRAIN: tl.constexpr,
    MIXED: tl.constexpr, EARLY: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """With MIXED, rows with more queries than one are left to another kernel. With EARLY a split's first tile is loaded before
    the wait, into registers, unless it holds the row's last token, which the kernel before writes. (Where this pass has written
    more of the row, as at a prompt's end, an ordinary kernel that gathers the queries stands between.)"""
    if PDL:
        gdc_launch_dependents()
    kv_head, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    context = tl.load(contexts + row)
    split_size = _tokens_of_split(context, SPLITS, LEAST, GRAIN)
    begin = split * split_size
    if LEAST > 0:
        known = tl.maximum(context, 1)  # a row of padding may have none
        if begin >= known:
            return
    end = tl.minimum(begin + split_size, context)
    member = tl.arange(0, GROUP_PAD)
    dim = tl.arange(0, DIM_PAD)
    table = tables + row.to(tl.int64) * table_stride
    if EARLY:
        first_end = tl.where(begin + TILE < context, tl.minimum(begin + TILE, end), begin)
        first_keys, first_values, first_inside = _kv_tile(
            kv, value_offset, table, kv_head, begin, first_end, dim, KV_HEADS, DIM, DIM_PAD, BLOCK_SIZE, TILE
        )
    if PDL:
        gdc_wait()
    token = row
    if MIXED:
        token = tl.load(query_start + row)
        if tl.load(query_start + row + 1) - token != 1:
            return
    head = kv_head * GROUP + member
    real = (member < GROUP)[:, None] & (dim < DIM)[None, :]
    query = tl.load(q + token.to(tl.int64) * q_stride + head[:, None] * DIM + dim[None, :], mask=real, other=0.0)
    query = beside_kv(query, kv)
    top = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    sums = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    if EARLY:
        top, total, sums = _attend(query, first_keys, first_values, first_inside, scale, top, total, sums, PRECISION)
        begin_left = first_end
    else:
        begin_left = begin
    for start in range(begin_left, end, TILE):
        keys, values, inside = _kv_tile(
            kv, value_offset, table, kv_head, start, end, dim, KV_HEADS, DIM, DIM_PAD, BLOCK_SIZE, TILE
        )
        top, total, sums = _attend(query, keys, values, inside, scale, top, total, sums, PRECISION)
    seen = total > 0.0
    total = tl.where(seen, total, 1.0)
    sums = sums / total[:, None]
    if SPLITS == 1 or LEAST > 0:
        places = token.to(tl.int64) * (KV_HEADS * GROUP * DIM) + head[:, None] * DIM + dim[None, :]
        tl.store(out + places, sums.to(out.dtype.element_ty), mask=real & (split_size + dim * 0 >= context)[None, :])
    if SPLITS > 1:
        is_one_of_many = begin + dim * 0 < end
        if LEAST > 0:
            is_one_of_many = split_size + dim * 0 < context
        piece = (row.to(tl.int64) * (KV_HEADS * GROUP) + head) * SPLITS + split
        tl.store(partial + piece[:, None] * DIM + dim[None, :], sums, mask=real & is_one_of_many[None, :])
        tl.store(lse + piece, tl.where(seen, top + tl.log2(total), float("-inf")), mask=member < GROUP)


@kernel()
def _merge_kernel(
    partial, lse, contexts, query_start, out,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr,
    GRAIN: tl.constexpr, MIXED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    row, head = tl.program_id(0), tl.program_id(1)
    split_size, context = 1, SPLITS
    if LEAST > 0:
        context = tl.load(contexts + row)
    if PDL:
        gdc_wait()
    token = row
    if MIXED:
        token = tl.load(query_start + row)
        if tl.load(query_start + row + 1) - token != 1:
            return
    if LEAST > 0:
        split_size = _tokens_of_split(context, SPLITS, LEAST, GRAIN)
        if split_size >= context:
            return
    split = tl.arange(0, SPLITS)
    dim = tl.arange(0, DIM_PAD)
    first = (row.to(tl.int64) * HEADS + head) * SPLITS
    logs = tl.load(lse + first + split, mask=split * split_size < context, other=float("-inf"))
    real = logs > float("-inf")
    peak = tl.max(logs, axis=0)
    weights = tl.where(real, tl.exp2(logs - tl.where(peak > float("-inf"), peak, 0.0)), 0.0)
    mask = real[:, None] & (dim < DIM)[None, :]
    pieces = tl.load(partial + (first + split)[:, None] * DIM + dim[None, :], mask=mask, other=0.0)
    total = tl.sum(weights, axis=0)
    result = tl.sum(pieces * weights[:, None], axis=0) / tl.where(total > 0.0, total, 1.0)
    places = out + (token.to(tl.int64) * HEADS + head) * DIM + dim
    tl.store(places, result.to(out.dtype.element_ty), mask=dim < DIM)


def decode_attention(
    q: torch.Tensor,
    shape: HeadShape,
    rows: AttentionBatch,
    kv: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    *,
    mixed: bool = False,
    choice: DecodeChoice | None = None,
) -> None:
    """Writes out[tokens, heads * dim] for the rows that have one query. Unless `mixed`, all have, and row i is token i."""
    num_rows, block_size, dim = rows.num_rows, kv.shape[2], shape.head_dim
    group = shape.num_heads // shape.num_kv_heads
    if choice is None:
        heads, head_bytes = num_rows * shape.num_kv_heads, dim * q.element_size()
        narrow = kv.element_size() < q.element_size()
        choice = choose_mixed(heads, head_bytes) if mixed else choose_decode(heads, rows.max_context, head_bytes, narrow)
    splits, grain = choice.splits, 32 if choice.tile == 32 else 16  # larger tiles would leave the last split short
    partial = lse = out
    if splits > 1:
        partial = torch.empty(num_rows, shape.num_heads, splits, dim, dtype=torch.float32, device=q.device)
        lse = torch.empty(num_rows, shape.num_heads, splits, dtype=torch.float32, device=q.device)
    _decode_kernel[(shape.num_kv_heads, num_rows, splits)](
        q, q.stride(0), kv, kv.stride(0), rows.block_tables, rows.block_tables.stride(0), rows.context_lens,
        rows.query_start, out, partial, lse, scale * _LOG2_E,
        KV_HEADS=shape.num_kv_heads, GROUP=group, GROUP_PAD=power_of_2(group, 16), DIM=dim, DIM_PAD=power_of_2(dim, 16),
        BLOCK_SIZE=block_size, TILE=choice.tile, SPLITS=splits, LEAST=choice.least, GRAIN=grain, MIXED=mixed,
        EARLY=choice.early, PRECISION="ieee" if q.dtype is torch.float32 else "tf32",
        **options(choice.num_warps, choice.num_stages),
    )  # fmt: skip
    if splits > 1:
        _merge_kernel[(num_rows, shape.num_heads)](
            partial, lse, rows.context_lens, rows.query_start, out,
            HEADS=shape.num_heads, DIM=dim, DIM_PAD=power_of_2(dim, 16), SPLITS=splits, LEAST=choice.least, GRAIN=grain,
            MIXED=mixed,
            **options(num_warps=1 if splits <= 16 else 2),
        )  # fmt: skip
