"""The KV blocks of a worker: who holds how many references to which.

A block is free, cached or held. `free` has nothing worth keeping. `cached` is unreferenced but holds KV that the prefix
cache can still find; the one unused for longest is given away first. Held blocks have references, each by some `Holder`.

        allocate                release (prefix cache knows it)
    free --------> held -----------------------------------------> cached
     ^              | ^                                              |  |
     +--------------+ +----------------------------------------------+  |
       release (not known)              retain                          |
     ^------------------------------------------------------------------+
                        evicted by allocate, which takes it at once
"""

from __future__ import annotations

import enum
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from itertools import filterfalse

from kvrelay.wire.registry import BlockCounts


class Holder(enum.IntEnum):
    """Why a block is held. A block with several holders counts as the first of them in this order."""

    SEQUENCE = 0  # a live sequence
    RESERVED = 1  # a transfer will fill it
    SENDING = 2  # a peer reads it, or writes from it are under way
    PINNED = 3  # kept for a continuation
    QUARANTINED = 4  # not wanted, but a peer or a copy may still write into it


_HOLDERS = tuple(Holder)
_ONCE = [[int(index == holder) for index in Holder] for holder in Holder]  # references by holder of blocks held once


class BlockPool:
    """Counts references. Knows nothing of tokens; asks `keep` whether a released block is worth keeping."""

    def __init__(self, num_blocks: int, *, keep: Callable[[int], bool], evict: Callable[[list[int]], None]) -> None:
        self.num_blocks = num_blocks
        self.references = [0] * num_blocks
        self.generations = [0] * num_blocks  # how often each was allocated: while this stays the same, so does its KV
        self.given_up: deque[int] = deque(maxlen=0)  # blocks that were cached lately, for `Swap.spill`
        self._keep = keep
        self._evict = evict
        self._free = list(range(num_blocks - 1, -1, -1))  # taken from the end
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._others: dict[int, list[int]] = {}  # block -> references by holder, for blocks that not only sequences hold
        self._kinds = [0] * len(Holder)  # blocks by kind; that of sequences means nothing

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could give."""
        return len(self._free) + len(self._cached)

    def is_cached(self, block: int) -> bool:
        return block in self._cached

    def is_pinned(self, block: int) -> bool:
        """Whether kept KV holds it and no live sequence does."""
        others = self._others.get(block)
        return others is not None and others[Holder.PINNED] > 0 and others[Holder.SEQUENCE] == 0

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks, each held once by a sequence, or None (and nothing changes) if there are not so many."""
        if count > self.num_available:
            return None
        free, oldest = self._free, self._cached.popitem
        num_left = max(0, len(free) - count)
        blocks = free[num_left:]
        blocks.reverse()
        del free[num_left:]
        if len(blocks) < count:
            evicted = [oldest(last=False)[0] for _ in range(count - len(blocks))]
            self._evict(evicted)
            blocks += evicted
        references, generations = self.references, self.generations
        for block in blocks:
            references[block] = 1
            generations[block] += 1
        return blocks

    def holds(self, block: int, generation: int) -> bool:
        """Whether the block still has what it was allocated for."""
        return self.generations[block] == generation and (self.references[block] > 0 or block in self._cached)

    def retain(self, blocks: Iterable[int], holder: Holder = Holder.SEQUENCE) -> None:
        """One more reference to each; a cached block is held again."""
        for block in blocks:
            if self.references[block] == 0:
                del self._cached[block]
            self._count(block, holder, 1)

    def release(self, blocks: Iterable[int], holder: Holder = Holder.SEQUENCE) -> None:
        """One reference less to each. Of those released together, the first becomes the oldest in the cache."""
        references, last = self.references, []
        for block in blocks:
            if references[block] == 1:
                references[block] = 0
                last.append(block)
            else:
                self._count(block, holder, -1)
        self._let_go(last, holder)
        kept = list(filter(self._keep, last))
        self._cached.update(dict.fromkeys(kept))
        self.given_up.extend(kept)
        if len(kept) < len(last):
            self._free.extend(filterfalse(self._keep, last))

    def hand_over(self, blocks: Iterable[int], before: Holder, after: Holder) -> None:
        """Of a long prompt these are many, between two steps of all other sequences: blocks held once, which is usual, are
        done without counting."""
        references, once = self.references, []
        for block in blocks:
            if references[block] == 1:
                once.append(block)
            else:
                self._count(block, after, 1)
                self._count(block, before, -1)
        self._let_go(once, before)
        if after is not Holder.SEQUENCE:
            self._others.update(dict.fromkeys(once, _ONCE[after]))
            self._kinds[after] += len(once)

    def _let_go(self, blocks: list[int], holder: Holder) -> None:
        """Of their only holder, which is this one."""
        if holder is Holder.SEQUENCE:
            assert self._others.keys().isdisjoint(blocks), f"not all of blocks {blocks} are held as {holder.name}"
            return
        others = [self._others.pop(block) for block in blocks]
        assert others.count(_ONCE[holder]) == len(others), f"not all of blocks {blocks} are held as {holder.name}"
        self._kinds[holder] -= len(blocks)

    def forget(self, block: int) -> None:
        """The prefix cache does not know the block any more: if it is not held, it is free."""
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)

    def counts(self) -> BlockCounts:
        free, cached = len(self._free), len(self._cached)
        _, reserved, sending, pinned, quarantined = self._kinds
        return BlockCounts(
            total=self.num_blocks,
            free=free,
            cached=cached,
            in_use=self.num_blocks - free - cached - reserved - sending - pinned - quarantined,
            reserved=reserved,
            sending=sending,
            pinned=pinned,
            quarantined=quarantined,
        )

    def pins(self) -> dict[int, int]:
        """References of kept KV, by block."""
        return {block: others[Holder.PINNED] for block, others in self._others.items() if others[Holder.PINNED]}

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
        kinds = [0] * len(Holder)
        for block in self._others:
            kind = self._kind(block)
            assert kind is not None, f"block {block} has no holder"
            kinds[kind] += 1
        assert kinds[1:] == self._kinds[1:], f"blocks by holder are {kinds}, counted as {self._kinds}"

    def _count(self, block: int, holder: Holder, change: int) -> None:
        others = self._others.get(block)
        if others is None:
            if holder is Holder.SEQUENCE:  # the usual case
                assert change > 0 or self.references[block] > 0, f"block {block} released more often than held"
                self.references[block] += change
                return
            others = [0] * len(Holder)
            others[Holder.SEQUENCE] = self.references[block]
        others = self._others[block] = others.copy()  # blocks held once share theirs
        if holder is Holder.SEQUENCE and others[holder] > 0 and others[holder] + change > 0:  # it stays a sequence's block
            others[holder] += change
            self.references[block] += change
            return
        self._note(block, -1)
        others[holder] += change
        self.references[block] += change
        assert others[holder] >= 0, f"block {block} released more often than held as {holder.name}"
        self._note(block, 1)
        if others[Holder.SEQUENCE] == self.references[block]:
            del self._others[block]

    def _kind(self, block: int) -> Holder | None:
        for holder, count in zip(_HOLDERS, self._others[block], strict=True):
            if count:
                return holder
        return None

    def _note(self, block: int, change: int) -> None:
        kind = self._kind(block)
        if kind is not None and kind is not Holder.SEQUENCE:
            self._kinds[kind] += change
