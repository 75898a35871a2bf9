"""The vision towers of the Qwen families.

- Qwen2-VL     every patch of an image sees every other
- Qwen2.5-VL   most blocks see only a window of the image; patches are sorted by window for the whole way
- Qwen3-VL     learned positions besides the rotation, and features out of the middle of the tower for the first text layers
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from kvrelay.checkpoint.vision_spec import VisionSpec
from kvrelay.models.layers import WeightSource
from kvrelay.models.vision import (
    VISION_PREFIX,
    Activation,
    Affine,
    Block,
    GatedMLP,
    Grid,
    LayerNorm,
    Merger,
    PatchPlaces,
    RMSNorm,
    Segments,
    TwoLayers,
    VisionTower,
)

_EMBED = f"{VISION_PREFIX}patch_embed.proj"
_MERGER = f"{VISION_PREFIX}merger"


def make_tower(spec: VisionSpec, source: WeightSource) -> VisionTower:
    match spec.kind:
        case "qwen2_vl":
            return Qwen2Tower(spec, source)
        case "qwen2_5_vl":
            return Qwen25Tower(spec, source)
        case "qwen3_vl":
            return Qwen3Tower(spec, source)


class Qwen2Tower:
    def __init__(self, spec: VisionSpec, source: WeightSource) -> None:
        self.spec = spec
        self._embed = Affine(source, _EMBED, _kernel(spec), bias=False)
        self._blocks = [
            Block(spec, source, name, LayerNorm, _two_layers(spec, source, f"{name}.mlp.fc1", f"{name}.mlp.fc2", _quick_gelu))
            for name in _block_names(spec)
        ]
        self._merger = Merger(spec, source, (f"{_MERGER}.ln_q", f"{_MERGER}.mlp.0", f"{_MERGER}.mlp.2"), LayerNorm)

    @torch.inference_mode()
    def forward(self, patches: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        places = PatchPlaces.of(grids, self.spec.merge_size, patches.device)
        cos_sin, images = places.rotation(self.spec), Segments.of_lengths(places.frame_lengths)
        x = self._embed(patches)
        for block in self._blocks:
            x = block(x, cos_sin, images)
        return self._merger(x).float()


class Qwen25Tower:
    def __init__(self, spec: VisionSpec, source: WeightSource) -> None:
        self.spec = spec
        self._embed = Affine(source, _EMBED, _kernel(spec), bias=False)
        self._blocks = [
            Block(spec, source, name, RMSNorm, GatedMLP(source, f"{name}.mlp", spec.hidden_size, spec.intermediate_size))
            for name in _block_names(spec)
        ]
        self._merger = Merger(spec, source, (f"{_MERGER}.ln_q", f"{_MERGER}.mlp.0", f"{_MERGER}.mlp.2"), RMSNorm)

    @torch.inference_mode()
    def forward(self, patches: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        spec = self.spec
        places = PatchPlaces.of(grids, spec.merge_size, patches.device)
        images = Segments.of_lengths(places.frame_lengths)
        order, window_lengths = _windows(grids, spec, patches.device)
        windows = Segments.of_lengths(window_lengths)
        cos_sin = _by_square(places.rotation(spec), order, spec)
        x = _by_square(self._embed(patches), order, spec)
        for index, block in enumerate(self._blocks):
            x = block(x, cos_sin, images if index in spec.full_attention_blocks else windows)
        features = torch.empty(order.shape[0], spec.out_hidden_size, device=patches.device)
        features[order] = self._merger(x).float()
        return features


class Qwen3Tower:
    def __init__(self, spec: VisionSpec, source: WeightSource) -> None:
        self.spec = spec
        self._embed = Affine(source, _EMBED, _kernel(spec))
        self._positions = source.take(f"{VISION_PREFIX}pos_embed.weight", (spec.num_positions_per_side**2, spec.hidden_size))
        self._blocks = [
            Block(
                spec, source, name, LayerNorm,
                _two_layers(spec, source, f"{name}.mlp.linear_fc1", f"{name}.mlp.linear_fc2", _tanh_gelu),
            )
            for name in _block_names(spec)
        ]  # fmt: skip
        self._merger = Merger(spec, source, _merger_names(_MERGER), LayerNorm)
        self._deepstack = {
            block: Merger(
                spec, source, _merger_names(f"{VISION_PREFIX}deepstack_merger_list.{index}"), LayerNorm, norm_after=True
            )
            for index, block in enumerate(spec.deepstack_blocks)
        }  # fmt: skip

    @torch.inference_mode()
    def forward(self, patches: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        places = PatchPlaces.of(grids, self.spec.merge_size, patches.device)
        cos_sin, images = places.rotation(self.spec), Segments.of_lengths(places.frame_lengths)
        x = self._embed(patches)
        x = x + self._interpolated(places).to(x.dtype)
        deepstack = []
        for index, block in enumerate(self._blocks):
            x = block(x, cos_sin, images)
            if index in self._deepstack:
                deepstack.append(self._deepstack[index](x))
        return torch.cat([self._merger(x), *deepstack], dim=-1).float()

    def _interpolated(self, places: PatchPlaces) -> torch.Tensor:
        """The square of learned positions, stretched over each image so that the corners meet."""
        side = self.spec.num_positions_per_side
        total = torch.zeros(places.rows.shape[0], self.spec.hidden_size, device=places.rows.device)
        for row, row_weight in _neighbours(places.rows, places.num_rows, side):
            for column, column_weight in _neighbours(places.columns, places.num_columns, side):
                total += self._positions[row * side + column] * (row_weight * column_weight)[:, None]
        return total


def _neighbours(index: torch.Tensor, size: torch.Tensor, side: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The two learned places next to each patch along one axis, and their weights."""
    place = index.float() * (side - 1) / (size - 1).clamp(min=1)
    low = place.floor()
    share = place - low
    below = low.long()
    return [(below, 1 - share), ((below + 1).clamp(max=side - 1), share)]


