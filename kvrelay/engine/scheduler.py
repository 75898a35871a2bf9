"""Who computes what in the next step.

The rules of both roles: those that run and those whose KV is on its way together are never more than `max_batch`; a decode
worker's sequence runs only when its transfer has finished, and transfers start whenever there is room; prompts start when
nothing runs or some of the budget is left, at most `max_running_prefills` at once.

Running sequences come first, by priority and by who would be the last to make room for the others (`--preempt`: usually who
came first); then swapped ones; then waiting ones, while there is room. A sequence that is decoding always gets its one token;
prompts share what is left of the token budget, in chunks.

When the pool is empty, the running sequence that is last makes room; since a step is planned in that same order, no sequence
that is already part of the step is ever chosen. Its KV goes to the host if there is room (`engine/memory/swap.py`), and until
it is there, the sequence that needed the blocks sits out. Else its KV is given up and computed again later. Its tokens are kept
either way. Before any running sequence has to, kept KV makes room in the same way (`engine/memory/kept.py`), as far as it can.

No sequence stays swapped for ever. Swapped sequences come back by priority and arrival, the first one first, whenever those
that run leave enough blocks; as long as one of them has to wait, no new one is admitted. So those that run get fewer: each step
brings at least one of them a token nearer to its end, and when the last has ended, the first swapped one has the pool to
itself. It waits at most as many steps as the requests that were admitted before still have tokens to compute, and for copies.

The beams of a search count as one here: they are planned, make room, are swapped and come back together.

A prompt is computed up to its first image whose embeddings are not here (`engine/requests/images.py`). One that runs sits out
until they are; one that waits and has nothing before them is set aside, so that others go first.

Samples of one request that are computed anew (preempted, or resumed here) share their prompt through the prefix cache: one
computes it, the others wait that long.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from functools import partial

from kvrelay.config import EngineOptions
from kvrelay.engine.interfaces import Row, StepPlan
from kvrelay.engine.memory.kept import KeptKV
from kvrelay.engine.memory.kv_cache import KVCache
from kvrelay.engine.memory.swap import Swap
from kvrelay.engine.queue import Queue
from kvrelay.engine.request import BeamGroup, Sequence
from kvrelay.engine.requests.images import Images
from kvrelay.engine.requests.incoming import Incoming
from kvrelay.engine.requests.outgoing import Outgoing
from kvrelay.states import FreeReason, RequestState
from kvrelay.wire.events import FreedForNow

_SMALLEST_PIECES = 8  # of a step's budget: what is left of it is a smaller one
Order = tuple[int, int, int]


class Scheduler:
    """Holds the queue and the batch. Touches no tensor, no socket and no clock."""

    def __init__(
        self,
        options: EngineOptions,
        kv: KVCache,
        kept: KeptKV,
        swap: Swap,
        incoming: Incoming,
        outgoing: Outgoing,
        images: Images,
    ) -> None:
        self._options = options
        self._kv = kv
        self._kept = kept
        self._incoming = incoming
        self._outgoing = outgoing
        self._swap = swap
        self._images = images
        self.rank: Callable[[Sequence], Order] = _latest_last if options.preempt == "latest" else _oldest_last
        self._watermark = max(1, kv.pool.num_blocks // 100)
        self.queue = Queue()
        self.running: list[Sequence] = []  # sorted by rank: the last one makes room first
        self.swapped: list[Sequence] = []  # sorted by order
        self.loading: list[Sequence] = []  # have blocks, into which their KV is copied from the host
        self.num_held_up = 0  # running ones that sat out the last step for their images
        self.num_preemptions = 0
        self.discarded: list[int] = []  # keys of beams that a search gave up; the engine takes them
        self.starved = False  # the last plan left a sequence waiting for a row of the batch or for blocks
        self._num_short = 0  # blocks that sequences which sit out this step need
        self._full_budget = 0  # for the prompts of this step

    def recall(self) -> None:
        """Images have come, or will not."""
        self.queue.recall()
        self.num_held_up = 0

    def run_at_once(self, sequence: Sequence) -> None:
        """Its KV is there already: it was forked, or handed over. Its row of the batch was kept for it."""
        sequence.become(RequestState.RUNNING)
        insort(self.running, sequence, key=self.rank)

    def remove(self, sequence: Sequence) -> None:
        self.num_held_up = 0
        match sequence.state:
            case RequestState.RUNNING:
                self.running.remove(sequence)
            case RequestState.WAITING:
                self.queue.ended()
            case RequestState.SWAPPED | RequestState.TRANSFERRING:
                (self.loading if sequence in self.loading else self.swapped).remove(sequence)
                self._swap.drop(sequence)
            case RequestState.FINISHED:
                raise AssertionError(f"{sequence.request_id} ended twice")
        self._kv.free(sequence)
        sequence.become(RequestState.FINISHED)

    def discard(self, sequence: Sequence) -> None:
        """A beam that its search does not follow any further."""
        self.remove(sequence)
        self._forget_beam(sequence)

    def _forget_beam(self, sequence: Sequence) -> None:
        sequence.request.sequences.remove(sequence)
        self.discarded.append(sequence.key)

    def take_copied(self, wait_s: float) -> None:
        """What came of copies to and from the host. If none ended, waits up to `wait_s` for one."""
        if self._swap.is_idle:
            return
        news = self._swap.poll(wait_s)
        self._kept.blocks.copied(news.stayed)
        for sequence in news.restored + news.fetched:
            self.loading.remove(sequence)
            self.run_at_once(sequence)
        for sequence in news.fetched:
            self._note_start(sequence)
        for sequence in news.lost_out:
            self.swapped.remove(sequence)
            self._recompute(sequence, FreeReason.SWAP_OUT_TIMEOUT)
        for sequence in news.lost_in:
            self.loading.remove(sequence)
            self._kept.let_go(sequence)
            self._recompute(sequence, FreeReason.SWAP_IN_TIMEOUT)

    def schedule(self) -> StepPlan:
        plan = StepPlan()
        num_decoding = sum([len(sequence.tokens) - sequence.num_computed == 1 for sequence in self.running])
        self._full_budget = budget = max(1, self._options.token_budget - num_decoding)
        self._num_short = self.num_held_up = 0
        budget = self._schedule_running(plan, budget)
        self.starved = False
        if self.swapped or self._num_short:
            self._bring_back()
        elif self._incoming.startable:
            self._admit_in_order(plan, budget)
        elif self.queue:
            self._schedule_waiting(plan, budget)
        return plan

    def admit_ahead(self, plan: StepPlan, budget: int, full_budget: int, coming: set[bytes]) -> None:
        """Prompts that wait, to a plan that runs ahead: up to the first whose next block is among `coming`, which the cache
        will have. `budget` is what is left of that for prompts."""
        self._full_budget, self.starved = full_budget, False
        self._schedule_waiting(plan, budget, coming)

    def reserve_early(self) -> None:
        """While a step is under way: blocks for transfers, where no one else waits for any."""
        if self._incoming.startable and not (self.queue.num_waiting or self.swapped or self.loading):
            self._incoming.reserve(self._num_free_rows, self._headroom)

    def _admit_in_order(self, plan: StepPlan, budget: int) -> None:
        """Transfers and prompts computed here take the same rows and blocks, so a later one must not take what an earlier one
        of the other kind waits for: under steady load that one would wait for ever."""
        incoming, waiting = self._incoming, self.queue.first()
        if incoming.reserve(self._num_free_rows, self._headroom, None if waiting is None else waiting.order):
            self._schedule_waiting(plan, budget)
            if self.starved or incoming.reserve(self._num_free_rows, self._headroom):
                return
        self._kept.blocks.make_room_for([incoming.startable[0][1]], self._headroom + 1)  # and for its next token

    def _bring_back(self) -> None:
        """Swapped sequences, in order. Not while a running one is short of blocks: it would be sent away again."""
        while self.swapped and not self._num_short:
            sequence = self.swapped[0]
            together = sequence.together
            if not self._swap.is_saved(sequence) or sum(one.num_batch_rows for one in together) > self._num_free_rows:
                return
            if not self._swap.swap_in(together, headroom=self._headroom):
                self._kept.blocks.make_room_for(together, self._headroom)
                return
            self.loading += self.swapped[: len(together)]
            del self.swapped[: len(together)]

    @property
    def _num_free_rows(self) -> int:
        taken = sum([sequence.num_batch_rows for sequence in self.running])
        taken += sum([sequence.num_batch_rows for sequence in self.loading])
        taken += sum(sequence.num_batch_rows for sequence in self._incoming.transferring)
        return self._options.max_batch - taken - len(self._outgoing.held)

    @property
    def _headroom(self) -> int:
        """Blocks to leave for those that run, so that newcomers do not make them stop at once."""
        return self._watermark if self.running or self.loading else 0

    def _headroom_for(self, sequence: Sequence) -> int:
        """A search that was thrown out once comes in where it can stay."""
        search = sequence.request.search
        if search is None or not search.has_restarted or not (self.running or self.loading):
            return self._headroom
        return self._headroom + search.most_blocks - self._kv.blocks_for(len(sequence.tokens))

    def _schedule_running(self, plan: StepPlan, budget: int) -> int:
        rows, grow, copies = plan.rows, self._kv.grow, plan.copies
        size, references = self._kv.block_size, self._kv.pool.references
        planned: BeamGroup | None = None
        for sequence in self.running:  # it gets shorter when a sequence is preempted, always at its end
            computed = sequence.num_computed
            uncomputed = len(sequence.tokens) - computed
            request = sequence.request
            search = request.search
            if search is not None and search.has_begun:
                if search is not planned:  # they stand next to each other
                    planned = search
                    self._schedule_beams(sequence.together, search.num_candidates, plan)
                continue
            if uncomputed == 1 and search is None:
                # The usual case, without a call: it decodes, and its last block has room and is its own.
                table = sequence.block_table
                place = computed // size
                if place < len(table) and references[table[place]] == 1 and not request.num_unforked:
                    rows.append(Row(sequence, computed, 1, 1) if request.prompt_logprobs is None else row_of(sequence, 1))
                    continue
            count = 1 if uncomputed == 1 else min(uncomputed, budget)
            if uncomputed > 1 and sequence.request.images:
                reachable = self._reachable(sequence)
                count = min(count, reachable)
                self.num_held_up += reachable == 0
            if count > 0:
                end = computed + count
                if not grow(sequence, end, copies) and not self._make_room(
                    sequence, self._kv.missing(sequence, end), partial(grow, sequence, end, copies)
                ):
                    continue  # it sits out this step, or was last and is gone
                if uncomputed > 1:
                    budget -= count
                rows.append(row_of(sequence, count))
        return budget

    def _schedule_beams(self, beams: list[Sequence], num_candidates: int, plan: StepPlan) -> None:
        """All of them or none."""
        grow = partial(self._kv.grow_together, beams, plan.copies)
        if grow() or self._make_room(beams[0], self._kv.missing_together(beams), grow):
            plan.rows += [Row(beam, beam.num_computed, 1, 0, candidates=num_candidates) for beam in beams]

    def _make_room(self, sequence: Sequence, missing: int, grow: Callable[[], bool]) -> bool:
        """Until it can grow, which takes `missing` blocks at most. False if the sequence is no part of this step: its room is
        still being made, or it was last and made room itself."""
        while not grow():
            if self._swap.num_releasing >= self._num_short + missing:
                self._num_short += missing
                return False
            if self._kept.blocks.make_room(self._num_short + missing):
                continue
            self._preempt_last()
            if sequence.state is not RequestState.RUNNING:
                return False
        return True

    def _preempt_last(self) -> None:
        together = list(self.running[-1].together)
        del self.running[-len(together) :]
        self.num_preemptions += 1
        if self._swap.swap_out(together):
            for sequence in together:
                sequence.become(RequestState.SWAPPED)
                insort(self.swapped, sequence, key=lambda s: s.order)
            return
        for sequence in together:
            self._recompute(sequence, self._swap.gives_up_because)

    def _recompute(self, sequence: Sequence, reason: FreeReason) -> None:
        """The KV is given up, and the sequence waits again: a free that is not the end of it. Of a search, one sequence waits:
        it starts again from the prompt, and the others are forgotten."""
        self._kv.free(sequence)
        search = sequence.request.search
        if search is not None:
            if sequence.sample != 0:
                sequence.become(RequestState.FINISHED)
                self._forget_beam(sequence)
                return
            if search.has_begun:
                search.start_again(sequence, self._kv.block_size)
        sequence.become(RequestState.WAITING)
        collected = sequence.request.prompt_logprobs
        if sequence.wants_prompt_logprobs and collected is not None:
            del collected[1:]  # the prompt starts over
        self._kv.recorder.lived(FreedForNow(request=sequence.request.external_id, reason=reason))
        self.queue.add(sequence)

    def _schedule_waiting(self, plan: StepPlan, budget: int, coming: set[bytes] | None = None) -> None:
        num_rows = self._num_free_rows
        limit = self._options.max_running_prefills
        full_budget, block_size = self._full_budget, self._options.block_size
        num_prefills = sum(1 for row in plan.rows if row.sequence.num_prompt_tokens > row.start)
        while budget > 0 and (limit == 0 or num_prefills < limit):
            sequence = self.queue.first()
            if sequence is None or (self._options.prefix_cache and _waits_for_sibling(sequence, block_size)):
                return
            if sequence.num_batch_rows > num_rows or not self._kept.attach(sequence, headroom=self._headroom_for(sequence)):
                self.starved = True
                return
            if coming and self._kv.is_next(sequence, coming):
                self._roll_back(sequence)
                return
            reachable = self._reachable(sequence) if sequence.request.images else sequence.num_uncomputed
            count = min(reachable, budget)
            if budget < full_budget and count < reachable and _had_better_wait(count, reachable, full_budget, block_size):
                self._roll_back(sequence)
                return
            self.queue.pop()
            num_rows -= sequence.num_batch_rows
            if self._kept.fetch(sequence):
                sequence.become(RequestState.TRANSFERRING)
                self.loading.append(sequence)
                continue
            if not reachable:
                num_rows += sequence.num_batch_rows
                self._roll_back(sequence)
                self.queue.set_aside(sequence)
                continue
            self.run_at_once(sequence)
            self._note_start(sequence)
            has_room = self._kv.grow(sequence, sequence.num_computed + count, plan.copies)
            assert has_room, "no block is left to copy the last one of kept KV to"
            budget -= count
            num_prefills += 1
            plan.rows.append(row_of(sequence, count))

    def _roll_back(self, sequence: Sequence) -> None:
        """Its blocks are not held until the next step. It keeps its place."""
        self._kv.free(sequence)
        self._kv.recorder.lived(FreedForNow(request=sequence.request.external_id, reason=FreeReason.ROLLED_BACK))

    def _note_start(self, sequence: Sequence) -> None:
        if sequence.num_output_tokens == 0 and sequence.sample == 0:
            sequence.cached_tokens = sequence.num_computed
        self._kept.started(sequence)

    def _reachable(self, sequence: Sequence) -> int:
        """Tokens that can be computed before an image whose embeddings are not here."""
        return max(0, self._images.limit(sequence) - sequence.num_computed)


def _latest_last(sequence: Sequence) -> Order:
    return sequence.order


def _oldest_last(sequence: Sequence) -> Order:
    priority, arrival, sample = sequence.order
    return priority, -arrival, -sample


def _had_better_wait(count: int, reachable: int, full_budget: int, block_size: int) -> bool:
    """Whether a prompt starts with the next step instead of being cut: where other prompts left it less than a block, or
    little, and the next step can compute all of it. Its first token comes no later, and attention over a prompt in one
    piece is faster than over two."""
    return count < block_size or (reachable <= full_budget and count * _SMALLEST_PIECES < full_budget)


def _waits_for_sibling(sequence: Sequence, block_size: int) -> bool:
    siblings = sequence.request.sequences
    if len(siblings) == 1:
        return False
    shared = sequence.num_prompt_tokens // block_size * block_size
    return any(sibling.state is RequestState.RUNNING and sibling.num_computed < shared for sibling in siblings)


def row_of(sequence: Sequence, count: int, start: int | None = None) -> Row:
    """From `num_computed`, if no other start is given."""
    start = sequence.num_computed if start is None else start
    search = sequence.request.search
    if search is not None:
        is_last = start + count == len(sequence.tokens)
        return Row(sequence, start, count, 0, candidates=search.num_candidates if is_last else 0)
    samples = 0
    if start + count == len(sequence.tokens):
        samples = 1 + sequence.request.num_unforked if sequence.sample == 0 else 1
    if sequence.request.prompt_logprobs is None:
        return Row(sequence, start, count, samples)
    return Row(sequence, start, count, samples, sequence.wants_prompt_logprobs)
