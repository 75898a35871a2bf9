"""The arrays that the inputs of a forward pass are written into, and the tensors that the pass reads.

    begin     the arrays of the pass before may be overwritten
    array     a named array of a given size, to be filled
    send      all arrays are filled: what has to go to the device is on its way
    tensor    what was filled, where the pass reads it

On a CPU the tensors are views of the arrays. On CUDA all arrays lie in one piece of pinned memory, which one copy sends; two
pieces take turns, so that what the device has not taken yet is not overwritten.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

_ALIGNED = 4  # numbers: kernels are compiled for addresses that are multiples of 16 bytes, and again for others
# int64 in the pass; others are int32.
WIDE = frozenset({"token_ids", "positions", "slots", "logit_rows", "changed_entries", "late_places", "late_sources"})


class Inputs(Protocol):
    """One thread calls it."""

    def begin(self) -> None: ...

    def array(self, name: str, size: int) -> NDArray[Any]: ...

    def send(self) -> None: ...

    def tensor(self, name: str, *shape: int) -> torch.Tensor: ...


def make_inputs(*, max_tokens: int, max_rows: int, max_blocks: int, device: torch.device, sent: bool) -> Inputs:
    if not sent:
        return HostInputs()
    return SentInputs(4 * max_tokens + 16 * (max_rows + 1) + 2 * max_blocks, device)


class HostInputs:
    """One array a name, which grows when a pass needs more."""

    def __init__(self) -> None:
        self._arrays: dict[str, NDArray[Any]] = {}
        self._views: dict[str, torch.Tensor] = {}  # the last of each name, which the next pass usually wants again

    def begin(self) -> None:
        """The pass before has ended."""

    def array(self, name: str, size: int) -> NDArray[Any]:
        known = self._arrays.get(name)
        if known is None or size > known.shape[0]:
            length = max(64, size, 2 * (0 if known is None else known.shape[0]))
            known = self._arrays[name] = np.zeros(length, dtype=np.int64 if name in WIDE else np.int32)
            self._views.pop(name, None)
        return known[:size]

    def send(self) -> None:
        """They are where the pass reads them."""

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        view = self._views.get(name)
        if view is None or view.shape != shape:
            view = self._views[name] = torch.from_numpy(self._arrays[name][: math.prod(shape)]).view(*shape)
        return view


class Staging:
    """Pinned host memory whose content is on its way to the device until the copy's event has passed."""

    def __init__(self, size: int, device: torch.device) -> None:
        on_card = device.type == "cuda"
        self.tensor = torch.zeros(max(1, size), dtype=torch.int32, pin_memory=on_card)
        self.array: NDArray[np.int32] = self.tensor.numpy()
        self._taken = torch.cuda.Event() if on_card else None  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        if self._taken is not None:
            self._taken.synchronize()

    def send(self, size: int, target: torch.Tensor) -> None:
        target.copy_(self.tensor[:size], non_blocking=True)
        if self._taken is not None:
            self._taken.record()


class SentInputs:
    """Arrays one after the other in a staging area; a device twin of it; and the twin as int64."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._device = device
        self._turn = 0
        self._allocate(size)

    def _allocate(self, size: int) -> None:
        self._areas = [Staging(size, self._device) for _ in range(2)]
        self._twin = torch.zeros(size, dtype=torch.int32, device=self._device)
        self._wide = self._twin.long()
        self._places: dict[str, int] = {}
        self._used = 0

    def begin(self) -> None:
        self._turn = 1 - self._turn
        self._areas[self._turn].wait()
        self._places, self._used = {}, 0

    def array(self, name: str, size: int) -> NDArray[Any]:
        first = self._used
        if first + size + _ALIGNED > len(self._areas[0].array):
            self._grow(first + size + _ALIGNED)
        self._places[name] = first
        self._used = -(-(first + size) // _ALIGNED) * _ALIGNED
        return self._areas[self._turn].array[first : first + size]

    def _grow(self, size: int) -> None:
        """Arrays handed out before must be filled by now: only block tables can need more than was planned, and come last."""
        filled, places, used = self._areas[self._turn].array[: self._used].copy(), self._places, self._used
        self._allocate(2 * size)
        self._areas[self._turn].array[:used] = filled
        self._places, self._used = places, used

    def send(self) -> None:
        used = self._used
        self._areas[self._turn].send(used, self._twin[:used])
        self._wide[:used].copy_(self._twin[:used])

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        first = self._places[name]
        return (self._wide if name in WIDE else self._twin)[first : first + math.prod(shape)].view(*shape)
