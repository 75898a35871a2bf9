"""The pieces vision towers are made of, in plain PyTorch.

A tower turns the patches of some images into features for the text model. All patches of a pass lie one after another,
image by image, and within an image square by square: the merge_size x merge_size patches that become one token are
neighbours. Everything is per patch except attention, which stays inside an image or inside a window of it (`Segments`).

    patches [n, colours * frames * size * size]  -> embed -> blocks -> merge -> features [tokens, (1 + deepstack) * width]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from kvrelay.checkpoint.vision_spec import VisionSpec
from kvrelay.kernels.torch_kernels import rms_norm, rotate
from kvrelay.models.layers import WeightSource

VISION_PREFIX = "visual."  # of the names that a tower takes from its `WeightSource`
NORM_EPS = 1e-6

Grid = tuple[int, int, int]  # frames, rows and columns of patches
Activation = Callable[[torch.Tensor], torch.Tensor]


class VisionTower(Protocol):
    """Holds weights and no state of any image; one thread calls it at a time."""

    spec: VisionSpec

    def forward(self, patches: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """float32 [tokens of all images, (1 + deepstack) * width]: the main features, then those for each of the first text
        layers, side by side."""


class Affine:
    """weight x + bias. `shape` is as the checkpoint has it; all but its first size are inputs."""

    def __init__(self, source: WeightSource, name: str, shape: tuple[int, ...], *, bias: bool = True) -> None:
        self._weight = source.take(f"{name}.weight", shape).flatten(1)
        self._bias = source.take(f"{name}.bias", shape[:1]) if bias else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.to(self._weight.dtype), self._weight, self._bias)


class LayerNorm:
    def __init__(self, source: WeightSource, name: str, width: int) -> None:
        self._weight, self._bias = source.take(f"{name}.weight", (width,)), source.take(f"{name}.bias", (width,))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self._weight.shape, self._weight, self._bias, NORM_EPS)


class RMSNorm:
    def __init__(self, source: WeightSource, name: str, width: int) -> None:
        self._weight = source.take(f"{name}.weight", (width,))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self._weight, NORM_EPS)


class TwoLayers:
    """An affine map, an activation, another affine map."""

    def __init__(self, first: Affine, activation: Activation, second: Affine) -> None:
        self._first, self._activation, self._second = first, activation, second

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._second(self._activation(self._first(x)))


class GatedMLP:
    def __init__(self, source: WeightSource, name: str, width: int, inner: int) -> None:
        self._gate = Affine(source, f"{name}.gate_proj", (inner, width))
        self._up = Affine(source, f"{name}.up_proj", (inner, width))
        self._down = Affine(source, f"{name}.down_proj", (width, inner))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._down(F.silu(self._gate(x)) * self._up(x))


@dataclass(frozen=True, slots=True)
class Segments:
    """Stretches of patches that attend to each other alone. Those of one length are computed together: many windows are."""

    by_length: tuple[torch.Tensor, ...]  # each [segments, length] int64: which patches

    @classmethod
    def of_lengths(cls, lengths: torch.Tensor) -> Segments:
        starts = lengths.cumsum(0) - lengths
        groups = []
        for length in sorted(set(lengths.tolist())):
            chosen = starts[lengths == length]
            groups.append(chosen[:, None] + torch.arange(length, device=lengths.device))
        return cls(tuple(groups))

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """[patches, heads, dim] -> the same shape."""
        out = torch.empty_like(query)
        for patches in self.by_length:
            q, k, v = (part[patches].transpose(1, 2) for part in (query, key, value))
            out[patches] = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return out


class Block:
    """x += attention(norm(x)); x += mlp(norm(x))."""

    def __init__(
        self, spec: VisionSpec, source: WeightSource, name: str, norm: type[LayerNorm] | type[RMSNorm], mlp: Activation
    ):
        width = spec.hidden_size
        self._num_heads = spec.num_heads
        self._norm1, self._norm2 = norm(source, f"{name}.norm1", width), norm(source, f"{name}.norm2", width)
        self._qkv = Affine(source, f"{name}.attn.qkv", (3 * width, width))
        self._output = Affine(source, f"{name}.attn.proj", (width, width))
        self._mlp = mlp

    def __call__(self, x: torch.Tensor, cos_sin: torch.Tensor, segments: Segments) -> torch.Tensor:
        qkv = self._qkv(self._norm1(x)).view(x.shape[0], 3, self._num_heads, -1)
        rotated = rotate(qkv[:, :2], cos_sin[:, None, None, :])
        attended = segments.attend(rotated[:, 0], rotated[:, 1], qkv[:, 2])
        x = x + self._output(attended.flatten(1))
        return x + self._mlp(self._norm2(x))


class Merger:
    """A square of patches -> one token. The norm is over each patch, or over the square (`norm_after`)."""

    def __init__(
        self,
        spec: VisionSpec,
        source: WeightSource,
        names: tuple[str, str, str],
        norm: type[LayerNorm] | type[RMSNorm],
        *,
        norm_after: bool = False,
    ) -> None:
        self._joined = spec.hidden_size * spec.merge_size**2
        self._norm_after = norm_after
        norm_name, first, second = names
        self._norm = norm(source, norm_name, self._joined if norm_after else spec.hidden_size)
        self._mlp = TwoLayers(
            Affine(source, first, (self._joined, self._joined)),
            F.gelu,
            Affine(source, second, (spec.out_hidden_size, self._joined)),
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        joined = self._norm(x.reshape(-1, self._joined)) if self._norm_after else self._norm(x).reshape(-1, self._joined)
        return self._mlp(joined)


@dataclass(frozen=True, slots=True)
class PatchPlaces:
    """Row and column of every patch in its image, and how large the image is: [patches] int64 each."""

    rows: torch.Tensor
    columns: torch.Tensor
    num_rows: torch.Tensor
    num_columns: torch.Tensor
    frame_lengths: torch.Tensor  # [frames of all images]: patches in each

    @classmethod
    def of(cls, grids: Sequence[Grid], merge_size: int, device: torch.device) -> PatchPlaces:
        rows, columns, heights, widths, lengths = [], [], [], [], []
        for frames, height, width in grids:
            squares = (height // merge_size, width // merge_size, merge_size, merge_size)
            row = torch.arange(height).view(squares[0], 1, merge_size, 1).expand(squares).flatten()
            column = torch.arange(width).view(1, squares[1], 1, merge_size).expand(squares).flatten()
            rows.append(row.repeat(frames))
            columns.append(column.repeat(frames))
            heights.append(torch.full((frames * height * width,), height))
            widths.append(torch.full((frames * height * width,), width))
            lengths += [height * width] * frames
        return cls(
            rows=torch.cat(rows).to(device),
            columns=torch.cat(columns).to(device),
            num_rows=torch.cat(heights).to(device),
            num_columns=torch.cat(widths).to(device),
            frame_lengths=torch.tensor(lengths, device=device),
        )

    def rotation(self, spec: VisionSpec) -> torch.Tensor:
        """[patches, head_dim] float32: half of a head is turned by the row, half by the column; cosines, then sines."""
        half = spec.hidden_size // spec.num_heads // 2
        turns = 1.0 / (spec.rope_theta ** (torch.arange(0, half, 2, dtype=torch.float32, device=self.rows.device) / half))
        angles = torch.cat((self.rows[:, None] * turns, self.columns[:, None] * turns), dim=-1)
        return torch.cat((angles.cos(), angles.sin()), dim=-1)
