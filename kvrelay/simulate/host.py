"""One host for all workers: passes that are under way at the same time slow each other.

A pass has so much to do, in seconds that it would take alone. While others are under way with it, it gets on slower by a factor
that depends on how many they are and of which kind; so whenever one begins or ends, the ends of all others are foretold anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvrelay.simulate.costs import Costs, State, most_like
from kvrelay.simulate.loop import VirtualLoop

EndsAt = Callable[[float], None]
Slower = Callable[[bool, State], float]
"""How many times longer than alone a pass takes, by whether it has prompts or images, and by what is under way with it."""


def sharing_of(costs: Costs, cores: int) -> Slower | None:
    """None: workers share nothing."""
    if cores:
        return lambda has_prompts, state: max(1.0, sum(state) / cores)
    tables = {True: costs.prefill_sharing, False: costs.decode_sharing}
    return (lambda has_prompts, state: max(1.0, most_like(tables[has_prompts], state))) if all(tables.values()) else None


@dataclass(slots=True, eq=False)
class Pass:
    """Under way. Who computes is told when it will end, and told again when that changes."""

    left_s: float  # to do, alone
    has_prompts: bool
    ends_at: EndsAt
    factor: float = 0.0  # of its end that was told last


class Host:
    def __init__(self, loop: VirtualLoop, slower: Slower) -> None:
        self._loop = loop
        self._slower = slower
        self._passes: list[Pass] = []
        self._state: State = (0, 0)
        self._looked_at = 0.0

    def takes_s(self, seconds: float, *, has_prompts: bool) -> float:
        """What a pass that begins now will take, if no other one begins or ends."""
        return seconds * self._slower(has_prompts, self.state_with(has_prompts=has_prompts))

    @property
    def has_steps(self) -> bool:
        """Under way."""
        return self._state[1] > 0

    def state_with(self, *, has_prompts: bool) -> State:
        """Once a pass has begun."""
        return self._add(has_prompts, 1)

    def begin(self, seconds: float, ends_at: EndsAt, *, has_prompts: bool) -> Pass:
        self._get_on()
        begun = Pass(seconds, has_prompts, ends_at)
        self._passes.append(begun)
        self._state = self.state_with(has_prompts=has_prompts)
        self._foretell()
        return begun

    def end(self, ended: Pass) -> None:
        """It was computed, or its worker is gone."""
        self._get_on()
        self._passes.remove(ended)
        self._state = self._add(ended.has_prompts, -1)
        self._foretell()

    def _get_on(self) -> None:
        passed_s = self._loop.now - self._looked_at
        self._looked_at = self._loop.now
        for one in self._passes:
            one.left_s = max(0.0, one.left_s - passed_s / one.factor)

    def _foretell(self) -> None:
        for one in self._passes:
            factor = self._slower(one.has_prompts, self._state)
            if factor != one.factor:
                one.factor = factor
                one.ends_at(self._loop.now + one.left_s * factor)

    def _add(self, has_prompts: bool, count: int) -> State:
        num_prompts, num_steps = self._state
        return (num_prompts + count, num_steps) if has_prompts else (num_prompts, num_steps + count)
