"""A `Fence` on a card: an event behind what a stream was given."""

from __future__ import annotations

import torch


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
