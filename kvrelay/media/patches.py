"""From a decoded image to the patches a vision tower takes.

    RGB image -> bicubic to the grid's size -> floats, normalised by colour -> patches, square by square

Bit for bit what transformers' Qwen2VLImageProcessorPil makes: the order of operations and their precisions matter.
"""

from __future__ import annotations

import numpy as np
import PIL.Image
from numpy.typing import NDArray

from kvrelay.media.image_spec import ImageSpec

Grid = tuple[int, int, int]  # frames, rows and columns of patches

_RESCALE = 1 / 255


def grid_of(height: int, width: int, spec: ImageSpec) -> Grid:
    """Of an image that was resized to this size."""
    assert height % spec.factor == 0 == width % spec.factor, f"{width}x{height} is not made of squares of {spec.factor}"
    return 1, height // spec.patch_size, width // spec.patch_size


def patches_of(image: PIL.Image.Image, height: int, width: int, spec: ImageSpec) -> tuple[NDArray[np.float32], Grid]:
    """[patches, colours * frames * patch_size * patch_size] of the resized image. All frames of a patch are the same."""
    assert image.mode == "RGB", f"an image in mode {image.mode} must be converted first"
    grid = grid_of(height, width, spec)
    resized = np.asarray(image.resize((width, height), PIL.Image.Resampling.BICUBIC))
    scaled = (resized.astype(np.float64) * _RESCALE).astype(np.float32)
    normal = (scaled - np.array(spec.mean, dtype=np.float32)) / np.array(spec.std, dtype=np.float32)
    size, merge = spec.patch_size, spec.merge_size
    squares = normal.reshape(height // spec.factor, merge, size, width // spec.factor, merge, size, 3)
    ordered = squares.transpose(0, 3, 1, 4, 6, 2, 5)  # square row, square column, row, column in it, colour, y, x
    frames = np.repeat(ordered[:, :, :, :, :, None], spec.temporal_patch_size, axis=5)
    return np.ascontiguousarray(frames.reshape(grid[1] * grid[2], -1)), grid
