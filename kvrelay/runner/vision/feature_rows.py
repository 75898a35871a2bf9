"""Features as rows of bytes, which move between workers. A row is one token: main features, then deepstack's, side by side."""

from __future__ import annotations

import torch


def to_rows(features: torch.Tensor) -> torch.Tensor:
    """[tokens, bytes of a token], on the device and in the memory of the features."""
    return features.contiguous().view(torch.uint8)


def from_rows(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[tokens, width], in the memory of `rows`."""
    return rows.view(dtype)
