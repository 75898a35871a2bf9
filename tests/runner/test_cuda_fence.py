"""A fence passes when what was launched before it has been computed, and not before."""

from __future__ import annotations

import time

import pytest
import torch
from patience import PATIENCE_S

from kvrelay.engine.fence import Fence
from kvrelay.runner.cuda_fence import CountedPasses, CudaFence

on_a_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="no card")

_SLOW_CYCLES = 1_000_000_000  # about half a second


def until_passed(fence: Fence) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not fence.passed():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.cuda
@on_a_card
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


@pytest.mark.cuda
@on_a_card
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


def test_passes_are_counted_from_those_before_they_began() -> None:
    passes = CountedPasses(torch.device("cpu"))
    passes.mark()
    passes.begin()
    first, second = passes.launched(), passes.launched()
    assert not first.passed()
    passes.mark()
    assert first.passed()
    assert not second.passed()
    passes.mark()
    assert first.passed()
    assert second.passed()


@pytest.mark.cuda
@on_a_card
def test_a_fence_within_a_graph_passes_while_the_rest_of_it_runs_and_not_before_its_replay() -> None:
    device = torch.device("cuda")
    passes, target = CountedPasses(device), torch.zeros(1024, device=device)
    graph = torch.cuda.CUDAGraph()

    def compute() -> None:
        torch.cuda._sleep(_SLOW_CYCLES // 4)
        target.add_(1.0)
        passes.mark()
        torch.cuda._sleep(_SLOW_CYCLES)

    compute()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        compute()
    passes.begin()
    fences, ends = [], []
    for _ in range(2):
        graph.replay()
        fences.append(passes.launched())
        ends.append(CudaFence(device))
    assert not fences[0].passed()
    for number, (fence, end) in enumerate(zip(fences, ends, strict=True)):
        until_passed(fence)
        assert not end.passed()
        assert number == 1 or not fences[1].passed()
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            assert float(target.sum().cpu()) == 1024.0 * (2 + number)
