"""A `Runner` that computes nothing. Every token is the same one; what a pass costs is added to the worker's clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvrelay.engine.fence import PASSED, Fence
from kvrelay.engine.interfaces import LayerListener, Row, RowResult, SequenceView, StepPlan, StepResult
from kvrelay.simulate.costs import Costs, attended

TOKEN = 7
_NOTHING = RowResult([])
_ONE = RowResult([TOKEN])
_LONGEST_S = 1.0  # of steps that are taken together, so that the router hears of the worker
_MOST_GROWTH = 0.01  # of a step, in such steps


class CostRunner:
    """`spend` is told the seconds of each pass, when it is collected, and whether it has prompts."""

    num_host_blocks = 0
    runs_ahead = False

    def __init__(self, costs: Costs, num_blocks: int, spend: Callable[[float, bool], None]) -> None:
        self.num_blocks = num_blocks
        self._costs = costs
        self._spend = spend
        self._held_s = costs.held_s
        self._decode_s: dict[int, float] = {}  # without what the sequences hold
        self._plan = StepPlan()

    def launch(self, plan: StepPlan) -> None:
        self._plan = plan

    def collect(self) -> StepResult:
        rows = self._plan.rows
        num_tokens = sum([row.count for row in rows])
        if num_tokens == len(rows) == sum([row.samples for row in rows]):  # the usual case of a decode worker
            self._spend(self.decode_s(len(rows), num_tokens + sum([row.start for row in rows])) if rows else 0.0, False)
            return StepResult([_ONE] * len(rows))
        self._spend(self._mixed_s(rows), True)
        return StepResult([_ONE if row.samples == 1 else _answer(row.samples) for row in rows])

    def _mixed_s(self, rows: Sequence[Row]) -> float:
        held = [row.start + 1 for row in rows if row.count == 1]
        prompts = [row for row in rows if row.count > 1]
        num_pairs = sum(attended(row.start, row.count) for row in prompts)
        num_tokens = sum(row.count for row in prompts)
        return self._costs.pass_s(num_tokens, len(held), num_pairs=num_pairs, num_held=sum(held))

    def decode_s(self, num_sequences: int, num_held: int) -> float:
        """Of a step of sequences that hold so many tokens, the ones that it computes included."""
        known = self._decode_s.get(num_sequences)
        if known is None:
            known = self._decode_s[num_sequences] = self._costs.pass_s(0, num_sequences)
        return known + num_held * self._held_s

    def steps_s(self, num_sequences: int, num_held: int, most: int) -> tuple[int, float]:
        """Up to so many steps, of which none takes noticeably longer than the first; and what each takes, on average."""
        first_s, growth_s = self.decode_s(num_sequences, num_held), num_sequences * self._held_s
        if growth_s:
            most = min(most, 1 + int(_MOST_GROWTH * first_s / growth_s))
        count = min(most, int(_LONGEST_S / first_s))
        return count, first_s + growth_s * (count - 1) / 2

    def begin_copies(self, saves: Sequence[tuple[int, int]], loads: Sequence[tuple[int, int]]) -> int:
        raise AssertionError("there are no host blocks")

    def finished_copies(self, wait_s: float = 0.0) -> list[int]:
        return []

    def on_layer(self, listener: LayerListener) -> None:
        """Transfers know from the cost of a layer when it was there."""

    def expect(self, sequences: Sequence[SequenceView]) -> None:
        """Nothing takes long."""

    def fence(self) -> Fence:
        return PASSED

    def close(self) -> None:
        pass


def _answer(samples: int) -> RowResult:
    return RowResult([TOKEN] * samples) if samples else _NOTHING
