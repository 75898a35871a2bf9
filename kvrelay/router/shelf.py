"""Requests that have ended and of which nothing is promised: remembered as long as there is room."""

from __future__ import annotations

from collections import OrderedDict

from kvrelay.router.parent import Parent

MAX_SHELF_BYTES = 256 << 20  # of images, which are needed to compute the KV again, and of stored answers


class Shelf:
    """At most `capacity` parents and MAX_SHELF_BYTES; the one unused for longest comes first, and goes first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._parents: OrderedDict[Parent, int] = OrderedDict()  # with their bytes
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._parents)

    def add(self, parent: Parent) -> list[Parent]:
        """Those for which there is no room any more."""
        self.remove(parent)
        self._parents[parent] = size = len(parent.record) + sum(len(image.data) for image in parent.images)
        self._num_bytes += size
        left: list[Parent] = []
        num_left, num_bytes = len(self._parents), self._num_bytes
        for oldest, size in self._parents.items():
            if num_left <= self._capacity and num_bytes <= MAX_SHELF_BYTES:
                break
            left.append(oldest)
            num_left, num_bytes = num_left - 1, num_bytes - size
        return left

    def remove(self, parent: Parent) -> None:
        self._num_bytes -= self._parents.pop(parent, 0)

    def use(self, parent: Parent) -> None:
        if parent in self._parents:
            self._parents.move_to_end(parent)
