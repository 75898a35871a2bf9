"""A decoder layer: the model's own calls, with the activation, or for few rows the rotation, in the product before it, and room
behind the fused rows, which cuDNN's attention wants."""

from __future__ import annotations

from typing import Protocol

import torch

from kvrelay.kernels.base import AttentionBatch, ForwardBatch, HeadShape, Kernels, LayerWeights, LinearName, LoraSpans, Packed
from kvrelay.kernels.ranks import Ranks


class LayerKernels(Kernels, Protocol):
    """What a layer needs besides."""

    def qkv_linear(self, x: torch.Tensor, packed: Packed, shape: HeadShape, rows: AttentionBatch) -> torch.Tensor: ...

    def turns_in_linear(self, x: torch.Tensor, packed: Packed, kv: torch.Tensor) -> bool: ...

    def turned_linear(
        self,
        x: torch.Tensor,
        packed: Packed,
        shape: HeadShape,
        cos_sin: torch.Tensor,
        batch: ForwardBatch,
        kv: torch.Tensor,
    ) -> torch.Tensor: ...

    def gated_linear(self, x: torch.Tensor, packed: Packed) -> torch.Tensor: ...

    def attention_parts(
        self, q: torch.Tensor, shape: HeadShape, batch: ForwardBatch, kv: torch.Tensor, scale: float
    ) -> list[torch.Tensor]: ...

    def joined_linear(self, parts: list[torch.Tensor], packed: Packed) -> torch.Tensor: ...


class CudaLayer:
    """Implements `FusedLayer`."""

    def __init__(self, weights: LayerWeights, kernels: LayerKernels, ranks: Ranks) -> None:
        self._weights = weights
        self._kernels = kernels
        self._ranks = ranks

    def __call__(
        self, x: torch.Tensor | None, residual: torch.Tensor, cos_sin: torch.Tensor, batch: ForwardBatch, kv: torch.Tensor
    ) -> torch.Tensor:
        kernels, own = self._kernels, self._weights
        lora = () if batch.lora is None else batch.lora.tokens
        if x is None:
            x = kernels.rms_norm(residual, own.input_norm, own.eps)
        else:
            x = kernels.add_rms_norm(x, residual, own.input_norm, own.eps)
        q = self._query_and_store(x, cos_sin, batch, kv, lora)
        parts = kernels.attention_parts(q, own.shape, batch, kv, own.scale)
        x = self._ranks.add_up(self._output(parts, lora))
        x = kernels.add_rms_norm(x, residual, own.post_norm, own.eps)
        active = self._gated(x, lora)
        return self._ranks.add_up(self._adapted(kernels.linear(active, own.down), active, lora, "down"))

    def _query_and_store(
        self, x: torch.Tensor, cos_sin: torch.Tensor, batch: ForwardBatch, kv: torch.Tensor, lora: LoraSpans
    ) -> torch.Tensor:
        kernels, own = self._kernels, self._weights
        if not lora and own.q_norm is None and kernels.turns_in_linear(x, own.qkv, kv):
            return kernels.turned_linear(x, own.qkv, own.shape, cos_sin, batch, kv)
        qkv = self._adapted(kernels.qkv_linear(x, own.qkv, own.shape, batch.attention), x, lora, "qkv")
        return kernels.rope_and_store(qkv, own.shape, cos_sin, batch, kv, own.q_norm, own.k_norm, own.eps)

    def _output(self, parts: list[torch.Tensor], lora: LoraSpans) -> torch.Tensor:
        if not lora:
            return self._kernels.joined_linear(parts, self._weights.output)
        attended = joined(parts)
        return self._adapted(self._kernels.linear(attended, self._weights.output), attended, lora, "output")

    def _gated(self, x: torch.Tensor, lora: LoraSpans) -> torch.Tensor:
        if not lora:
            return self._kernels.gated_linear(x, self._weights.gate_up)
        return self._kernels.silu_mul(self._adapted(self._kernels.linear(x, self._weights.gate_up), x, lora, "gate_up"))

    def _adapted(self, out: torch.Tensor, x: torch.Tensor, lora: LoraSpans, name: LinearName) -> torch.Tensor:
        if lora:
            self._kernels.add_lora(out, x, lora, self._weights.index, name)
        return out


def joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
