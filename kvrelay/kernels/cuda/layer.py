"""A decoder layer in as few launches as pay.

A pass of few rows: norms, activation and both sums with the residual go into the linears, so seven kernels remain. More rows:
cuBLAS, with kernels for what is between.
"""

from __future__ import annotations

from typing import Protocol

import torch

from kvrelay.kernels.base import ForwardBatch, Kernels, LayerWeights, Packed
from kvrelay.kernels.cuda.linear import CudaPacked, Norm, small_linear


class LayerKernels(Kernels, Protocol):
    """What a layer needs besides."""

    def is_small(self, num_rows: int) -> bool: ...

    def gated_linear(self, x: torch.Tensor, packed: Packed) -> torch.Tensor: ...


class CudaLayer:
    """Implements `FusedLayer`."""

    def __init__(self, weights: LayerWeights, kernels: LayerKernels) -> None:
        self._weights = weights
        self._kernels = kernels
        self._input_norm = Norm(weights.input_norm, weights.eps)
        self._post_norm = Norm(weights.post_norm, weights.eps)

    def __call__(
        self, x: torch.Tensor | None, residual: torch.Tensor, cos_sin: torch.Tensor, batch: ForwardBatch, kv: torch.Tensor
    ) -> torch.Tensor | None:
        kernels, own = self._kernels, self._weights
        if batch.images is None and kernels.is_small(residual.shape[0]):
            return self._small(x, residual, cos_sin, batch, kv)
        if x is None:
            x = kernels.rms_norm(residual, own.input_norm, own.eps)
        else:
            x = kernels.add_rms_norm(x, residual, own.input_norm, own.eps)
        qkv = kernels.linear(x, own.qkv)
        x = kernels.linear(self._attended(qkv, cos_sin, batch, kv), own.output)
        x = kernels.add_rms_norm(x, residual, own.post_norm, own.eps)
        return kernels.linear(kernels.gated_linear(x, own.gate_up), own.down)

    def _small(
        self, x: torch.Tensor | None, residual: torch.Tensor, cos_sin: torch.Tensor, batch: ForwardBatch, kv: torch.Tensor
    ) -> None:
        own = self._weights
        linears = (own.qkv, own.output, own.gate_up, own.down)
        qkv_weight, output, gate_up, down = (packed for packed in linears if isinstance(packed, CudaPacked))
        if x is not None:
            residual += x
        qkv = small_linear(residual, qkv_weight, norm=self._input_norm)
        small_linear(self._attended(qkv, cos_sin, batch, kv), output, add_to=residual)
        active = small_linear(residual, gate_up, gated=True, norm=self._post_norm)
        small_linear(active, down, add_to=residual)

    def _attended(self, qkv: torch.Tensor, cos_sin: torch.Tensor, batch: ForwardBatch, kv: torch.Tensor) -> torch.Tensor:
        kernels, own = self._kernels, self._weights
        q = kernels.rope_and_store(qkv, own.shape, cos_sin, batch, kv, own.q_norm, own.k_norm, own.eps)
        return kernels.attention(q, own.shape, batch, kv, own.scale)
