"""The KV blocks of a worker: who holds how many references to which.

A block is free, cached or held. `free` has nothing worth keeping. `cached` is unreferenced but holds KV that the prefix
cache can still find; the one unused for longest is given away first. Held blocks have references.

        allocate                release (prefix cache knows it)
    free --------> held -----------------------------------------> cached
     ^              | ^                                              |  |
     +--------------+ +----------------------------------------------+  |
       release (not known)              retain                          |
     ^------------------------------------------------------------------+
                        evicted by allocate, which takes it at once
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from kvrelay.wire.registry import BlockCounts


class BlockPool:
    """Counts references. Knows nothing of tokens; asks `keep` whether a released block is worth keeping."""

    def __init__(self, num_blocks: int, *, keep: Callable[[int], bool], evict: Callable[[int], None]) -> None:
        self.num_blocks = num_blocks
        self.references = [0] * num_blocks
        self._keep = keep
        self._evict = evict
        self._free = list(range(num_blocks - 1, -1, -1))  # taken from the end
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could give."""
        return len(self._free) + len(self._cached)

    def is_cached(self, block: int) -> bool:
        return block in self._cached

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each, or None (and nothing changes) if there are not so many."""
        if count > self.num_available:
            return None
        blocks = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                self._evict(block)
            self.references[block] = 1
            blocks.append(block)
        return blocks

    def retain(self, blocks: Iterable[int]) -> None:
        """One more reference to each; a cached block is held again."""
        for block in blocks:
            if self.references[block] == 0:
                del self._cached[block]
            self.references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One reference less to each. Of those released together, the first becomes the oldest in the cache."""
        for block in blocks:
            assert self.references[block] > 0, f"block {block} released more often than held"
            self.references[block] -= 1
            if self.references[block] == 0:
                if self._keep(block):
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def forget(self, block: int) -> None:
        """The prefix cache lost interest in the block: if nobody holds it, it is free."""
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)

    def counts(self) -> BlockCounts:
        free, cached = len(self._free), len(self._cached)
        return BlockCounts(total=self.num_blocks, free=free, cached=cached, in_use=self.num_blocks - free - cached)

    def check(self) -> None:
        """Every block is in exactly one place."""
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & cached, f"blocks free and cached: {free & cached}"
        for block, references in enumerate(self.references):
            assert references >= 0, f"block {block} has {references} references"
            assert (references == 0) == (block in free or block in cached), f"block {block}: {references} references"
            assert block not in cached or self._keep(block), f"block {block} is cached but the prefix cache lost it"
            assert block not in free or not self._keep(block), f"block {block} is free but the prefix cache has it"
