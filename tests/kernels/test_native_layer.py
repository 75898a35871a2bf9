"""A decoder layer that C computes in one call: the bits are those of its steps."""

from __future__ import annotations

import pytest
import torch
from cases import Case, make
from quantised_blocks import random_blocks

from kvrelay.kernels.base import HeadShape, LayerWeights, Quantised
from kvrelay.kernels.native.kernels import NativeKernels
from kvrelay.kernels.ranks import ALONE

CPU = torch.device("cpu")


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def quantised(layout: str, out_size: int, in_size: int) -> Quantised:
    blocks = random_blocks(layout, out_size * in_size, seed=out_size)
    return Quantised(layout, torch.from_numpy(blocks.reshape(out_size, -1)), in_size)


@pytest.mark.parametrize(("layout", "biased"), [("", False), ("", True), ("Q4_0", True)])
@pytest.mark.parametrize("inner", [64, 80, 160])  # gates and what they are multiplied with in panels of their own, or not
def test_a_layer_in_one_call_gives_the_bits_of_its_steps(
    kernels: NativeKernels, threads: None, inner: int, layout: str, biased: bool
) -> None:
    shape, hidden = HeadShape(6, 2, 32), 96
    sizes = {"qkv": (320, hidden), "output": (hidden, 192), "gate_up": (2 * inner, hidden), "down": (hidden, inner)}
    packed = {
        name: kernels.pack(
            quantised(layout, *size) if layout and name == "gate_up" else randn(*size, seed=index) / 8,
            randn(size[0], seed=9 + index) if biased else None,
        )
        for index, (name, size) in enumerate(sizes.items())
    }
    norms = {"input_norm": 1 + randn(hidden, seed=20), "post_norm": 1 + randn(hidden, seed=21), "q_norm": None, "k_norm": None}
    weights = LayerWeights(index=0, shape=shape, eps=1e-5, scale=0.2, **packed, **norms)  # type: ignore[arg-type]
    cos_sin = randn(700, 32, seed=22)
    for number, rows in enumerate([((0, 5),), ((1, 5),), ((1, 1), (1, 600)), ((1, 300),) * 40, ((1, 9), (130, 130), (7, 100))]):
        _, batch, kv = make(Case(shape, 16, rows, torch.float32), CPU, seed=number)
        tokens = batch.positions.numel()
        for num_threads in (1, 3, 16):
            torch.set_num_threads(num_threads)
            x, residual, kept, own = (
                randn(tokens, hidden),
                randn(tokens, hidden, seed=1),
                randn(tokens, hidden, seed=1),
                kv.clone(),
            )
            layer = kernels.fuse(weights, ALONE)
            assert layer is not None
            got = layer(x, residual, cos_sin, batch, kv)
            normed = kernels.add_rms_norm(x, kept, weights.input_norm, weights.eps)
            q = kernels.rope_and_store(kernels.linear(normed, weights.qkv), shape, cos_sin, batch, own, None, None, weights.eps)
            out = kernels.linear(kernels.attention(q, shape, batch, own, weights.scale), weights.output)
            normed = kernels.add_rms_norm(out, kept, weights.post_norm, weights.eps)
            assert torch.equal(got, kernels.linear(kernels.silu_mul(kernels.linear(normed, weights.gate_up)), weights.down))
            assert torch.equal(residual, kept)
