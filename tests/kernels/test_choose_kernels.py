"""Which kernels a device gets, and what is said where the wanted ones cannot be had."""

from __future__ import annotations

import importlib.metadata
import importlib.util

import pytest
import torch

from kvrelay.config import ModelOptions, read_environment
from kvrelay.errors import ConfigError
from kvrelay.kernels.choose import choose_kernels
from kvrelay.kernels.torch_kernels import TorchKernels

CARD = torch.device("cuda")


def chosen(device: torch.device, **options: str) -> object:
    return choose_kernels(device, torch.bfloat16, read_environment(), ModelOptions(**options))


@pytest.mark.parametrize("options", [{"attention": "triton"}, {"linears": "cublas"}, {"attention": "torch"}], ids=str)
def test_a_cpu_refuses_options_for_cards(options: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="--device cuda"):
        chosen(torch.device("cpu"), **options)


@pytest.mark.parametrize("options", [{}, {"attention": "torch", "linears": "cublas"}], ids=str)
def test_without_triton_pytorch_serves(options: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert isinstance(chosen(CARD, **options), TorchKernels)


@pytest.mark.parametrize("options", [{"attention": "triton"}, {"linears": "triton"}], ids=str)
def test_triton_that_is_forced_and_missing_is_an_error(options: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"Triton is not installed \(pip install 'kvrelay\[cuda\]'\)"):
        chosen(CARD, **options)


def triton_is(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)


def test_an_old_triton_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    triton_is("3.2.0", monkeypatch)
    assert isinstance(chosen(CARD), TorchKernels)
    with pytest.raises(ConfigError, match=r"Triton 3\.2\.0 is older than 3\.5"):
        chosen(CARD, linears="triton")


def test_without_a_card_pytorch_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    triton_is("3.6.0", monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert isinstance(chosen(CARD), TorchKernels)


def test_an_old_card_gets_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    triton_is("3.6.0", monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert isinstance(chosen(CARD), TorchKernels)
    with pytest.raises(ConfigError, match=r"compute capability is below 8\.0"):
        chosen(CARD, attention="triton")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA card")
def test_a_card_gets_its_kernels() -> None:
    pytest.importorskip("triton")
    from kvrelay.kernels.cuda.kernels import CudaKernels

    assert isinstance(chosen(CARD), CudaKernels)
