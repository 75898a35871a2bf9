"""What the owner says of its memory, as far as the device has come with it (`engine/fence.py`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvrelay.engine.fence import Fence

LOOK_S = 0.0002  # between looks at a fence that has not passed: the last one of a prompt delays its second token
IDLE_S = 60.0


class Fenced:
    """Actions in order, each run when its fence has passed: at once if it has and nothing waits before it. For the transfer
    thread alone, so that what the owner says in order is done in order, whichever of it waits for a fence."""

    def __init__(self) -> None:
        self._actions: deque[tuple[Fence, Callable[[], object]]] = deque()

    def put(self, fence: Fence, action: Callable[[], object]) -> None:
        self._actions.append((fence, action))
        self.look()

    def look(self) -> float:
        """Runs what may run. The longest pause until the next look."""
        while self._actions and self._actions[0][0].passed():
            self._actions.popleft()[1]()
        return LOOK_S if self._actions else IDLE_S
