"""Products that cuBLAS gets wrong are found: the check compares, and the worker refuses by name."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kvrelay.kernels.cuda import products

SIZES = [(96, 64), (64, 96)]


def test_right_products_are_right() -> None:
    assert products.wrong_product(SIZES, torch.bfloat16, torch.device("cpu")) is None


def test_a_wrong_number_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        result = torch.matmul(x, weight.T)
        if x.shape[0] == 512 and weight.shape[0] == 64:
            result[7, 9] += 1
        return result

    monkeypatch.setattr(F, "linear", wrong)
    assert products.wrong_product(SIZES, torch.float32, torch.device("cpu")) == (512, 64, 96)
