"""KV on the host: sequences that had to make room, and blocks that left the device's prefix cache.

A host block holds what one device block held (`memory/host_blocks.py`). Copies run beside the steps; nothing here waits for
one.

    swap_out    the KV of a running sequence goes to host blocks; its own come back when it is there   ACTIVE -> SWAPPED
                (beams of one search: together)
    swap_in     blocks first; what is on the device already is shared, the rest copied; only when it is
                there is the host's copy dropped                                                       SWAPPED -> ACTIVE
    fetch       a prompt's next blocks, evicted on the device, are copied from the host's cache        stays ALLOCATED
    load        the same, from given host blocks: those of kept KV
    save        kept KV (`memory/kept.py`) goes to host blocks; it holds its own until it is there
    adopt       the host blocks of a swapped sequence that ends become those of its kept KV
    spill       blocks that are cached and not held are copied to host blocks that are free
    prefetch    at rest: full blocks of kept KV that only the host has are cached on the device again
    poll        which copies ended, and which took too long: those sequences compute their KV again    -> FREED

Who may touch what while a copy runs: a copy holds its host blocks until it has really ended, also when no sequence waits for it
any more. A copy to the host holds its blocks until it ended or took too long (what it reads then is not used). A copy to the
device holds its blocks, as QUARANTINED, until it has really ended, since it writes.

Where the host has no blocks (`--swap-blocks 0`), nothing comes here: all of this does nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from kvrelay.engine.interfaces import Runner
from kvrelay.engine.memory.block_pool import Holder
from kvrelay.engine.memory.host_blocks import HostBlocks, Origin
from kvrelay.engine.memory.kv_cache import KVCache
from kvrelay.engine.request import Sequence
from kvrelay.states import FreeReason, KVState
from kvrelay.wire.events import Restored, Swapped
from kvrelay.wire.registry import HostCounts

_SPILLED = 32  # blocks per copy, so that a swap never waits long behind it
_NO_ONE_WAITS = (Holder.PINNED, None)  # holders of what a copy to the host reads: kept KV, or nothing for cached blocks
_COPIED_AT_REST = 8  # fewer, since a request may come at any time


Content = tuple[bytes, list[int], bytes]  # of a full block: its hash, its tokens, and the hash of the block before


@dataclass(slots=True)
class Copy:
    """Under way. `blocks` are held as `holder` says; None: not at all."""

    deadline_s: float
    host_blocks: list[int]
    blocks: list[int]
    holder: Holder | None
    spilled: list[Origin] = field(default_factory=list)  # of a copy that no sequence waits for: what it was meant to copy
    prefetched: list[Content] = field(default_factory=list)  # the same: what is to be in each of `blocks`
    expired: bool = False


@dataclass(slots=True)
class OnHost:
    """A sequence, live or kept, whose KV is on the host, or on the way to or from it."""

    sequence: Sequence
    host_blocks: list[int]
    tickets: set[int] = field(default_factory=set)  # copies that must end before the next thing can happen
    table: list[int] = field(default_factory=list)  # its blocks, once it comes back
    num_fetched: int = 0  # of a prompt: tokens whose KV it will have then
    num_hits: int = 0  # of these: tokens whose KV comes from the host
    is_kept: bool = False  # stays here until it is dropped


@dataclass(slots=True)
class SwapNews:
    """Since the last poll. None of these is known here any more, except those that are swapped out."""

    restored: list[Sequence] = field(default_factory=list)
    fetched: list[Sequence] = field(default_factory=list)
    lost_out: list[Sequence] = field(default_factory=list)  # the copy to the host took too long
    lost_in: list[Sequence] = field(default_factory=list)  # the copy from the host took too long
    stayed: list[Sequence] = field(default_factory=list)  # of kept KV: the copy to the host took too long


class Swap:
    """Owns every reference to host blocks, and the block references of copies. Decides nothing about who runs."""

    def __init__(self, kv: KVCache, runner: Runner, *, clock: Callable[[], float], timeout_s: float) -> None:
        self._kv = kv
        self._runner = runner
        self._clock = clock
        self._timeout_s = timeout_s
        self.host = HostBlocks(kv, runner.num_host_blocks)
        self.copies: dict[int, Copy] = {}
        self.on_host: dict[int, OnHost] = {}  # by the sequence's key
        self._filling: dict[int, int] = {}  # host block -> the copy that fills it
        self.gives_up_because = FreeReason.NO_SWAP_ROOM if runner.num_host_blocks else FreeReason.PREEMPTED
        self._num_out = self._num_in = self._num_timeouts = self._num_hit_tokens = 0

    # Out

    def swap_out(self, sequences: list[Sequence]) -> bool:
        """False (and nothing changes) if there are too few host blocks. The sequences hold no blocks afterwards; those that are
        being copied come back later (`num_releasing`). What they share is stored once, and they are saved, or lost,
        together."""
        entries = self._save(sequences, Holder.SEQUENCE)
        if entries is None:
            return False
        for entry in entries:
            sequence = entry.sequence
            self._kv.pool.release(reversed(sequence.block_table))
            sequence.block_table = []
            sequence.kv_become(KVState.SWAPPED)
            self._num_out += 1
            if not entry.tickets:
                self._swapped_out(entry)
        return True

    def save(self, kept_kv: Sequence) -> bool:
        """As `swap_out`, but the blocks stay: they are given up once `is_saved`, unless `poll` says that they stayed."""
        entries = self._save([kept_kv], Holder.PINNED)
        if entries is None:
            return False
        (entry,) = entries
        entry.is_kept = True
        if not entry.tickets:
            self._swapped_out(entry)
        return True

    def adopt(self, sequence: Sequence, kept_kv: Sequence) -> bool:
        """The sequence is about to end. False if its KV is not on the host yet: it may never be."""
        entry = self.on_host[sequence.key]
        if entry.tickets and not entry.table:
            return False
        host_blocks = entry.host_blocks[: self._kv.blocks_for(kept_kv.num_computed)]
        self.host.pool.retain(host_blocks)
        self.on_host[kept_kv.key] = OnHost(kept_kv, host_blocks, is_kept=True)
        return True

    def has(self, sequence: Sequence) -> bool:
        """Whether its KV is on the host, or is being copied to it or from it."""
        return sequence.key in self.on_host and bool(self.on_host[sequence.key].host_blocks)

    def _save(self, sequences: list[Sequence], holder: Holder) -> list[OnHost] | None:
        placed = self.host.place(sequences)
        if placed is None:
            return None
        if placed.saves:
            self._begin_save(placed.saves, holder)
        tickets = {self._filling[block] for block in placed.host_blocks.values() if block in self._filling}
        entries = []
        for sequence in sequences:
            host_blocks = [placed.host_blocks[origin] for origin in self.host.origins(sequence)]
            self.host.pool.retain(host_blocks)
            entry = self.on_host[sequence.key] = OnHost(sequence, host_blocks, set(tickets))
            entries.append(entry)
        self.host.release(list(placed.host_blocks.values()))  # the entries hold them now
        return entries

    def is_saved(self, sequence: Sequence) -> bool:
        return not self.on_host[sequence.key].tickets

    @property
    def is_idle(self) -> bool:
        """Nothing is on the host for a sequence, or on its way: `poll` would say nothing."""
        return not self.copies and not self.on_host

    @property
    def num_releasing(self) -> int:
        """Blocks that only copies hold which no sequence waits for, and kept KV that waits for these: they come back soon."""
        references = self._kv.pool.references
        holds: Counter[int] = Counter()
        for copy in self.copies.values():
            if (copy.prefetched or copy.holder in (Holder.SEQUENCE, Holder.PINNED)) and not copy.expired:
                holds.update(copy.blocks)
        for entry in self.on_host.values():
            if entry.is_kept:
                holds.update(entry.sequence.block_table)
        return sum(references[block] == count for block, count in holds.items())

    @property
    def copies_in_background(self) -> bool:
        """Whether copies are under way that no sequence waits for."""
        return any(not copy.expired and (copy.prefetched or copy.holder in _NO_ONE_WAITS) for copy in self.copies.values())

    def _begin_save(self, saves: list[tuple[int, int]], holder: Holder) -> None:
        blocks, host_blocks = [block for block, _ in saves], [host_block for _, host_block in saves]
        self._kv.pool.retain(blocks, holder)
        self.host.pool.retain(host_blocks)
        ticket = self._begin(Copy(self._deadline_s(), host_blocks, blocks, holder), saves, [])
        self._filling.update(dict.fromkeys(host_blocks, ticket))

    def _swapped_out(self, entry: OnHost) -> None:
        """All of it is on the host: full blocks can be found there, too."""
        sequence = entry.sequence
        for index, host_block in enumerate(entry.host_blocks[: sequence.num_computed // self._kv.block_size]):
            self.host.remember(host_block, sequence, index)
        if not entry.is_kept:
            self._kv.recorder.lived(Swapped(request=sequence.request.external_id, num_blocks=len(entry.host_blocks)))

    # In

    def swap_in(self, sequences: list[Sequence], *, headroom: int) -> bool:
        """Blocks for all tokens of all of them, if `headroom` blocks would still be left over. What they have in one host
        block, they share in one block. `poll` says when their KV is in them: they come back, or are lost, together."""
        entries, pool = [self.on_host[sequence.key] for sequence in sequences], self._kv.pool
        found: dict[int, int | None] = {}
        num_new = 0
        for entry in entries:
            assert not entry.tickets
            num_new += self._kv.blocks_for(len(entry.sequence.tokens)) - len(entry.host_blocks)
            for index, host_block in enumerate(entry.host_blocks):
                if host_block not in found:
                    found[host_block] = self.host.on_device(host_block, entry.sequence, index)
        present = {block for block in found.values() if block is not None}
        missing = [host_block for host_block, block in found.items() if block is None]
        num_new += len(missing)
        if num_new + sum(map(pool.is_cached, present)) + headroom > pool.num_available:
            return False
        pool.retain(present)
        fresh = pool.allocate(num_new)
        assert fresh is not None
        loads = [(host_block, fresh.pop()) for host_block in missing]
        placed = {host_block: block for host_block, block in found.items() if block is not None} | dict(loads)
        tickets = {self._begin_load(loads)} if loads else set()
        for entry in entries:
            entry.table = [placed[host_block] for host_block in entry.host_blocks]
            entry.tickets = set(tickets)
            pool.retain(entry.table)
            while len(entry.table) < self._kv.blocks_for(len(entry.sequence.tokens)):
                entry.table.append(fresh.pop())
            self._num_in += 1
        pool.release([*present, *(block for _, block in loads)])  # the sequences hold them now
        return True

    def fetch(self, sequence: Sequence) -> bool:
        """After `attach`. True if blocks of the prompt come from the host: `poll` says when."""
        first = sequence.num_computed // self._kv.block_size
        host_blocks = self._kv.host_blocks(sequence, first)
        if not host_blocks:
            return False
        loads = list(zip(host_blocks, sequence.block_table[first:], strict=False))
        self.load(sequence, loads, (first + len(host_blocks)) * self._kv.block_size)
        return True

    def load(self, sequence: Sequence, loads: list[tuple[int, int]], num_tokens: int) -> None:
        """From (host block, one of its blocks). `poll` says when: it has the KV of its first `num_tokens` tokens then."""
        num_fetched = num_tokens - sequence.num_computed
        num_hits = min(num_fetched, len(loads) * self._kv.block_size)
        self.on_host[sequence.key] = entry = OnHost(sequence, [], num_fetched=num_fetched, num_hits=num_hits)
        entry.tickets = {self._begin_load(loads)}

    def host_blocks_of(self, kept_kv: Sequence) -> list[int]:
        return self.on_host[kept_kv.key].host_blocks[: self._kv.blocks_for(kept_kv.num_computed)]

    def blocks_of(self, kept_kv: Sequence) -> list[int | None]:
        """Where the device still has what is in its host blocks. Not of a partial block, which a sequence may go on writing."""
        num_full = kept_kv.num_computed // self._kv.block_size
        return [
            self.host.on_device(host_block, kept_kv, index) if index < num_full else None
            for index, host_block in enumerate(self.host_blocks_of(kept_kv))
        ]

    def _begin_load(self, loads: list[tuple[int, int]]) -> int:
        host_blocks, blocks = [host_block for host_block, _ in loads], [block for _, block in loads]
        self._kv.pool.retain(blocks, Holder.QUARANTINED)
        self.host.pool.retain(host_blocks)
        return self._begin(Copy(self._deadline_s(), host_blocks, blocks, Holder.QUARANTINED), [], loads)

    def _swapped_in(self, entry: OnHost) -> None:
        """All of it is on the device, so the host's copy goes (into the host's cache, where it has a hash)."""
        sequence = entry.sequence
        sequence.block_table = entry.table
        sequence.kv_become(KVState.ACTIVE)
        for origin, host_block in zip(self.host.origins(sequence), entry.host_blocks, strict=True):
            self.host.move(origin, host_block)  # other sequences that share the host block find the block
        self.host.release(entry.host_blocks)
        self._kv.register_computed(sequence)
        self._kv.recorder.lived(Restored(request=sequence.request.external_id, num_blocks=len(entry.host_blocks)))

    # Both

    def drop(self, sequence: Sequence) -> None:
        """The sequence ended. Copies for it go on, and their end is not told."""
        entry = self.on_host.pop(sequence.key)
        self._kv.pool.release(reversed(entry.table))
        self.host.release(entry.host_blocks)

    def spill(self, *, at_rest: bool) -> None:
        """In the background, when no copy is under way: blocks that were given up lately, newest first, if there is room."""
        if self.copies or not self._kv.pool.given_up:
            return
        wanted = self.host.to_spill(_COPIED_AT_REST if at_rest else _SPILLED)
        if not (host_blocks := self.host.pool.allocate(len(wanted))):
            return
        saves = list(zip(wanted, host_blocks, strict=False))
        origins = [(block, self._kv.pool.generations[block], self._kv.block_size) for block in wanted]
        self._begin(Copy(self._deadline_s(), host_blocks, [], None, spilled=origins), saves, [])

    def prefetch(self, wanted: list[tuple[int, Content]]) -> bool:
        """Host blocks and what is in them, the last ones of which are copied. False if nothing is."""
        wanted = wanted[-_COPIED_AT_REST:]
        blocks = self._kv.pool.allocate(len(wanted))
        if not blocks:
            return False
        ticket = self._begin_load([(host_block, block) for (host_block, _), block in zip(wanted, blocks, strict=True)])
        self.copies[ticket].prefetched = [content for _, content in wanted]
        self._kv.pool.release(blocks)  # the copy holds them now
        return True

    def poll(self, wait_s: float = 0.0) -> SwapNews:
        """Waits up to `wait_s` for a copy to end."""
        news = SwapNews()
        if self.copies:
            for ticket in self._runner.finished_copies(wait_s):
                self._ended(ticket)
            now = self._clock()
            for ticket, copy in self.copies.items():
                if not copy.expired and now >= copy.deadline_s:
                    self._expire(ticket, copy, news)
        for entry in [entry for entry in self.on_host.values() if not entry.tickets and (entry.table or entry.num_fetched)]:
            self._come_back(entry, news)
        return news

    def counts(self) -> HostCounts:
        if not self.host.pool.num_blocks:
            return HostCounts()
        blocks = self.host.pool.counts()
        return HostCounts(
            total=blocks.total, free=blocks.free, cached=blocks.cached, in_use=blocks.in_use, hit_tokens=self._num_hit_tokens,
            swapped_out=self._num_out, swapped_in=self._num_in, timeouts=self._num_timeouts,
        )  # fmt: skip

    def _come_back(self, entry: OnHost, news: SwapNews) -> None:
        del self.on_host[entry.sequence.key]
        if entry.table:
            self._swapped_in(entry)
            news.restored.append(entry.sequence)
            return
        self._num_hit_tokens += entry.num_hits
        self._kv.computed(entry.sequence, entry.num_fetched)
        news.fetched.append(entry.sequence)

    def _ended(self, ticket: int) -> None:
        copy = self.copies.pop(ticket)
        for host_block in copy.host_blocks:
            self._filling.pop(host_block, None)
        if copy.spilled and not copy.expired:
            self.host.spilled(copy.spilled, copy.host_blocks)
        for block, content in zip(copy.blocks, [] if copy.expired else copy.prefetched, strict=False):
            if not self._kv.prefixes.has(content[0]):
                self._kv.prefixes.add(block, *content)
        if copy.holder is Holder.QUARANTINED or (copy.holder is not None and not copy.expired):
            self._kv.pool.release(reversed(copy.blocks), copy.holder)
        for entry in self.on_host.values():
            if ticket in entry.tickets:
                entry.tickets.discard(ticket)
                if not entry.tickets and not entry.table and not entry.num_fetched:
                    self._swapped_out(entry)
        self.host.release(copy.host_blocks)

    def _expire(self, ticket: int, copy: Copy, news: SwapNews) -> None:
        """No sequence waits for it any more. What it reads from now on may be anything, so what it writes is not shared."""
        copy.expired = True
        self._num_timeouts += 1
        if copy.holder in (Holder.SEQUENCE, Holder.PINNED):
            self._kv.pool.release(reversed(copy.blocks), copy.holder)
            for host_block in copy.host_blocks:
                self.host.forget_origin(host_block)
        for entry in [entry for entry in self.on_host.values() if ticket in entry.tickets]:
            going_out = not entry.table and not entry.num_fetched
            (news.stayed if entry.is_kept else news.lost_out if going_out else news.lost_in).append(entry.sequence)
            self.drop(entry.sequence)
        if copy.holder is Holder.QUARANTINED and not copy.prefetched:
            self.host.distrust(copy.host_blocks)

    def _begin(self, copy: Copy, saves: list[tuple[int, int]], loads: list[tuple[int, int]]) -> int:
        self.copies[ticket := self._runner.begin_copies(saves, loads)] = copy
        return ticket

    def _deadline_s(self) -> float:
        return self._clock() + self._timeout_s
