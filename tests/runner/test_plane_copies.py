"""Copies of blocks in two dimensions, by a driver that copies within the host."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvrelay.runner import plane_copies
from kvrelay.runner.plane_copies import PlaneCopies

POOL = torch.arange(3 * 2 * 5 * 4 * 2, dtype=torch.float32).view(3, 2, 5, 4, 2)  # layers, K and V, blocks, tokens, width


def copy_here(pointer: Any, stream: int) -> int:
    """What cuMemcpy2DAsync is asked to do."""
    one = pointer._obj
    assert stream == 7
    for row in range(one.Height):
        source = (one.srcHost or one.srcDevice) + row * one.srcPitch
        target = (one.dstHost or one.dstDevice) + row * one.dstPitch
        ctypes.memmove(target, source, one.WidthInBytes)
    return 0


@pytest.fixture(params=[2**31 - 1, 8], ids=["at once", "plane by plane"])
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plane_copies, "_MAX_PITCH", request.param)
    monkeypatch.setattr(plane_copies, "_driver", lambda: SimpleNamespace(cuMemcpy2DAsync_v2=copy_here))


@pytest.mark.usefixtures("driver")
def test_a_block_goes_to_its_host_block_and_back() -> None:
    host = torch.zeros(2, 3, 2, 4, 2)
    PlaneCopies(POOL, host, 6).copy(3, 1, to_host=True, stream=7)
    assert torch.equal(host[1], POOL[:, :, 3])
    assert not host[0].any()
    pool = torch.zeros_like(POOL)
    PlaneCopies(pool, host, 6).copy(2, 1, to_host=False, stream=7)
    assert torch.equal(pool[:, :, 2], POOL[:, :, 3])
    assert not pool[:, :, [0, 1, 3, 4]].any()


def test_a_copy_that_the_driver_refuses_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plane_copies, "_driver", lambda: SimpleNamespace(cuMemcpy2DAsync_v2=lambda *_: 700))
    with pytest.raises(RuntimeError, match="says 700"):
        PlaneCopies(POOL, torch.zeros(2, 3, 2, 4, 2), 6).copy(0, 0, to_host=True, stream=0)


def test_the_request_has_the_size_that_the_driver_knows() -> None:
    assert ctypes.sizeof(plane_copies._Copy2D) == 128
