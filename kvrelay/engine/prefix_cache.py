"""Which full block holds which tokens, found by chained hashes.

The hash of a block covers its tokens and, through its parent's hash, all tokens before it. The chain starts from a seed of
model, layout and cache salt, so equal prompts hash equally in every process and different models or tenants never meet.
A hash that leads to a block with other tokens is a collision and counts as a miss.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence


def root_hash(cache_seed: str, cache_salt: str) -> bytes:
    """Where a chain starts."""
    seed = cache_seed.encode()
    return hashlib.blake2b(len(seed).to_bytes(8, "little") + seed + cache_salt.encode(), digest_size=16).digest()


def block_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    return hashlib.blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


def extend_hashes(hashes: list[bytes], root: bytes, tokens: Sequence[int], block_size: int, num_blocks: int) -> None:
    """Appends the hashes of the blocks up to `num_blocks` (all of them full) that are not there yet."""
    parent = hashes[-1] if hashes else root
    for index in range(len(hashes), num_blocks):
        parent = block_hash(parent, tokens[index * block_size : (index + 1) * block_size])
        hashes.append(parent)


class PrefixCache:
    """Finds blocks by hash. Holds no references: a block may be in use or merely cached."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._block_of: dict[bytes, int] = {}
        self._content: dict[int, tuple[bytes, list[int]]] = {}
        self.num_collisions = 0

    def __len__(self) -> int:
        return len(self._content)

    def __contains__(self, block: int) -> bool:
        return block in self._content

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

    def add(self, block: int, digest: bytes, tokens: list[int]) -> int | None:
        """The block is full and computed. A block that already holds the same stays; one that collides is replaced and
        returned. The same block is never added twice."""
        assert block not in self._content, f"block {block} is in the prefix cache already"
        present = self._block_of.get(digest)
        if present is not None and self._content[present][1] == tokens:
            return None
        if present is not None:
            self.num_collisions += 1
            del self._content[present]
        self._block_of[digest] = block
        self._content[block] = (digest, tokens)
        return present

    def remove(self, block: int) -> None:
        digest, _ = self._content.pop(block)
        del self._block_of[digest]
