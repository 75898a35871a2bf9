"""The reference: every kernel in plain PyTorch, on any device, in float32 or bfloat16.

It defines what the other implementations must compute, and it serves where they cannot. Norms and rotations are done in
float32 whatever the dtype, as transformers does. No kernel reads a KV slot outside a row's context, so whatever lies there
(another request's tokens, uninitialised memory) cannot leak into a result.

Attention over paged KV:
- rows with one query (decode) are gathered into padded batches and computed together; on the CPU they are first sorted by
  length, so that one long context does not pad all the others;
- rows with more queries (prefill) are computed one after another, their queries in pieces, so that scores stay small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kvrelay.kernels.base import (
    AttentionBatch,
    ForwardBatch,
    HeadShape,
    LayerWeights,
    LinearName,
    LoraLayer,
    LoraSpans,
    Packed,
    PackedAdapter,
    Quantised,
)
from kvrelay.kernels.fp8 import movable, to_kv
from kvrelay.kernels.ranks import Ranks

_MAX_SCORES = 1 << 24  # attention scores (queries x context, all heads) materialised at once: 64 MiB of float32
_MAX_GATHERED = 1 << 26  # KV elements gathered at once: 256 MiB of float32
_MAX_PADDING = 1.5  # a group of decode rows may do so many times the work of its real contexts


@dataclass(frozen=True, slots=True)
class TorchPacked:
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
class TorchAdapter:
    layers: Sequence[LoraLayer]

    @property
    def num_layers(self) -> int:
        return len(self.layers)


class TorchKernels:
    """Implements `Kernels`. Stateless, so one instance may serve any number of models."""

    def fuse(self, weights: LayerWeights, ranks: Ranks) -> None:
        return None

    quantised_formats: frozenset[str] = frozenset()
    has_bulk = False

    def pack(
        self, weight: torch.Tensor | Quantised, bias: torch.Tensor | None, scale: torch.Tensor | None = None
    ) -> TorchPacked:
        assert isinstance(weight, torch.Tensor), "weights in blocks are for the native kernels"
        assert scale is None, "fp8 is computed by the kernels of cards"
        return TorchPacked(weight.contiguous(), bias)

    def linear(self, x: torch.Tensor, packed: Packed) -> torch.Tensor:
        assert isinstance(packed, TorchPacked)
        return F.linear(x, packed.weight, packed.bias)

    def pack_adapter(self, layers: Sequence[LoraLayer]) -> PackedAdapter:
        return TorchAdapter(layers)

    def add_lora(self, out: torch.Tensor, x: torch.Tensor, spans: LoraSpans, layer: int, name: LinearName) -> None:
        for span in spans:
            assert isinstance(span.adapter, TorchAdapter)
            rows, inputs = out[span.begin : span.end], x[span.begin : span.end]
            for part in span.adapter.layers[layer].get(name, ()):
                rows[:, part.first : part.end] += inputs @ part.a.T @ part.b

    def embed(self, token_ids: torch.Tensor, packed: Packed) -> torch.Tensor:
        assert isinstance(packed, TorchPacked)
        return F.embedding(token_ids, packed.weight)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm(x, weight, eps)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        residual += x
        return self.rms_norm(residual, weight, eps)

    def rope_and_store(
        self,
        qkv: torch.Tensor,
        shape: HeadShape,
        cos_sin: torch.Tensor,
        batch: ForwardBatch,
        kv: torch.Tensor,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        heads = qkv.view(qkv.shape[0], -1, shape.head_dim)
        qk, v = heads.split_with_sizes([shape.num_heads + shape.num_kv_heads, shape.num_kv_heads], dim=1)
        if q_norm is not None and k_norm is not None:
            q, k = qk.split_with_sizes([shape.num_heads, shape.num_kv_heads], dim=1)
            qk = torch.cat((self.rms_norm(q, q_norm, eps), self.rms_norm(k, k_norm, eps)), dim=1)
        rotated = rotate(qk, cos_sin[batch.positions].unsqueeze(1))
        keys, values = _token_view(kv)
        for stored, new in ((keys, rotated[:, shape.num_heads :]), (values, v)):
            movable(stored).index_copy_(0, batch.slots, movable(to_kv(new, kv.dtype)))
        return rotated[:, : shape.num_heads]

    def attention(self, q: torch.Tensor, shape: HeadShape, batch: ForwardBatch, kv: torch.Tensor, scale: float) -> torch.Tensor:
        rows = batch.attention
        if rows.max_query == 1:
            return _decode(q, rows, kv, shape, scale).flatten(1)
        return _mixed(q, rows, kv, shape, scale).flatten(1)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def rotate(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Half-split rotary: `cos_sin` holds cos, then sin, of the first half's angles."""
    cos, sin = cos_sin.chunk(2, dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def _token_view(kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values as [slots, kv_heads, head_dim]."""
    flat = kv.flatten(1, 2)
    assert flat.data_ptr() == kv.data_ptr(), "a layer's KV must be contiguous"
    return flat[0], flat[1]


def _mixed(q: torch.Tensor, rows: AttentionBatch, kv: torch.Tensor, shape: HeadShape, scale: float) -> torch.Tensor:
    """Prefill chunks one by one, all decode rows together."""
    out = torch.empty_like(q)
    starts, contexts = rows.query_start.tolist(), rows.context_lens.tolist()
    single = [row for row in range(rows.num_rows) if starts[row + 1] - starts[row] == 1]
    if single:
        chosen = torch.tensor(single, device=q.device)
        tokens = rows.query_start[:-1].long()[chosen]
        part = AttentionBatch(
            query_start=torch.arange(len(single) + 1, dtype=torch.int32, device=q.device),
            context_lens=rows.context_lens[chosen],
            block_tables=rows.block_tables[chosen],
            max_query=1,
            max_context=max(contexts[row] for row in single),
        )
        out[tokens] = _decode(q[tokens], part, kv, shape, scale)
    for row, context in enumerate(contexts):
        start, end = starts[row], starts[row + 1]
        if end - start > 1:
            out[start:end] = _prefill(q[start:end], rows.block_tables[row], context, kv, shape, scale)
    return out


def _decode(q: torch.Tensor, rows: AttentionBatch, kv: torch.Tensor, shape: HeadShape, scale: float) -> torch.Tensor:
    """One query per row. Query heads that share a key head are the "queries" of one product, so keys are not repeated."""
    grouped = q.reshape(q.shape[0], shape.num_kv_heads, -1, shape.head_dim)
    groups = _decode_groups(rows, shape)
    if len(groups) == 1 and groups[0][0] is None:
        return _decode_group(grouped, rows.block_tables, rows.context_lens, groups[0][1], kv, scale).reshape(q.shape)
    out = torch.empty_like(grouped)
    for chosen, max_context in groups:
        assert chosen is not None
        tables, contexts = rows.block_tables[chosen], rows.context_lens[chosen]
        out[chosen] = _decode_group(grouped[chosen], tables, contexts, max_context, kv, scale)
    return out.reshape(q.shape)


def _decode_groups(rows: AttentionBatch, shape: HeadShape) -> list[tuple[torch.Tensor | None, int]]:
    """Which rows to compute together, and their longest context. None stands for all rows.

    Reading the lengths makes the host wait for the device, so that is only done on the CPU.
    """
    row_elements = 2 * shape.num_kv_heads * shape.head_dim
    max_tokens = max(1, _MAX_GATHERED // row_elements)
    device, num_rows = rows.context_lens.device, rows.num_rows
    if device.type != "cpu":
        if num_rows * rows.max_context <= max_tokens:
            return [(None, rows.max_context)]
        size = max(1, max_tokens // rows.max_context)
        begins = range(0, num_rows, size)
        return [(torch.arange(begin, min(begin + size, num_rows), device=device), rows.max_context) for begin in begins]
    lengths, order = rows.context_lens.sort()
    return _length_groups(lengths.tolist(), order, max_tokens)


def _length_groups(lengths: list[int], order: torch.Tensor, max_tokens: int) -> list[tuple[torch.Tensor | None, int]]:
    """Cuts rows sorted by length where padding or memory would become too much."""
    groups: list[tuple[torch.Tensor | None, int]] = []
    begin, real = 0, 0
    for end, length in enumerate(lengths):
        padded = (end - begin + 1) * length
        if end > begin and (padded > _MAX_PADDING * (real + length) + 256 or padded > max_tokens):
            groups.append((order[begin:end], lengths[end - 1]))
            begin, real = end, 0
        real += length
    if begin == 0:
        return [(None, lengths[-1])]
    return [*groups, (order[begin:], lengths[-1])]


def _decode_group(
    q: torch.Tensor, tables: torch.Tensor, contexts: torch.Tensor, max_context: int, kv: torch.Tensor, scale: float
) -> torch.Tensor:
    """q [rows, kv_heads, group, dim] -> the same shape."""
    positions = torch.arange(max_context, device=q.device)
    keys, values = _gather(tables, torch.minimum(positions[None, :], contexts[:, None].long() - 1), kv, q.dtype)
    visible = positions[None, :] < contexts[:, None]
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=visible[:, None, None, :], scale=scale)


def _gather(
    tables: torch.Tensor, positions: torch.Tensor, kv: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of [rows, positions] as [rows, kv_heads, positions, dim], in `dtype`. Positions must lie inside the
    contexts: a padded place repeats a real one and is masked later, so nothing outside a context is read."""
    block_size = kv.shape[2]
    slots = tables.long().gather(1, positions // block_size) * block_size + positions % block_size
    keys, values = _token_view(kv)
    gathered_shape = (*slots.shape, *keys.shape[1:])
    flat = slots.flatten()
    return (
        keys.index_select(0, flat).to(dtype).view(gathered_shape).transpose(1, 2),
        values.index_select(0, flat).to(dtype).view(gathered_shape).transpose(1, 2),
    )


def _fits_at_once(q: torch.Tensor, shape: HeadShape) -> bool:
    """Whether a whole prompt's attention stays small: it does where PyTorch has a kernel that keeps no scores."""
    keeps_scores = q.device.type != "cpu" and q.dtype is torch.float32
    return not keeps_scores or shape.num_heads * q.shape[0] ** 2 <= _MAX_SCORES


def _prefill(
    q: torch.Tensor, table: torch.Tensor, context: int, kv: torch.Tensor, shape: HeadShape, scale: float
) -> torch.Tensor:
    """The queries of one row, the last of which sees the whole context: [tokens, heads, dim] -> the same shape."""
    num_queries = q.shape[0]
    keys, values = _gather(table[None, :], torch.arange(context, device=q.device)[None, :], kv, q.dtype)
    queries = q.transpose(0, 1)[None]  # [1, heads, tokens, dim]
    gqa = shape.num_heads != shape.num_kv_heads
    if num_queries == context and _fits_at_once(q, shape):
        out = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale, enable_gqa=gqa)
        return out[0].transpose(0, 1)
    out = torch.empty_like(q)
    step = max(1, _MAX_SCORES // (shape.num_heads * context))
    for begin in range(0, num_queries, step):
        end = min(begin + step, num_queries)
        seen = context - num_queries + end  # what the last query of the piece sees
        last_seen = torch.arange(seen - (end - begin), seen, device=q.device)
        visible = torch.arange(seen, device=q.device)[None, :] <= last_seen[:, None]
        piece = F.scaled_dot_product_attention(
            queries[:, :, begin:end], keys[:, :, :seen], values[:, :, :seen], attn_mask=visible, scale=scale, enable_gqa=gqa
        )
        out[begin:end] = piece[0].transpose(0, 1)
    return out
