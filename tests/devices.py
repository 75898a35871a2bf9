"""The devices that suites of whole servers run on. On a card all workers share it; `-m cuda` selects those tests."""

from __future__ import annotations

import pytest
import torch

ON_A_CARD = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA card")]
DEVICES = ["cpu", pytest.param("cuda", marks=ON_A_CARD)]


def on(device: str) -> list[str]:
    """Options of `kvrelay serve` with which its tokens are those of the reference."""
    return ["--device", device, "--dtype", "float32"]
