"""Kept KV: what outlives its request for a while, so that another request, a child, can go on where it ended.

    expect      a request asks for its KV to be kept (`Submit.keep`)
    ended       one of its samples is about to end: its blocks are pinned while it still holds them, or, if it was swapped
                out, its host blocks are kept; or it is refused                                     -> ON_DEVICE | ON_HOST
    inherit     a child is submitted: from now on the kept KV stays for it, also after its time
    attach      the child is scheduled: it shares the kept blocks; from the host they are copied into its own (`fetch`)
    started     the child has all that it takes; the kept KV is let go of when the step is over, since its last block, if it is
                a partial one, is copied in the step
    expire, release                                                                                 -> ENDED

Where the kept blocks lie, and how they make room for others, is in `memory/kept_blocks.py`.

What is kept of a sample is what its client saw: the router may find its end before the last token that was computed
(`seen`). The last token has no KV, so a child computes that one and what it adds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

from kvrelay.engine.memory.kept_blocks import KeptBlocks
from kvrelay.engine.memory.kept_sample import GRACE_S, Due, Heir, KeptSample, verify_child
from kvrelay.engine.memory.kv_cache import KVCache
from kvrelay.engine.memory.swap import Swap
from kvrelay.engine.outbox import Outbox
from kvrelay.engine.request import Sequence
from kvrelay.ids import KeptId, RequestId
from kvrelay.states import KeptState
from kvrelay.wire.serving import Finish, Inherited, KeptInfo, KeptNews, Submit


class KeptKV:
    """What clients were promised, and which children take it. `blocks` has where it lies."""

    def __init__(
        self,
        kv: KVCache,
        swap: Swap,
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
        self._verify = verify
        self.samples: dict[KeptId, KeptSample] = {}  # the least recently used first
        self.heirs: dict[int, Heir] = {}  # by the child's key
        self.let_go_after_step: list[KeptSample] = []
        self._num_over = 0
        self.blocks = KeptBlocks(kv, swap, self.samples, share=share, most=most)
        self._due: dict[RequestId, Due] = {}
        self._unanswered: set[RequestId] = set()  # asked to inherit, and were not told what came of it
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
        for kept in self.samples.values():
            if kept.kv.request_id == finish.request_id and kept.kv.sample == finish.sample:
                self._cut(kept.kv, kept.kv.num_prompt_tokens + finish.keep_tokens)

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
        """All samples that were not answered yet."""
        due = self._due.pop(request_id, None)
        if due is not None:
            for sample in sorted(due.samples):
                self._outbox.news.append(KeptNews(request_id, sample, due.keep.kept_ids[sample], kept=False, reason=reason))

    def forget(self, request_id: RequestId) -> None:
        self.refuse(request_id, "nothing of it was computed here")
        self._unanswered.discard(request_id)

    def _keep(self, sequence: Sequence, sample: int, due: Due) -> None:
        kept_id = due.keep.kept_ids[sample]
        kept_kv = Sequence(next(self._keys), sequence.request, sample, list(sequence.tokens), sequence.num_prompt_tokens)
        kept_kv.num_computed, kept_kv.hashes = sequence.num_computed, list(sequence.hashes)
        self._cut(kept_kv, sequence.num_prompt_tokens + due.seen.get(sample, sequence.num_output_tokens))
        refusal = f"there is a {kept_id} already" if kept_id in self.samples else self.blocks.take(sequence, kept_kv)
        if refusal:
            self._outbox.news.append(KeptNews(sequence.request_id, sample, kept_id, kept=False, reason=refusal))
            return
        state = KeptState.ON_DEVICE if kept_kv.block_table else KeptState.ON_HOST
        ttl_s = due.keep.ttl_s
        kept = self.samples[kept_id] = KeptSample(kept_id, due.keep.owner, kept_kv, self._clock() + ttl_s + GRACE_S, state)
        self._next_expiry_s = min(self._next_expiry_s, kept.expires_s)
        num_blocks = self._kv.blocks_for(kept_kv.num_computed)
        told = KeptNews(sequence.request_id, sample, kept_id, True, ttl_s, len(kept_kv.tokens), num_blocks)
        self._outbox.news.append(told)

    def _cut(self, kept_kv: Sequence, num_tokens: int) -> None:
        """To its first tokens. Blocks behind them, if there are any, stay with it."""
        del kept_kv.tokens[num_tokens:]
        kept_kv.num_computed = min(kept_kv.num_computed, len(kept_kv.tokens) - 1)
        del kept_kv.hashes[kept_kv.num_computed // self._kv.block_size :]

    # Going on

    def check(self, submit: Submit) -> None:
        """Raises what answers a request that is no child of the kept KV it names."""
        kept = self._find(submit.inherit)
        if kept is not None:
            kept.check_child(submit)

    def inherit(self, submit: Submit, children: Iterable[Sequence]) -> None:
        if submit.inherit is None:
            return
        self._unanswered.add(submit.request_id)
        kept = self._find(submit.inherit)
        if kept is None:
            return
        self.samples[kept.kept_id] = self.samples.pop(kept.kept_id)  # used last
        for child in children:
            self.heirs[child.key] = Heir(kept)
            kept.num_holds += 1

    def attach(self, sequence: Sequence, *, headroom: int) -> bool:
        """As `KVCache.attach`, for every sequence. If blocks are missing, kept KV begins to make room."""
        heir = self.heirs.get(sequence.key)
        if heir is None:
            attached = self._kv.attach(sequence, headroom=headroom)
            if not attached:
                self.blocks.make_room_for([sequence], headroom)
            return attached
        parent = heir.kept.kv
        if self._verify:
            verify_child(self._kv, sequence, parent)
        present = self.blocks.present(heir.kept)
        heir.absent = [index for index, block in enumerate(present) if block is None]
        missing = self._kv.inherit(sequence, parent, present, headroom=headroom)
        if missing:
            self.blocks.make_room(missing, spared=heir.kept)
        return not missing

    def fetch(self, sequence: Sequence) -> bool:
        """After `attach`. True if some of its KV comes from the host: `Swap.poll` says when it is there."""
        heir = self.heirs.get(sequence.key)
        if heir is None:
            return self._swap.fetch(sequence)
        if not heir.absent:
            return False
        host_blocks = self._swap.host_blocks_of(heir.kept.kv)
        loads = [(host_blocks[index], sequence.block_table[index]) for index in heir.absent]
        self._swap.load(sequence, loads, heir.kept.kv.num_computed)
        return True

    def started(self, sequence: Sequence) -> None:
        """It runs, and what it did not have to compute is known."""
        heir = self.heirs.pop(sequence.key, None)
        if heir is not None:
            self.let_go_after_step.append(heir.kept)
            self.num_inherited_tokens += sequence.num_computed
        if sequence.request_id in self._unanswered:
            self._unanswered.discard(sequence.request_id)
            num_tokens, num_cached = (0, sequence.num_computed) if heir is None else (sequence.num_computed, 0)
            self._outbox.news.append(Inherited(sequence.request_id, num_tokens, num_cached))

    def let_go(self, sequence: Sequence) -> None:
        """It ended before it started, or what it was to inherit did not come from the host in time."""
        heir = self.heirs.pop(sequence.key, None)
        if heir is not None:
            self._let_go(heir.kept)

    def end_step(self) -> None:
        let_go, self.let_go_after_step = self.let_go_after_step, []
        for kept in let_go:
            self._let_go(kept)

    # Endings

    def release(self, kept_ids: Iterable[KeptId]) -> None:
        for kept_id in kept_ids:
            kept = self._find(kept_id)
            if kept is not None:
                self._be_over(kept)

    def expire(self) -> bool:
        now = self._clock()
        if now < self._next_expiry_s:
            return False
        for kept in list(self.samples.values()):
            if kept.expires_s <= now and not kept.is_over:
                self._be_over(kept)
        self._next_expiry_s = min((one.expires_s for one in self.samples.values() if not one.is_over), default=math.inf)
        return True

    def _be_over(self, kept: KeptSample) -> None:
        kept.is_over = True
        self._num_over += 1
        if not kept.num_holds:
            self._end(kept)

    def _let_go(self, kept: KeptSample) -> None:
        kept.num_holds -= 1
        if kept.is_over and not kept.num_holds:
            self._end(kept)

    def _end(self, kept: KeptSample) -> None:
        self.blocks.release(kept)
        self._num_over -= 1
        del self.samples[kept.kept_id]

    # What others want to know

    def __len__(self) -> int:
        """Those that can be inherited from."""
        return len(self.samples) - self._num_over

    def find(self, handle: str, owner: str) -> list[KeptInfo]:
        return [
            kept.info(self._clock(), self._kv.blocks_for(kept.kv.num_computed))
            for kept in self.samples.values()
            if kept.owner == owner and not kept.is_over and handle in (kept.kept_id, kept.kv.request.external_id)
        ]

    def _find(self, kept_id: KeptId | None) -> KeptSample | None:
        kept = None if kept_id is None else self.samples.get(kept_id)
        return None if kept is None or kept.is_over else kept
