"""Who computes what in the next step.

The rules of both roles: those that run and those whose KV is on its way together are never more than `max_batch`; a decode
worker's sequence runs only when its transfer has finished, and transfers start whenever there is room; prompts start when
nothing runs or some of the budget is left, at most `max_running_prefills` at once.

Running sequences come first, in order of priority and arrival; then waiting ones, while there is room. A sequence that is
decoding always gets its one token; prompts share what is left of the token budget, in chunks. When the pool is empty, the
sequence that is last in order gives its blocks back and waits again (its tokens are kept and recomputed later); since a
step is planned in that same order, nobody who is already part of the step is ever chosen.

Samples of one request that are computed anew (preempted, or resumed here) share their prompt through the prefix cache: one
computes it, the others wait that long.
"""

from __future__ import annotations

import heapq
from bisect import insort

from kvrelay.config import EngineOptions
from kvrelay.engine.incoming import Incoming
from kvrelay.engine.interfaces import Row, StepPlan
from kvrelay.engine.kv_cache import KVCache
from kvrelay.engine.outgoing import Outgoing
from kvrelay.engine.request import Sequence
from kvrelay.states import RequestState


class Scheduler:
    """Holds the queue and the batch. Touches no tensor, no socket and no clock."""

    def __init__(
        self, options: EngineOptions, kv: KVCache, incoming: Incoming | None = None, outgoing: Outgoing | None = None
    ) -> None:
        self._options = options
        self._kv = kv
        self._incoming = incoming
        self._outgoing = outgoing
        self._watermark = max(1, kv.pool.num_blocks // 100)
        self._waiting: list[tuple[tuple[int, int, int], Sequence]] = []  # a heap; those that ended are skipped when met
        self.running: list[Sequence] = []  # sorted by order
        self.num_waiting = 0
        self.num_preemptions = 0
        self.starved = False  # the last plan left somebody waiting for a place or for blocks

    def add(self, sequence: Sequence) -> None:
        heapq.heappush(self._waiting, (sequence.order, sequence))
        self.num_waiting += 1

    def run_at_once(self, sequence: Sequence) -> None:
        """Its KV is there already: it was forked, or handed over. Its place in the batch was kept for it."""
        sequence.become(RequestState.RUNNING)
        insort(self.running, sequence, key=lambda s: s.order)

    def remove(self, sequence: Sequence) -> None:
        """The sequence ended."""
        if sequence.state is RequestState.RUNNING:
            self.running.remove(sequence)
        else:
            self.num_waiting -= 1
        self._kv.free(sequence)
        sequence.become(RequestState.FINISHED)

    @property
    def waiting(self) -> list[Sequence]:
        return [sequence for _, sequence in self._waiting if sequence.state is RequestState.WAITING]

    def schedule(self) -> StepPlan:
        plan = StepPlan()
        num_decoding = sum([len(sequence.tokens) - sequence.num_computed == 1 for sequence in self.running])
        budget = max(1, self._options.token_budget - num_decoding)
        budget = self._schedule_running(plan, budget)
        self.starved = False
        if self._incoming is not None and self._incoming.has_startable:
            self._admit_in_order(plan, budget, self._incoming)
        elif self._waiting:
            self._schedule_waiting(plan, budget)
        return plan

    def _admit_in_order(self, plan: StepPlan, budget: int, incoming: Incoming) -> None:
        """Transfers and prompts computed here take the same places and blocks, so who came later must not take what an earlier
        one of the other kind waits for: under steady load that one would wait for ever."""
        waiting = self._first_waiting()
        if incoming.reserve(self._num_free_slots, self._headroom, None if waiting is None else waiting.order):
            self._schedule_waiting(plan, budget)
            if not self.starved:
                incoming.reserve(self._num_free_slots, self._headroom)

    def _first_waiting(self) -> Sequence | None:
        while self._waiting and self._waiting[0][1].state is not RequestState.WAITING:
            heapq.heappop(self._waiting)  # it ended meanwhile
        return self._waiting[0][1] if self._waiting else None

    @property
    def _num_free_slots(self) -> int:
        taken = sum(sequence.num_slots for sequence in self.running)
        if self._incoming is not None:
            taken += sum(sequence.num_slots for sequence in self._incoming.transferring)
        if self._outgoing is not None:
            taken += len(self._outgoing.held)
        return self._options.max_batch - taken

    @property
    def _headroom(self) -> int:
        """Blocks to leave for those that run, so that newcomers do not make them stop at once."""
        return self._watermark if self.running else 0

    def _schedule_running(self, plan: StepPlan, budget: int) -> int:
        index, running, rows, grow, copies = 0, self.running, plan.rows, self._kv.grow, plan.copies
        while index < len(running):  # it gets shorter when somebody is preempted
            sequence = running[index]
            computed = sequence.num_computed
            uncomputed = len(sequence.tokens) - computed
            count = 1 if uncomputed == 1 else min(uncomputed, budget)
            if count > 0:
                if not grow(sequence, computed + count, copies) and not self._make_room(sequence, computed + count, plan):
                    break  # it was last in order and preempted itself
                if uncomputed > 1:
                    budget -= count
                rows.append(_row(sequence, count))
            index += 1
        return budget

    def _make_room(self, sequence: Sequence, num_tokens: int, plan: StepPlan) -> bool:
        while not self._kv.grow(sequence, num_tokens, plan.copies):
            victim = self.running.pop()
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._kv.free(sequence)
        sequence.become(RequestState.WAITING)
        collected = sequence.request.prompt_logprobs
        if sequence.wants_prompt_logprobs and collected is not None:
            del collected[1:]  # the prompt starts over
        self.num_preemptions += 1
        self.add(sequence)

    def _schedule_waiting(self, plan: StepPlan, budget: int) -> None:
        slots = self._num_free_slots
        limit = self._options.max_running_prefills
        num_prefills = sum(1 for row in plan.rows if row.sequence.num_prompt_tokens > row.start)
        while self._waiting and budget > 0 and (limit == 0 or num_prefills < limit):
            sequence = self._waiting[0][1]
            if sequence.state is not RequestState.WAITING:
                heapq.heappop(self._waiting)
                continue
            if self._waits_for_sibling(sequence):
                return
            if sequence.num_slots > slots or not self._kv.attach(sequence, headroom=self._headroom):
                self.starved = True
                return
            heapq.heappop(self._waiting)
            self.num_waiting -= 1
            sequence.become(RequestState.RUNNING)
            insort(self.running, sequence, key=lambda s: s.order)
            if sequence.num_output_tokens == 0 and sequence.sample == 0:
                sequence.cached_tokens = sequence.num_computed
            count = min(sequence.num_uncomputed, budget)
            budget -= count
            slots -= sequence.num_slots
            num_prefills += 1
            plan.rows.append(_row(sequence, count))

    def _waits_for_sibling(self, sequence: Sequence) -> bool:
        siblings = sequence.request.sequences
        if len(siblings) == 1 or not self._options.prefix_cache:
            return False
        shared = sequence.num_prompt_tokens // self._options.block_size * self._options.block_size
        return any(sibling.state is RequestState.RUNNING and sibling.num_computed < shared for sibling in siblings)


def _row(sequence: Sequence, count: int) -> Row:
    start = sequence.num_computed
    samples = 0
    if start + count == len(sequence.tokens):
        samples = 1 + sequence.request.num_unforked if sequence.sample == 0 else 1
    if sequence.request.prompt_logprobs is None:
        return Row(sequence, start, count, samples)
    return Row(sequence, start, count, samples, sequence.wants_prompt_logprobs)
