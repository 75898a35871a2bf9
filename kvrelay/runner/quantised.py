"""Weights that stay quantised: the blocks of a GGUF file, which its conversion left beside the float32 tensors."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

from safetensors import SafetensorError, safe_open

from kvrelay.checkpoint.convert import BLOCKS_NAME
from kvrelay.checkpoint.dequantise import FORMATS, Format
from kvrelay.errors import ModelError, WrongShapeError
from kvrelay.kernels.base import Quantised

_BY_NAME = {layout.name: layout for layout in FORMATS.values()}


class BlockFile:
    """Hands out the matrices of a folder that it has in blocks of one of `formats`."""

    def __init__(self, folder: pathlib.Path, formats: frozenset[str]) -> None:
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
        blocks = self._file.get_tensor(name)
        if tuple(blocks.shape) != (shape[0], shape[1] // layout.block_elements * layout.block_bytes):
            raise WrongShapeError(f"tensor {name} in {self._path} has not the shape that the config says")
        return Quantised(layout.name, blocks, shape[1])


def _open(path: pathlib.Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is not a readable safetensors file: {error}") from error
