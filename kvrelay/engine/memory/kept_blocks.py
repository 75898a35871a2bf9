"""Where kept KV lies, and how it makes room.

    take        a sequence is about to end: its blocks are pinned, or its host blocks adopted       -> ON_DEVICE | ON_HOST
    make_room   a sequence lacks blocks: kept KV goes to the host, the least recently used first    ON_DEVICE -> LEAVING
    copied      it is there, and the blocks are free; or the copy took too long                     -> ON_HOST | ON_DEVICE
    prefetch    nothing is to be done: full blocks that only the host has are cached here again     stays ON_HOST
    release                                                                                         -> ENDED

KV that a client was told is kept stays until its time is over. So there must always be room beside all kept KV for one request
as long as the model allows: it never pins more blocks than that leaves (`most`), those on their way to the host included. Its
share of the pool (`--kept-kv-share`) is a smaller limit, for blocks that are not on their way.
"""

from __future__ import annotations

from collections import Counter

from kvrelay.engine.memory.kept_sample import KeptSample
from kvrelay.engine.memory.kv_cache import KVCache
from kvrelay.engine.memory.swap import Content, Swap
from kvrelay.engine.request import Sequence
from kvrelay.ids import KeptId
from kvrelay.states import KeptState


class KeptBlocks:
    """Owns the references of kept KV, to blocks and (through `Swap`) to host blocks. Decides what goes to the host."""

    def __init__(self, kv: KVCache, swap: Swap, samples: dict[KeptId, KeptSample], *, share: int, most: int) -> None:
        self._kv = kv
        self._swap = swap
        self._samples = samples  # the least recently used first
        self._is_off = share == 0
        self.limit = min(share, most)
        self.most = most
        self._leaving: list[KeptSample] = []
        self.pinned: Counter[int] = Counter()  # blocks on the device: by how many samples
        self.staying: Counter[int] = Counter()  # the same, without samples on their way to the host

    def take(self, sequence: Sequence, kept_kv: Sequence) -> str:
        """The sequence's blocks or host blocks. Returns why not, if that cannot be."""
        if self._is_off:
            return "the worker keeps no KV: its share for that is 0"
        if kept_kv.num_computed <= 0:
            return "nothing of it was computed, or its KV had been given up"
        if self._swap.has(sequence):
            return "" if self._swap.adopt(sequence, kept_kv) else "its KV was on the way to the host"
        blocks = self._kv.pinnable(sequence, kept_kv)
        if not self._has_room(blocks):
            total = self._kv.pool.num_blocks
            return f"{len(blocks)} KV blocks are more than the quota has left: kept KV may pin {self.limit} of {total}"
        self._kv.pin(kept_kv, blocks)
        self.pinned.update(blocks)
        self.staying.update(blocks)
        return ""

    def _has_room(self, blocks: list[int]) -> bool:
        """Within the quota. Older kept KV goes to the host for it, if it can."""
        if len(blocks) > self.limit:
            return False
        while _num_together(self.staying, blocks) > self.limit:
            if not any(self._leave(kept) for kept in self._movable()):
                return False
        return _num_together(self.pinned, blocks) <= self.most

    def release(self, kept: KeptSample) -> None:
        if kept.state is KeptState.ON_DEVICE:
            _subtract(self.staying, kept.kv.block_table)
        if kept.state is not KeptState.ON_HOST:
            _subtract(self.pinned, kept.kv.block_table)
            self._kv.unpin(kept.kv)
        if kept.state is not KeptState.ON_DEVICE:
            self._swap.drop(kept.kv)
        kept.become(KeptState.ENDED)

    def present(self, kept: KeptSample) -> list[int | None]:
        """The blocks that have the kept KV; None where only the host has it."""
        if kept.state is KeptState.ON_HOST:
            return self._swap.blocks_of(kept.kv)
        return [*kept.kv.block_table[: self._kv.blocks_for(kept.kv.num_computed)]]

    def make_room_for(self, sequences: list[Sequence], headroom: int) -> None:
        """They could not have blocks for all their tokens. What they share is counted for each: more room than they need."""
        num_blocks = sum(self._kv.blocks_for(len(sequence.tokens)) for sequence in sequences) + headroom
        self.make_room(min(num_blocks, self._kv.pool.num_blocks) - self._kv.pool.num_available)

    def make_room(self, num_blocks: int, spared: KeptSample | None = None) -> bool:
        """Kept KV goes to the host until so many blocks are free or will be soon. False if none could."""
        moved = False
        if num_blocks <= 0:
            return moved
        wanted = self._kv.pool.num_available + num_blocks
        for kept in self._movable():
            if self._swap.num_releasing + self._kv.pool.num_available >= wanted:
                break
            if kept is not spared and self._would_help(kept):
                moved |= self._leave(kept)
        return moved

    def prefetch(self) -> None:
        """Nothing runs or waits. What was used last comes first. Half of the blocks that can be had are left to others, and it
        ends with the first sample that finds no room, so that none takes the place of another."""
        if self._swap.copies:
            return
        room = self._kv.pool.num_available // 2
        for kept in reversed(self._samples.values()):
            if kept.state is KeptState.ON_HOST:
                room -= kept.kv.num_computed // self._kv.block_size
                if room < 0 or self._swap.prefetch(self._absent(kept.kv)):
                    return

    def _absent(self, kept_kv: Sequence) -> list[tuple[int, Content]]:
        """Full blocks that only the host has. They come back from the last one on, since what is cached first is given away
        first; so if the first and the last one are here, the others are."""
        host_blocks = self._swap.host_blocks_of(kept_kv)[: kept_kv.num_computed // self._kv.block_size]

        def is_absent(index: int) -> bool:
            return self._swap.host.on_device(host_blocks[index], kept_kv, index) is None

        last = len(host_blocks) - 1
        if last < 0 or not (is_absent(0) or is_absent(last)):
            return []
        contents = [(index, self._kv.content_of(kept_kv, index)) for index in range(last + 1) if is_absent(index)]
        has = self._kv.prefixes.has  # of other tokens with the same hash
        return [(host_blocks[index], content) for index, content in contents if content is not None and not has(content[0])]

    def copied(self, stayed: list[Sequence]) -> None:
        """After `Swap.poll`, which names those whose copy took too long."""
        keys = {sequence.key for sequence in stayed}
        leaving, self._leaving = self._leaving, []
        for kept in leaving:
            if kept.state is KeptState.ENDED:
                continue
            if kept.kv.key in keys:
                kept.become(KeptState.ON_DEVICE)
                kept.is_stuck = True
                self.staying.update(kept.kv.block_table)
            elif self._swap.is_saved(kept.kv):
                self._left(kept)
            else:
                self._leaving.append(kept)

    def _movable(self) -> list[KeptSample]:
        return [kept for kept in self._samples.values() if kept.state is KeptState.ON_DEVICE and not kept.is_stuck]

    def _would_help(self, kept: KeptSample) -> bool:
        """Not if live sequences hold all its blocks anyway."""
        return any(self._kv.pool.is_pinned(block) for block in kept.kv.block_table)

    def _leave(self, kept: KeptSample) -> bool:
        """False if the host has no room."""
        if not self._swap.save(kept.kv):
            return False
        kept.become(KeptState.LEAVING)
        _subtract(self.staying, kept.kv.block_table)
        if self._swap.is_saved(kept.kv):
            self._left(kept)
        else:
            self._leaving.append(kept)
        return True

    def _left(self, kept: KeptSample) -> None:
        kept.become(KeptState.ON_HOST)
        _subtract(self.pinned, kept.kv.block_table)
        self._kv.unpin(kept.kv)


def _num_together(pinned: Counter[int], blocks: list[int]) -> int:
    """How many different blocks are pinned if these are too."""
    return len(pinned) + sum(block not in pinned for block in blocks)


def _subtract(pinned: Counter[int], blocks: list[int]) -> None:
    for block in blocks:
        pinned[block] -= 1
        if not pinned[block]:
            del pinned[block]
