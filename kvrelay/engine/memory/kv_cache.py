"""Blocks for sequences: joins the pool and the prefix cache.

attach      a waiting sequence gets the cached blocks of its prefix and new ones for the rest    FREED -> ALLOCATED
grow        a running one gets room for more tokens; a block shared with others is copied first (`grow_together`: several)
computed    KV was written: full blocks enter the prefix cache                                   ALLOCATED -> ACTIVE
fork        a child holds its parent's blocks
free        the end, or preemption: every reference goes back                                    -> FREED
pin         the blocks of a sequence that is about to end are kept
inherit     as `attach`, but the beginning is taken from kept KV: the cache is not asked       FREED -> ALLOCATED

Swapping (`engine/memory/swap.py`) leads from ACTIVE to SWAPPED and back.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator

from kvrelay.engine.memory.block_pool import BlockPool, Holder
from kvrelay.engine.memory.events import EventRecorder
from kvrelay.engine.memory.prefix_cache import PrefixCache
from kvrelay.engine.request import Sequence
from kvrelay.native.hashing import extend_hashes, root_hash
from kvrelay.states import KVState


class KVCache:
    """Owns every block reference of every sequence. Decides nothing about who runs."""

    def __init__(self, *, num_blocks: int, block_size: int, prefix_cache: bool, cache_seed: str) -> None:
        self.block_size = block_size
        self.prefixes = PrefixCache(block_size)
        self.host_prefixes = PrefixCache(block_size)
        self.prefixes.twin, self.host_prefixes.twin = self.host_prefixes, self.prefixes
        self.pool = BlockPool(num_blocks, keep=self.prefixes.knows, evict=self.prefixes.remove)
        self._enabled = prefix_cache
        self._cache_seed = cache_seed
        self._roots: dict[tuple[str, str], bytes] = {}

    def record_events(self) -> EventRecorder:
        """From now on, what enters and leaves the prefix cache is recorded."""
        recorder = EventRecorder(self._chains, self.pool.num_blocks + (self.pool.given_up.maxlen or 0))
        self.prefixes.recorder = self.host_prefixes.recorder = recorder
        return recorder

    @property
    def recorder(self) -> EventRecorder:
        return self.prefixes.recorder

    def use_host_cache(self, num_blocks: int) -> PrefixCache:
        """The second cache, of blocks on the host. From now on the pool remembers which of its own were given up lately."""
        assert not self.recorder.is_heard, "events are recorded already"
        self.pool.given_up = deque(maxlen=num_blocks)
        return self.host_prefixes

    def findable(self, hashes: list[bytes]) -> list[bytes]:
        """Those of them that lead to a block, here or on the host."""
        here, on_host = self.prefixes.has, self.host_prefixes.has
        if not len(self.host_prefixes):
            return list(filter(here, hashes))
        return [digest for digest in hashes if here(digest) or on_host(digest)]

    def _chains(self) -> Iterator[tuple[bytes, bytes]]:
        yield from self.prefixes.chains()
        yield from (chain for chain in self.host_prefixes.chains() if not self.prefixes.has(chain[0]))

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def attach(self, sequence: Sequence, *, headroom: int, num_more_tokens: int = 0) -> bool:
        """Blocks for all its tokens and for `num_more_tokens` to come, if `headroom` blocks would still be left over. Sets
        `num_computed` to the cached part."""
        assert not sequence.block_table
        found = self._cached_blocks(sequence)
        num_new = self.blocks_for(len(sequence.tokens) + num_more_tokens) - len(found)
        num_taken = num_new + sum(map(self.pool.is_cached, found))
        if num_taken + headroom > self.pool.num_available:
            return False
        sequence.block_table = found + self._take(found, num_new)
        sequence.num_computed = len(found) * self.block_size
        sequence.kv_become(KVState.ALLOCATED)
        return True

    def _take(self, found: list[int], num_new: int) -> list[int]:
        """Holds what was found, and returns as many new blocks: there are enough."""
        self.pool.retain(found)
        fresh = self.pool.allocate(num_new)
        assert fresh is not None
        return fresh

    def num_cached_tokens(self, sequence: Sequence) -> int:
        """How many `attach` would find now."""
        return len(self._cached_blocks(sequence)) * self.block_size

    def missing(self, sequence: Sequence, num_tokens: int) -> int:
        """How many blocks `grow` would take."""
        index, offset = divmod(sequence.num_computed, self.block_size)
        shared = offset != 0 and self.pool.references[sequence.block_table[index]] > 1
        return max(0, self.blocks_for(num_tokens) - len(sequence.block_table)) + shared

    def grow(self, sequence: Sequence, num_tokens: int, copies: list[tuple[int, int]]) -> bool:
        """Room for the sequence's first `num_tokens` tokens, of which those past `num_computed` are about to be written.
        False (and nothing changes) if the pool has too few blocks."""
        table, pool, size = sequence.block_table, self.pool, self.block_size
        index, offset = divmod(sequence.num_computed, size)
        missing = -(-num_tokens // size) - len(table)
        shared = offset != 0 and pool.references[table[index]] > 1
        if missing <= 0 and not shared:
            return True
        blocks = pool.allocate(max(missing, 0) + shared)
        if blocks is None:
            return False
        if shared:
            copy = blocks.pop()
            copies.append((table[index], copy))
            pool.release((table[index],))
            table[index] = copy
        table.extend(blocks)
        return True

    def missing_together(self, sequences: list[Sequence]) -> int:
        """How many blocks `grow_together` would take. Of those that share a block, the last one to write it needs no copy,
        unless another sequence holds it, too."""
        num_new = 0
        writers: Counter[int] = Counter()
        for sequence in sequences:
            index, offset = divmod(sequence.num_computed, self.block_size)
            num_new += index >= len(sequence.block_table)
            if offset:
                writers[sequence.block_table[index]] += 1
        return num_new + sum(count - (self.pool.references[block] == count) for block, count in writers.items())

    def grow_together(self, sequences: list[Sequence], copies: list[tuple[int, int]]) -> bool:
        """Room for one more token of each. False (and nothing changes) if the pool has too few blocks for all."""
        if self.missing_together(sequences) > self.pool.num_available:
            return False
        for sequence in sequences:
            has_room = self.grow(sequence, sequence.num_computed + 1, copies)
            assert has_room
        return True

    def computed(self, sequence: Sequence, count: int) -> None:
        """KV of the next `count` tokens was written."""
        if sequence.kv_state is KVState.ALLOCATED:
            sequence.kv_become(KVState.ACTIVE)
        before, size = sequence.num_computed, self.block_size
        sequence.num_computed = after = before + count
        if before % size + count >= size and self._enabled:
            self._register(sequence, before // size, after // size)

    def register_computed(self, sequence: Sequence) -> None:
        """Its full blocks came back from the host: they can be found again."""
        if self._enabled:
            self._register(sequence, 0, sequence.num_computed // self.block_size)

    def find(self, cache: PrefixCache, sequence: Sequence, index: int) -> int | None:
        if not self._enabled:
            return None
        self._extend_hashes(sequence, index + 1)
        return cache.find(sequence.hashes[index], self._tokens_of(sequence, index))

    def content_of(self, sequence: Sequence, index: int) -> tuple[bytes, list[int], bytes] | None:
        """Hash, tokens and parent's hash of a full block, if there is a prefix cache."""
        if not self._enabled:
            return None
        self._extend_hashes(sequence, index + 1)
        parent = sequence.hashes[index - 1] if index else self._root(sequence)
        return sequence.hashes[index], self._tokens_of(sequence, index), parent

    def digests(self, sequence: Sequence, start: int, end: int) -> list[bytes]:
        """Of the blocks that are full once its tokens from `start` to `end` are computed; none without a prefix cache."""
        last = end // self.block_size if self._enabled else 0
        self._extend_hashes(sequence, last)
        return sequence.hashes[start // self.block_size : last]

    def is_next(self, sequence: Sequence, digests: set[bytes]) -> bool:
        """Whether the next full block that it has to compute, and could find, is one of these."""
        start = sequence.num_computed // self.block_size * self.block_size
        end = min(start + self.block_size, len(sequence.tokens) - 1)  # the last token is always computed
        return not digests.isdisjoint(self.digests(sequence, start, end))

    def host_blocks(self, sequence: Sequence, first: int) -> list[int]:
        """The host's blocks that go on where the device's end, which is block `first`."""
        found: list[int] = []
        if not self._enabled or not len(self.host_prefixes) or sequence.wants_prompt_logprobs:
            return found
        for index in range(first, (len(sequence.tokens) - 1) // self.block_size):
            host_block = self.find(self.host_prefixes, sequence, index)
            if host_block is None:
                break
            found.append(host_block)
        return found

    def _tokens_of(self, sequence: Sequence, index: int) -> list[int]:
        return sequence.tokens[index * self.block_size : (index + 1) * self.block_size]

    def fork(self, parent: Sequence, child: Sequence) -> None:
        shared = parent.block_table[: self.blocks_for(parent.num_computed)]  # only what holds KV: the rest stays the parent's
        self.pool.retain(shared)
        child.block_table = shared
        child.hashes = list(parent.hashes)
        child.num_computed = parent.num_computed
        child.kv_become(KVState.ALLOCATED)
        child.kv_become(KVState.ACTIVE)

    def free(self, sequence: Sequence) -> None:
        """Harmless for a sequence that holds nothing. The end of a prompt is given away before its beginning."""
        if sequence.kv_state is KVState.FREED:
            return
        self.pool.release(reversed(sequence.block_table))
        sequence.block_table = []
        sequence.num_computed = 0
        sequence.kv_become(KVState.FREED)

    def pinnable(self, sequence: Sequence, kept_kv: Sequence) -> list[int]:
        """The blocks that keep the sequence's beginning. Where another block has the same KV and can be found, it is that one:
        it must not go while the KV is kept."""
        blocks = sequence.block_table[: self.blocks_for(kept_kv.num_computed)]
        for index in range(kept_kv.num_computed // self.block_size):
            if blocks[index] not in self.prefixes:
                twin = self.find(self.prefixes, kept_kv, index)
                blocks[index] = blocks[index] if twin is None else twin
        return blocks

    def pin(self, kept_kv: Sequence, blocks: list[int]) -> None:
        self.pool.retain(blocks, Holder.PINNED)
        kept_kv.block_table = blocks

    def unpin(self, kept_kv: Sequence) -> None:
        self.pool.release(reversed(kept_kv.block_table), Holder.PINNED)
        kept_kv.block_table = []

    def inherit(self, sequence: Sequence, kept_kv: Sequence, present: list[int | None], *, headroom: int) -> int:
        """0: it has blocks for all its tokens, and shares those of the kept KV that are present. If all are, `num_computed`
        says so, and there is one more block for `grow` to copy a partial one to. Else, how many blocks are missing."""
        assert not sequence.block_table
        found = [block for block in present if block is not None]
        num_new = self.blocks_for(len(sequence.tokens)) - len(found)
        is_partial = kept_kv.num_computed % self.block_size != 0
        num_taken = num_new + sum(map(self.pool.is_cached, found)) + (is_partial and present[-1] is not None)
        if num_taken + headroom > self.pool.num_available:
            return num_taken + headroom - self.pool.num_available
        fresh = iter(self._take(found, num_new))
        sequence.block_table = [next(fresh) if block is None else block for block in present]
        sequence.block_table.extend(fresh)
        sequence.hashes = list(kept_kv.hashes)
        sequence.num_computed = kept_kv.num_computed if len(found) == len(present) else 0
        sequence.kv_become(KVState.ALLOCATED)
        return 0

    def fresh_hashes(self, sequence: Sequence, num_blocks: int) -> list[bytes]:
        hashes: list[bytes] = []
        extend_hashes(hashes, self._root(sequence), sequence.tokens, self.block_size, num_blocks)
        return hashes

    def reserve(self, sequence: Sequence) -> list[int]:
        """After `attach`: the new blocks, which a transfer will fill."""
        fresh = sequence.block_table[sequence.num_computed // self.block_size :]
        self.pool.hand_over(fresh, Holder.SEQUENCE, Holder.RESERVED)
        return fresh

    def received(self, sequence: Sequence, num_tokens: int) -> None:
        """The KV of the first `num_tokens` tokens is there."""
        fresh = sequence.block_table[sequence.num_computed // self.block_size :]
        self.pool.hand_over(fresh, Holder.RESERVED, Holder.SEQUENCE)
        self.computed(sequence, num_tokens - sequence.num_computed)

    def quarantine(self, sequence: Sequence) -> list[int]:
        """Instead of `received`. Give what it returns to `release` once no peer can write it."""
        kept = sequence.num_computed // self.block_size
        fresh = sequence.block_table[kept:]
        self.pool.hand_over(fresh, Holder.RESERVED, Holder.QUARANTINED)
        del sequence.block_table[kept:]
        self.free(sequence)
        return fresh

    def send(self, sequence: Sequence) -> list[int]:
        """Instead of `free`. Give what it returns to `release` once no peer reads it."""
        blocks, sequence.block_table = sequence.block_table, []
        self.pool.hand_over(blocks, Holder.SEQUENCE, Holder.SENDING)
        self.free(sequence)
        return blocks

    def release(self, blocks: list[int], holder: Holder) -> None:
        self.pool.release(reversed(blocks), holder)

    def _cached_blocks(self, sequence: Sequence) -> list[int]:
        # At least one token is left to compute, since its logits give the next one. Prompt logprobs need every token.
        if not self._enabled or sequence.wants_prompt_logprobs:
            return []
        num_full = (len(sequence.tokens) - 1) // self.block_size
        self._extend_hashes(sequence, len(sequence.tokens) // self.block_size)  # that of the last block is needed soon, too
        return self.prefixes.match(sequence.hashes[:num_full], sequence.tokens)

    def _register(self, sequence: Sequence, first: int, last: int) -> None:
        self._extend_hashes(sequence, last)
        prefixes, size = self.prefixes, self.block_size
        table, hashes, tokens = sequence.block_table, sequence.hashes, sequence.tokens
        parent = hashes[first - 1] if first else self._root(sequence)
        if last - first > 1 and prefixes.add_new(
            table[first:last], hashes[first:last], tokens[first * size : last * size], parent
        ):
            return
        for index in range(first, last):
            block, digest = table[index], hashes[index]
            if block not in prefixes:
                replaced = prefixes.add(block, digest, tokens[index * size : (index + 1) * size], parent)
                if replaced is not None:
                    self.pool.forget(replaced)
            parent = digest

    def _extend_hashes(self, sequence: Sequence, num_blocks: int) -> None:
        hashes = sequence.hashes
        if len(hashes) < num_blocks:
            root = b"" if hashes else self._root(sequence)  # asked for only where it is needed
            extend_hashes(hashes, root, sequence.tokens, self.block_size, num_blocks)

    def _root(self, sequence: Sequence) -> bytes:
        key = sequence.request.cache_salt, sequence.request.adapter_digest
        root = self._roots.get(key)
        if root is None:
            if len(self._roots) >= 1024:
                self._roots.clear()
            root = self._roots[key] = root_hash(self._cache_seed, *key)
        return root
