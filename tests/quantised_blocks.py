"""Random weights in the blocks of GGUF, and models made of them."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from gguf_files import F32, gguf_of_checkpoint

from kvrelay.checkpoint.convert import convert
from kvrelay.checkpoint.dequantise import FORMATS, Format
from kvrelay.progress import Silent

TYPE_IDS = {layout.name: type_id for type_id, layout in FORMATS.items()}
_STEPS = {"Q4_0": 1.0, "Q4_1": 1.0, "Q8_0": 1 / 16, "Q4_K": 1 / 32, "Q6_K": 1 / 256}  # of d, so that weights are about as large


def layout_of(name: str) -> Format:
    return FORMATS[TYPE_IDS[name]]


def random_blocks(name: str, num_elements: int, seed: int, size: float = 0.3) -> npt.NDArray[np.uint8]:
    """Weights of about this size, with every quant and scale that there is."""
    rng, layout = np.random.default_rng(seed), layout_of(name)
    fields = np.dtype(layout.fields)
    blocks = rng.integers(0, 256, (num_elements // layout.block_elements, layout.block_bytes), dtype=np.uint8).view(fields)
    step = (size / 5 * _STEPS[name] * rng.uniform(0.5, 1.5, blocks.shape)).astype(np.float16)
    blocks["d"] = step
    for minimum, sign in (("m", -1), ("dmin", 1)):
        if minimum in (fields.names or ()):
            blocks[minimum] = (sign * 7.5 * step).astype(np.float16)
    return blocks.view(np.uint8).reshape(-1)


def quantised_checkpoint(original: pathlib.Path, folder: pathlib.Path, format_of: Callable[[str], str]) -> None:
    """Converts a GGUF file that has a checkpoint's shapes, its vectors, and random matrices in blocks of these formats."""

    def quantised(name: str, shape: tuple[int, ...], values: bytes) -> tuple[int, tuple[int, ...], bytes]:
        layout = format_of(name)
        if len(shape) != 2 or layout == "F32":
            return F32, shape, values
        return TYPE_IDS[layout], shape, random_blocks(layout, shape[0] * shape[1], seed=sum(name.encode())).tobytes()

    path = folder.with_suffix(".gguf")
    gguf_of_checkpoint(original, path, "llama", quantised=quantised)
    folder.mkdir()
    convert(path, folder, Silent())
