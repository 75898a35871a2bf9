"""Weights in fp8: quantised when they are loaded, or read as a checkpoint has them."""

from __future__ import annotations

import json
import pathlib
import shutil
from typing import Any

import pytest
import torch
from paged_run import PagedRun, prompts_of
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model
from triton_here import DEVICE, HAS_TRITON, ON_CARD, use_few_programs

from kvrelay.checkpoint.spec import CONFIG_NAME, read_spec
from kvrelay.errors import MissingTensorError, WrongShapeError
from kvrelay.kernels.base import Kernels
from kvrelay.kernels.fp8 import FP8, dequantise, quantise
from kvrelay.kernels.torch_kernels import TorchKernels
from kvrelay.models.registry import Model
from kvrelay.progress import Silent
from kvrelay.runner.loader import WHOLE_NAME, load_model

pytestmark = pytest.mark.cuda if ON_CARD else []
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
PROMPTS = prompts_of((2, 1))
CONFIG = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"weights": {"type": "float", "num_bits": 8, "strategy": "channel"}}},
    "ignore": ["lm_head"],
}


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    return pathlib.Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))


def card_kernels() -> Kernels:
    from kvrelay.kernels.cuda.kernels import CudaKernels

    use_few_programs()
    return CudaKernels(linears="triton")


def load(folder: pathlib.Path, kernels: Kernels, *, fp8: bool = False) -> Model:
    return load_model(
        folder,
        read_spec(folder),
        kernels=kernels,
        device=DEVICE,
        dtype=torch.float32,
        load="auto",
        progress=Silent(),
        weights="fp8" if fp8 else "auto",
    )


def logits_of(model: Model) -> torch.Tensor:
    """In passes of one token each: of several, in float32, the reference keeps more digits."""
    run = PagedRun(model, PROMPTS, str(DEVICE))
    return torch.cat([run.step({row: 1})[row] for row in (0, 0, 1)])


def is_linear(name: str) -> bool:
    return name.endswith("_proj.weight")


def change(folder: pathlib.Path, tensors: dict[str, torch.Tensor], **config: Any) -> None:
    save_file(tensors, folder / WHOLE_NAME)
    path = folder / CONFIG_NAME
    path.write_text(json.dumps(json.loads(path.read_bytes()) | config))


def test_rows_keep_three_bits_of_their_numbers() -> None:
    weight = torch.randn(9, 200, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 3, 9)[:, None]
    weight[4] = 0.0
    narrow, scale = quantise(weight)
    assert narrow.dtype is FP8
    assert scale.shape == (9,)
    error = (dequantise(narrow, scale, torch.float32) - weight).abs()
    assert torch.all(error <= weight.abs() / 16 + weight.abs().amax(1, keepdim=True) / 448 / 512)


@needs_triton
def test_linear_layers_are_quantised_when_they_are_loaded(folder: pathlib.Path) -> None:
    """And nothing else: neither norms nor the embedding, which is the head too."""
    got = logits_of(load(folder, card_kernels(), fp8=True))
    exact = logits_of(load(folder, TorchKernels()))
    tensors = load_file(folder / WHOLE_NAME)
    rounded = {
        name: dequantise(*quantise(tensor), torch.float32) if is_linear(name) else tensor for name, tensor in tensors.items()
    }
    change(folder, rounded)
    torch.testing.assert_close(got, logits_of(load(folder, TorchKernels())), atol=1e-3, rtol=0)
    assert not torch.allclose(got, exact, atol=1e-3)


@needs_triton
def test_a_pass_of_several_rows_gives_about_what_passes_of_one_do(folder: pathlib.Path) -> None:
    """Values in float32 keep 8 digits there."""
    model = load(folder, card_kernels(), fp8=True)
    several = PagedRun(model, PROMPTS, str(DEVICE)).step({0: 2, 1: 1})
    torch.testing.assert_close(torch.cat([several[0], several[1]]), logits_of(model), atol=0.05, rtol=0)


@needs_triton
@pytest.mark.parametrize("only", ["", "q_proj"], ids=["every projection", "some of those that are fused"])
def test_a_checkpoint_in_fp8_is_read_as_it_is(only: str, folder: pathlib.Path) -> None:
    """With a scale per output, or, in the middle layer, per tensor."""
    stored: dict[str, torch.Tensor] = {}
    meant: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / WHOLE_NAME).items():
        stored[name] = meant[name] = tensor
        if not is_linear(name) or only not in name:
            continue
        narrow, scale = quantise(tensor)
        if ".layers.1." in name:
            scale = scale.max()
            narrow = (tensor / scale).to(FP8)
        stored[name], stored[f"{name}_scale"] = narrow, scale if scale.dim() == 0 else scale[:, None]
        meant[name] = dequantise(narrow, scale.expand(len(narrow)), torch.float32)
    change(folder, stored, quantization_config=CONFIG)
    got = logits_of(load(folder, card_kernels(), fp8=not only))
    change(folder, meant)
    torch.testing.assert_close(got, logits_of(load(folder, TorchKernels())), atol=1e-3, rtol=0)


@pytest.mark.parametrize(("scale", "error"), [(None, MissingTensorError), (torch.ones(2, 3), WrongShapeError)], ids=str)
def test_a_scale_that_is_missing_or_means_something_else(
    scale: torch.Tensor | None, error: type[Exception], folder: pathlib.Path
) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    tensors = load_file(folder / WHOLE_NAME)
    tensors[name] = tensors[name].to(FP8)
    if scale is not None:
        tensors[f"{name}_scale"] = scale
    change(folder, tensors, quantization_config=CONFIG)
    with pytest.raises(error, match=r"down_proj\.weight_scale"):
        load(folder, TorchKernels())
