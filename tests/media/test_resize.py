"""Sizes equal those of the processor that the models were trained with."""

from __future__ import annotations

import random

import pytest

from kvrelay.errors import MediaError
from kvrelay.media.resize import target_size

# height, width, factor, min_pixels, max_pixels -> what transformers' smart_resize gives
KNOWN = [
    ((480, 640, 28, 3136, 12845056), (476, 644)),
    ((480, 640, 32, 65536, 16777216), (480, 640)),
    ((1080, 1920, 28, 3136, 12845056), (1092, 1932)),
    ((2160, 3840, 32, 65536, 16777216), (2176, 3840)),
    ((6000, 6000, 32, 65536, 16777216), (4096, 4096)),
    ((1, 1, 28, 3136, 12845056), (56, 56)),
    ((1, 200, 32, 65536, 16777216), (32, 3648)),
    ((42, 70, 28, 784, 12845056), (56, 56)),  # 1.5 and 2.5 both round to 2
    ((20, 3000, 28, 784, 4096), (28, 756)),  # a thin image may end above the bound
]


@pytest.mark.parametrize(("given", "expected"), KNOWN)
def test_known_sizes(given: tuple[int, int, int, int, int], expected: tuple[int, int]) -> None:
    height, width, factor, least, most = given
    assert target_size(height, width, factor=factor, min_pixels=least, max_pixels=most) == expected


@pytest.mark.parametrize(("height", "width"), [(1, 201), (3, 601), (0, 5), (5, 0)])
def test_a_image_without_content_or_too_thin_is_refused(height: int, width: int) -> None:
    with pytest.raises(MediaError, match=f"{width}x{height}"):
        target_size(height, width, factor=28, min_pixels=3136, max_pixels=50176)


@pytest.mark.long
def test_sizes_equal_those_of_transformers() -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    draw = random.Random(5)
    for _ in range(20_000):
        height = draw.randint(1, 5000)
        width = draw.randint(max(1, height // 200 + 1), min(5000, 199 * height))
        factor, least, most = draw.choice([(28, 3136, 12845056), (32, 65536, 16777216), (28, 3136, 50176), (32, 1, 4096)])
        ours = target_size(height, width, factor=factor, min_pixels=least, max_pixels=most)
        assert ours == smart_resize(height, width, factor, least, most), (height, width, factor, least, most)
