"""Features as rows of bytes, which move between workers. A row is one token: main features, then deepstack's, side by side."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

Rows = NDArray[np.uint8]  # [tokens, bytes of a token]


def to_rows(features: torch.Tensor) -> Rows:
    """A view where the features are on the host."""
    rows: Rows = features.contiguous().cpu().view(torch.uint8).numpy()
    return rows


def from_rows(rows: Rows, dtype: torch.dtype) -> torch.Tensor:
    """[tokens, width], in the memory of `rows`."""
    return torch.from_numpy(rows).view(dtype)
