"""Progress of anything that takes over two seconds, told to the user who watches."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Told of one task at a time: start, any number of advances, done. Units are the caller's (bytes, tensors, prompts)."""

    def start(self, title: str, total: int, *, unit: str) -> None: ...

    def advance(self, count: int) -> None: ...

    def done(self) -> None: ...


class Silent:
    """Watches nothing."""

    def start(self, title: str, total: int, *, unit: str) -> None:
        pass

    def advance(self, count: int) -> None:
        pass

    def done(self) -> None:
        pass
