"""Random passes over paged KV and what attention makes of them, in float64."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch

from kvrelay.kernels.base import AttentionBatch, ForwardBatch, HeadShape

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Case:
    """`rows` holds (queries, context) of each; context 0 is a row of padding."""

    shape: HeadShape
    block_size: int
    rows: tuple[tuple[int, int], ...]
    dtype: torch.dtype

    @property
    def num_tokens(self) -> int:
        return sum(count for count, _ in self.rows)


def random_case(seed: int, dtype: torch.dtype, *, max_context: int, max_rows: int, max_kv_heads: int, kind: str) -> Case:
    """`kind`: decode (single queries, some rows padding), prompts (no prefix), chunks (some prefix) or mixed."""
    choose = random.Random(f"{kind} {seed}")
    kv_heads = min(choose.choice([1, 2, 3, 8]), max_kv_heads)
    shape = HeadShape(kv_heads * choose.randint(1, 8), kv_heads, choose.choice([64, 96, 128, 256]))

    def row() -> tuple[int, int]:
        context = max(1, int(max_context ** choose.random()))
        match kind:
            case "decode":
                return 1, choose.choice([0, 1, context, context])
            case "prompts":
                return context, context
            case "chunks":
                return choose.randint(1, context), context
            case _:
                return choose.choice([1, choose.randint(1, context)]), context

    rows = tuple(row() for _ in range(choose.randint(1, max_rows)))
    return Case(shape, choose.choice([8, 16, 32, 64]), rows, dtype)


def make(case: Case, device: torch.device, seed: int = 0) -> tuple[torch.Tensor, ForwardBatch, torch.Tensor]:
    """q, the batch and KV whose slots outside all contexts are NaN."""
    generator = torch.Generator(device=device).manual_seed(seed)
    shape, size = case.shape, case.block_size
    needed = [math.ceil(context / size) for _, context in case.rows]
    num_blocks = sum(needed) + 3
    free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()
    tables = [[free.pop() for _ in range(count)] for count in needed]
    kv = torch.full((2, num_blocks * size, shape.num_kv_heads, shape.head_dim), float("nan"), dtype=case.dtype, device=device)
    positions, slots = [], []
    for table, (count, context) in zip(tables, case.rows, strict=True):
        places = torch.tensor([table[p // size] * size + p % size for p in range(context)], device=device, dtype=torch.int64)
        drawn = torch.randn(2, context, *kv.shape[2:], generator=generator, device=device)
        kv[:, places] = drawn.to(case.dtype)
        positions += list(range(max(0, context - count), context)) if context else [0] * count
        slots += places[context - count :].tolist() if context else [-1] * count
    width = max(map(len, tables)) + 1
    starts = [sum(count for count, _ in case.rows[:row]) for row in range(len(case.rows) + 1)]
    rows = AttentionBatch(
        query_start=torch.tensor(starts, dtype=torch.int32, device=device),
        context_lens=torch.tensor([context for _, context in case.rows], dtype=torch.int32, device=device),
        block_tables=torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32, device=device),
        max_query=max(count for count, _ in case.rows),
        max_context=max(1, *(context for _, context in case.rows)),
        lengths=case.rows,
    )
    tokens = torch.zeros(case.num_tokens, dtype=torch.int64, device=device)
    places_of = [torch.tensor(places, dtype=torch.int64, device=device) for places in (positions, slots)]
    batch = ForwardBatch(tokens, *places_of, rows, tokens[:0])
    q = torch.randn(case.num_tokens, shape.num_heads, shape.head_dim, generator=generator, device=device).to(case.dtype)
    return q, batch, kv.view(2, num_blocks, size, *kv.shape[2:])


def attention64(case: Case, q: torch.Tensor, batch: ForwardBatch, kv: torch.Tensor, scale: float) -> torch.Tensor:
    """Softmax over what each query sees, row by row; zeros for padding."""
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    keys, values = kv.flatten(1, 2)
    group = case.shape.num_heads // case.shape.num_kv_heads
    first = 0
    for row, (count, context) in enumerate(case.rows):
        if context:
            places = torch.arange(context, device=q.device)
            table = batch.attention.block_tables[row].long()
            slots = table[places // case.block_size] * case.block_size + places % case.block_size
            visible = places[None, :] <= torch.arange(context - count, context, device=q.device)[:, None]
            for head in range(case.shape.num_heads):
                wide = [part[slots, head // group].double() for part in (keys, values)]
                scores = q[first : first + count, head].double() @ wide[0].T * scale
                weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
                out[first : first + count, head] = weights @ wide[1]
        first += count
    return out.flatten(1)


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative to the largest expected value; NaN becomes infinity."""
    distance = (got.double() - expected).abs().max() / max(1.0, float(expected.abs().max()))
    return float(distance.nan_to_num(nan=float("inf")))
