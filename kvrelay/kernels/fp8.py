"""Weights in fp8 (e4m3): one float32 scale per output, by which a row of the stored weight is multiplied."""

from __future__ import annotations

import torch

FP8 = torch.float8_e4m3fn
_LARGEST = 448.0


def quantise(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in fp8 and their scales [rows]; a row of zeros has scale 1."""
    wide = values.float()
    largest = wide.abs().amax(dim=1)
    scale = torch.where(largest > 0.0, largest / _LARGEST, 1.0)
    return (wide / scale[:, None]).clamp(-_LARGEST, _LARGEST).to(FP8), scale


def dequantise(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (weight.float() * scale.float()[:, None]).to(dtype)
