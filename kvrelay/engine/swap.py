"""KV on the host: sequences that had to make room, and blocks that left the device's prefix cache.

A host slot holds what one device block held. Slots are counted and cached like blocks (`BlockPool`, `PrefixCache`), and
copies run beside the steps; nothing here waits for one.

    swap_out    the KV of a running sequence goes to slots; its blocks come back when it is there      ACTIVE -> SWAPPED
    swap_in     blocks first; what is on the device already is shared, the rest copied; only when it is
                there is the host's copy dropped                                                       SWAPPED -> ACTIVE
    fetch       a prompt's next blocks, evicted on the device, are copied from the host's cache        stays ALLOCATED
    load        the same, of slots that are known: those of a lease
    save        the KV of a lease (`engine/continuation.py`) goes to slots; it keeps its blocks until it is there
    adopt       the slots of a swapped sequence that ends become a lease's
    spill       blocks that nobody holds any more are copied to slots that nobody needs
    poll        which copies ended, and which took too long: those sequences compute their KV again    -> FREED

Who may touch what while a copy runs: a copy holds its slots until it has really ended, also when nobody waits for it any
more. A copy to the host holds its blocks until it ended or took too long (what it reads then is not used). A copy to the
device holds its blocks, as QUARANTINED, until it has really ended, since it writes.

The same content is kept once: a slot is found again by the block it was copied from, as long as that block was not given to
somebody else (`BlockPool.generations`), and by its hash.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from kvrelay.engine.block_pool import BlockPool, Holder
from kvrelay.engine.interfaces import Runner
from kvrelay.engine.kv_cache import KVCache
from kvrelay.engine.prefix_cache import PrefixCache
from kvrelay.engine.request import Sequence
from kvrelay.states import KVState
from kvrelay.wire.registry import HostCounts

_MOST_SPILLED = 32  # blocks per copy, so that a swap never waits long behind it

Origin = tuple[int, int, int]
"""Block, its generation, and how many of its tokens have KV."""


@dataclass(slots=True)
class Copy:
    """Under way. `blocks` are held as `holder` says; None: not at all."""

    deadline_s: float
    slots: list[int]
    blocks: list[int]
    holder: Holder | None
    spilled: list[Origin] = field(default_factory=list)  # of a copy that nobody waits for: what it was meant to copy
    expired: bool = False


@dataclass(slots=True)
class Kept:
    """A sequence (or a lease's) whose KV is on the host, or on the way to or from it."""

    sequence: Sequence
    slots: list[int]
    tickets: set[int] = field(default_factory=set)  # copies that must end before the next thing can happen
    table: list[int] = field(default_factory=list)  # its blocks, once it comes back
    num_fetched: int = 0  # of a prompt: tokens whose KV it will have then
    num_hits: int = 0  # of these: tokens whose KV comes from the host
    leased: bool = False  # stays here until it is dropped


@dataclass(slots=True)
class SwapNews:
    """Since the last poll. None of these is known here any more, except those that are swapped out."""

    restored: list[Sequence] = field(default_factory=list)
    fetched: list[Sequence] = field(default_factory=list)
    lost_out: list[Sequence] = field(default_factory=list)  # the copy to the host took too long
    lost_in: list[Sequence] = field(default_factory=list)  # the copy from the host took too long
    stayed: list[Sequence] = field(default_factory=list)  # of leases: the copy to the host took too long


class Swap:
    """Owns every slot reference, and the block references of copies. Decides nothing about who runs."""

    def __init__(self, kv: KVCache, runner: Runner, *, clock: Callable[[], float], timeout_s: float) -> None:
        self._kv = kv
        self._runner = runner
        self._clock = clock
        self._timeout_s = timeout_s
        self.cache: PrefixCache = kv.use_host_cache(runner.num_host_blocks)
        self.slots = BlockPool(runner.num_host_blocks, keep=self.cache.__contains__, evict=self.cache.remove)
        self.copies: dict[int, Copy] = {}
        self.kept: dict[int, Kept] = {}  # by the sequence's key
        self._slot_of: dict[Origin, int] = {}
        self._origin_of: dict[int, Origin] = {}
        self._filling: dict[int, int] = {}  # slot -> the copy that fills it
        self._num_out = self._num_in = self._num_timeouts = self._num_hit_tokens = 0

    # Out

    def swap_out(self, sequence: Sequence) -> bool:
        """False (and nothing changes) if there are too few slots. The sequence holds no blocks afterwards; those that are being
        copied come back later (`num_releasing`)."""
        kept = self._save(sequence, Holder.SEQUENCE)
        if kept is None:
            return False
        self._kv.pool.release(reversed(sequence.block_table))
        sequence.block_table = []
        sequence.kv_become(KVState.SWAPPED)
        self._num_out += 1
        if not kept.tickets:
            self._swapped_out(kept)
        return True

    def save(self, leased: Sequence) -> bool:
        """As `swap_out`, but nothing becomes of the blocks: the lease gives them up once `is_saved`, unless `poll` says that
        they stayed."""
        kept = self._save(leased, Holder.PINNED)
        if kept is None:
            return False
        kept.leased = True
        if not kept.tickets:
            self._swapped_out(kept)
        return True

    def adopt(self, sequence: Sequence, leased: Sequence) -> bool:
        """The sequence is about to end. False if its KV is not on the host yet: nobody knows whether it will be."""
        kept = self.kept[sequence.key]
        if kept.tickets and not kept.table:
            return False
        slots = kept.slots[: self._kv.blocks_for(leased.num_computed)]
        self.slots.retain(slots)
        self.kept[leased.key] = Kept(leased, slots, leased=True)
        return True

    def has_slots(self, sequence: Sequence) -> bool:
        """Whether its KV is on the host, or is being copied to it or from it."""
        return sequence.key in self.kept and bool(self.kept[sequence.key].slots)

    def _save(self, sequence: Sequence, holder: Holder) -> Kept | None:
        origins = self._origins(sequence)
        present = [self._find_slot(origin, sequence, index) for index, origin in enumerate(origins)]
        self.slots.retain([slot for slot in present if slot is not None])
        fresh = self.slots.allocate(present.count(None))
        if fresh is None:
            self._release_slots([slot for slot in present if slot is not None])
            return None
        saves: list[tuple[int, int]] = []
        slots = []
        for origin, slot in zip(origins, present, strict=True):
            if slot is None:
                slot = fresh.pop()
                self._slot_of[origin] = slot
                self._origin_of[slot] = origin
                saves.append((origin[0], slot))
            slots.append(slot)
        kept = self.kept[sequence.key] = Kept(sequence, slots)
        if saves:
            self._begin_save(saves, holder)
        kept.tickets = {self._filling[slot] for slot in slots if slot in self._filling}
        return kept

    def is_saved(self, sequence: Sequence) -> bool:
        return not self.kept[sequence.key].tickets

    @property
    def num_releasing(self) -> int:
        """Blocks that nobody holds but copies to the host, and leases that wait for these: they come back soon."""
        references = self._kv.pool.references
        holds: Counter[int] = Counter()
        for copy in self.copies.values():
            if copy.holder in (Holder.SEQUENCE, Holder.PINNED) and not copy.expired:
                holds.update(copy.blocks)
        for kept in self.kept.values():
            if kept.leased:
                holds.update(kept.sequence.block_table)
        return sum(references[block] == count for block, count in holds.items())

    @property
    def is_saving_leases(self) -> bool:
        return any(copy.holder is Holder.PINNED and not copy.expired for copy in self.copies.values())

    def _begin_save(self, saves: list[tuple[int, int]], holder: Holder) -> None:
        blocks, slots = [block for block, _ in saves], [slot for _, slot in saves]
        self._kv.pool.retain(blocks, holder)
        self.slots.retain(slots)
        ticket = self._begin(Copy(self._deadline_s(), slots, blocks, holder), saves=saves)
        self._filling.update(dict.fromkeys(slots, ticket))

    def _swapped_out(self, kept: Kept) -> None:
        """All of it is on the host: full blocks can be found there, too."""
        sequence = kept.sequence
        for index, slot in enumerate(kept.slots[: sequence.num_computed // self._kv.block_size]):
            self._remember(slot, sequence, index)
        if self._kv.recorder is not None and not kept.leased:
            self._kv.recorder.swapped(sequence.request.external_id, len(kept.slots))

    # In

    def swap_in(self, sequence: Sequence, *, headroom: int) -> bool:
        """Blocks for all its tokens, if `headroom` blocks would still be left over. `poll` says when its KV is in them."""
        kept, pool = self.kept[sequence.key], self._kv.pool
        assert not kept.tickets
        present = [self._find_block(slot, sequence, index) for index, slot in enumerate(kept.slots)]
        found = [block for block in present if block is not None]
        num_new = self._kv.blocks_for(len(sequence.tokens)) - len(found)
        if num_new + sum(map(pool.is_cached, found)) + headroom > pool.num_available:
            return False
        pool.retain(found)
        fresh = pool.allocate(num_new)
        assert fresh is not None
        fresh.reverse()
        table = [fresh.pop() if block is None else block for block in present]
        loads = [(slot, table[index]) for index, slot in enumerate(kept.slots) if present[index] is None]
        kept.table = table + fresh
        self._num_in += 1
        if loads:
            kept.tickets = {self._begin_load(loads)}
        return True

    def fetch(self, sequence: Sequence) -> bool:
        """After `attach`. True if blocks of the prompt come from the host: `poll` says when."""
        first = sequence.num_computed // self._kv.block_size
        slots = self._kv.host_blocks(sequence, first)
        if not slots:
            return False
        loads = list(zip(slots, sequence.block_table[first:], strict=False))
        self.load(sequence, loads, (first + len(slots)) * self._kv.block_size)
        return True

    def load(self, sequence: Sequence, loads: list[tuple[int, int]], num_tokens: int) -> None:
        """Of (slot, one of its blocks). `poll` says when: it has the KV of its first `num_tokens` tokens then."""
        num_fetched = num_tokens - sequence.num_computed
        num_hits = min(num_fetched, len(loads) * self._kv.block_size)
        self.kept[sequence.key] = kept = Kept(sequence, [], num_fetched=num_fetched, num_hits=num_hits)
        kept.tickets = {self._begin_load(loads)}

    def slots_of(self, leased: Sequence) -> list[int]:
        return self.kept[leased.key].slots[: self._kv.blocks_for(leased.num_computed)]

    def blocks_of(self, leased: Sequence) -> list[int | None]:
        """Where the device still has what is in its slots. Not of a partial block, which somebody may go on writing."""
        num_full = leased.num_computed // self._kv.block_size
        return [
            self._find_block(slot, leased, index) if index < num_full else None
            for index, slot in enumerate(self.slots_of(leased))
        ]

    def _begin_load(self, loads: list[tuple[int, int]]) -> int:
        slots, blocks = [slot for slot, _ in loads], [block for _, block in loads]
        self._kv.pool.retain(blocks, Holder.QUARANTINED)
        self.slots.retain(slots)
        return self._begin(Copy(self._deadline_s(), slots, blocks, Holder.QUARANTINED), loads=loads)

    def _swapped_in(self, kept: Kept) -> None:
        """All of it is on the device, so the host's copy goes (into the host's cache, where it has a hash)."""
        sequence = kept.sequence
        sequence.block_table = kept.table
        sequence.kv_become(KVState.ACTIVE)
        for origin, slot in zip(self._origins(sequence), kept.slots, strict=True):
            self._slot_of.pop(self._origin_of.get(slot, origin), None)
            self._slot_of[origin], self._origin_of[slot] = slot, origin  # others who share the slot find the block
        self._release_slots(kept.slots)
        self._kv.register_computed(sequence)
        if self._kv.recorder is not None:
            self._kv.recorder.restored(sequence.request.external_id, len(kept.slots))

    # Both

    def drop(self, sequence: Sequence) -> None:
        """The sequence ended. Copies for it go on, and end for nobody."""
        kept = self.kept.pop(sequence.key)
        self._kv.pool.release(reversed(kept.table))
        self._release_slots(kept.slots)

    def spill(self) -> None:
        """In the background, when no copy is under way: blocks that were given up lately, newest first, if there is room."""
        pool, prefixes = self._kv.pool, self._kv.prefixes
        given_up = pool.given_up
        if self.copies or not given_up:
            return
        wanted: dict[int, None] = {}
        most = min(_MOST_SPILLED, self.slots.num_available)
        while given_up and len(wanted) < most:
            block = given_up.pop()
            if pool.is_cached(block) and not self.cache.has(prefixes.content(block)[0]):
                wanted[block] = None
        slots = self.slots.allocate(len(wanted))
        if not slots:
            return
        saves = list(zip(wanted, slots, strict=False))
        origins = [(block, pool.generations[block], self._kv.block_size) for block, _ in saves]
        self._begin(Copy(self._deadline_s(), slots, [], None, spilled=origins), saves=saves)

    def poll(self, wait_s: float = 0.0) -> SwapNews:
        """If `wait_s` is given, waits so long for a copy to end."""
        news = SwapNews()
        if self.copies:
            for ticket in self._runner.finished_copies(wait_s):
                self._ended(ticket)
            now = self._clock()
            for ticket, copy in self.copies.items():
                if not copy.expired and now >= copy.deadline_s:
                    self._expire(ticket, copy, news)
        for kept in [kept for kept in self.kept.values() if not kept.tickets and (kept.table or kept.num_fetched)]:
            self._come_back(kept, news)
        return news

    def counts(self) -> HostCounts:
        blocks = self.slots.counts()
        return HostCounts(
            total=blocks.total,
            free=blocks.free,
            cached=blocks.cached,
            in_use=blocks.in_use,
            hit_tokens=self._num_hit_tokens,
            swapped_out=self._num_out,
            swapped_in=self._num_in,
            timeouts=self._num_timeouts,
        )

    def _come_back(self, kept: Kept, news: SwapNews) -> None:
        del self.kept[kept.sequence.key]
        if kept.table:
            self._swapped_in(kept)
            news.restored.append(kept.sequence)
            return
        self._num_hit_tokens += kept.num_hits
        self._kv.computed(kept.sequence, kept.num_fetched)
        news.fetched.append(kept.sequence)

    def _ended(self, ticket: int) -> None:
        copy = self.copies.pop(ticket)
        for slot in copy.slots:
            self._filling.pop(slot, None)
        if copy.spilled and not copy.expired:
            self._spilled(copy)
        if copy.holder is Holder.QUARANTINED or (copy.holder is not None and not copy.expired):
            self._kv.pool.release(reversed(copy.blocks), copy.holder)
        for kept in self.kept.values():
            if ticket in kept.tickets:
                kept.tickets.discard(ticket)
                if not kept.tickets and not kept.table and not kept.num_fetched:
                    self._swapped_out(kept)
        self._release_slots(copy.slots)

    def _spilled(self, copy: Copy) -> None:
        """A block that was given to somebody else meanwhile may have changed under the copy."""
        pool, prefixes = self._kv.pool, self._kv.prefixes
        for (block, generation, _), slot in zip(copy.spilled, copy.slots, strict=True):
            if pool.generations[block] == generation and block in prefixes:
                self._add_to_cache(slot, *prefixes.content(block))

    def _expire(self, ticket: int, copy: Copy, news: SwapNews) -> None:
        """Nobody waits for it any more. What it reads from now on may be anything, so nobody shares what it writes."""
        copy.expired = True
        self._num_timeouts += 1
        if copy.holder in (Holder.SEQUENCE, Holder.PINNED):
            self._kv.pool.release(reversed(copy.blocks), copy.holder)
            for slot in copy.slots:
                self._forget_origin(slot)
        for kept in [kept for kept in self.kept.values() if ticket in kept.tickets]:
            going_out = not kept.table and not kept.num_fetched
            (news.stayed if kept.leased else news.lost_out if going_out else news.lost_in).append(kept.sequence)
            self.drop(kept.sequence)
        if copy.holder is Holder.QUARANTINED:
            self._distrust(copy.slots)

    def _distrust(self, slots: list[int]) -> None:
        """A prompt that waited in vain for these would find and wait for them again."""
        for slot in slots:
            if slot in self.cache:
                self.cache.remove(slot)
                self.slots.forget(slot)

    def _begin(
        self, copy: Copy, *, saves: list[tuple[int, int]] | None = None, loads: list[tuple[int, int]] | None = None
    ) -> int:
        ticket = self._runner.begin_copies(saves or [], loads or [])
        self.copies[ticket] = copy
        return ticket

    def _deadline_s(self) -> float:
        return self._clock() + self._timeout_s

    def _origins(self, sequence: Sequence) -> list[Origin]:
        """Of its blocks that have KV."""
        size, generations = self._kv.block_size, self._kv.pool.generations
        num_full, filled = divmod(sequence.num_computed, size)
        origins = [(block, generations[block], size) for block in sequence.block_table[:num_full]]
        if filled:
            block = sequence.block_table[num_full]
            origins.append((block, generations[block], filled))
        return origins

    def _find_slot(self, origin: Origin, sequence: Sequence, index: int) -> int | None:
        slot = self._slot_of.get(origin)
        if slot is None and origin[2] == self._kv.block_size:
            slot = self._kv.find(self.cache, sequence, index)
        return slot

    def _find_block(self, slot: int, sequence: Sequence, index: int) -> int | None:
        origin, is_full = self._origin_of.get(slot), (index + 1) * self._kv.block_size <= sequence.num_computed
        if origin is not None and self._kv.pool.holds(origin[0], origin[1]):
            if is_full or origin[0] not in self._kv.prefixes:  # a block that others can find must not be written
                return origin[0]
        if not is_full:
            return None
        return self._kv.find(self._kv.prefixes, sequence, index)

    def _remember(self, slot: int, sequence: Sequence, index: int) -> None:
        content = self._kv.content_of(sequence, index)
        if content is not None:
            self._add_to_cache(slot, *content)

    def _add_to_cache(self, slot: int, digest: bytes, tokens: list[int], parent: bytes) -> None:
        if slot in self.cache:
            return
        replaced = self.cache.add(slot, digest, tokens, parent)
        if replaced is not None:
            self.slots.forget(replaced)

    def _release_slots(self, slots: list[int]) -> None:
        self.slots.release(reversed(slots))
        for slot in slots:
            if self.slots.references[slot] == 0:
                self._forget_origin(slot)

    def _forget_origin(self, slot: int) -> None:
        origin = self._origin_of.pop(slot, None)
        if origin is not None and self._slot_of.get(origin) == slot:
            del self._slot_of[origin]
