"""Qwen3: Llama's decoder with a norm on each head's query and key before the rotation."""

from __future__ import annotations

import torch

from kvrelay.checkpoint.spec import ModelSpec
from kvrelay.models.layers import WeightSource
from kvrelay.models.llama import DecoderLayer, LlamaModel


class Qwen3Layer(DecoderLayer):
    def _take_head_norms(
        self, spec: ModelSpec, source: WeightSource, name: str
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        shape = (spec.head_dim,)
        q_norm = source.take(f"{name}.self_attn.q_norm.weight", shape)
        return q_norm, source.take(f"{name}.self_attn.k_norm.weight", shape)


class Qwen3Model(LlamaModel):
    layer_class = Qwen3Layer
