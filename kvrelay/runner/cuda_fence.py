"""Fences on a card: an event behind what a stream was given, or a number that a replayed graph counts up in its middle."""

from __future__ import annotations

import torch


def leave_default_stream(device: torch.device) -> None:
    """From now on this thread launches on another. Libraries that know nothing of streams copy on the default one, Mooncake
    among them: there, each of their copies would wait for all passes that have been launched."""
    if device.type == "cuda" and torch.cuda.current_stream(device) == torch.cuda.default_stream(device):
        torch.cuda.set_stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


class CountedPasses:
    """Counts, in passes that are captured once and replayed, how many have come to a certain kernel: the device writes the
    number into host memory. (An event inside a graph would be recorded again by the next replay, while a thread may still be
    asking about this one.)"""

    def __init__(self, device: torch.device) -> None:
        self._device = torch.zeros(1, dtype=torch.int64, device=device)
        self._host = torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._count = self._host.numpy()
        self._num_launched = 0

    def mark(self) -> None:
        """In the pass, behind that kernel."""
        self._device += 1
        self._host.copy_(self._device, non_blocking=True)

    def begin(self) -> None:
        """Called while the device is idle: launched passes are counted from here."""
        self._num_launched = int(self._count[0])

    def launched(self) -> CountFence:
        """One more pass was."""
        self._num_launched += 1
        return CountFence(self, self._num_launched)

    @property
    def num_passed(self) -> int:
        return int(self._count[0])


class CountFence:
    """Never passes where a kernel has failed: then the engine's next call raises, and the worker ends."""

    def __init__(self, passes: CountedPasses, number: int) -> None:
        self._passes = passes
        self._number = number

    def passed(self) -> bool:
        return self._passes.num_passed >= self._number


class CudaFence:
    """The event is its own, and goes with it: nothing records it a second time while a thread still asks."""

    def __init__(self, device: torch.device) -> None:
        self._has_passed = False
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(device))

    def passed(self) -> bool:
        """`query` raises where a kernel before has failed: then the engine's next call raises too, and the worker ends."""
        if not self._has_passed:
            self._has_passed = bool(self._event.query())  # type: ignore[no-untyped-call]
        return self._has_passed
