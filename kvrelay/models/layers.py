"""The pieces models are made of. They hold weights and call `Kernels`; they know nothing of requests or blocks.

A model is built by asking a `WeightSource` for each tensor by name. The source hands a tensor out once and keeps no
reference, and `Kernels.pack` takes it over, so weights exist once in memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from kvrelay.checkpoint.rope import RopeSpec
from kvrelay.kernels.base import Kernels, Packed, Quantised
from kvrelay.kernels.fp8 import dequantise


class WeightSource(Protocol):
    """Where a model's tensors come from: a checkpoint, or a random generator."""

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor of that name, on the model's device in its dtype. Each name is taken once; a tensor that is missing or
        has another shape is an error that names it."""

    def take_linear(self, name: str, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The same for the weight of a linear layer: one in fp8 comes with the scale of each output, in float32."""

    def take_quantised(self, shapes: Mapping[str, tuple[int, int]], cut: int = 0) -> list[Quantised] | None:
        """Matrices in their blocks. None, and nothing is taken, unless all of them are to be had so, in one format whose blocks
        end at every multiple of `cut`."""


def fused_linear(
    kernels: Kernels, source: WeightSource, names: Sequence[str], out_sizes: Sequence[int], in_size: int, *, bias: bool
) -> Packed:
    """One packed layer out of several projections of the same input, stacked in order."""
    shapes = {f"{name}.weight": (out, in_size) for name, out in zip(names, out_sizes, strict=True)}
    biases = [source.take(f"{name}.bias", (out,)) for name, out in zip(names, out_sizes, strict=True)] if bias else []
    weight: torch.Tensor | Quantised | None = _take_quantised(source, shapes)
    scale: torch.Tensor | None = None
    if weight is None:
        weight, scale = _joined([source.take_linear(name, shape) for name, shape in shapes.items()])
    return kernels.pack(weight, _stacked(biases) if biases else None, scale)


def take_matrix(source: WeightSource, name: str, shape: tuple[int, int]) -> torch.Tensor | Quantised:
    return _take_quantised(source, {name: shape}) or source.take(name, shape)


def _take_quantised(source: WeightSource, shapes: Mapping[str, tuple[int, int]]) -> Quantised | None:
    """Matrices of the same input, stacked in order."""
    parts = source.take_quantised(shapes)
    if parts is None:
        return None
    return Quantised(parts[0].format, _stacked([part.blocks for part in parts]), parts[0].in_features)


def linear(kernels: Kernels, source: WeightSource, name: str, out_size: int, in_size: int, *, bias: bool) -> Packed:
    return fused_linear(kernels, source, [name], [out_size], in_size, bias=bias)


def rotary_table(rope: RopeSpec, head_dim: int, num_positions: int, device: torch.device) -> torch.Tensor:
    """[num_positions, head_dim] float32: the cosines of a position's head_dim / 2 angles, then the sines.

    Float32 whatever the model's dtype. Computed on the CPU in transformers' order of operations, so it is equal to its table.
    """
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * inverse_frequencies(rope, head_dim)[None, :]
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    return (table * rope.attention_factor).to(device)


def axis_of_pairs(rope: RopeSpec) -> torch.Tensor:
    """[head_dim / 2] int64: whether time (0), height (1) or width (2) turns each pair, for tokens that have three positions."""
    assert rope.mrope_section is not None
    if not rope.mrope_interleaved:
        return torch.arange(3).repeat_interleave(torch.tensor(rope.mrope_section))
    section = rope.mrope_section
    turns = [pair % 3 if pair < 3 * section[pair % 3] else 0 for pair in range(sum(section))]
    return torch.tensor(turns)


def rotary_rows(table: torch.Tensor, axes: torch.Tensor, axis_of_pair: torch.Tensor) -> torch.Tensor:
    """[tokens, head_dim]: each token's own row, put together from the table's rows at its positions `axes` [3, tokens]. For a
    token whose positions are equal it is that row of the table, bit for bit."""
    positions = axes[axis_of_pair].t()  # [tokens, head_dim / 2]
    pairs = torch.arange(axis_of_pair.shape[0], device=table.device)
    cos, sin = table[positions, pairs], table[positions, pairs + axis_of_pair.shape[0]]
    return torch.cat((cos, sin), dim=-1)


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> torch.Tensor:
    """[head_dim / 2] float32: the angle per position of each rotated pair."""
    plain = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    match rope.kind:
        case "default":
            return plain
        case "linear":
            return plain / rope.factor
        case "llama3":
            return _llama3_frequencies(plain, rope)
        case "yarn":
            return _yarn_frequencies(rope, head_dim)


def _llama3_frequencies(plain: torch.Tensor, rope: RopeSpec) -> torch.Tensor:
    """Long waves are stretched by the factor, short ones kept, those between interpolated."""
    context = rope.original_max_position_embeddings
    wavelength = 2 * math.pi / plain
    is_long = wavelength > context / rope.low_freq_factor
    is_short = wavelength < context / rope.high_freq_factor
    scaled = torch.where(is_long, plain / rope.factor, plain)
    smooth = (context / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - smooth) * scaled / rope.factor + smooth * scaled
    return torch.where(~is_short & ~is_long, between, scaled)


def _yarn_frequencies(rope: RopeSpec, head_dim: int) -> torch.Tensor:
    """Dimensions that turn often keep their frequency, those that turn rarely are stretched, with a ramp between."""

    def dimension_of(rotations: float) -> float:
        turns = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high += 0.001 if low == high else 0.0  # a ramp of no width is a step
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    powers = rope.theta ** (torch.arange(0, head_dim, 2).to(torch.float32) / head_dim)
    kept = 1 - ramp
    return 1.0 / (rope.factor * powers) * (1 - kept) + 1.0 / powers * kept


def _joined(parts: list[tuple[torch.Tensor, torch.Tensor | None]]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Where some parts are in fp8 and others are not, none is."""
    scales = [scale for _, scale in parts if scale is not None]
    if len(scales) == len(parts):
        return _stacked([weight for weight, _ in parts]), _stacked(scales)
    dtype = next(weight.dtype for weight, scale in parts if scale is None)
    return _stacked([weight if scale is None else dequantise(weight, scale, dtype) for weight, scale in parts]), None


def _stacked(parts: list[torch.Tensor]) -> torch.Tensor:
    if len(parts) == 1:
        return parts[0]
    if parts[0].is_meta:  # `torch.cat` of shapes alone imports PyTorch's compiler: seconds, and 60 MiB
        return torch.empty((sum(len(part) for part in parts), *parts[0].shape[1:]), dtype=parts[0].dtype, device="meta")
    return torch.cat(parts)
