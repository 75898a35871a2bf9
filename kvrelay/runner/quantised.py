"""Weights in blocks: those of a GGUF file, which its conversion left beside the float32 tensors, and those that are quantised
here (`--weights int8`)."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from kvrelay.checkpoint.convert import BLOCKS_NAME
from kvrelay.checkpoint.dequantise import FORMATS, Format
from kvrelay.errors import ModelError, WrongShapeError
from kvrelay.kernels.base import Quantised
from kvrelay.models.layers import WeightSource

_BY_NAME = {layout.name: layout for layout in FORMATS.values()}
_INT8 = _BY_NAME["Q8_0"]
_LARGEST_HALF = 65504.0


class BlockFile:
    """Hands out the matrices of a folder that it has in blocks of one of `formats`."""

    def __init__(self, folder: pathlib.Path, formats: frozenset[str], *, contents: bool = True) -> None:
        """Without `contents`, shapes alone."""
        self._contents = contents
        self._path = folder / BLOCKS_NAME
        self._file: Any = _open(self._path) if formats and self._path.exists() else None
        named = {} if self._file is None else self._file.metadata()
        self._formats = {name: _BY_NAME[layout] for name, layout in named.items() if layout in formats}

    def find(self, shapes: Mapping[str, tuple[int, int]], cut: int) -> list[Quantised] | None:
        """None unless it has all of them, in one format whose blocks end at every multiple of `cut`."""
        found = {self._formats.get(name) for name in shapes}
        layout = found.pop()
        if found or layout is None or cut % layout.block_elements:
            return None
        return [self._read(name, layout, shape) for name, shape in shapes.items()]

    def close(self) -> None:
        self._file = None

    def _read(self, name: str, layout: Format, shape: tuple[int, int]) -> Quantised:
        stored = self._file.get_slice(name)
        if tuple(stored.get_shape()) != (shape[0], shape[1] // layout.block_elements * layout.block_bytes):
            raise WrongShapeError(f"tensor {name} in {self._path} has not the shape that the config says")
        if not self._contents:
            return Quantised(layout.name, torch.empty(stored.get_shape(), dtype=torch.uint8, device="meta"), shape[1])
        return Quantised(layout.name, self._file.get_tensor(name), shape[1])


class Int8Source:
    """Implements `WeightSource`: every matrix in int8, whatever it is in another source. Each run of 32 inputs of an output has
    a scale of its own, so that it is a block of Q8_0. At no time do more than a layer's matrices exist in both precisions."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self._source.take(name, shape)

    def take_linear(self, name: str, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._source.take_linear(name, shape)

    def take_quantised(self, shapes: Mapping[str, tuple[int, int]], cut: int = 0) -> list[Quantised] | None:
        """None for matrices that are no whole blocks: they stay floats."""
        if any(width % _INT8.block_elements for width in (cut, *(shape[1] for shape in shapes.values()))):
            return None
        return [int8_blocks(self._source.take(name, shape)) for name, shape in shapes.items()]


def int8_blocks(weight: torch.Tensor) -> Quantised:
    """The nearest of 255 steps, of which the largest weight of a run has 127."""
    runs = weight.float().reshape(weight.shape[0], -1, _INT8.block_elements)
    scale = (runs.abs().amax(dim=2) / 127).clamp(max=_LARGEST_HALF).half()
    steps = torch.where(scale[..., None] > 0, runs / scale[..., None].float(), 0.0).round().clamp(-127, 127)
    fields = (scale[..., None].view(torch.uint8), steps.to(torch.int8).view(torch.uint8))
    return Quantised(_INT8.name, torch.cat(fields, dim=2).flatten(1), weight.shape[1])


def _open(path: pathlib.Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is not a readable safetensors file: {error}") from error
