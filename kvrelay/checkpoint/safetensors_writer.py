"""Writes a safetensors file tensor by tensor, so that a model far larger than memory could be converted.

header size u64 | header JSON {name: {dtype, shape, data_offsets}} padded to 8 bytes | tensors, back to back
"""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt


def write_float32(
    path: pathlib.Path,
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], npt.NDArray[np.float32]],
    written: Callable[[int], None],
) -> None:
    """`read` is asked for each tensor in the order of `shapes`; `written` is told of every tensor's bytes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for name, shape in shapes.items():
            values = np.ascontiguousarray(read(name), dtype="<f4")
            assert values.shape == shape, f"{name} is {values.shape}, announced as {shape}"
            file.write(values.data)
            written(values.nbytes)
