"""Leases: KV that outlives its request for a while, so that another request, a child, can go on where it ended.

    expect      a request asks to be kept (`Submit.keep`)
    ended       one of its samples is about to end: its blocks are pinned while it still holds them, or, if it was swapped
                out, its host slots are kept; or it is refused                                      -> ON_DEVICE | ON_HOST
    inherit     a child is submitted: from now on the lease stays for it, whatever its time says
    attach      the child is scheduled: it shares the lease's blocks; from the host they are copied into its own (`fetch`)
    started     the child has all that it takes; the lease is let go of when the step is over, since its last block, if it is a
                partial one, is copied in the step
    make_room   somebody lacks blocks: leases go to the host, who was used least lately first       ON_DEVICE -> LEAVING
    copied      they are there, and the blocks free; or the copy took too long                      -> ON_HOST | ON_DEVICE
    expire, release                                                                                 -> ENDED

A lease that was granted is kept until its time is over. So there must always be room beside all leases for one request as long
as the model allows: leases never pin more blocks than that leaves, those that are still leaving included. Their share of the
pool (`--kept-kv-share`) is a smaller limit, for those that are not leaving.

What is kept of a sample is what its client saw: the router may find its end before the last token that was computed
(`seen`). The last token has no KV, so a child computes that one and what it adds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from kvrelay.engine.kv_cache import KVCache
from kvrelay.engine.lease import GRACE_S, Due, Heir, Lease
from kvrelay.engine.outbox import Outbox
from kvrelay.engine.request import Sequence
from kvrelay.engine.swap import Swap
from kvrelay.ids import KeptId, RequestId
from kvrelay.states import KeptState
from kvrelay.wire.serving import Finish, Inherited, KeptInfo, KeptNews, Submit


class Leases:
    """Owns the references of leases, to blocks and (through `Swap`) to slots. Decides who is granted one, and who goes to the
    host. `share` and `most` are the two limits, in blocks."""

    def __init__(
        self,
        kv: KVCache,
        swap: Swap | None,
        outbox: Outbox,
        *,
        clock: Callable[[], float],
        keys: Iterator[int],
        share: int,
        most: int,
        verify: bool,
    ) -> None:
        self._kv = kv
        self._swap = swap
        self._outbox = outbox
        self._clock = clock
        self._keys = keys
        self._is_off = share == 0
        self.limit = min(share, most)
        self.most = most
        self._verify = verify
        self.leases: dict[KeptId, Lease] = {}  # who was used least lately comes first
        self.heirs: dict[int, Heir] = {}  # by the child's key
        self.let_go_after_step: list[Lease] = []
        self._leaving: list[Lease] = []
        self._num_over = 0
        self.pinned: Counter[int] = Counter()  # blocks of leases on the device: by how many
        self.staying: Counter[int] = Counter()  # the same, without those that are leaving
        self._due: dict[RequestId, Due] = {}
        self._unanswered: set[RequestId] = set()  # named a lease, and were not told what came of it
        self._next_expiry_s = math.inf
        self.num_inherited_tokens = 0

    # Keeping

    def expect(self, submit: Submit) -> None:
        if submit.keep is not None:
            samples = {resumed.sample for resumed in submit.resume} or set(range(submit.params.n))
            self._due[submit.request_id] = Due(submit.keep, samples)

    def is_due(self, request_id: RequestId) -> bool:
        return request_id in self._due

    def seen(self, finish: Finish) -> None:
        """How much of a sample its client saw. If the sample has ended before, it ran further than that."""
        due = self._due.get(finish.request_id)
        if due is not None and finish.sample in due.samples:
            due.seen[finish.sample] = finish.keep_tokens
            return
        for lease in self.leases.values():
            if lease.kv.request_id == finish.request_id and lease.kv.sample == finish.sample:
                self._cut(lease.kv, lease.kv.num_prompt_tokens + finish.keep_tokens)

    def ended(self, sequence: Sequence) -> None:
        """It is about to end. Samples that were not forked from it yet end with it."""
        self.let_go(sequence)
        due = self._due.get(sequence.request_id)
        if due is None:
            return
        unforked = sequence.request.num_unforked if sequence.sample == 0 else 0
        for sample in (sequence.sample, *range(1, 1 + unforked)):
            if sample in due.samples:
                due.samples.discard(sample)
                self._keep(sequence, sample, due)

    def refuse(self, request_id: RequestId, reason: str) -> None:
        """For all samples that nothing was said of."""
        due = self._due.pop(request_id, None)
        if due is not None:
            for sample in sorted(due.samples):
                self._outbox.news.append(KeptNews(request_id, sample, due.keep.kept_ids[sample], kept=False, reason=reason))

    def forget(self, request_id: RequestId) -> None:
        """The request is over."""
        self.refuse(request_id, "nothing of it was computed here")
        self._unanswered.discard(request_id)

    def _keep(self, sequence: Sequence, sample: int, due: Due) -> None:
        kept_id = due.keep.kept_ids[sample]
        leased = Sequence(next(self._keys), sequence.request, sample, list(sequence.tokens), sequence.num_prompt_tokens)
        leased.num_computed, leased.hashes = sequence.num_computed, list(sequence.hashes)
        self._cut(leased, sequence.num_prompt_tokens + due.seen.get(sample, sequence.num_output_tokens))
        refusal = f"there is a lease {kept_id} already" if kept_id in self.leases else self._take(sequence, leased)
        if refusal:
            self._outbox.news.append(KeptNews(sequence.request_id, sample, kept_id, kept=False, reason=refusal))
            return
        state = KeptState.ON_DEVICE if leased.block_table else KeptState.ON_HOST
        ttl_s = due.keep.ttl_s
        lease = self.leases[kept_id] = Lease(kept_id, due.keep.owner, leased, self._clock() + ttl_s + GRACE_S, state)
        self._next_expiry_s = min(self._next_expiry_s, lease.expires_s)
        num_blocks = self._kv.blocks_for(leased.num_computed)
        told = KeptNews(sequence.request_id, sample, kept_id, True, ttl_s, len(leased.tokens), num_blocks)
        self._outbox.news.append(told)

    def _cut(self, leased: Sequence, num_tokens: int) -> None:
        """To its first tokens. Blocks behind them, if there are any, stay with the lease."""
        del leased.tokens[num_tokens:]
        leased.num_computed = min(leased.num_computed, len(leased.tokens) - 1)
        del leased.hashes[leased.num_computed // self._kv.block_size :]

    def _take(self, sequence: Sequence, leased: Sequence) -> str:
        """Blocks or slots of the sequence for a lease. Says why not, if it cannot be."""
        if self._is_off:
            return "the worker's lease share is 0"
        if leased.num_computed <= 0:
            return "nothing of it was computed, or its KV had been given up"
        if self._swap is not None and self._swap.has_slots(sequence):
            return "" if self._swap.adopt(sequence, leased) else "its KV was on the way to the host"
        blocks = self._kv.pinnable(sequence, leased)
        if not self._has_room(blocks):
            total = self._kv.pool.num_blocks
            return f"{len(blocks)} KV blocks are more than the quota has left: leases may pin {self.limit} of {total}"
        self._kv.pin(leased, blocks)
        self.pinned.update(blocks)
        self.staying.update(blocks)
        return ""

    def _has_room(self, blocks: list[int]) -> bool:
        """Within the quota. Older leases go to the host for it, if they can."""
        if len(blocks) > self.limit:
            return False
        while _num_together(self.staying, blocks) > self.limit:
            if not any(self._leave(lease) for lease in self._movable()):
                return False
        return _num_together(self.pinned, blocks) <= self.most

    # Going on

    def check(self, submit: Submit) -> None:
        """Raises what answers a child that is not one of the lease it names."""
        lease = self._find(submit.inherit)
        if lease is not None:
            lease.check_child(submit)

    def inherit(self, submit: Submit, children: Iterable[Sequence]) -> None:
        if submit.inherit is None:
            return
        self._unanswered.add(submit.request_id)
        lease = self._find(submit.inherit)
        if lease is None:
            return
        self.leases[lease.kept_id] = self.leases.pop(lease.kept_id)  # used last
        for child in children:
            self.heirs[child.key] = Heir(lease)
            lease.num_holds += 1

    def attach(self, sequence: Sequence, *, headroom: int) -> bool:
        """As `KVCache.attach`, for everybody. If blocks are missing, leases begin to make room."""
        heir = self.heirs.get(sequence.key)
        if heir is None:
            attached = self._kv.attach(sequence, headroom=headroom)
            if not attached:
                self.make_room_for([sequence], headroom)
            return attached
        parent = heir.lease.kv
        if self._verify:
            self._verify_heir(sequence, parent)
        present = self._present(heir.lease)
        heir.absent = [index for index, block in enumerate(present) if block is None]
        missing = self._kv.inherit(sequence, parent, present, headroom=headroom)
        if missing:
            self.make_room(missing, spared=heir.lease)
        return not missing

    def fetch(self, sequence: Sequence) -> bool:
        """After `attach`. True if some of its KV comes from the host: `Swap.poll` says when it is there."""
        heir = self.heirs.get(sequence.key)
        if self._swap is None or (heir is not None and not heir.absent):
            return False
        if heir is None:
            return self._swap.fetch(sequence)
        slots = self._swap.slots_of(heir.lease.kv)
        loads = [(slots[index], sequence.block_table[index]) for index in heir.absent]
        self._swap.load(sequence, loads, heir.lease.kv.num_computed)
        return True

    def started(self, sequence: Sequence) -> None:
        """It runs, and what it did not have to compute is known."""
        heir = self.heirs.pop(sequence.key, None)
        if heir is not None:
            self.let_go_after_step.append(heir.lease)
            self.num_inherited_tokens += sequence.num_computed
        if sequence.request_id in self._unanswered:
            self._unanswered.discard(sequence.request_id)
            num_tokens, num_cached = (0, sequence.num_computed) if heir is None else (sequence.num_computed, 0)
            self._outbox.news.append(Inherited(sequence.request_id, num_tokens, num_cached))

    def let_go(self, sequence: Sequence) -> None:
        """It ended before it started, or what it was to inherit did not come from the host in time."""
        heir = self.heirs.pop(sequence.key, None)
        if heir is not None:
            self._let_go(heir.lease)

    def end_step(self) -> None:
        leases, self.let_go_after_step = self.let_go_after_step, []
        for lease in leases:
            self._let_go(lease)

    def _present(self, lease: Lease) -> list[int | None]:
        """The blocks that have the lease's KV; None where only the host has it."""
        if lease.state is KeptState.ON_HOST:
            assert self._swap is not None
            return self._swap.blocks_of(lease.kv)
        return [*lease.kv.block_table[: self._kv.blocks_for(lease.kv.num_computed)]]

    def _verify_heir(self, sequence: Sequence, parent: Sequence) -> None:
        assert sequence.tokens[: len(parent.tokens)] == parent.tokens, "a child of other tokens"
        fresh = self._kv.fresh_hashes(sequence, len(parent.hashes))
        assert fresh == parent.hashes, "the hashes of a lease are not those of its tokens"
        for digest, block in zip(parent.hashes, parent.block_table, strict=False):
            known = self._kv.prefixes.content(block)[0] if block in self._kv.prefixes else digest
            assert known == digest, f"block {block} of a lease is known for other tokens"

    # Making room

    def make_room_for(self, sequences: list[Sequence], headroom: int) -> None:
        """They could not have blocks for all their tokens. What they share is counted for each: more room than they need."""
        num_blocks = sum(self._kv.blocks_for(len(sequence.tokens)) for sequence in sequences) + headroom
        self.make_room(min(num_blocks, self._kv.pool.num_blocks) - self._kv.pool.num_available)

    def make_room(self, num_blocks: int, spared: Lease | None = None) -> bool:
        """Leases go to the host until so many blocks are free or will be soon. False if none could."""
        moved = False
        if self._swap is None or num_blocks <= 0:
            return moved
        wanted = self._kv.pool.num_available + num_blocks
        for lease in self._movable():
            if self._swap.num_releasing + self._kv.pool.num_available >= wanted:
                break
            if lease is not spared and self._would_help(lease):
                moved |= self._leave(lease)
        return moved

    def copied(self, stayed: list[Sequence]) -> None:
        """After `Swap.poll`, which names those whose copy took too long."""
        keys = {sequence.key for sequence in stayed}
        leaving, self._leaving = self._leaving, []
        for lease in leaving:
            assert self._swap is not None
            if lease.state is KeptState.ENDED:
                continue
            if lease.kv.key in keys:
                lease.become(KeptState.ON_DEVICE)
                lease.is_stuck = True
                self.staying.update(lease.kv.block_table)
            elif self._swap.is_saved(lease.kv):
                self._left(lease)
            else:
                self._leaving.append(lease)

    def _movable(self) -> list[Lease]:
        if self._swap is None:
            return []
        return [lease for lease in self.leases.values() if lease.state is KeptState.ON_DEVICE and not lease.is_stuck]

    def _would_help(self, lease: Lease) -> bool:
        """Not if live sequences hold all its blocks anyway."""
        return any(self._kv.pool.is_pinned(block) for block in lease.kv.block_table)

    def _leave(self, lease: Lease) -> bool:
        """False if the host has no room."""
        assert self._swap is not None
        if not self._swap.save(lease.kv):
            return False
        lease.become(KeptState.LEAVING)
        _subtract(self.staying, lease.kv.block_table)
        if self._swap.is_saved(lease.kv):
            self._left(lease)
        else:
            self._leaving.append(lease)
        return True

    def _left(self, lease: Lease) -> None:
        lease.become(KeptState.ON_HOST)
        _subtract(self.pinned, lease.kv.block_table)
        self._kv.unpin(lease.kv)

    # Endings

    def release(self, kept_ids: Iterable[KeptId]) -> None:
        for kept_id in kept_ids:
            lease = self._find(kept_id)
            if lease is not None:
                self._be_over(lease)

    def expire(self) -> bool:
        """True if somebody's time is over."""
        now = self._clock()
        if now < self._next_expiry_s:
            return False
        for lease in list(self.leases.values()):
            if lease.expires_s <= now and not lease.is_over:
                self._be_over(lease)
        self._next_expiry_s = min((one.expires_s for one in self.leases.values() if not one.is_over), default=math.inf)
        return True

    def _be_over(self, lease: Lease) -> None:
        lease.is_over = True
        self._num_over += 1
        if not lease.num_holds:
            self._end(lease)

    def _let_go(self, lease: Lease) -> None:
        lease.num_holds -= 1
        if lease.is_over and not lease.num_holds:
            self._end(lease)

    def _end(self, lease: Lease) -> None:
        if lease.state is KeptState.ON_DEVICE:
            _subtract(self.staying, lease.kv.block_table)
        if lease.state is not KeptState.ON_HOST:
            _subtract(self.pinned, lease.kv.block_table)
            self._kv.unpin(lease.kv)
        if lease.state is not KeptState.ON_DEVICE:
            assert self._swap is not None
            self._swap.drop(lease.kv)
        lease.become(KeptState.ENDED)
        self._num_over -= 1
        del self.leases[lease.kept_id]

    # What others want to know

    def __len__(self) -> int:
        """Those that can be inherited from."""
        return len(self.leases) - self._num_over

    def find(self, handle: str, owner: str) -> list[KeptInfo]:
        return [
            lease.info(self._clock(), self._kv.blocks_for(lease.kv.num_computed))
            for lease in self.leases.values()
            if lease.owner == owner and not lease.is_over and handle in (lease.kept_id, lease.kv.request.external_id)
        ]

    def _find(self, kept_id: KeptId | None) -> Lease | None:
        lease = None if kept_id is None else self.leases.get(kept_id)
        return None if lease is None or lease.is_over else lease


def _num_together(pinned: Counter[int], blocks: list[int]) -> int:
    """How many different blocks are pinned if these are too."""
    return len(pinned) + sum(block not in pinned for block in blocks)


def _subtract(pinned: Counter[int], blocks: list[int]) -> None:
    for block in blocks:
        pinned[block] -= 1
        if not pinned[block]:
            del pinned[block]
