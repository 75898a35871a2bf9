"""Attention of rows with many queries.

- `paged_attention`: any rows, any prefix; keys and values are read through the block table. Flash attention in Triton.
- `own_attention`: rows without a prefix attend to what stands beside their queries; cuDNN's kernel, the fastest there is.

The paged kernel's programs are numbered without knowing the rows' lengths: row r owns the programs from
query_start[r] // queries + r on, which are enough for its queries, and a program finds its row by bisection.
"""

from __future__ import annotations

import torch
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvrelay.kernels.base import AttentionBatch, HeadShape
from kvrelay.kernels.cuda.launch import beside_kv, fits, kernel, options, power_of_2
from kvrelay.kernels.cuda.table import PrefillChoice, choose_prefill

_LOG2_E = 1.4426950408889634
PLAN_STEP = 256


@kernel(do_not_specialize=["table_stride", "num_rows"])
def _paged_kernel(
    q, q_stride, kv, value_offset, tables, table_stride, contexts, query_start, out, num_rows, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    QUERY_TILE: tl.constexpr, TILE: tl.constexpr, MIXED: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """QUERY_TILE rows of a tile are QUERY_TILE // GROUP queries x the GROUP heads of one KV head. With MIXED, rows with a
    single query are left to another kernel."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    queries: tl.constexpr = QUERY_TILE // GROUP
    piece = tl.num_programs(0) - 1 - tl.program_id(0)  # the last queries see most: they start first
    kv_head = tl.program_id(1)
    low, high = 0, num_rows
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_start + middle) // queries + middle <= piece:
            low = middle + 1
        else:
            high = middle
    row = low - 1
    first = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - first
    begin = (piece - first // queries - row) * queries
    if begin >= count:
        return
    if MIXED and count == 1:
        return
    prefix = tl.load(contexts + row) - count
    line = tl.arange(0, QUERY_TILE)
    dim = tl.arange(0, DIM_PAD)
    query_index = begin + line // GROUP
    real_line = (line < queries * GROUP) & (query_index < count)
    places = ((first + query_index).to(tl.int64), kv_head * GROUP + line % GROUP)
    real = real_line[:, None] & (dim < DIM)[None, :]
    query = tl.load(q + (places[0] * q_stride + places[1] * DIM)[:, None] + dim[None, :], mask=real, other=0.0)
    query = beside_kv(query, kv)
    query_place = prefix + query_index
    top = tl.full([QUERY_TILE], float("-inf"), tl.float32)
    total = tl.zeros([QUERY_TILE], tl.float32)
    sums = tl.zeros([QUERY_TILE, DIM_PAD], tl.float32)
    end = prefix + tl.minimum(begin + queries, count)
    all_see = (prefix + begin + 1) // TILE * TILE  # up to here every query sees every key of a tile
    table = tables + tl.cast(row, tl.int64) * table_stride
    for start in range(0, all_see, TILE):
        place = start + tl.arange(0, TILE)
        slot = tl.load(table + place // BLOCK_SIZE).to(tl.int64) * BLOCK_SIZE + place % BLOCK_SIZE
        source = kv + ((slot * KV_HEADS + kv_head) * DIM)[:, None] + dim[None, :]
        if DIM == DIM_PAD:
            keys = tl.load(source)
        else:
            keys = tl.load(source, mask=(dim < DIM)[None, :], other=0.0)
        scores = tl.dot(query, tl.trans(keys.to(query.dtype)), input_precision=PRECISION) * scale
        peak = tl.maximum(top, tl.max(scores, axis=1))
        ratio = tl.exp2(top - peak)
        weights = tl.exp2(scores - peak[:, None])
        if DIM == DIM_PAD:
            values = tl.load(source + value_offset)
        else:
            values = tl.load(source + value_offset, mask=(dim < DIM)[None, :], other=0.0)
        sums = tl.dot(weights.to(query.dtype), values.to(query.dtype), sums * ratio[:, None], input_precision=PRECISION)
        total = total * ratio + tl.sum(weights, axis=1)
        top = peak
    for start in range(all_see, end, TILE):
        place = start + tl.arange(0, TILE)
        inside = place < end
        block = tl.load(table + place // BLOCK_SIZE, mask=inside, other=0)
        slot = block.to(tl.int64) * BLOCK_SIZE + place % BLOCK_SIZE
        source = kv + ((slot * KV_HEADS + kv_head) * DIM)[:, None] + dim[None, :]
        loaded = inside[:, None] & (dim < DIM)[None, :]
        keys = tl.load(source, mask=loaded, other=0.0)
        scores = tl.dot(query, tl.trans(keys.to(query.dtype)), input_precision=PRECISION) * scale
        visible = place[None, :] <= query_place[:, None]
        scores = tl.where(visible & inside[None, :], scores, float("-inf"))
        peak = tl.maximum(top, tl.max(scores, axis=1))
        safe = tl.where(peak > float("-inf"), peak, 0.0)  # a query may see nothing of a tile
        ratio = tl.exp2(top - safe)
        weights = tl.exp2(scores - safe[:, None])
        values = tl.load(source + value_offset, mask=loaded, other=0.0)
        sums = tl.dot(weights.to(query.dtype), values.to(query.dtype), sums * ratio[:, None], input_precision=PRECISION)
        total = total * ratio + tl.sum(weights, axis=1)
        top = peak
    sums = sums / tl.where(total > 0.0, total, 1.0)[:, None]
    target = out + (places[0] * (KV_HEADS * GROUP * DIM) + places[1] * DIM)[:, None] + dim[None, :]
    tl.store(target, sums.to(out.dtype.element_ty), mask=real)


def paged_attention(
    q: torch.Tensor,
    shape: HeadShape,
    rows: AttentionBatch,
    kv: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    *,
    mixed: bool = False,
    choice: PrefillChoice | None = None,
) -> None:
    """Writes out[tokens, heads * dim]; if `mixed`, for the rows that have more queries than one."""
    dim, group = shape.head_dim, shape.num_heads // shape.num_kv_heads
    dim_pad, size = power_of_2(dim, 16), q.element_size()
    is_given, choice = choice is not None, choice or choose_prefill(rows.max_query * group, dim_pad * size)
    query_tile, tile = max(choice.query_tile, power_of_2(group, 16)), choice.tile
    while not is_given and tile > 16 and not fits((query_tile * dim_pad + 2 * tile * dim_pad + query_tile * tile) * size):
        tile //= 2  # queries, KV and weights are kept there
    grid = (q.shape[0] // (query_tile // group) + rows.num_rows, shape.num_kv_heads)
    _paged_kernel[grid](
        q, q.stride(0), kv, kv.stride(0), rows.block_tables, rows.block_tables.stride(0), rows.context_lens,
        rows.query_start, out, rows.num_rows, scale * _LOG2_E,
        KV_HEADS=shape.num_kv_heads, GROUP=group, DIM=dim, DIM_PAD=dim_pad, BLOCK_SIZE=kv.shape[2],
        QUERY_TILE=query_tile, TILE=tile, MIXED=mixed, PRECISION="ieee" if q.dtype is torch.float32 else "tf32",
        **options(choice.num_warps, choice.num_stages),
    )  # fmt: skip


def padded(count: int) -> int:
    """cuDNN plans every new length anew, which takes 45 ms, so lengths are rounded up to a multiple."""
    return -(-count // PLAN_STEP) * PLAN_STEP


def own_attention(q: torch.Tensor, shape: HeadShape, queries: list[int], scale: float) -> torch.Tensor:
    """q [tokens, heads, dim] is a view of fused rows, turned keys and values beside it; each of the last rows, of so many
    queries, attends to itself, causally. Behind the last token there is `PLAN_STEP` of room that holds finite numbers: no query
    sees them, nor what follows a row. Returns [tokens of those rows, heads * dim]."""
    first, total = queries[0], sum(queries)
    begin = q.shape[0] - total
    if len(queries) == 1 or (first % PLAN_STEP == 0 and all(count == first for count in queries)):
        found = _cudnn(_fused_view(q, shape, begin, len(queries), first), shape, scale)  # all in one call
        return found[:, :first].flatten(0, 1).flatten(1)
    out = q.new_empty(total, *q.shape[1:])
    start = 0
    for count in queries:
        out[start : start + count] = _cudnn(_fused_view(q, shape, begin + start, 1, count), shape, scale)[0, :count]
        start += count
    return out.flatten(1)


def has_room(q: torch.Tensor, shape: HeadShape, queries: list[int]) -> bool:
    """Whether q is a view of fused rows, as `rope_and_store` returns it, with the room that `own_attention` wants behind the
    last of them."""
    width = fused_width(shape)
    rows = q.untyped_storage().nbytes() // q.element_size() // width
    return q.stride(0) == width and q.storage_offset() == 0 and rows >= q.shape[0] - queries[-1] + padded(queries[-1])


def fused_width(shape: HeadShape) -> int:
    return (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim


def _fused_view(q: torch.Tensor, shape: HeadShape, start: int, num_rows: int, count: int) -> torch.Tensor:
    """[rows, padded count, q heads | k heads | v heads, dim] from a token on."""
    width, dim = fused_width(shape), shape.head_dim
    return q.as_strided((num_rows, padded(count), width // dim, dim), (count * width, width, dim, 1), start * width)


def _cudnn(fused: torch.Tensor, shape: HeadShape, scale: float) -> torch.Tensor:
    """[rows, tokens, heads, dim]."""
    sizes = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
    parts = [part.transpose(1, 2) for part in fused.split_with_sizes(sizes, dim=2)]
    result = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *parts, None, compute_log_sumexp=False, is_causal=True, scale=scale
    )
    found: torch.Tensor = result[0]
    return found.transpose(1, 2)
