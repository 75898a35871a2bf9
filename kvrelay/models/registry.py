"""Which class runs which architecture. `checkpoint/spec.py` has refused all others before anything gets here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from kvrelay.checkpoint.spec import ModelSpec
from kvrelay.errors import UnsupportedModelError
from kvrelay.kernels.base import ForwardBatch
from kvrelay.models.llama import LlamaModel


class Model(Protocol):
    """What a runner sees of a model. It holds weights and no state of any request; one thread calls it at a time."""

    spec: ModelSpec
    dtype: torch.dtype  # of activations and logits; KV may have another

    def forward(self, batch: ForwardBatch, kv: torch.Tensor, on_layer: Callable[[int], None] | None = None) -> torch.Tensor:
        """Stores the tokens' KV, telling `on_layer` after each layer's; returns logits [len(batch.logit_rows), vocabulary] in
        the model's dtype."""


_CLASSES: dict[str, type[LlamaModel]] = {
    "LlamaForCausalLM": LlamaModel,
    "MistralForCausalLM": LlamaModel,
    "Qwen2ForCausalLM": LlamaModel,
    "Qwen3ForCausalLM": LlamaModel,
    "Qwen2VLForConditionalGeneration": LlamaModel,
    "Qwen2_5_VLForConditionalGeneration": LlamaModel,
    "Qwen3VLForConditionalGeneration": LlamaModel,
}


def model_class(architecture: str) -> type[LlamaModel]:
    if architecture not in _CLASSES:
        raise UnsupportedModelError(f"architecture {architecture} is not supported; supported: {', '.join(_CLASSES)}")
    return _CLASSES[architecture]
