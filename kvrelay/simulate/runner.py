"""A `Runner` that computes nothing. Every token is the same one; what a pass costs is added to the worker's clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvrelay.engine.fence import PASSED, Fence
from kvrelay.engine.interfaces import LayerListener, RowResult, SequenceView, StepPlan, StepResult
from kvrelay.simulate.costs import Costs

TOKEN = 7
_NOTHING = RowResult([])
_ONE = RowResult([TOKEN])


class CostRunner:
    """`spend` is told the seconds of each pass, when it is collected, and whether it has prompts."""

    num_host_blocks = 0
    runs_ahead = False

    def __init__(self, costs: Costs, num_blocks: int, spend: Callable[[float, bool], None]) -> None:
        self.num_blocks = num_blocks
        self._costs = costs
        self._spend = spend
        self._decode_s: dict[int, float] = {}
        self._plan = StepPlan()

    def launch(self, plan: StepPlan) -> None:
        self._plan = plan

    def collect(self) -> StepResult:
        rows = self._plan.rows
        num_tokens = sum([row.count for row in rows])
        if num_tokens == len(rows) == sum([row.samples for row in rows]):  # the usual case of a decode worker
            self._spend(self.decode_s(len(rows)) if rows else 0.0, False)
            return StepResult([_ONE] * len(rows))
        num_decoding = sum([row.count == 1 for row in rows])
        self._spend(self._costs.pass_s(num_tokens - num_decoding, num_decoding), True)
        return StepResult([_ONE if row.samples == 1 else _answer(row.samples) for row in rows])

    def decode_s(self, num_sequences: int) -> float:
        known = self._decode_s.get(num_sequences)
        if known is None:
            known = self._decode_s[num_sequences] = self._costs.pass_s(0, num_sequences)
        return known

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
