"""A decoder layer: the model's own calls, with the activation in the product before it and room behind the fused rows, which
cuDNN's attention wants."""

from __future__ import annotations

from typing import Protocol

import torch

from kvrelay.kernels.base import AttentionBatch, ForwardBatch, HeadShape, Kernels, LayerWeights, Packed


class LayerKernels(Kernels, Protocol):
    """What a layer needs besides."""

    def qkv_linear(self, x: torch.Tensor, packed: Packed, shape: HeadShape, rows: AttentionBatch) -> torch.Tensor: ...

    def gated_linear(self, x: torch.Tensor, packed: Packed) -> torch.Tensor: ...


class CudaLayer:
    """Implements `FusedLayer`."""

    def __init__(self, weights: LayerWeights, kernels: LayerKernels) -> None:
        self._weights = weights
        self._kernels = kernels

    def __call__(
        self, x: torch.Tensor | None, residual: torch.Tensor, cos_sin: torch.Tensor, batch: ForwardBatch, kv: torch.Tensor
    ) -> torch.Tensor:
        assert batch.lora is None, "adapters are refused where a card computes"
        kernels, own = self._kernels, self._weights
        if x is None:
            x = kernels.rms_norm(residual, own.input_norm, own.eps)
        else:
            x = kernels.add_rms_norm(x, residual, own.input_norm, own.eps)
        qkv = kernels.qkv_linear(x, own.qkv, own.shape, batch.attention)
        q = kernels.rope_and_store(qkv, own.shape, cos_sin, batch, kv, own.q_norm, own.k_norm, own.eps)
        x = kernels.linear(kernels.attention(q, own.shape, batch, kv, own.scale), own.output)
        x = kernels.add_rms_norm(x, residual, own.post_norm, own.eps)
        return kernels.linear(kernels.gated_linear(x, own.gate_up), own.down)
