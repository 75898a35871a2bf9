"""What of a captured decode step is not the model: its inputs before, and the choice of tokens behind."""

from __future__ import annotations

from typing import Protocol

import torch

from kvrelay.runner.sampling.draw import likeliest


class Ends(Protocol):
    def step_inputs(
        self, columns: torch.Tensor, chosen: torch.Tensor, twin: torch.Tensor, tables: torch.Tensor
    ) -> torch.Tensor:
        """`columns` as `graphs.py` sends them, [6, rows]. Returns token ids, positions and slots [3, rows] in int64, and writes
        block tables by row: those of `twin` at the rows' places. A token is the larger one of what the host knows and what was
        chosen at its source: one is 0, and a token that could not be chosen is negative, so it becomes 0."""

    def keep_likeliest(self, logits: torch.Tensor, kept: torch.Tensor, tokens: torch.Tensor) -> None:
        """Copies logits to `kept`, and writes the most likely token of each row, the lowest id among equals; -1 where the
        largest logit is not finite."""


class PlainEnds:
    """Implements `Ends` with PyTorch."""

    def step_inputs(
        self, columns: torch.Tensor, chosen: torch.Tensor, twin: torch.Tensor, tables: torch.Tensor
    ) -> torch.Tensor:
        torch.index_select(twin, 0, columns[5], out=tables)
        wide = columns.long()
        return torch.stack([torch.maximum(wide[0], chosen[wide[1]]), wide[2], wide[3]])

    def keep_likeliest(self, logits: torch.Tensor, kept: torch.Tensor, tokens: torch.Tensor) -> None:
        kept.copy_(logits)
        tokens.copy_(likeliest(logits))


def ends_on(device: torch.device) -> Ends:
    """Steps are captured where there is Triton."""
    if device.type != "cuda":
        return PlainEnds()
    from kvrelay.kernels.cuda import ends  # needs Triton

    return ends
