"""What tests of the C kernels share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from processors import built_for, targets

from kvrelay.kernels.native.kernels import NativeKernels


@pytest.fixture(scope="module", params=targets())
def kernels(request: pytest.FixtureRequest) -> NativeKernels:
    """Built for each kind of processor that this one can stand for."""
    return built_for(request.param)


@pytest.fixture
def threads() -> Iterator[None]:
    """For tests that change the number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
