"""What was seen of late."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


class Recent(dict[T, None]):
    """The last `size` different things, the oldest first."""

    def __init__(self, size: int) -> None:
        self._size = size

    def add(self, thing: T) -> None:
        self[thing] = None
        if len(self) > self._size:
            del self[next(iter(self))]
