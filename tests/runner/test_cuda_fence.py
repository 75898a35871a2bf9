"""A fence on a card passes when what was launched before it has been computed, and not before."""

from __future__ import annotations

import time

import pytest
import torch
from patience import PATIENCE_S

from kvrelay.runner.cuda_fence import CudaFence

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no card")]

_SLOW_CYCLES = 1_000_000_000  # about half a second


def until_passed(fence: CudaFence) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not fence.passed():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_it_does_not_pass_before_a_slow_kernel_has_ended() -> None:
    device = torch.device("cuda")
    target = torch.zeros(1024, device=device)
    torch.cuda.synchronize()
    before = CudaFence(device)
    torch.cuda._sleep(_SLOW_CYCLES)
    target.fill_(1.0)
    after = CudaFence(device)
    until_passed(before)
    assert not after.passed()
    until_passed(after)
    other = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(other):  # what another stream reads behind it is whole
        assert float(target.sum().cpu()) == 1024.0


def test_several_are_under_way_and_pass_in_order() -> None:
    device = torch.device("cuda")
    torch.cuda.synchronize()
    fences = []
    for _ in range(8):
        torch.cuda._sleep(_SLOW_CYCLES // 16)
        fences.append(CudaFence(device))
    seen = [fence.passed() for fence in fences]
    assert seen == sorted(seen, reverse=True)
    assert not seen[-1]
    for fence in fences:
        until_passed(fence)
    assert all(fence.passed() for fence in fences)
