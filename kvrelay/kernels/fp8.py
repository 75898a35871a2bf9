"""fp8 (e4m3). Weights have one float32 scale per output, by which a row of the stored weight is multiplied; KV has none."""

from __future__ import annotations

import torch

FP8 = torch.float8_e4m3fn
FIRST_WITH_FP8 = (8, 9)  # compute capability
_LARGEST = 448.0


def quantise(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in fp8 and their scales [rows]; a row of zeros has scale 1."""
    wide = values.float()
    largest = wide.abs().amax(dim=1)
    scale = torch.where(largest > 0.0, largest / _LARGEST, 1.0)
    return (wide / scale[:, None]).clamp(-_LARGEST, _LARGEST).to(FP8), scale


def dequantise(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (weight.float() * scale.float()[:, None]).to(dtype)


def to_kv(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As KV of that dtype holds them: in fp8, what is beyond its range becomes its largest value."""
    return values.clamp(-_LARGEST, _LARGEST).to(FP8) if dtype is FP8 else values


def movable(kv: torch.Tensor) -> torch.Tensor:
    """Its bytes where it is in fp8, whose elements PyTorch cannot put into places; they can be read as they are."""
    return kv.view(torch.uint8) if kv.dtype is FP8 else kv
