"""One host for all workers: passes that are under way at the same time slow each other.

A pass has so much to do, in seconds that it would take alone. While others are under way with it, it gets on slower by a factor
that depends on how many they are; so whenever one begins or ends, the ends of all others are foretold anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvrelay.simulate.costs import Costs, Point, interpolate
from kvrelay.simulate.loop import VirtualLoop

EndsAt = Callable[[float], None]


def sharing_of(costs: Costs, cores: int) -> dict[bool, tuple[Point, ...]] | None:
    """By whether a pass has prompts or images: how many times longer it takes while so many are under way. None: workers share
    nothing."""
    if cores:
        return dict.fromkeys((True, False), ((cores, 1.0), (2 * cores, 2.0)))
    if costs.prefill_sharing and costs.decode_sharing:
        return {True: costs.prefill_sharing, False: costs.decode_sharing}
    return None


@dataclass(slots=True, eq=False)
class Pass:
    """Under way. Who computes is told when it will end, and told again when that changes."""

    left_s: float  # to do, alone
    has_prompts: bool
    ends_at: EndsAt
    factor: float = 0.0  # of its end that was told last


class Host:
    def __init__(self, loop: VirtualLoop, sharing: dict[bool, tuple[Point, ...]]) -> None:
        self._loop = loop
        self._sharing = sharing
        self._passes: list[Pass] = []
        self._looked_at = 0.0

    def takes_s(self, seconds: float, *, has_prompts: bool) -> float:
        """What a pass that begins now will take, if no other one begins or ends."""
        return seconds * self._factor(has_prompts, len(self._passes) + 1)

    def begin(self, seconds: float, ends_at: EndsAt, *, has_prompts: bool) -> Pass:
        self._get_on()
        begun = Pass(seconds, has_prompts, ends_at)
        self._passes.append(begun)
        self._foretell()
        return begun

    def end(self, ended: Pass) -> None:
        """It was computed, or its worker is gone."""
        self._get_on()
        self._passes.remove(ended)
        self._foretell()

    def _get_on(self) -> None:
        passed_s = self._loop.now - self._looked_at
        self._looked_at = self._loop.now
        for one in self._passes:
            one.left_s = max(0.0, one.left_s - passed_s / one.factor)

    def _foretell(self) -> None:
        for one in self._passes:
            factor = self._factor(one.has_prompts, len(self._passes))
            if factor != one.factor:
                one.factor = factor
                one.ends_at(self._loop.now + one.left_s * factor)

    def _factor(self, has_prompts: bool, num_passes: int) -> float:
        return max(1.0, interpolate(self._sharing[has_prompts], num_passes))
