"""The kernels for NVIDIA cards: Triton, with cuBLAS and cuDNN where they are faster.

- `linear.py`       linears of few rows at the memory rate, with what follows them, and of weights in fp8; others go to cuBLAS
- `decode.py`       paged attention of rows with one query, split over the context
- `prefill.py`      paged attention of rows with many queries, and cuDNN's for those without a prefix
- `ends.py`         what is before the first layer and behind the last
- `elementwise.py`  norms, rotation with KV store, activation
- `table.py`        which variant a shape gets

A pass that decodes, or computes a prompt over pages, makes the host wait for nothing and reads lengths on the device alone, so
it can be captured in a CUDA graph: `max_context` of the captured batch bounds what later replays may have. Padding: a row with
context 0 gives zeros, a token with slot -1 stores nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F

from kvrelay.kernels.base import (
    AttentionBatch,
    ForwardBatch,
    FusedLayer,
    HeadShape,
    LayerWeights,
    LinearName,
    LoraLayer,
    LoraSpans,
    Packed,
    PackedAdapter,
    Quantised,
)
from kvrelay.kernels.cuda import elementwise
from kvrelay.kernels.cuda.decode import decode_attention
from kvrelay.kernels.cuda.ends import take_rows
from kvrelay.kernels.cuda.launch import INTERPRETED
from kvrelay.kernels.cuda.layer import CudaLayer, joined
from kvrelay.kernels.cuda.linear import CudaPacked, Turn, scaled_linear, small_linear
from kvrelay.kernels.cuda.prefill import PLAN_STEP, has_room, own_attention, paged_attention
from kvrelay.kernels.cuda.table import is_triton_faster
from kvrelay.kernels.fp8 import FP8
from kvrelay.kernels.ranks import Ranks
from kvrelay.kernels.torch_kernels import TorchKernels

Attention = Literal["auto", "triton", "torch"]
Linears = Literal["auto", "triton", "cublas"]
_MAX_FORCED_ROWS = 64  # Triton's linears keep the rows of a pass in one tile
_MAX_HEAD_DIM = 256
_MAX_CUDNN_DIM = 128
_MIN_CUDNN_QUERIES = 512  # shorter rows are computed together by the paged kernel


def _large_linear(x: torch.Tensor, packed: CudaPacked) -> torch.Tensor:
    return F.linear(x, packed.weight, packed.bias) if packed.scale is None else scaled_linear(x, packed)


def _linear_into(out: torch.Tensor, x: torch.Tensor, packed: CudaPacked) -> torch.Tensor:
    if packed.scale is not None:
        return scaled_linear(x, packed, out)
    if packed.bias is None:
        return torch.mm(x, packed.weight.T, out=out)
    return torch.addmm(packed.bias, x, packed.weight.T, out=out)


class CudaKernels:
    """Implements `Kernels`. Stateless, so one instance may serve any number of models."""

    def __init__(self, attention: Attention = "auto", linears: Linears = "auto") -> None:
        self._attention = attention
        self._reference = TorchKernels()
        self._linears = linears

    def fuse(self, weights: LayerWeights, ranks: Ranks) -> FusedLayer:
        return CudaLayer(weights, self, ranks)

    quantised_formats: frozenset[str] = frozenset()
    has_bulk = False

    def pack(
        self, weight: torch.Tensor | Quantised, bias: torch.Tensor | None, scale: torch.Tensor | None = None
    ) -> CudaPacked:
        assert isinstance(weight, torch.Tensor)
        parts = (part if part is None else part.contiguous() for part in (bias, scale))
        return CudaPacked(weight.contiguous(), *parts)

    def is_small(self, num_rows: int, packed: CudaPacked, *, gated: bool = False) -> bool:
        """Whether a linear of so many rows is Triton's."""
        num_lines = packed.out_features // 2 if gated else packed.out_features
        is_faster = num_rows > 0 and is_triton_faster(num_rows, num_lines, gated, packed.weight.element_size())
        if self._linears == "auto":
            return is_faster
        return self._linears == "triton" and (is_faster or 0 < num_rows <= _MAX_FORCED_ROWS)

    def linear(self, x: torch.Tensor, packed: Packed) -> torch.Tensor:
        assert isinstance(packed, CudaPacked)
        if self.is_small(x.shape[0], packed):
            return small_linear(x, packed)
        return _large_linear(x, packed)

    def qkv_linear(self, x: torch.Tensor, packed: Packed, shape: HeadShape, rows: AttentionBatch) -> torch.Tensor:
        """A linear whose rows have room behind them where cuDNN will attend over them: see `own_attention`."""
        assert isinstance(packed, CudaPacked)
        if not self._own_rows(rows, shape, x):
            return self.linear(x, packed)
        tokens = x.shape[0]
        roomy = x.new_empty(tokens + PLAN_STEP, packed.out_features)
        roomy[tokens:].zero_()
        return _linear_into(roomy[:tokens], x, packed)

    def joined_linear(self, parts: list[torch.Tensor], packed: Packed) -> torch.Tensor:
        """A linear of rows that lie in several tensors, which takes less time than a copy that joins them."""
        assert isinstance(packed, CudaPacked)
        if len(parts) == 1:
            return self.linear(parts[0], packed)
        sizes = [part.shape[0] for part in parts]
        out = parts[0].new_empty(sum(sizes), packed.out_features)
        for target, part in zip(out.split(sizes), parts, strict=True):
            _linear_into(target, part, packed)
        return out

    def turns_in_linear(self, x: torch.Tensor, packed: Packed, kv: torch.Tensor) -> bool:
        """Whether `turned_linear` computes so many rows. Interpreted, 7.9 becomes 4 in fp8, so KV in fp8 is the reference's."""
        assert isinstance(packed, CudaPacked)
        return self.is_small(x.shape[0], packed) and not (INTERPRETED and kv.dtype is FP8)

    def turned_linear(
        self,
        x: torch.Tensor,
        packed: Packed,
        shape: HeadShape,
        cos_sin: torch.Tensor,
        batch: ForwardBatch,
        kv: torch.Tensor,
    ) -> torch.Tensor:
        """rope_and_store(qkv_linear(x)) in one kernel."""
        assert isinstance(packed, CudaPacked)
        return small_linear(x, packed, turn=Turn(shape, cos_sin, batch, kv))

    def gated_linear(self, x: torch.Tensor, packed: Packed) -> torch.Tensor:
        """silu_mul(linear(x)), in one kernel for few rows."""
        assert isinstance(packed, CudaPacked)
        if self.is_small(x.shape[0], packed, gated=True):
            return small_linear(x, packed, gated=True)
        return elementwise.silu_mul(_large_linear(x, packed))

    def pack_adapter(self, layers: Sequence[LoraLayer]) -> PackedAdapter:
        return self._reference.pack_adapter(layers)

    def add_lora(self, out: torch.Tensor, x: torch.Tensor, spans: LoraSpans, layer: int, name: LinearName) -> None:
        self._reference.add_lora(out, x, spans, layer, name)

    def embed(self, token_ids: torch.Tensor, packed: Packed) -> torch.Tensor:
        assert isinstance(packed, CudaPacked)
        return take_rows(packed.weight, token_ids)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return elementwise.rms_norm(x, None, weight, eps)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return elementwise.rms_norm(x, residual, weight, eps)

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
        if INTERPRETED and kv.dtype is FP8:  # there 7.9 becomes 4 in fp8
            return self._reference.rope_and_store(qkv, shape, cos_sin, batch, kv, q_norm, k_norm, eps)
        keep = bool(self._own_rows(batch.attention, shape, qkv))
        return elementwise.rope_and_store(qkv, shape, cos_sin, batch, kv, q_norm, k_norm, eps, keep=keep)

    def attention(self, q: torch.Tensor, shape: HeadShape, batch: ForwardBatch, kv: torch.Tensor, scale: float) -> torch.Tensor:
        return joined(self.attention_parts(q, shape, batch, kv, scale))

    def attention_parts(
        self, q: torch.Tensor, shape: HeadShape, batch: ForwardBatch, kv: torch.Tensor, scale: float
    ) -> list[torch.Tensor]:
        """Attention in one or two tensors: the rows that Triton computes, then those that cuDNN does."""
        if self._attention == "torch" or shape.head_dim > _MAX_HEAD_DIM:
            return [self._reference.attention(q, shape, batch, kv, scale)]
        rows = batch.attention
        own_rows = self._own_rows(rows, shape, q)
        if own_rows and not has_room(q, shape, own_rows):
            own_rows = []
        own = [own_attention(q, shape, own_rows, scale)] if own_rows else []
        if len(own_rows) == rows.num_rows:
            return own
        if own_rows:
            q, rows = q[: q.shape[0] - sum(own_rows)], _first_rows(rows, rows.num_rows - len(own_rows))
        out = q.new_empty(q.shape[0], shape.num_heads * shape.head_dim)
        mixed = bool(own_rows) or (rows.num_rows > 1 and rows.max_query > 1)
        if rows.max_query > 1:
            paged_attention(q, shape, rows, kv, scale, out, mixed=mixed)
        if rows.max_query == 1 or mixed:
            decode_attention(q, shape, rows, kv, scale, out, mixed=mixed)
        return [out, *own]

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return elementwise.silu_mul(gate_up)

    def _own_rows(self, rows: AttentionBatch, shape: HeadShape, q: torch.Tensor) -> list[int]:
        """The queries of each row that cuDNN shall compute: long ones without a prefix, at the end of the pass, where the
        engine puts prompts that begin."""
        if self._attention != "auto" or not q.is_cuda or q.dtype is torch.float32 or rows.max_query < _MIN_CUDNN_QUERIES:
            return []
        if shape.head_dim > _MAX_CUDNN_DIM or shape.head_dim % 8:
            return []
        return _prompts_at_end(rows)


def _prompts_at_end(rows: AttentionBatch) -> list[int]:
    if rows.num_rows == 1:
        return [rows.max_query] if rows.max_query == rows.max_context else []
    found: list[int] = []
    for count, context in reversed(rows.lengths or ()):
        if count != context or count < _MIN_CUDNN_QUERIES:
            break
        found.append(count)
    return found[::-1]


def _first_rows(rows: AttentionBatch, num_rows: int) -> AttentionBatch:
    assert rows.lengths is not None
    lengths = rows.lengths[:num_rows]
    return AttentionBatch(
        query_start=rows.query_start[: num_rows + 1],
        context_lens=rows.context_lens[:num_rows],
        block_tables=rows.block_tables[:num_rows],
        max_query=max(count for count, _ in lengths),
        max_context=max(context for _, context in lengths),
        lengths=lengths,
    )
