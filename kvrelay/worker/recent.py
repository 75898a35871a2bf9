"""What was seen of late."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class Recent(Generic[T]):
    """Remembers the last `size` different things."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._things: dict[T, None] = {}  # the oldest first

    def __contains__(self, thing: T) -> bool:
        return thing in self._things

    def add(self, thing: T) -> None:
        self._things[thing] = None
        if len(self._things) > self._size:
            del self._things[next(iter(self._things))]
