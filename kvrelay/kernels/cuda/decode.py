"""Paged attention of rows with one query each, at the rate of memory.

A program takes one row, one KV head and one split of the row's context. The query heads that share the KV head are one tile
(at least 16 rows, as tensor cores want), so keys and values are read once. The grid depends on shapes alone; lengths are read
on the device, where a row's own context is cut into splits: a short row does not use all of them.

A row's splits count themselves, and the one that ends last merges them by their log-sum-exp and sets the count back to 0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvrelay.kernels.base import AttentionBatch, HeadShape
from kvrelay.kernels.cuda.launch import options, power_of_2
from kvrelay.kernels.cuda.table import DecodeChoice, choose_decode

_LOG2_E = 1.4426950408889634
_MIN_COUNTS = 1 << 16


@triton.jit(do_not_specialize=["table_stride"])
def _decode_kernel(
    q, q_stride, kv, value_offset, tables, table_stride, contexts, query_start, out, partial, lse, counts, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, MIXED: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """With MIXED, rows with more queries than one are left to another kernel."""
    if PDL:
        gdc_launch_dependents()
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    context = tl.load(contexts + row)
    token = row
    is_single = True
    if MIXED:
        token = tl.load(query_start + row)
        is_single = tl.load(query_start + row + 1) - token == 1
    split_size = tl.cdiv(tl.cdiv(context, TILE // 2), SPLITS) * (TILE // 2)
    begin = split * split_size
    end = tl.minimum(begin + split_size, context)
    if PDL:
        gdc_wait()
    if (split > 0 and begin >= end) or not is_single:
        return
    member = tl.arange(0, GROUP_PAD)
    dim = tl.arange(0, DIM_PAD)
    head = kv_head * GROUP + member
    real = (member < GROUP)[:, None] & (dim < DIM)[None, :]
    query = tl.load(q + token.to(tl.int64) * q_stride + head[:, None] * DIM + dim[None, :], mask=real, other=0.0)
    top = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    sums = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    for start in range(begin, end, TILE):
        place = start + tl.arange(0, TILE)
        inside = place < end
        block = tl.load(tables + row.to(tl.int64) * table_stride + place // BLOCK_SIZE, mask=inside, other=0)
        slot = block.to(tl.int64) * BLOCK_SIZE + place % BLOCK_SIZE
        source = kv + ((slot * KV_HEADS + kv_head) * DIM)[:, None] + dim[None, :]
        loaded = inside[:, None]
        if DIM != DIM_PAD:
            loaded = loaded & (dim < DIM)[None, :]
        keys = tl.load(source, mask=loaded, other=0.0)
        scores = tl.dot(query, tl.trans(keys), input_precision=PRECISION) * scale
        scores = tl.where(inside[None, :], scores, float("-inf"))
        peak = tl.maximum(top, tl.max(scores, axis=1))
        ratio = tl.exp2(top - peak)
        weights = tl.exp2(scores - peak[:, None])
        values = tl.load(source + value_offset, mask=loaded, other=0.0)
        sums = tl.dot(weights.to(values.dtype), values, sums * ratio[:, None], input_precision=PRECISION)
        total = total * ratio + tl.sum(weights, axis=1)
        top = peak
    seen = total > 0.0
    sums = sums / tl.where(seen, total, 1.0)[:, None]
    places = token.to(tl.int64) * (KV_HEADS * GROUP * DIM) + head[:, None] * DIM + dim[None, :]
    if SPLITS == 1:
        tl.store(out + places, sums.to(query.dtype), mask=real)
    else:
        first = (row.to(tl.int64) * KV_HEADS + kv_head) * SPLITS
        piece = member[:, None] * DIM + dim[None, :]
        tl.store(partial + (first + split) * (GROUP * DIM) + piece, sums, mask=real)
        log = tl.where(seen, top + tl.log2(tl.where(seen, total, 1.0)), float("-inf"))
        tl.store(lse + (first + split) * GROUP_PAD + member, log)
        tl.debug_barrier()  # all threads have stored before one of them counts
        num_splits = tl.maximum(1, tl.cdiv(context, tl.maximum(1, split_size)))
        count = counts + row * KV_HEADS + kv_head
        if tl.atomic_add(count, 1, sem="acq_rel") == num_splits - 1:
            top = tl.full([GROUP_PAD], float("-inf"), tl.float32)
            total = tl.zeros([GROUP_PAD], tl.float32)
            sums = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
            for other in range(num_splits):
                log = tl.load(lse + (first + other) * GROUP_PAD + member, cache_modifier=".cg")
                there = partial + (first + other) * (GROUP * DIM) + piece
                sums_there = tl.load(there, mask=real, other=0.0, cache_modifier=".cg")
                peak = tl.maximum(top, log)
                safe = tl.where(peak > float("-inf"), peak, 0.0)
                ratio, weight = tl.exp2(top - safe), tl.exp2(log - safe)
                sums = sums * ratio[:, None] + sums_there * weight[:, None]
                total = total * ratio + weight
                top = peak
            sums = sums / tl.where(total > 0.0, total, 1.0)[:, None]
            tl.store(out + places, sums.to(query.dtype), mask=real)
            tl.store(count, 0)


class SplitCounts:
    """How many splits of each row and KV head are done: zero between kernels. Kernels that share it must not run at once."""

    def __init__(self) -> None:
        self._counts: dict[torch.device, torch.Tensor] = {}

    def on(self, device: torch.device, size: int) -> torch.Tensor:
        """At least so many. What was handed out before stays valid: a captured graph may hold it."""
        found = self._counts.get(device)
        if found is None or found.shape[0] < size:
            found = self._counts[device] = torch.zeros(max(size, _MIN_COUNTS), dtype=torch.int32, device=device)
        return found


def decode_attention(
    q: torch.Tensor,
    shape: HeadShape,
    rows: AttentionBatch,
    kv: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    counts: SplitCounts,
    *,
    mixed: bool = False,
    choice: DecodeChoice | None = None,
) -> None:
    """Writes out[tokens, heads * dim] for the rows that have one query. Unless `mixed`, all have, and row i is token i."""
    num_rows, block_size, dim = rows.num_rows, kv.shape[2], shape.head_dim
    group, num_heads = shape.num_heads // shape.num_kv_heads, num_rows * shape.num_kv_heads
    group_pad = power_of_2(group, 16)
    if choice is None:
        choice = choose_decode(num_heads, rows.max_context, dim * kv.element_size())
    splits = choice.splits
    partial = lse = count = out
    if splits > 1:
        partial = torch.empty(num_heads * splits * group * dim, dtype=torch.float32, device=q.device)
        lse = torch.empty(num_heads * splits * group_pad, dtype=torch.float32, device=q.device)
        count = counts.on(q.device, num_heads)
    _decode_kernel[(num_rows, shape.num_kv_heads, splits)](
        q, q.stride(0), kv, kv.stride(0), rows.block_tables, rows.block_tables.stride(0), rows.context_lens,
        rows.query_start, out, partial, lse, count, scale * _LOG2_E,
        KV_HEADS=shape.num_kv_heads, GROUP=group, GROUP_PAD=group_pad, DIM=dim, DIM_PAD=power_of_2(dim, 16),
        BLOCK_SIZE=block_size, TILE=choice.tile, SPLITS=splits, MIXED=mixed,
        PRECISION="ieee" if q.dtype is torch.float32 else "tf32", **options(choice.num_warps, choice.num_stages),
    )  # fmt: skip
