"""What vLLM's prefix cache does, in the names that routers know blocks by.

vLLM names blocks by hashes of its own, and tells with them the tokens and what else is in the name. A block of a request with a
salt begins a chain of its own; blocks whose chain is not known are not told of.
"""

from __future__ import annotations

from typing import Any

from kvrelay.engine.memory.events import EventRecorder
from kvrelay.native.hashing import block_hash, extend_hashes, root_hash
from kvrelay.states import FreeReason
from kvrelay.wire.events import Freed
from kvrelay.wire.serving import Submit


class CacheListener:
    """Takes the place of vLLM's event publisher. `names` are the blocks in the cache: their names and their parents'."""

    def __init__(self, cache_seed: str, block_size: int, max_blocks: int) -> None:
        self._cache_seed = cache_seed
        self._block_size = block_size
        self._names: dict[Any, tuple[bytes, bytes]] = {}
        self._known: set[bytes] = set()
        self.recorder = EventRecorder(self._names.values, max_blocks)

    def publish(self, batch: Any) -> None:
        for event in batch.events:
            match type(event).__name__:
                case "BlockStored":
                    self._stored(event)
                case "BlockRemoved":
                    for theirs in event.block_hashes:
                        if (name := self._names.pop(theirs, (None, None))[0]) is not None:
                            self._known.discard(name)
                            self.recorder.removed((name,))
                case "AllBlocksCleared":
                    self.recorder.removed([name for name, _ in self._names.values()])
                    self._names.clear()
                    self._known.clear()

    def over(self, submit: Submit, reason: FreeReason) -> None:
        """A request has ended here. Of its blocks, those of its prompt are told."""
        hashes: list[bytes] = []
        root, num_blocks = root_hash(self._cache_seed, submit.cache_salt), len(submit.prompt) // self._block_size
        extend_hashes(hashes, root, submit.prompt, self._block_size, num_blocks)
        found = [name for name in hashes if name in self._known]
        self.recorder.lived(Freed(request=submit.external_id, reason=reason, hashes=found))

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
                self._known.add(name)
                self.recorder.stored((name,), parent)
            parent = name

    def _root(self, event: Any) -> bytes:
        """The salt is in the name of a chain's first block, and nothing else is, where there are no adapters and images."""
        extra = (event.extra_keys or [None])[0]
        return root_hash(self._cache_seed, str(extra[0]) if extra else "")
