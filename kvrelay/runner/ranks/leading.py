"""The model as rank 0 runs it: the others hear of each pass, and take part in it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvrelay.kernels.base import ForwardBatch
from kvrelay.models.registry import Model
from kvrelay.runner.ranks.adapters import SplitAdapters, own_share, to_lora_pass
from kvrelay.runner.ranks.group import RankGroup
from kvrelay.runner.ranks.passes import spread_inputs, to_pass


class LeadingModel:
    """Implements `Model` for rank 0."""

    def __init__(self, model: Model, group: RankGroup, adapters: SplitAdapters) -> None:
        self.spec = model.spec
        self.dtype = model.dtype
        self._model = model
        self._group = group
        self._adapters = adapters
        self._captured: set[str] = set()  # passes that the others have, or will have, captured

    def forward(self, batch: ForwardBatch, kv: torch.Tensor, on_layer: Callable[[int], None] | None = None) -> torch.Tensor:
        if batch.name not in self._captured:
            self._group.tell(to_pass(batch, kv.shape[3], to_lora_pass(batch.lora), self._adapters.take_dropped()))
            self._captured |= {batch.name} - {""}
        spread_inputs(batch, self._group.ranks)
        return self._model.forward(own_share(batch), kv, on_layer)
