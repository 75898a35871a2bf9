"""What vLLM's prefix cache does, in the names that routers know blocks by.

vLLM names blocks by hashes of its own, and tells with them the tokens and what else is in the name. A block of a request with a
salt begins a chain of its own; blocks whose chain is not known are not told of.
"""

from __future__ import annotations

from typing import Any

from kvrelay.engine.memory.events import EventRecorder
from kvrelay.native.hashing import block_hash, root_hash


class CacheListener:
    """Takes the place of vLLM's event publisher. `names` are the blocks in the cache: their names and their parents'."""

    def __init__(self, cache_seed: str, max_blocks: int) -> None:
        self._cache_seed = cache_seed
        self._names: dict[Any, tuple[bytes, bytes]] = {}
        self.recorder = EventRecorder(self._names.values, max_blocks)

    def publish(self, batch: Any) -> None:
        for event in batch.events:
            match type(event).__name__:
                case "BlockStored":
                    self._stored(event)
                case "BlockRemoved":
                    for theirs in event.block_hashes:
                        if (known := self._names.pop(theirs, None)) is not None:
                            self.recorder.removed(known[0])
                case "AllBlocksCleared":
                    for name, _ in self._names.values():
                        self.recorder.removed(name)
                    self._names.clear()

    def shutdown(self) -> None:
        """Nothing is open."""

    def _stored(self, event: Any) -> None:
        if event.parent_block_hash is not None and event.parent_block_hash not in self._names:
            return
        size = event.block_size
        parent = self._root(event) if event.parent_block_hash is None else self._names[event.parent_block_hash][0]
        for index, theirs in enumerate(event.block_hashes):
            name = block_hash(parent, event.token_ids[index * size : (index + 1) * size])
            if theirs not in self._names:
                self._names[theirs] = (name, parent)
                self.recorder.stored(name, parent)
            parent = name

    def _root(self, event: Any) -> bytes:
        """The salt is in the name of a chain's first block, and nothing else is, where there are no adapters and images."""
        extra = (event.extra_keys or [None])[0]
        return root_hash(self._cache_seed, str(extra[0]) if extra else "")
