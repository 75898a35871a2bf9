"""The size of an image before it is cut into patches: a pure function, so that router and worker agree on it."""

from __future__ import annotations

import math

from kvrelay.errors import MediaError

MAX_ASPECT_RATIO = 200


def target_size(height: int, width: int, *, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Height and width, both multiples of `factor`, of about the same shape and with an area within the bounds.

    The arithmetic of the processors that the models were trained with: rounding is half to even, and a long and thin image may
    end above `max_pixels`.
    """
    if min(height, width) < 1:
        raise MediaError(f"an image of {width}x{height} pixels has no content")
    if max(height, width) / min(height, width) > MAX_ASPECT_RATIO:
        raise MediaError(f"an image of {width}x{height} pixels is more than {MAX_ASPECT_RATIO} times as long as it is wide")
    to_height = round(height / factor) * factor
    to_width = round(width / factor) * factor
    if to_height * to_width > max_pixels:
        scale = math.sqrt((height * width) / max_pixels)
        to_height = max(factor, math.floor(height / scale / factor) * factor)
        to_width = max(factor, math.floor(width / scale / factor) * factor)
    elif to_height * to_width < min_pixels:
        scale = math.sqrt(min_pixels / (height * width))
        to_height = math.ceil(height * scale / factor) * factor
        to_width = math.ceil(width * scale / factor) * factor
    return to_height, to_width
