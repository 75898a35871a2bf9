"""The next decode step, launched before the one under way is collected, so that the device never waits for the engine.

Where nothing but decoding is to be done, the step after this one is known but for its tokens: each sequence that does not
reach its length takes one more. `RunAhead` plans it while the device computes, and the runner takes the tokens where they are
(`Runner.runs_ahead`). A sequence that was handed over meanwhile has its first token, and joins. Nothing else may be under way:
no prompt, fork, search, swap or image, no row whose parameters look at the tokens so far, and a block must be free for every
sequence that needs one.

A sequence may end while a step with it runs ahead: by its token, by its client, by a failure. Then what that step computes for
it is dropped. Its blocks are free at once, and are safe: whatever the device does with them later comes after that step, and
a peer that is given them learns of it behind a fence.

While requests wait, a plan is made at least every few steps, so that they get the room that others leave. Those whose peer
computes their prompt wait for nothing that a plan could give them.
"""

from __future__ import annotations

from kvrelay.engine.core import Core
from kvrelay.engine.interfaces import Row, Runner, SequenceView, StepPlan, StepResult
from kvrelay.engine.request import Sequence
from kvrelay.states import RequestState

_MOST_WHILE_WAITING = 8


class RunAhead:
    """Holds the plan that runs ahead, if there is one."""

    def __init__(self, core: Core, runner: Runner) -> None:
        self._scheduler = core.scheduler
        self._pool = core.kv.pool
        self._block_size = core.kv.block_size
        self._incoming = core.incoming
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
        newcomers = self._newcomers(plan) if self._nothing_else(plan) else None
        rows = [row for row in plan.rows if not self._reaches_its_length(row.sequence)]
        if newcomers is None or not rows or (len(rows) < len(plan.rows) and self._num_waiting):
            return
        ahead = [Row(row.sequence, row.start + row.count, 1, 1) for row in rows] + newcomers
        if all(map(_is_plain, ahead)) and self._grow(ahead):
            self.plan = StepPlan(rows=ahead, released=released.copy())
            released.clear()
            self._runner.launch(self.plan)

    @property
    def _num_waiting(self) -> int:
        return self._scheduler.queue.num_waiting + len(self._incoming.startable)

    def _nothing_else(self, plan: StepPlan) -> bool:
        scheduler = self._scheduler
        if scheduler.swapped or scheduler.loading or scheduler.num_held_up:
            return False
        if self._num_waiting and (not scheduler.starved or self._num_in_turn >= _MOST_WHILE_WAITING):
            return False
        return all(_is_running(row) and row.samples == 1 and not row.prompt_logprobs for row in plan.rows)

    def _newcomers(self, plan: StepPlan) -> list[Row] | None:
        """Rows of the sequences that run and are not in `plan`; None if one of them has more to do than to decode."""
        if len(plan.rows) == len(self._scheduler.running):
            return []
        known = {row.sequence.key for row in plan.rows}
        found = [sequence for sequence in self._scheduler.running if sequence.key not in known]
        if not all(map(self._only_decodes, found)):
            return None
        return [Row(sequence, sequence.num_computed, 1, 1) for sequence in found]

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
