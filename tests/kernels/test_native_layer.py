"""A decoder layer that C computes in one call: the bits are those of its steps."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from cases import Case, make
from quantised_blocks import random_blocks

from kvrelay.kernels.base import ForwardBatch, HeadShape, LayerWeights, Packed, Quantised
from kvrelay.kernels.native.kernels import NativeKernels
from kvrelay.kernels.ranks import ALONE

CPU = torch.device("cpu")


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def quantised(layout: str, out_size: int, in_size: int) -> Quantised:
    blocks = random_blocks(layout, out_size * in_size, seed=out_size)
    return Quantised(layout, torch.from_numpy(blocks.reshape(out_size, -1)), in_size)


def make_layer(kernels: NativeKernels, shape: HeadShape, hidden: int, inner: int, layout: str, biased: bool) -> LayerWeights:
    sizes = {"qkv": (320, hidden), "output": (hidden, 192), "gate_up": (2 * inner, hidden), "down": (hidden, inner)}
    packed = {
        name: kernels.pack(
            quantised(layout, *size) if layout and name == "gate_up" else randn(*size, seed=index) / 8,
            randn(size[0], seed=9 + index) if biased else None,
        )
        for index, (name, size) in enumerate(sizes.items())
    }
    norms = {"input_norm": 1 + randn(hidden, seed=20), "post_norm": 1 + randn(hidden, seed=21), "q_norm": None, "k_norm": None}
    return LayerWeights(index=0, shape=shape, eps=1e-5, scale=0.2, **packed, **norms)  # type: ignore[arg-type]


def in_steps(
    kernels: NativeKernels, weights: LayerWeights, x: torch.Tensor, residual: torch.Tensor, cos_sin: torch.Tensor,
    batch: ForwardBatch, kv: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """The layer by single calls, each token's products in its own way."""

    def linear(x: torch.Tensor, packed: Packed) -> torch.Tensor:
        out = kernels.linear(x, packed)
        for begin, end in batch.bulk:
            out[begin:end] = kernels.linear(x[begin:end].contiguous(), packed, bulk=True)
        return out

    shape = weights.shape
    normed = kernels.add_rms_norm(x, residual, weights.input_norm, weights.eps)
    q = kernels.rope_and_store(linear(normed, weights.qkv), shape, cos_sin, batch, kv, None, None, weights.eps)
    out = linear(kernels.attention(q, shape, batch, kv, weights.scale), weights.output)
    normed = kernels.add_rms_norm(out, residual, weights.post_norm, weights.eps)
    return linear(kernels.silu_mul(linear(normed, weights.gate_up)), weights.down)


def assert_fused_is_steps(kernels: NativeKernels, weights: LayerWeights, batch: ForwardBatch, kv: torch.Tensor) -> None:
    tokens, hidden = batch.positions.numel(), weights.input_norm.numel()
    cos_sin = randn(700, 32, seed=22)
    x, residual, kept, own = randn(tokens, hidden), randn(tokens, hidden, seed=1), randn(tokens, hidden, seed=1), kv.clone()
    layer = kernels.fuse(weights, ALONE)
    assert layer is not None
    got = layer(x, residual, cos_sin, batch, kv)
    assert torch.equal(got, in_steps(kernels, weights, randn(tokens, hidden), kept, cos_sin, batch, own))
    assert torch.equal(residual, kept)


@pytest.mark.parametrize(("layout", "biased"), [("", False), ("", True), ("Q4_0", True)])
@pytest.mark.parametrize("inner", [64, 80, 160])  # gates and what they are multiplied with in panels of their own, or not
def test_a_layer_in_one_call_gives_the_bits_of_its_steps(
    kernels: NativeKernels, threads: None, inner: int, layout: str, biased: bool
) -> None:
    shape = HeadShape(6, 2, 32)
    weights = make_layer(kernels, shape, 96, inner, layout, biased)
    for number, rows in enumerate([((0, 5),), ((1, 5),), ((1, 1), (1, 600)), ((1, 300),) * 40, ((1, 9), (130, 130), (7, 100))]):
        _, batch, kv = make(Case(shape, 16, rows, torch.float32), CPU, seed=number)
        for num_threads in (1, 3, 16):
            torch.set_num_threads(num_threads)
            assert_fused_is_steps(kernels, weights, batch, kv.clone())


@pytest.mark.parametrize("layout", ["", "Q4_0"])
@pytest.mark.parametrize(
    "bulk", [((0, 70),), ((1, 131),), ((5, 6), (131, 138)), ((0, 138),), ((0, 1), (2, 40), (131, 137))], ids=str
)
def test_the_bulk_of_prompts_in_one_call(
    kernels: NativeKernels, threads: None, bulk: tuple[tuple[int, int], ...], layout: str
) -> None:
    if not kernels.has_bulk:  # then no pass names a bulk
        bulk = ()
    shape = HeadShape(6, 2, 32)
    weights = make_layer(kernels, shape, 96, 80, layout, biased=True)
    _, batch, kv = make(Case(shape, 16, ((1, 9), (130, 130), (7, 100)), torch.float32), CPU)
    for num_threads in (1, 3):
        torch.set_num_threads(num_threads)
        assert_fused_is_steps(kernels, weights, dataclasses.replace(batch, bulk=bulk), kv.clone())
