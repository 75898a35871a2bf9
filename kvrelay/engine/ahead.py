"""The next step, launched before the one under way is collected, so that the device never waits for the engine.

The step after this one is known but for its tokens: each sequence that decodes and does not reach its length takes one more,
and prompts are computed further. `RunAhead` plans it while the device computes, and the runner takes the tokens where they are
(`Runner.runs_ahead`). A sequence that was handed over meanwhile has its first token, and joins. Nothing else may be under way:
no fork, search, swap or image, no row whose parameters look at the tokens so far, and a block must be free for every
sequence that needs one.

Prompts are part of such a step where those that run and wait fill it, so that a request that comes a moment later would have
had no place in it either. A prompt whose next block is being computed for another one waits until it can be found.

A sequence may end while a step with it runs ahead: by its token, by its client, by a failure. Then what that step computes for
it is dropped. Its blocks are free at once, and are safe: whatever the device does with them later comes after that step, and
a peer that is given them learns of it behind a fence.

While requests wait for room, a plan is made at least every few steps, so that they get what others leave. Those whose peer
computes their prompt wait for nothing that a plan could give them.
"""

from __future__ import annotations

from kvrelay.engine.core import Core
from kvrelay.engine.interfaces import Row, Runner, SequenceView, StepPlan, StepResult
from kvrelay.engine.request import Sequence
from kvrelay.engine.scheduler import row_of
from kvrelay.states import RequestState

_MOST_WHILE_WAITING = 8
UnderWay = tuple[Sequence, int]  # a prompt, and where it will be once the step under way is collected


