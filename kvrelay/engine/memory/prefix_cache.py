"""Which full block holds which tokens, found by chained hashes (`kvrelay/hashing.py`).

A hash that leads to a block with other tokens is a collision and counts as a miss. What enters and leaves is told to the
recorder. Where there are two caches, the device's and the host's, each is the other's twin: what one of
them still has was not removed, and what one of them already has is not news.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvrelay.engine.memory.events import EventRecorder, Unheard


class PrefixCache:
    """Finds blocks by hash. Holds no references: a block may be in use or merely cached."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._block_of: dict[bytes, int] = {}
        self._content: dict[int, tuple[bytes, list[int], bytes]] = {}  # hash, tokens, the parent's hash
        self.knows: Callable[[int], bool] = self._content.__contains__  # a block
        self.has: Callable[[bytes], bool] = self._block_of.__contains__  # a hash
        self.num_collisions = 0
        self.recorder: EventRecorder = Unheard()
        self.twin: PrefixCache | None = None

    def __len__(self) -> int:
        return len(self._content)

    def __contains__(self, block: int) -> bool:
        return block in self._content

    def content(self, block: int) -> tuple[bytes, list[int], bytes]:
        """Hash, tokens, and the parent's hash."""
        return self._content[block]

    def find(self, digest: bytes, tokens: list[int]) -> int | None:
        """The block that holds exactly these tokens behind exactly this chain."""
        block = self._block_of.get(digest)
        if block is None:
            return None
        if self._content[block][1] != tokens:
            self.num_collisions += 1
            return None
        return block

    def match(self, hashes: list[bytes], tokens: list[int]) -> list[int]:
        """The longest run of cached blocks from the start of `tokens`, one per hash."""
        size, blocks = self._block_size, []
        for index, digest in enumerate(hashes):
            block = self.find(digest, tokens[index * size : (index + 1) * size])
            if block is None:
                break
            blocks.append(block)
        return blocks

    def chains(self) -> Iterator[tuple[bytes, bytes]]:
        """Every hash that leads to a block, and its parent's."""
        return ((digest, parent) for digest, _, parent in self._content.values())

    def add(self, block: int, digest: bytes, tokens: list[int], parent: bytes) -> int | None:
        """The block is full and computed. A block that already holds the same stays; one that collides is replaced and
        returned. The same block is never added twice."""
        assert block not in self._content, f"block {block} is in the prefix cache already"
        present = self._block_of.get(digest)
        if present is not None and self._content[present][1] == tokens:
            return None
        if present is not None:
            self.num_collisions += 1
            del self._content[present]
            self.recorder.removed((digest,))
            self.recorder.stored((digest,), parent)
        elif not self._twin_has(digest):
            self.recorder.stored((digest,), parent)
        self._block_of[digest] = block
        self._content[block] = (digest, tokens, parent)
        return present

    def add_new(self, blocks: list[int], hashes: list[bytes], tokens: list[int], parent: bytes) -> bool:
        """As `add` of each, the first behind `parent`. False (and nothing changes) if any of them is known here or in the twin.
        Of a long prompt these are many."""
        content, block_of = self._content, self._block_of
        if not (content.keys().isdisjoint(blocks) and block_of.keys().isdisjoint(hashes)):
            return False
        if self.twin is not None and not self.twin._block_of.keys().isdisjoint(hashes):
            return False
        self.recorder.stored(hashes, parent)
        block_of.update(zip(hashes, blocks, strict=True))
        size = self._block_size
        pieces = [tokens[start : start + size] for start in range(0, len(blocks) * size, size)]
        content.update(zip(blocks, zip(hashes, pieces, [parent, *hashes[:-1]], strict=True), strict=True))
        return True

    def remove(self, blocks: Sequence[int]) -> None:
        hashes = [self._content.pop(block)[0] for block in blocks]
        for digest in hashes:
            del self._block_of[digest]
        self.recorder.removed([digest for digest in hashes if not self._twin_has(digest)] if self.twin else hashes)

    def _twin_has(self, digest: bytes) -> bool:
        return self.twin is not None and self.twin.has(digest)
