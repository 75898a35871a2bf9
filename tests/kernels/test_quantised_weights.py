"""Weights that stay in GGUF's blocks give the bits of the dequantised ones: in every format, on every kind of processor, for
any number of rows."""

from __future__ import annotations

import functools

import pytest
import torch
from quantised_blocks import layout_of, random_blocks

from kvrelay.checkpoint.convert import KEPT_FORMATS
from kvrelay.kernels.base import Quantised
from kvrelay.kernels.native.kernels import NativeKernels

ROWS = (1, 2, 3, 4, 5, 7, 14, 15, 40, 99, 200)


@functools.cache
def both(layout: str, out_size: int, in_size: int) -> tuple[Quantised, torch.Tensor]:
    """A weight in blocks, and dequantised as a checkpoint's conversion does it."""
    blocks = random_blocks(layout, out_size * in_size, seed=out_size + in_size)
    floats = layout_of(layout).dequantise(blocks).reshape(out_size, in_size)
    return Quantised(layout, torch.from_numpy(blocks.reshape(out_size, -1)), in_size), torch.from_numpy(floats)


@pytest.mark.parametrize("layout", sorted(KEPT_FORMATS))
@pytest.mark.parametrize(("out_size", "in_size"), [(1, 256), (75, 256), (96, 768), (200, 2304)])
def test_products_are_those_of_the_dequantised_weight(kernels: NativeKernels, layout: str, out_size: int, in_size: int) -> None:
    quantised, floats = both(layout, out_size, in_size)
    bias = torch.randn(out_size, generator=torch.Generator().manual_seed(1))
    packed, expected = kernels.pack(quantised, bias), kernels.pack(floats, bias)
    for rows in ROWS:
        x = torch.randn(rows, in_size, generator=torch.Generator().manual_seed(rows))
        for bulk in {False, kernels.has_bulk}:
            assert torch.equal(kernels.linear(x, packed, bulk=bulk), kernels.linear(x, expected, bulk=bulk)), (rows, bulk)


@pytest.mark.parametrize("layout", sorted(KEPT_FORMATS))
def test_embedding_gives_back_the_dequantised_rows(kernels: NativeKernels, layout: str) -> None:
    quantised, floats = both(layout, 75, 512)
    ids = torch.tensor([74, 0, 31, 32, 33, 0])
    assert torch.equal(kernels.embed(ids, kernels.pack(quantised, None)), floats[ids])


@pytest.mark.parametrize("in_size", [32, 96, 160, 4768])
def test_any_number_of_small_blocks(kernels: NativeKernels, in_size: int) -> None:
    quantised, floats = both("Q4_1", 33, in_size)
    packed, expected = kernels.pack(quantised, None), kernels.pack(floats, None)
    for rows in (1, 3, 17):
        x = torch.randn(rows, in_size, generator=torch.Generator().manual_seed(rows))
        for bulk in {False, kernels.has_bulk}:
            assert torch.equal(kernels.linear(x, packed, bulk=bulk), kernels.linear(x, expected, bulk=bulk))


def test_what_a_conversion_keeps_can_be_computed_with(kernels: NativeKernels) -> None:
    assert kernels.quantised_formats == KEPT_FORMATS


def test_a_weight_takes_the_bytes_of_its_blocks(kernels: NativeKernels) -> None:
    bits = {name: kernels.pack(both(name, 96, 256)[0], None).size_bytes * 8 / (96 * 256) for name in KEPT_FORMATS}
    assert bits == {"Q4_0": 4.5, "Q4_1": 5.0, "Q8_0": 8.5, "Q4_K": 4.625, "Q6_K": 8.5625}