class RunAhead:
    """Holds the plan that runs ahead, if there is one."""

    def __init__(self, core: Core, runner: Runner) -> None:
        self._scheduler = core.scheduler
        self._kv = core.kv
        self._pool = core.kv.pool
        self._block_size = core.kv.block_size
        self._incoming = core.incoming
        self._token_budget = core.options.token_budget
        self._takes_images = core.limits.takes_images
        self._max_model_len = core.limits.model.max_model_len
        self._runner = runner
        self._num_in_turn = 0  # steps since the last plan that the scheduler made
        self.plan: StepPlan | None = None

    def take(self) -> StepPlan | None:
        """The plan that was launched ahead and is to be collected now."""
        plan, self.plan = self.plan, None
        self._num_in_turn = 0 if plan is None else self._num_in_turn + 1
        return plan

    def launch_after(self, plan: StepPlan, released: list[int]) -> None:
        """Plans and launches the step after `plan`, which is under way, where all that it lacks are the tokens of that one. The
        runner then forgets those `released`, too."""
        if not self._runner.runs_ahead:
            return
        self._scheduler.reserve_early()
        going = self._going_on(plan) if self._nothing_else(plan) else None
        if going is None:
            return
        decodes, prompts = going
        if not all(map(_is_plain, decodes)) or not self._grow(decodes):
            return
        ahead = StepPlan(rows=decodes)
        has_prompts = prompts or (self._scheduler.queue.num_waiting and not self._waits_for_room)
        if has_prompts and (self._takes_images or not self._add_prompts(ahead, prompts, plan)):
            return
        if ahead.rows:
            self.plan, ahead.released = ahead, released.copy()
            released.clear()
            self._runner.launch(ahead)

    @property
    def _waits_for_room(self) -> bool:
        """Whether a request waits for rows or blocks that another one has, or is to be given blocks for its transfer."""
        return self._scheduler.starved or bool(self._incoming.startable)

    def _nothing_else(self, plan: StepPlan) -> bool:
        scheduler = self._scheduler
        if scheduler.swapped or scheduler.loading or scheduler.num_held_up:
            return False
        if self._incoming.startable and not scheduler.starved:
            return False
        if self._waits_for_room and self._num_in_turn >= _MOST_WHILE_WAITING and self._num_waiting:
            return False
        return all(
            _is_running(row) and row.samples <= 1 and not row.candidates and not row.prompt_logprobs for row in plan.rows
        )

    @property
    def _num_waiting(self) -> int:
        return self._scheduler.queue.num_waiting + len(self._incoming.startable)

    def _going_on(self, plan: StepPlan) -> tuple[list[Row], list[UnderWay]] | None:
        """What those that run have to do after `plan`: who decodes, and prompts with the place that they have come to. None if
        something else is to be done, or one of them ends and leaves room to another that waits for it."""
        decodes: list[Row] = []
        prompts: list[UnderWay] = []
        for row in plan.rows:
            end = row.start + row.count
            if not row.samples:
                assert isinstance(row.sequence, Sequence)
                prompts.append((row.sequence, end))
            elif not self._reaches_its_length(row.sequence):
                decodes.append(Row(row.sequence, end, 1, 1))
            elif self._num_waiting and self._waits_for_room:
                return None
        for sequence in self._others(plan):
            if self._only_decodes(sequence):
                decodes.append(Row(sequence, sequence.num_computed, 1, 1))
            elif sequence.num_uncomputed > 1:
                prompts.append((sequence, sequence.num_computed))
            else:
                return None
        return decodes, prompts

    def _others(self, plan: StepPlan) -> list[Sequence]:
        """That run, and had no place in `plan`."""
        if len(plan.rows) == len(self._scheduler.running):
            return []
        known = {row.sequence.key for row in plan.rows}
        return [sequence for sequence in self._scheduler.running if sequence.key not in known]

    def _add_prompts(self, ahead: StepPlan, under_way: list[UnderWay], plan: StepPlan) -> bool:
        """Beside the rows that decode: those under way, then those that wait. False, and nothing is added, if they are too few
        to fill a step."""
        scheduler, budget = self._scheduler, max(1, self._token_budget - len(ahead.rows))
        if not scheduler.queue.holds(budget - sum(len(sequence.tokens) - start for sequence, start in under_way)):
            return False
        left = budget
        for sequence, start in sorted(under_way, key=lambda one: scheduler.rank(one[0])):
            count = min(len(sequence.tokens) - start, left)
            if not count or not self._kv.grow(sequence, start + count, ahead.copies):
                return True
            ahead.rows.append(row_of(sequence, count, start))
            left -= count
        scheduler.admit_ahead(ahead, left, budget, self._digests_of(plan))
        return True

    def _digests_of(self, plan: StepPlan) -> set[bytes]:
        """The blocks that will be in the prefix cache once `plan` is collected, as far as it computes prompts."""
        found: set[bytes] = set()
        for row in plan.rows:
            if row.count > 1:
                assert isinstance(row.sequence, Sequence)
                found.update(self._kv.digests(row.sequence, row.start, row.start + row.count))
        return found

    def _only_decodes(self, sequence: Sequence) -> bool:
        """Whether its next step takes one token, and writes a block that is its own."""
        index, offset = divmod(sequence.num_computed, self._block_size)
        is_shared = offset != 0 and self._pool.references[sequence.block_table[index]] > 1
        is_decoding = sequence.num_prompt_tokens <= sequence.num_computed == len(sequence.tokens) - 1
        return is_decoding and not is_shared

    def _reaches_its_length(self, sequence: SequenceView) -> bool:
        """With the token that is being computed."""
        length = len(sequence.tokens) + 1
        return length - sequence.num_prompt_tokens >= sequence.params.max_tokens or length >= self._max_model_len

    def _grow(self, rows: list[Row]) -> bool:
        """Room for the token that each writes. The step under way made sure that the last block is the sequence's own, so
        nothing is copied."""
        wanting = []
        for row in rows:
            assert isinstance(row.sequence, Sequence)
            if row.start >= len(row.sequence.block_table) * self._block_size:
                wanting.append(row.sequence)
        blocks = self._pool.allocate(len(wanting))
        for sequence, block in zip(wanting, blocks or [], strict=blocks is not None):
            sequence.block_table.append(block)
        return blocks is not None


def without_ended(plan: StepPlan, result: StepResult) -> tuple[StepPlan, StepResult]:
    """Without the rows of sequences that have ended since they were planned."""
    if all(_is_running(row) for row in plan.rows):
        return plan, result
    left = [(row, answer) for row, answer in zip(plan.rows, result.rows, strict=True) if _is_running(row)]
    return StepPlan(rows=[row for row, _ in left]), StepResult(rows=[answer for _, answer in left])


def _is_running(row: Row) -> bool:
    assert isinstance(row.sequence, Sequence)
    return row.sequence.state is RequestState.RUNNING


def _is_plain(row: Row) -> bool:
    """Whether its token may be taken without a look at those before."""
    sequence = row.sequence
    assert isinstance(sequence, Sequence)
    params = sequence.params
    if sequence.request.num_unforked or sequence.request.search is not None:
        return False
    if params.penalised or params.grammar is not None or params.bad_tokens or sequence.adapter is not None:
        return False
    return row.start + 1 - sequence.num_prompt_tokens >= params.min_tokens
