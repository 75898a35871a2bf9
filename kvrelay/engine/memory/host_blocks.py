"""The blocks on the host: which sequences and copies hold them, and what is in them.

They are counted and cached like the device's. The same content is stored once: a host block is found again by the device block
that it was copied from, as long as that block was not given to another sequence (`BlockPool.generations`), and by its hash.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrelay.engine.memory.block_pool import BlockPool
from kvrelay.engine.memory.kv_cache import KVCache
from kvrelay.engine.request import Sequence

Origin = tuple[int, int, int]
"""Device block, its generation, and how many of its tokens have KV."""


@dataclass(frozen=True, slots=True)
class Placed:
    """Where blocks go on the host, and which of them have to be copied: (block, host block)."""

    host_blocks: dict[Origin, int] = field(default_factory=dict)
    saves: list[tuple[int, int]] = field(default_factory=list)


class HostBlocks:
    """Finds and counts. Copies nothing."""

    def __init__(self, kv: KVCache, num_blocks: int) -> None:
        self._kv = kv
        self.cache = kv.use_host_cache(num_blocks)
        self.pool = BlockPool(num_blocks, keep=self.cache.knows, evict=self.cache.remove)
        self._block_of: dict[Origin, int] = {}
        self._origin_of: dict[int, Origin] = {}

    def origins(self, sequence: Sequence) -> list[Origin]:
        size, generations = self._kv.block_size, self._kv.pool.generations
        num_full, filled = divmod(sequence.num_computed, size)
        origins = [(block, generations[block], size) for block in sequence.block_table[:num_full]]
        if filled:
            block = sequence.block_table[num_full]
            origins.append((block, generations[block], filled))
        return origins

    def find(self, origin: Origin, sequence: Sequence, index: int) -> int | None:
        """The host block with the same KV as the sequence's block of this index."""
        host_block = self._block_of.get(origin)
        if host_block is None and origin[2] == self._kv.block_size:
            host_block = self._kv.find(self.cache, sequence, index)
        return host_block

    def on_device(self, host_block: int, sequence: Sequence, index: int) -> int | None:
        """The device block with the same KV as the sequence's host block of this index."""
        is_full = (index + 1) * self._kv.block_size <= sequence.num_computed
        origin = self._origin_of.get(host_block)
        may_share = origin is not None and (is_full or origin[0] not in self._kv.prefixes)  # what others find is not written
        if origin is not None and may_share and self._kv.pool.holds(origin[0], origin[1]):
            return origin[0]
        if not is_full:
            return None
        return self._kv.find(self._kv.prefixes, sequence, index)

    def place(self, sequences: list[Sequence]) -> Placed | None:
        """A host block, held once, for every block of the sequences that has KV; shared ones once. None (and nothing changes)
        if there are too few."""
        if not self.pool.num_blocks:
            return None
        found: dict[Origin, int | None] = {}
        for sequence in sequences:
            for index, origin in enumerate(self.origins(sequence)):
                if origin not in found:
                    found[origin] = self.find(origin, sequence, index)
        present = [host_block for host_block in found.values() if host_block is not None]
        self.pool.retain(present)
        fresh = self.pool.allocate(len(found) - len(present))
        if fresh is None:
            self.release(present)
            return None
        placed = Placed()
        for origin, host_block in found.items():
            if host_block is None:
                host_block = fresh.pop()
                self._note(origin, host_block)
                placed.saves.append((origin[0], host_block))
            placed.host_blocks[origin] = host_block
        return placed

    def move(self, origin: Origin, host_block: int) -> None:
        """It was copied back, and has this origin now."""
        self._block_of.pop(self._origin_of.get(host_block, origin), None)
        self._note(origin, host_block)

    def _note(self, origin: Origin, host_block: int) -> None:
        self._block_of[origin] = host_block
        self._origin_of[host_block] = origin

    def forget_origin(self, host_block: int) -> None:
        origin = self._origin_of.pop(host_block, None)
        if origin is not None and self._block_of.get(origin) == host_block:
            del self._block_of[origin]

    def remember(self, host_block: int, sequence: Sequence, index: int) -> None:
        """It has the sequence's full block of this index, and can be found by its hash."""
        content = self._kv.content_of(sequence, index)
        if content is not None:
            self.add(host_block, *content)

    def add(self, host_block: int, digest: bytes, tokens: list[int], parent: bytes) -> None:
        if host_block in self.cache:
            return
        replaced = self.cache.add(host_block, digest, tokens, parent)
        if replaced is not None:
            self.pool.forget(replaced)

    def to_spill(self, most: int) -> list[int]:
        """Blocks that were given up lately, newest first, and are only on the device."""
        pool, prefixes = self._kv.pool, self._kv.prefixes
        wanted: dict[int, None] = {}
        most = min(most, self.pool.num_available)
        while pool.given_up and len(wanted) < most:
            block = pool.given_up.pop()
            if pool.is_cached(block) and not self.cache.has(prefixes.content(block)[0]):
                wanted[block] = None
        return list(wanted)

    def spilled(self, origins: list[Origin], host_blocks: list[int]) -> None:
        """A block that was given to another sequence meanwhile may have changed under the copy."""
        for (block, generation, _), host_block in zip(origins, host_blocks, strict=True):
            if self._kv.pool.generations[block] == generation and block in self._kv.prefixes:
                self.add(host_block, *self._kv.prefixes.content(block))

    def distrust(self, host_blocks: list[int]) -> None:
        """A prompt that waited in vain for these would find and wait for them again."""
        for host_block in host_blocks:
            if host_block in self.cache:
                self.cache.remove((host_block,))
                self.pool.forget(host_block)

    def release(self, host_blocks: list[int]) -> None:
        self.pool.release(reversed(host_blocks))
        for host_block in host_blocks:
            if self.pool.references[host_block] == 0:
                self.forget_origin(host_block)
