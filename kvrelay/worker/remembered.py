"""What routers want to be remembered of requests that have ended, so that another router can go on from them.

A router may be lost, and a client may ask any of them. A worker only keeps what it is told, and tells it to those that ask.
"""

from __future__ import annotations

from kvrelay.wire.serving import ParentInfo

_MAX_BYTES = 64 << 20
_MAX_PARENTS = 4096

_Key = tuple[str, str, str, int]  # owner, the two names of an answer, and the choice


class Remembered:
    """The last ones that there is room for."""

    def __init__(self, *, max_bytes: int = _MAX_BYTES, max_parents: int = _MAX_PARENTS) -> None:
        self._max_bytes, self._max_parents = max_bytes, max_parents
        self._parents: dict[_Key, ParentInfo] = {}  # the oldest first
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._parents)

    def add(self, parent: ParentInfo) -> None:
        """Instead of what was told of the same choice before."""
        key = (parent.owner, parent.external_id, parent.answer_id, parent.choice)
        self._remove(key)
        self._parents[key] = parent
        self._num_bytes += _size(parent)
        while self._num_bytes > self._max_bytes or len(self._parents) > self._max_parents:
            self._remove(next(iter(self._parents)))

    def find(self, handle: str, owner: str) -> list[ParentInfo]:
        """Of a name that was used more than once, the choices of the last answer."""
        found = [parent for parent in self._parents.values() if _is_called(parent, handle, owner)]
        return [parent for parent in found if parent.answer_id == found[-1].answer_id]

    def forget(self, handle: str, owner: str) -> None:
        for key in [key for key, parent in self._parents.items() if _is_called(parent, handle, owner)]:
            self._remove(key)

    def _remove(self, key: _Key) -> None:
        parent = self._parents.pop(key, None)
        if parent is not None:
            self._num_bytes -= _size(parent)


def _is_called(parent: ParentInfo, handle: str, owner: str) -> bool:
    return parent.owner == owner and handle in (parent.external_id, parent.answer_id, parent.kept_id)


def _size(parent: ParentInfo) -> int:
    return len(parent.tokens) + len(parent.record) + sum(len(image.data) for image in parent.images)