def _windows(grids: Sequence[Grid], spec: VisionSpec, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Which token comes where when those of a window are neighbours, and how many patches each window has."""
    width = spec.window_size // spec.merge_size // spec.patch_size  # of a window, in tokens
    orders, lengths, first = [], [], 0
    for frames, num_rows, num_columns in grids:
        height, breadth = num_rows // spec.merge_size, num_columns // spec.merge_size
        row, column = torch.arange(height) // width, torch.arange(breadth) // width
        window = (row[:, None] * (-(-breadth // width)) + column).flatten()
        for _ in range(frames):
            orders.append(first + window.argsort(stable=True))
            lengths.append(window.bincount() * spec.merge_size**2)
            first += height * breadth
    return torch.cat(orders).to(device), torch.cat(lengths).to(device)


def _by_square(x: torch.Tensor, order: torch.Tensor, spec: VisionSpec) -> torch.Tensor:
    """Brings patches into another order of tokens."""
    return x.view(order.shape[0], spec.merge_size**2, -1)[order].view(x.shape)


def _kernel(spec: VisionSpec) -> tuple[int, ...]:
    """Patches do not overlap, so the checkpoint's convolution is an affine map of each."""
    return (spec.hidden_size, 3, spec.temporal_patch_size, spec.patch_size, spec.patch_size)


def _block_names(spec: VisionSpec) -> list[str]:
    return [f"{VISION_PREFIX}blocks.{index}" for index in range(spec.depth)]


def _merger_names(name: str) -> tuple[str, str, str]:
    return f"{name}.norm", f"{name}.linear_fc1", f"{name}.linear_fc2"


def _two_layers(spec: VisionSpec, source: WeightSource, first: str, second: str, activation: Activation) -> TwoLayers:
    inner, width = spec.intermediate_size, spec.hidden_size
    return TwoLayers(Affine(source, first, (inner, width)), activation, Affine(source, second, (width, inner)))


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def _tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")
